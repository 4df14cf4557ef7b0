"""What each model is asked: checked against its context length and its tokenizer before any model is loaded."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ctxext.checkpoint.opening import open_checkpoint
from ctxext.errors import CtxextError
from ctxext.evaluate.checkpoint_info import CheckpointInfo, info_of, open_infos
from ctxext.evaluate.settings import Settings, lengths_of
from ctxext.evaluate.tasks.base import RetrievalTask
from ctxext.evaluate.tasks.registry import DEFAULTS, TASKS
from ctxext.system import processes

if TYPE_CHECKING:
    from ctxext.data.encoding import Encoder
    from ctxext.evaluate.model import LoadedModel, Loading
    from ctxext.evaluate.tasks.base import Work
    from ctxext.evaluate.tasks.perplexity import PerplexityWork
    from ctxext.evaluate.tasks.pseudo_perplexity import PseudoPerplexityWork
    from ctxext.evaluate.tasks.short import ShortWork

    DocumentWork = PerplexityWork | PseudoPerplexityWork | ShortWork

WORDS = {"causal": "causal language model", "masked": "masked language model", "encoder": "model without a head"}
"""What errors call each kind of model."""


@dataclass(frozen=True)
class ModelPlan:
    """One model with everything it is asked.

    Attributes:
        info: The model.
        lengths: Prompt lengths in tokens.
        tasks: Retrieval tasks.
        documents: Documents to measure the loss on.
        settings: The rest.
    """

    info: CheckpointInfo
    lengths: tuple[int, ...]
    tasks: tuple[RetrievalTask, ...]
    documents: "tuple[DocumentWork, ...]"
    settings: Settings

    @property
    def num_samples(self) -> int:
        """How many single measurements there are."""
        prompts = len(self.tasks) * len(self.lengths) * len(self.settings.depths) * self.settings.samples
        return len(self.documents) + prompts

    @property
    def num_tokens(self) -> int:
        """Tokens of all prompts and documents."""
        prompts = sum(self.lengths) * len(self.tasks) * len(self.settings.depths) * self.settings.samples
        return prompts + sum(key.length for work in self.documents for key in work.keys)

    def make_work(self, loaded: "LoadedModel", settings: Settings) -> "Iterator[Work]":
        """Everything in the order it is run, in batches that fit into memory."""
        from ctxext.evaluate.scoring.batch_size import rows_that_fit
        from ctxext.evaluate.served import ServedModel, questions_per_call
        from ctxext.evaluate.tasks.retrieval import RetrievalWork, num_questions

        for task in self.tasks:
            for length in self.lengths:
                count, depths = num_questions(task, settings), len(settings.depths) if task.has_depths else 1
                served = isinstance(loaded, ServedModel)
                fitting = questions_per_call(length, depths) if served else rows_that_fit(loaded.model, length)
                size = settings.batch_size or fitting
                size = min(size, -(-count // processes.num_processes()))
                for first in range(0, count, size):
                    samples = tuple(range(first, min(first + size, count)))
                    yield RetrievalWork(task, length, samples, settings)
        yield from self.documents


def plan_questions(models: Sequence[str], settings: Settings, loading: "Loading") -> list[ModelPlan]:
    """Check everything that can be checked before a model is loaded.

    Raises:
        CtxextError: a checkpoint, a length, a file or a task is refused.
    """
    from ctxext.data.encoding import Encoder
    from ctxext.evaluate.model import load_tokenizer
    from ctxext.evaluate.served import check_served
    from ctxext.evaluate.tasks.retrieval import check_fits

    infos = open_infos(models, revision=loading.revision, token=loading.token, original_length=settings.original_length)
    for info in infos:
        check_kind(info, settings, loading)
    known = [length for info in infos for length in (info.trained_length, info.context_length)]
    tasks = tuple(settings.retrieval_tasks())
    lengths = {}
    for info in infos:
        own = known if settings.allow_beyond else [info.trained_length, info.context_length]
        lengths[info.name] = lengths_of(settings, own)
        check_context_length(info, lengths[info.name], allow_beyond=settings.allow_beyond)
        if loading.engine == "vllm":
            check_served(info, lengths[info.name])
    longest = max(max(own) for own in lengths.values())
    plans = []
    for info in infos:
        encoder = Encoder(load_tokenizer(info, loading), chat_template=loading.chat_template)
        for task in tasks:
            check_fits(task, encoder, lengths[info.name], settings)
        documents = _documents(info, encoder, lengths[info.name], longest, settings)
        plans.append(ModelPlan(info, lengths[info.name], tasks, documents, settings))
    for source in _sources(infos) if "short" in settings.tasks else []:
        encoder = Encoder(load_tokenizer(source, loading), chat_template=False)
        plans.append(ModelPlan(source, (), (), _short_documents(source, encoder, settings), settings))
    return plans


def default_tasks(models: Sequence[str], loading: "Loading") -> tuple[str, ...]:
    """What is asked where nothing is named: what every one of the models can be asked.

    Raises:
        CtxextError: a checkpoint is refused.
    """
    infos = open_infos(models, revision=loading.revision, token=loading.token)
    first = DEFAULTS[infos[0].kind] if infos else DEFAULTS["causal"]
    return tuple(task for task in first if all(info.kind in TASKS[task].kinds for info in infos)) or first


def check_kind(info: CheckpointInfo, settings: Settings, loading: "Loading") -> None:
    """Refuse tasks, and engines, that are for another kind of model.

    Raises:
        CtxextError: one is.
    """
    for task in settings.tasks:
        if info.kind not in TASKS[task].kinds:
            able = ", ".join(name for name, other in TASKS.items() if info.kind in other.kinds)
            raise CtxextError(
                f'The task "{task}" cannot be asked of "{info.name}", a {WORDS[info.kind]}.', hint=f"Ask it {able}."
            )
    other = "--harness" if settings.harness else "--engine vllm" if loading.engine == "vllm" else ""
    if other and info.kind != "causal":
        raise CtxextError(f'{other} is for causal language models; "{info.name}" is a {WORDS[info.kind]}.')


def check_context_length(info: CheckpointInfo, lengths: Sequence[int], *, allow_beyond: bool) -> None:
    """Refuse lengths that the model does not claim to read.

    Raises:
        CtxextError: a length is beyond the context length, or none is known.
    """
    if not lengths:
        raise CtxextError(f'"{info.name}" does not say how long its context is.', hint="Say it with --lengths.")
    reach = info.context_length
    if reach is None or max(lengths) <= reach or (allow_beyond and not info.has_table):
        return
    message = f'"{info.name}" reads {reach} tokens, but a length of {max(lengths)} was asked for.'
    hint = "Extend it with ctxext convert, or measure what happens there with --allow-beyond."
    raise CtxextError(message, hint="Its position table ends there." if info.has_table else hint)


def _documents(
    info: CheckpointInfo, encoder: "Encoder", lengths: tuple[int, ...], longest: int, settings: Settings
) -> "tuple[DocumentWork, ...]":
    """The same documents for every model; each reads as much of them as its lengths allow."""
    found: list[DocumentWork] = []
    for task in settings.tasks:
        if task == "short":
            found += _short_documents(info, encoder, settings)
        elif task == "pseudo-perplexity":
            found += _masked_documents(encoder, lengths, longest, settings)
        elif task == "perplexity":
            found += _long_documents(encoder, lengths, longest, settings)
    return tuple(found)


def _long_documents(
    encoder: "Encoder", lengths: tuple[int, ...], longest: int, settings: Settings
) -> "tuple[PerplexityWork, ...]":
    from ctxext.data.texts import read_corpus
    from ctxext.evaluate.tasks.perplexity import PerplexityWork

    most = 2 * longest if settings.stride else longest
    corpus = read_corpus(settings.data, encoder, count=settings.samples, length=longest, most=most, seed=settings.seed)
    start, stride = len(encoder.start()), settings.stride
    return tuple(PerplexityWork(ids, number, lengths, start, stride) for number, ids in enumerate(corpus.documents))


def _masked_documents(
    encoder: "Encoder", lengths: tuple[int, ...], longest: int, settings: Settings
) -> "tuple[PseudoPerplexityWork, ...]":
    from ctxext.data.texts import read_corpus
    from ctxext.evaluate.tasks.pseudo_perplexity import PseudoPerplexityWork

    count, seed, end = settings.samples, settings.seed, tuple(encoder.end())
    corpus = read_corpus(settings.data, encoder, count=count, length=longest, most=longest, seed=seed)
    return tuple(PseudoPerplexityWork(ids, number, lengths, end) for number, ids in enumerate(corpus.documents))


def _short_documents(info: CheckpointInfo, encoder: "Encoder", settings: Settings) -> "tuple[ShortWork, ...]":
    from ctxext.data.texts import read_corpus
    from ctxext.evaluate.tasks.pseudo_perplexity import closed
    from ctxext.evaluate.tasks.short import ShortWork

    length = info.trained_length or max(settings.lengths)
    corpus = read_corpus(settings.data, encoder, count=settings.samples, length=length, most=length, seed=settings.seed)
    end = tuple(encoder.end()) if info.kind == "masked" else ()
    return tuple(ShortWork(closed(ids, length, end), sample) for sample, ids in enumerate(corpus.documents))


def _sources(infos: Sequence[CheckpointInfo]) -> list[CheckpointInfo]:
    """The checkpoints that some of these were converted from, where they are at hand and not asked already."""
    found: dict[str, CheckpointInfo] = {}
    names = {info.name for info in infos}
    for info in infos:
        source, revision = info.provenance.get("source"), info.provenance.get("revision")
        if not source or source in names or source in found:
            continue
        beside = info.checkpoint.folder.resolve().parent / Path(source).name
        place = source if revision or source == "demo" else str(beside)
        try:
            found[source] = info_of(source, open_checkpoint(place, revision=revision))
        except CtxextError:
            continue
    return list(found.values())
