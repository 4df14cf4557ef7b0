"""The work for each model, checked against context length and tokenizer before any model is loaded."""

import dataclasses
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ctxext.checkpoint.opening import Checkpoint, is_source_of, open_checkpoint
from ctxext.data.texts import kinds_of_text
from ctxext.errors import CtxextError
from ctxext.evaluate.processes import Team
from ctxext.gguf import is_gguf
from ctxext.models.checkpoint_info import (
    CheckpointInfo,
    GeneratorInfo,
    ServedInfo,
    info_of,
    open_gguf_infos,
    open_infos,
)
from ctxext.models.loading import SERVER
from ctxext.recipes.encodings.base import provenance
from ctxext.tasks.base import DocumentPlan, RetrievalTask
from ctxext.tasks.forms import choose_form
from ctxext.tasks.longppl import LongPerplexity
from ctxext.tasks.perplexity import Short
from ctxext.tasks.registry import DEFAULTS, TASKS
from ctxext.tasks.settings import Settings, lengths_of

if TYPE_CHECKING:
    from ctxext.data.encoding import Encoder
    from ctxext.models.model import LoadedModel, Loading
    from ctxext.tasks.base import Work

WORDS = {"causal": "causal language model", "masked": "masked language model", "encoder": "model without a head"}
"""Name of each kind of model in errors."""


@dataclass(frozen=True)
class ModelPlan:
    """The work of one model.

    Attributes:
        info: The model.
        lengths: Prompt lengths in tokens.
        tasks: Retrieval tasks.
        documents: Documents to measure the loss on.
        settings: Depths, samples and batch size.
        encoder: The tokenizer.
        longest_prompt: The number of tokens of the longest prompt.
    """

    info: CheckpointInfo
    lengths: tuple[int, ...]
    tasks: tuple[RetrievalTask, ...]
    documents: "tuple[Work, ...]"
    settings: Settings
    encoder: "Encoder"
    longest_prompt: int = 0

    @property
    def measured_lengths(self) -> list[int]:
        """The length of every document and prompt that is measured."""
        times = len(self.tasks) * len(self.settings.depths) * self.settings.samples
        return [*(key.length for work in self.documents for key in work.keys), *self.lengths * times]

    def make_work(
        self, loaded: "LoadedModel", samples: range | None = None, team: Team | None = None
    ) -> "Iterator[Work]":
        """Yield the work in running order, in batches that fit into memory.

        Args:
            loaded: The model.
            samples: The samples of each cell, and the documents; by default all.
            team: The processes that share the work. Batches are small enough for each to have one of every cell.
        """
        from ctxext.tasks.retrieval import RetrievalWork, num_questions

        settings, chosen, team = self.settings, samples or range(self.settings.samples), team or Team(0, 1)
        for task in self.tasks:
            # A task without depths has as many questions as other tasks have at all depths.
            times, depths = num_questions(task, settings) // settings.samples, len(settings.depths)
            for length in self.lengths:
                most = settings.batch_size or loaded.questions_at_once(length, depths if task.has_depths else 1)
                share = -(-len(chosen) * times // team.size)
                size = team.agree(f"{self.info.name} {task.name} {length} {chosen}", min(most, share))
                for first in range(chosen.start * times, chosen.stop * times, size):
                    numbers = tuple(range(first, min(first + size, chosen.stop * times)))
                    yield RetrievalWork(task, length, numbers, settings)
        yield from (work for work in self.documents if samples is None or work.keys[0].sample in samples)


def plan_questions(models: Sequence[str], settings: Settings, loading: "Loading") -> list[ModelPlan]:
    """Plan the work, after all checks that need no loaded model."""
    infos = _open(models, loading, settings.original_length)
    return plans_of(infos, settings, loading)


def plans_of(infos: Sequence[CheckpointInfo], settings: Settings, loading: "Loading") -> list[ModelPlan]:
    """Plan the work for open checkpoints, as `plan_questions` does."""
    from ctxext.data.encoding import Encoder
    from ctxext.models.model import load_tokenizer
    from ctxext.models.serving import check_served
    from ctxext.tasks.retrieval import check_fits

    infos, sources = _with_sources(infos, opens=Short.name in settings.tasks)
    for info in infos:
        check_kind(info, settings, loading)
    known = [length for info in infos for length in (info.trained_length, info.context_length)]
    shared = settings.retrieval_tasks()
    lengths = {}
    for info in infos:
        usual = known if settings.allow_beyond else [info.trained_length, info.context_length]
        lengths[info.name] = lengths_of(settings, usual)
        check_context_length(info, lengths[info.name], allow_beyond=settings.allow_beyond)
        if loading.engine not in ("transformers", SERVER):
            check_served(info, lengths[info.name])
    longest = max(max(of_model) for of_model in lengths.values())
    if settings.evaluator and LongPerplexity.name in settings.tasks:
        check_evaluator(settings.evaluator, longest, loading)
    plans = []
    for info in infos:
        encoder = Encoder(load_tokenizer(info, loading), chat_template=loading.chat_template)
        tasks = tuple(_use_form(task, info, encoder, lengths[info.name], settings, loading) for task in shared)
        # Positions beyond a table fail, and those of another model beyond its context length only lose quality.
        limit = None if settings.allow_beyond and not info.has_table else info.context_length
        sizes = [check_fits(task, encoder, lengths[info.name], settings, limit) for task in tasks]
        documents = _plan_documents(settings.tasks, info, encoder, lengths[info.name], longest, settings)
        longest_prompt = max(sizes, default=0)
        plans.append(ModelPlan(info, lengths[info.name], tasks, documents, settings, encoder, longest_prompt))
    for source in sources:
        encoder = Encoder(load_tokenizer(source, loading), chat_template=False)
        documents = _plan_documents([Short.name], source, encoder, (), longest, settings)
        plans.append(ModelPlan(source, (), (), documents, settings, encoder))
    return plans


def _use_form(
    task: RetrievalTask,
    info: CheckpointInfo,
    encoder: "Encoder",
    lengths: Sequence[int],
    settings: Settings,
    loading: "Loading",
) -> RetrievalTask:
    """Return a task in the form of its prompts; for a server without a checkpoint, with tokens by its counts."""
    is_served = isinstance(info, ServedInfo)
    prompt = settings.prompt or ("chat" if is_served else None)
    form = choose_form(task, info.name, encoder, prompt=prompt, reason=settings.reason, no_think=settings.no_think)
    task = task.use_form(form)
    if not is_served:
        return task
    from ctxext.evaluate.token_counts import estimate_tokens

    assert loading.server is not None
    estimate = estimate_tokens(loading.server.connection, task, encoder, lengths, settings)
    return task.use_form(dataclasses.replace(form, estimate=estimate))


def _describe_server(loading: "Loading") -> ServedInfo:
    """Return what is known of the model of a server without its checkpoint, which gets messages from now on."""
    assert loading.server is not None
    server = loading.server.connection
    if not server.is_chat:
        server.use_completions(chat=True)
    name = server.model or "served"
    return ServedInfo(name, Checkpoint(name, Path(), {}), None, server.length)


def _open(models: Sequence[str], loading: "Loading", original_length: int | None = None) -> list[CheckpointInfo]:
    """Open checkpoints, or GGUF files for llama.cpp."""
    is_llama = loading.engine == "llama.cpp"
    if loading.server is not None and len(models) > 1:
        raise CtxextError(f"A server serves one model, not {len(models)}.", hint="Evaluate one model at a time.")
    for model in models:
        if is_gguf(model) and not is_llama:
            hint = "Add --engine llama.cpp." if loading.server is None else "Give its checkpoint, for the tokenizer."
            raise CtxextError(f'"{model}" is a GGUF file, which needs llama.cpp.', hint=hint)
        if is_llama and not is_gguf(model):
            hint = "Convert the checkpoint with ctxext export gguf."
            raise CtxextError(f'llama.cpp needs a GGUF file, but "{model}" is not one.', hint=hint)
    if is_llama:
        return [*open_gguf_infos(models, original_length)]
    if not models:
        return [_describe_server(loading)]
    try:
        return open_infos(models, revision=loading.revision, token=loading.token, original_length=original_length)
    except CtxextError as error:
        if loading.server is None:
            raise
        hint = "Without the checkpoint, omit MODEL: lengths then follow the server's counts."
        raise CtxextError(error.message, hint=f"{error.hint} {hint}".strip()) from error


_WRITTEN = ("needle",)
"""Default tasks for engines, which only generate text."""


def default_tasks(models: Sequence[str], loading: "Loading") -> tuple[str, ...]:
    """Return the default tasks that all models support, in transformers or in an engine."""
    if loading.engine != "transformers":
        return _WRITTEN
    infos = _open(models, loading)
    first = DEFAULTS[infos[0].kind] if infos else DEFAULTS["causal"]
    return tuple(task for task in first if all(info.kind in TASKS[task].kinds for info in infos)) or first


def check_kind(info: CheckpointInfo, settings: Settings, loading: "Loading") -> None:
    """Raise if a task or engine does not support this kind of model."""
    for task in settings.tasks:
        if info.kind not in TASKS[task].kinds:
            supported = ", ".join(name for name, candidate in TASKS.items() if info.kind in candidate.kinds)
            raise CtxextError(
                f'The task "{task}" does not support "{info.name}", a {WORDS[info.kind]}.', hint=f"Use {supported}."
            )
    option = "--harness" if settings.harness else {"vllm": "--engine vllm", SERVER: "--server"}.get(loading.engine)
    if option and info.kind != "causal":
        raise CtxextError(f'{option} supports only causal language models, but "{info.name}" is a {WORDS[info.kind]}.')


def check_evaluator(source: str, longest: int, loading: "Loading") -> None:
    """Raise if the evaluator is not causal, or has too short a context."""
    (evaluator,) = open_infos([source], token=loading.token)
    if evaluator.kind != "causal":
        raise CtxextError(f'The evaluator "{evaluator.name}" is a {WORDS[evaluator.kind]}.', hint="Use a causal one.")
    if evaluator.context_length is not None and evaluator.context_length < longest:
        raise CtxextError(
            f'The evaluator "{evaluator.name}" supports {evaluator.context_length} tokens, but a prompt length is '
            f"{longest}.",
            hint="Use an evaluator with a longer context, or shorter --lengths.",
        )


def check_context_length(info: CheckpointInfo, lengths: Sequence[int], *, allow_beyond: bool) -> None:
    """Raise if a length is beyond the context length of a model."""
    if not lengths:
        raise CtxextError(f'The context length of "{info.name}" is unknown.', hint="Set --lengths.")
    limit = info.context_length
    if info.pipeline is not None:  # Longer texts are cut, as in normal use.
        return
    if limit is None or max(lengths) <= limit or (allow_beyond and not info.has_table):
        return
    message = f'"{info.name}" supports {limit} tokens, but a prompt length is {max(lengths)}.'
    hint = "Extend it with ctxext convert, or evaluate it there with --allow-beyond."
    raise CtxextError(message, hint="Its position table ends there." if info.has_table else hint)


def _plan_documents(
    tasks: Collection[str],
    info: CheckpointInfo,
    encoder: "Encoder",
    lengths: tuple[int, ...],
    longest: int,
    settings: Settings,
) -> "tuple[Work, ...]":
    """Return the work on documents: the same documents for every model, cut to the model's lengths."""
    kinds = kinds_of_text(settings.data)
    document_plan = DocumentPlan(
        kind=info.kind,
        encoder=encoder,
        lengths=lengths,
        longest=longest,
        trained_length=info.trained_length or max(settings.lengths, default=longest),
        data=(*kinds.values(),),
        samples=settings.samples,
        seed=settings.seed,
        stride=settings.stride,
        evaluator=settings.evaluator,
        key_tokens=settings.key_tokens,
    )
    separate = [dataclasses.replace(document_plan, data=(place,), text=name) for name, place in kinds.items()]
    return tuple(
        work
        for task in tasks
        for documents in (separate if TASKS[task].separates_texts else [document_plan])
        for work in TASKS[task].documents_to_read(documents)
    )


def _with_sources(infos: Sequence[CheckpointInfo], *, opens: bool) -> tuple[list[CheckpointInfo], list[CheckpointInfo]]:
    """Return the checkpoints with the names of their sources, and further opened sources.

    A folder next to a result, with the name of its source, is the source only if its content matches.

    Args:
        infos: The checkpoints to evaluate.
        opens: Whether to open sources that are not evaluated.
    """
    named: list[CheckpointInfo] = []
    opened: list[CheckpointInfo] = []
    for info in infos:
        if isinstance(info, GeneratorInfo):
            named.append(info)
            continue
        others = [entry for entry in (*infos, *opened) if entry is not info and not isinstance(entry, GeneratorInfo)]
        source = next((entry for entry in others if is_source_of(entry.checkpoint, info.checkpoint)), None)
        if source is None and opens:
            source = _open_source(info, {entry.name for entry in (*infos, *opened)})
            opened += [source] if source else []
        # The report names a source that is not evaluated, unless another checkpoint has this name.
        name = provenance(info.checkpoint.config).get("source")
        is_taken = any(name == entry.name for entry in (*infos, *opened))
        named.append(dataclasses.replace(info, source=source.name if source else None if is_taken else name))
    return named, opened


def _open_source(info: CheckpointInfo, names: set[str]) -> CheckpointInfo | None:
    """Open the checkpoint that another was converted from; return None if that fails."""
    origin = provenance(info.checkpoint.config)
    name, revision = origin.get("source"), origin.get("revision")
    if not name:
        return None
    neighbour = info.checkpoint.folder.resolve().parent / Path(name).name
    place = name if revision or name == "demo" else str(neighbour)
    try:
        source = open_checkpoint(place, revision=revision)
        return info_of(place if name in names else name, source) if is_source_of(source, info.checkpoint) else None
    except CtxextError:
        return None
