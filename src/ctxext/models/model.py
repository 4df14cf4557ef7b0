"""Loading of checkpoints for evaluation: model, tokenizer, and pooling."""

import functools
import importlib
import importlib.util
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ctxext.checkpoint.head import Head
from ctxext.checkpoint.loading import (
    BUILT_IN,
    choose_device,
    explain_loading_errors,
    guard_vocabulary,
    hub_backbones,
    load_checkpoint,
    rename,
)
from ctxext.checkpoint.other_files import SentenceModule, read_lengths
from ctxext.data.encoding import BASE_FORM, Encoder, PromptForm, open_tokenizer
from ctxext.data.estimated_tokens import EstimatedTokenizer
from ctxext.data.prompt import Prompt
from ctxext.engines.llama_cpp import tokenizer_of
from ctxext.errors import CtxextError
from ctxext.files.offline import forbid_network
from ctxext.files.processes import total_memory
from ctxext.files.strict import parse_json, read_text
from ctxext.models.checkpoint_info import CheckpointInfo, GgufInfo, ServedInfo
from ctxext.models.loading import Loading as Loading
from ctxext.models.prefix_cache import (
    PrefixCache,
    cache_of_windows,
    forget_longer_prompts,
    is_static,
    is_static_for,
    sharing_works,
)
from ctxext.models.reading import piece_size, run
from ctxext.recipes.code.own_code import carries_code, check_pinned, needs_code, runs_only_own_code
from ctxext.recipes.code.staging import stage_checkpoint

_MAX_ROWS = 32
_SHARE = 0.4
_STATES = 16
"""Generous estimate of a layer's activations, in hidden states per token."""
_WARM, _FIRST = 8, 64
"""Numbers of tokens to warm up, and of the first text."""
_ENOUGH = 1.5
"""Seconds of the longest measured text: shorter ones are mostly overhead."""
_SHARE_MEASURED = 0.01
_IDLE = 0.6
"""Share of the threads' time without work from which other programs slow them down."""

_POOLINGS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "cls": lambda states: states[:, 0],
    "mean": lambda states: states.mean(1),
    "max": lambda states: states.amax(1),
    "mean_sqrt_len_tokens": lambda states: states.sum(1) / states.shape[1] ** 0.5,
    "lasttoken": lambda states: states[:, -1],
}
"""The poolings of sentence-transformers, for texts without padding of shape (texts, tokens, width)."""

_PLAIN = ("Transformer", "Pooling", "Normalize")
"""Modules that work without sentence-transformers; the cosine normalizes anyway."""

_LAYERS = ("Pooling", "Normalize", "Dense", "LayerNorm", "Dropout", "WeightedLayerPooling", "CNN", "LSTM")
"""Modules of sentence-transformers that consist of layers of torch."""

_PACKAGE = "sentence_transformers"


@dataclass(frozen=True)
class Pooler:
    """The pooling of a model, which computes one vector per text.

    Attributes:
        pooling: The poolings; their vectors are concatenated.
        modules: Modules of sentence-transformers, used instead of `pooling`.
        length: Maximum number of tokens of a text, which is cut there; None for no limit.
    """

    pooling: tuple[str, ...] = ("mean",)
    modules: tuple[Any, ...] = ()
    length: int | None = None

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """Compute the vectors of texts of the same length from their last hidden states."""
        if not self.modules:
            return torch.cat([_POOLINGS[name](states) for name in self.pooling], 1)
        mask = torch.ones(states.shape[:2], dtype=torch.long, device=states.device)
        features: dict[str, Any] = {"token_embeddings": states, "attention_mask": mask}
        for module in self.modules:
            features = module.to(states)(features)
        vectors: torch.Tensor = features["sentence_embedding"]
        return vectors

    def cut(self, text: Sequence[int], start: Sequence[int], end: Sequence[int]) -> list[int]:
        """Cut a text to the maximum length, with its end tokens."""
        return self.chunks(text, start, end)[0]

    def chunks(self, text: Sequence[int], start: Sequence[int], end: Sequence[int]) -> list[list[int]]:
        """Split a text into chunks of the maximum length, each with begin and end tokens."""
        if self.length is None or len(text) <= self.length:
            return [list(text)]
        room = self.length - len(start) - len(end)
        content = text[len(start) : len(text) - len(end)]
        return [[*start, *content[at : at + room], *end] for at in range(0, len(content), room)]


class Written(NamedTuple):
    """A generated answer.

    Attributes:
        ids: Its tokens, up to the first end token.
        is_cut: Whether it ended at the maximum number of tokens.
        text: Its text without thoughts, if a server returned them separately.
        read_tokens: The number of tokens of the prompt that a server counted; None if it is the prompt's own.
        thinks: Whether a server returned thoughts.
    """

    ids: list[int]
    is_cut: bool
    text: str | None = None
    read_tokens: int | None = None
    thinks: bool = False

    def read(self, encoder: Encoder) -> str:
        """Return the text, with an encoder of the form of the prompts."""
        return encoder.read_answer(self.ids) if self.text is None else self.text

    def has_thoughts(self, encoder: Encoder) -> bool:
        """Return whether the answer has thoughts, with an encoder of the form of the prompts."""
        return self.thinks if self.text is not None else encoder.has_thoughts(encoder.tokenizer.decode(self.ids))


@dataclass(frozen=True)
class LoadedModel:
    """A model with its tokenizer, ready for evaluation.

    Attributes:
        name: The name in reports.
        model: A transformers model in eval mode.
        encoder: The tokenizer.
        can_share: Whether prompts with a common prefix may share a cache.
        kind: One of the values of `checkpoint_info.KINDS`.
        pooler: The pooling, which computes one vector per text.
    """

    name: str
    model: Any
    encoder: Encoder
    can_share: bool
    kind: str = "causal"
    pooler: Pooler = field(default_factory=Pooler)

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return torch.device(self.model.device)

    @functools.cached_property
    def head(self) -> Head:
        """The head of the model, tested once for whether it can run separately."""
        return Head(self.model, is_masked=self.kind == "masked")

    def facts(self) -> dict[str, str]:
        """Return the dtype, device, attention and chat template of the loaded model, for the report."""
        return {
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "device": self.device.type,
            "attention": str(getattr(self.model.config, "_attn_implementation", None)),
            **self.encoder.facts(),
        }

    def first_pace(self, longest: int, num_tokens: float = math.inf) -> list[tuple[int, float]]:
        """Measure the seconds to read one token, 64, twice as many and so on, up to 1.5 seconds.

        On a processor that other programs keep busy, threads wait for each other, and short texts take up to a hundred
        times as long, but long ones do not. Then one thread is measured, and its time divided by the threads.

        Args:
            longest: The largest number of tokens to read.
            num_tokens: The number of tokens that will be read: the measurement takes at most a small share of the time.
        """
        read, threads = self._read_growing(longest, num_tokens), torch.get_num_threads()
        if read or threads == 1:
            return read
        torch.set_num_threads(1)
        try:
            return [(length, seconds / threads) for length, seconds in self._read_growing(longest, num_tokens)]
        finally:
            torch.set_num_threads(threads)

    @torch.inference_mode()
    def _read_growing(self, longest: int, num_tokens: float) -> list[tuple[int, float]]:
        """Return lengths with the seconds to read them; none if several threads wait for each other."""
        length, read, threads = 1, list[tuple[int, float]](), torch.get_num_threads()
        while True:
            ids = torch.ones((1, length), dtype=torch.long, device=self.device)
            self._read_once(ids[:, :_WARM])
            began, began_here = time.monotonic(), time.process_time()
            float(self._read_once(ids).flatten()[0])  # Reading a value waits for the GPU.
            seconds, in_threads = time.monotonic() - began, time.process_time() - began_here
            if self.device.type == "cpu" and threads > 1 and in_threads < _IDLE * threads * seconds:
                return []
            read.append((length, seconds))
            spent = math.fsum(seconds for _, seconds in read)
            is_much = length >= _FIRST and spent >= _SHARE_MEASURED * num_tokens * seconds / length
            if length >= longest or is_much or seconds >= _ENOUGH:
                return read
            length = min(max(_FIRST, 2 * length), longest)

    def _read_once(self, ids: torch.Tensor) -> torch.Tensor:
        """Read tokens as in an evaluation, and return a result of the last layer."""
        if self.kind == "causal":
            return run(self.model, ids, 1, self.cache_for(ids.shape[1]))
        output: torch.Tensor = self.model(input_ids=ids)[0]
        return output

    def may_share(self, common: int, length: int) -> bool:
        """Return whether prompts of a length with some common tokens may share a cache."""
        if self.can_share:
            return True
        config = self.model.config.to_dict()
        return not is_static(config) and is_static_for(config, common, length) and self._can_continue

    @functools.cached_property
    def _can_continue(self) -> bool:
        return self.kind == "causal" and sharing_works(self.model)

    def cache_for(self, length: int) -> PrefixCache | None:
        """Return a cache to read a prompt of a length in pieces, or None where one call is faster or must be made."""
        return cache_of_windows(self.model, length) if self.may_share(0, length) else None

    def rows_that_fit(self, length: int) -> int:
        """Return the number of prompts of a length that fit into memory together.

        The estimate uses total instead of free memory, so that batches are reproducible.
        """
        weights = sum(parameter.numel() * parameter.element_size() for parameter in self.model.parameters())
        room = _SHARE * (total_memory(self.device) - weights)
        return int(min(_MAX_ROWS, max(1, room // self.estimate_memory(length))))

    def estimate_memory(self, length: int) -> int:
        """Estimate the bytes to read a prompt of a length, without the weights.

        In pieces, layers with a window keep few tokens, and only the activations and the mask of a piece are in memory.
        The cache grows by copies, which take about its size again.
        """
        config = self.model.config.get_text_config(decoder=True)

        def size(name: str, default: int) -> int:
            try:
                value = getattr(config, name, None) or default
            except RuntimeError:  # Gemma 4 raises if layers have different values.
                value = config.to_dict()[name] or default
            return max(value) if isinstance(value, list) else int(value)  # Gemma 3n lists a value per layer.

        hidden, heads = size("hidden_size", 4096), size("num_attention_heads", 32)
        per_token = 2 * size("num_key_value_heads", heads) * size("head_dim", hidden // heads)
        activations = _STATES * hidden + 3 * size("intermediate_size", 4 * hidden)
        cache, numbers = self.cache_for(length), 0.0
        if cache is None:
            numbers = (size("num_hidden_layers", 32) * per_token + activations) * length
        else:
            piece = min(length, piece_size(self.device))
            mask = 1.25 * length * piece  # As booleans and as numbers.
            numbers = 2 * per_token * cache.count_tokens(length) + activations * piece + mask + hidden * length
        return int(self.model.dtype.itemsize * numbers)

    def questions_at_once(self, length: int, num_depths: int) -> int:
        """Return the number of questions per batch, each at some depths."""
        return self.rows_that_fit(length)

    def write(
        self, questions: Sequence[Sequence[Prompt]], depths: Sequence[int], form: PromptForm = BASE_FORM
    ) -> Iterator[tuple[int, list[Written]]]:
        """Generate the answer of each prompt at some depths, as long as `num_answer` allows.

        Args:
            questions: The prompts of each question, one per depth.
            depths: Indices of the depths.
            form: The form of the prompts.

        Yields:
            The index of a depth, and the answer to each question.
        """
        for depth in depths:
            prompts = [question[depth] for question in questions]
            written = [Written([], is_cut=False) for _ in prompts]
            # Prompts and answers of the same sizes run together.
            sizes = [(prompt.num_answer, len(prompt.ids)) for prompt in prompts]
            by_size = sorted(range(len(prompts)), key=sizes.__getitem__)
            for (size, _), group in groupby(by_size, key=sizes.__getitem__):
                rows = list(group)
                ids = torch.tensor([prompts[row].ids[:-size] for row in rows], device=self.device)
                for row, new in zip(rows, self._decode(ids, size), strict=True):
                    written[row] = end_answer(new, self.ends, size)
            yield depth, written

    @property
    def ends(self) -> tuple[int, ...]:
        """The tokens that end generation."""
        end = self.model.generation_config.eos_token_id
        return tuple(end) if isinstance(end, list) else () if end is None else (end,)

    @torch.inference_mode()
    def _decode(self, ids: torch.Tensor, num_new: int) -> list[list[int]]:
        from transformers import GenerationConfig, LogitsProcessorList

        def check_step(_ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
            # Some families mask unused words with minus infinity; the largest number is still finite.
            self.check_finite(logits.amax(1))
            return logits

        config = self.model.generation_config
        # The checkpoint's settings may include penalties and sampling, unlike greedy decoding.
        self.model.generation_config = GenerationConfig(
            bos_token_id=config.bos_token_id,
            eos_token_id=config.eos_token_id,
            pad_token_id=config.pad_token_id,
            prefill_chunk_size=piece_size(self.device) if self.cache_for(ids.shape[1]) is not None else None,
        )
        forget_longer_prompts(self.model)
        try:
            # `output_logits` would keep float32 logits of every step: 18 GiB for 32 rows of 1,024 tokens.
            sequences = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=num_new,
                do_sample=False,
                pad_token_id=next((token for token in (config.pad_token_id, *self.ends) if token is not None), 0),
                logits_processor=LogitsProcessorList([check_step]),
            )
        finally:
            self.model.generation_config = config
        generated: list[list[int]] = sequences[:, ids.shape[1] :].tolist()
        return generated

    def check_finite(self, values: torch.Tensor) -> None:
        """Raise if a value is NaN or infinite."""
        if not bool(values.isfinite().all()):
            raise CtxextError(
                f'"{self.name}" returns NaN or infinite logits.',
                hint="Try --dtype bf16 or --dtype fp32, or check the weights.",
            )

    def close(self) -> None:
        """Release resources other than memory; there are none here."""


def end_answer(ids: Sequence[int], ends: Sequence[int], room: int) -> Written:
    """Return an answer up to its first end token: rows that end before others are padded, maybe with text."""
    last = next((place for place, token in enumerate(ids) if token in ends), None)
    return Written(list(ids[: last + 1] if last is not None else ids), is_cut=last is None and len(ids) >= room)


def wrap_model(
    name: str,
    model: Any,
    tokenizer: Any,
    *,
    chat_template: bool = True,
    kind: str = "causal",
    pooler: Pooler | None = None,
) -> LoadedModel:
    """Wrap a model and a tokenizer that are already loaded."""
    model.eval()
    can_share = kind == "causal" and is_static(model.config.to_dict()) and sharing_works(model)
    return LoadedModel(
        name, model, Encoder(tokenizer, chat_template=chat_template), can_share, kind, pooler or Pooler()
    )


def load_tokenizer(info: CheckpointInfo, loading: Loading) -> Any:
    """Load the checkpoint's tokenizer."""
    if isinstance(info, GgufInfo):
        return tokenizer_of(info.path)
    if isinstance(info, ServedInfo):
        return EstimatedTokenizer()
    hint = "Copy the tokenizer files of its source into its folder."
    message = f'The tokenizer of "{info.name}" cannot be loaded'
    with (
        stage_checkpoint(info.checkpoint, foreign=runs_foreign_code(info, loading)) as stage,
        explain_loading_errors(message, hint),
    ):
        return rename(open_tokenizer(stage.folder, trust_remote_code=stage.trust_tokenizer), info.checkpoint)


def load_model(info: CheckpointInfo, loading: Loading, tokenizer: Any = None) -> LoadedModel:
    """Load the checkpoint's model, and its tokenizer unless that is loaded: a large one takes as long as the model."""
    device = choose_device(loading.device)
    pooler = open_pooler(info)
    extra = {"attn_implementation": loading.attention} if loading.attention else {}
    # Only kernels from the user are fetched, never those from a configuration.
    fetches_kernel = (loading.attention or "eager") not in BUILT_IN and not hub_backbones(info.checkpoint.config)
    with stage_checkpoint(info.checkpoint, foreign=runs_foreign_code(info, loading), kernels=fetches_kernel) as stage:
        model = load_checkpoint(
            info.checkpoint, stage.folder, trust=stage.trust, dtype=loading.dtype, device=device, **extra
        )
    tokenizer = load_tokenizer(info, loading) if tokenizer is None else tokenizer
    guard_vocabulary(model, tokenizer)
    return wrap_model(info.name, model, tokenizer, chat_template=loading.chat_template, kind=info.kind, pooler=pooler)


def open_pooler(info: CheckpointInfo) -> Pooler:
    """Return the pooler of a checkpoint: without a pipeline, the mean of all states for any length."""
    pipeline, folder = info.pipeline, info.checkpoint.folder
    if pipeline is None:
        return Pooler()
    length = min([*read_lengths(folder).values(), *filter(None, [info.context_length])], default=None)
    plain = all(module.name in _PLAIN for module in pipeline.modules)
    if plain and pipeline.pooling and set(pipeline.pooling) <= set(_POOLINGS):
        return Pooler(pipeline.pooling, length=length)
    if foreign := [module.type for module in pipeline.modules if module.type.partition(".")[0] != _PACKAGE]:
        raise CtxextError(f'"{folder}" has the module {foreign[0]}, which does not belong to sentence-transformers.')
    for module in pipeline.modules[1:]:
        _check_module(folder, module)
    if importlib.util.find_spec(_PACKAGE) is None:
        raise CtxextError(
            f'"{folder}" needs modules of sentence-transformers: {pipeline}.',
            hint='pip install "sentence-transformers>=5"',
        )
    with forbid_network():
        load = importlib.import_module("sentence_transformers.util").import_from_string
    modules = [load(module.type).load(str(folder), subfolder=module.path) for module in pipeline.modules[1:]]
    return Pooler((), tuple(module.eval() for module in modules), length)


def _check_module(folder: Path, module: SentenceModule) -> None:
    """Raise if loading a module could import other code: others load a model, or classes that their files name."""
    if module.name not in _LAYERS:
        raise CtxextError(
            f'"{folder}" has the module {module.type}, which is not supported.',
            hint=f"Supported after the first: {', '.join(_LAYERS)}.",
        )
    path = folder / module.path / "config.json"
    settings = parse_json(read_text(path), str(path)) if path.is_file() else {}
    for key, value in settings.items() if isinstance(settings, dict) else ():
        if key.endswith("activation_function") and not str(value).startswith("torch.nn."):
            raise CtxextError(f'"{path}" has the activation function "{value}", which does not belong to torch.')


def runs_foreign_code(info: CheckpointInfo, loading: Loading) -> bool:
    """Return whether the checkpoint runs code that ctxext did not write, as allowed by the user.

    Raises:
        CtxextError: The checkpoint needs such code, but `trust_remote_code` is False. Code of ctxext always runs.
    """
    if runs_only_own_code(info.checkpoint):
        return False
    if loading.trust_remote_code and carries_code(info.checkpoint):
        check_pinned(info.checkpoint, loading.revision)
        return True
    if needs_code(info.checkpoint.config):
        raise CtxextError(
            f'"{info.name}" needs the Python code in its folder, which this version of ctxext did not write.',
            hint="Read that code. If you trust it, add --trust-remote-code.",
        )
    return False
