"""Run every form of attention that users run, for the check in a process without ctxext (see `isolated_process.py`).

The portable code computes one attention in several forms: a prompt in one call, tokens after those in a cache, one
token at a time, positions with gaps, padded batches, and each by the backend that is used and by eager attention. All
of them are the same function of the tokens, so all are compared with one expectation, on states of known spread
(`Samples`). A text is longer than the original context length. The references compute pair by pair, so they
compute some rows only, each with all of its keys.
"""

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .decoding_process import cache_argument, crop
from .expected_process import APPLY, Expected, Samples, code_of, hook_attentions, run_and_record
from .model_process import backend_of, describe, replace_functions

SPREAD = 1.25  # Standard deviation of scores: in a long text every key has a share that would be missed.
LARGE = 2600  # Number of tokens from which a text is run in the form of most users only, and one layer compared.
PADDING = 13  # Number of padding tokens on the left of the second row of a padded batch.
GAP = 7  # Size of a gap between positions, before the last tokens.
NUM_LAYERS = 2  # Layers with the methods that are compared in the way of most users; otherwise only the first.
# Number of tokens up to which rounded angles do not count, as float32 rounds in proportion to positions; a quarter
# without relation maps, because frequencies of Ms-PoE are rounded too, and an eighth if it moves positions.
PRECISE = 2000
FEW = 12  # Number of rows of a call that are compared, with a few in between.
EDGES = (0, 1, 63, 64, 65, 127, 128, 129, 255, 256, 257)  # Queries at edges of tiles and blocks.
# The name of each call after the prompt, and the number of tokens: rotations of 16 are computed together, more
# are decoded, and more than 256 follow those for which the rotated keys first have room.
CALLS = (("decoded", 3), ("continued", 280), ("decoded", 20))
FEWER = (*CALLS[:-1], ("decoded", 3))
GAPS = (("continued after a gap", 150), ("decoded after a gap", 3))
AROUND = 3  # Number of tokens that are decoded before a level begins, and from there on.
# Numbers of draft tokens before a chunk, or before each decoded token: first more than are rotated together. Chunks are
# so short that several are within a level.
DRAFTS = {"continued": (24,), "decoded": (24, 1, 1)}
AFTER_DRAFTS = (FEWER[0], *[("continued", 40)] * 7, FEWER[2])


@dataclass(frozen=True)
class Way:
    """A way of running a text.

    Attributes:
        name: As in the result.
        backend: The attention implementation.
        batch: The number of texts.
        padding: The padding of the second.
        calls: The name and number of tokens of each call.
        dtype: The type of attention.
        trains: Whether gradients are recorded.
        drafts: By the name of a call, the numbers of draft tokens that are read before it and removed from the cache,
            as in assisted generation. Decoded tokens after the first of a call skip the first draft.
        swaps: Whether the texts of a batch change places in the cache after the prompt, as in beam search.
        is_main: Whether most users run it: then more layers are compared, and states are rotated in small pieces.
    """

    name: str
    backend: str
    calls: Sequence[tuple[str, int]]
    batch: int = 1
    padding: int = 0
    dtype: torch.dtype = torch.float32
    trains: bool = False
    drafts: Mapping[str, Sequence[int]] = field(default_factory=dict)
    swaps: bool = False
    is_main: bool = False


@dataclass(frozen=True)
class Text:
    """The text of a check.

    Attributes:
        prompt: The number of tokens of the first call.
        steps: The settings of each method.
        marks: Positions where the rules of a method change.
        is_short: Whether lengths are so short that all ways are affordable.
        inside: The number of tokens of a prompt within the original context length; 0 to begin beyond it only.
        is_sample: Whether it runs in the way of most users only.
        level: A query of the prompt from which far keys are elsewhere; 0 if there is none.
    """

    prompt: int
    steps: list[dict[str, Any]]
    marks: list[int]
    is_short: bool
    inside: int = 0
    is_sample: bool = False
    level: int = 0

    @property
    def length(self) -> int:
        """Number of tokens."""
        return self.prompt + sum(count for _, count in (*CALLS, *GAPS))

    @property
    def positions(self) -> Any:
        """Position of each token: there is a gap before the last ones."""
        positions = torch.arange(self.length)
        positions[self.length - sum(count for _, count in GAPS) :] += GAP
        return positions

    @property
    def is_alone(self) -> bool:
        """Whether it runs in one way, because it is a sample or all ways would take too long."""
        return self.is_sample or self.length > LARGE

    @property
    def layers(self) -> set[int]:
        """Layers in which a method takes part."""
        return {layer for step in self.steps for layer in step.get("layers", ())}

    @property
    def is_ordered_by_prompt(self) -> bool:
        """Whether the prompt orders the heads, for which each of the layers must run."""
        return any(step["method"] == "mspoe" and "ranks" not in step for step in self.steps)

    def ways(self, backend: str, *, takes_positions: bool) -> list[Way]:
        """Return the ways of running this text on a model that uses a backend by default."""
        prompt = "one call", self.prompt
        calls = [prompt, *(CALLS if self.is_short else FEWER)]
        ways = [Way(backend, backend, [prompt, *CALLS, *(GAPS if takes_positions else ())], is_main=self.is_short)]
        if self.is_alone:
            return ways
        backends = dict.fromkeys((backend, "eager"))
        if takes_positions:
            ways += [Way(f"{name}, padded", name, calls, batch=2, padding=PADDING) for name in backends]
        ways += [Way("eager", "eager", calls)] if backend != "eager" else []
        if self.is_ordered_by_prompt:
            return ways
        if self.inside:
            names = backends if self.is_short else [backend]
            ways += [Way(f"{name}, chunks", name, self.chunks(name)) for name in names]
        if takes_positions and self.is_short:
            ways.append(Way(f"{backend}, drafts", backend, [prompt, *AFTER_DRAFTS], drafts=DRAFTS))
            ways.append(Way(f"{backend}, beams", backend, calls, batch=2, padding=PADDING, swaps=True))
        early = [("one call", self.early), *FEWER]  # Rotated keys then need longer room before a level ends.
        ways.append(Way(f"{backend}, batch", backend, early, batch=2))
        if self.is_short and backend == "sdpa":
            ways.append(Way("sdpa, training", backend, early, trains=True))
            # A type other than float32: float16 would be rounded more.
            ways.append(Way("sdpa, float64", backend, early, dtype=torch.float64))
        return ways

    def chunks(self, backend: str) -> list[tuple[str, int]]:
        """Return the calls of a text that begins within the original context length.

        Around the first query of a level, eager attention reads a chunk of two queries; others decode tokens.
        """
        ends = [("continued beyond the original length", self.prompt)]
        if self.level and backend == "eager":
            ends = [(ends[0][0], self.level - 1), ("continued", self.level + 1), ("continued", self.prompt)]
        elif self.level:
            ends = [(ends[0][0], self.level - AROUND), ("decoded", self.level + AROUND), ("continued", self.prompt)]
        starts = [self.inside, *(end for _, end in ends)]
        rest = [(name, end - start) for start, (name, end) in zip(starts, ends, strict=False)]
        return [("one call", self.inside), *rest, *FEWER[:1]]

    @property
    def early(self) -> int:
        """Number of tokens of a shorter prompt: a call continues it to the end of the long one."""
        return max(self.prompt - CALLS[1][1], 1)

    def rows(self, number: int) -> list[int]:
        """Return the tokens of text `number` with compared outputs: every decoded one, others at edges."""
        start, rows = 0, set[int]()
        lengths = sorted({value for step in self.steps for value in step.values() if type(value) is int})
        for _, count in (("one call", self.prompt), *CALLS, *GAPS):
            stop = start + count
            firsts = [start] if start else [length for length in lengths if start < length < stop][-3:]
            edges = [first + edge for edge in EDGES for first in reversed(firsts)]
            edges = [start, stop - 1, *edges, *self.marks, *(length - 1 for length in lengths)]
            inside = [row for row in dict.fromkeys(edges) if start <= row < stop]
            rows |= {*inside[:FEW], *(start + count * at // 5 for at in range(1, 5))}
            if count <= FEW or (count < 2 * FEW and not self.is_alone):
                rows |= set(range(start, stop))
            start = stop
        rows |= set(range(self.early - 1, self.early + 4))
        if self.level and not self.is_alone:
            rows |= set(range(self.level - 1, self.level + AROUND))
        if number == 1:  # In the padded text, column `row` has the position `row - PADDING`.
            shifted = {row - PADDING for row in sorted(rows)[::3] if row >= PADDING}
            borders = {place for length in lengths for place in (length - 1, length)}
            rows = shifted | set(sorted(rows)[::2]) | (rows & borders)
        return sorted(rows)


@contextlib.contextmanager
def replace_states(model: Any, samples: Samples) -> Iterator[None]:
    """Replace the states of a loaded checkpoint by samples."""
    spaces = {id(space): space for space in (code_of(module).__globals__ for module in samples.attentions)}

    def use_samples(rotate: Any, is_complex: bool) -> Any:
        def apply(*args: Any, **kwargs: Any) -> Any:
            count = 2 if torch.is_tensor(args[1]) and args[1].ndim == 4 else 1  # Keys, or already cos.
            axis = 2 if is_complex else kwargs.get("unsqueeze_dim", 1)
            return rotate(*samples.states(args[:count], axis), *args[count:], **kwargs)

        return apply

    with contextlib.ExitStack() as stack:
        for space in spaces.values():
            functions = {name: use_samples(space[name], name == APPLY[1]) for name in APPLY if name in space}
            stack.enter_context(replace_functions(space, functions))
        stack.enter_context(samples.replace_inputs())
        yield


def layer_calls(model: Any) -> list[int | None]:
    """Return the layer of each call of an attention in one forward."""
    layers = list[int | None]()

    def enter(attention: Any, _: Any, named: dict[str, Any]) -> None:
        own = getattr(attention, "layer_idx", getattr(attention, "block_idx", None))
        layers.append(named.get("layer_idx", own))

    with hook_attentions(model, enter=enter), torch.no_grad():
        model(torch.zeros(1, 2, dtype=torch.long), use_cache=False)
    return layers


def compared_calls(model: Any, text: Text) -> tuple[list[int], int | None]:
    """Return the numbers of the attention calls that are compared, and how many calls a forward needs."""
    acting = [number for number, layer in enumerate(layer_calls(model)) if layer in text.layers]
    if text.is_ordered_by_prompt:
        return acting, None
    return first_calls(acting[: NUM_LAYERS if text.is_short else 1])


def first_calls(numbers: list[int]) -> tuple[list[int], int | None]:
    """Return the numbers of attention calls, and how many calls a forward needs for them."""
    return numbers, numbers[-1] + 1 if numbers else None


def run_forms(model: Any, text: Text) -> dict[str, Any]:
    """Run a text in every way on a loaded checkpoint.

    Returns the outputs of the compared rows by the name of the form, each with the number of the text, the call and
    the rows; or an error, text.
    """
    samples = Samples(model, 2 * text.length, SPREAD)
    takes_positions = "position_ids" in inspect.signature(model.forward).parameters
    default, forms = backend_of(model), dict[str, Any]()
    calls = compared_calls(model, text)
    with replace_states(model, samples), unwritten_memory_as_nan():
        for way in text.ways(default, takes_positions=takes_positions):
            is_whole = way.is_main or text.is_ordered_by_prompt
            try:
                model.set_attn_implementation(way.backend)
                pieces = small_pieces() if way.is_main else contextlib.nullcontext()
                with cast_attentions(samples.attentions, way.dtype), pieces:
                    run_way(model, samples, text, way, calls if is_whole else first_calls(calls[0][:1]), forms)
            except Exception as error:  # Any exception of the model or its cache is the result.
                forms[way.name] = describe(error)
            finally:
                model.set_attn_implementation(default)
    return forms


@contextlib.contextmanager
def small_pieces() -> Iterator[None]:
    """Rotate the states of a short text in small pieces, as those of a long one are."""
    modules = [module for name, module in sys.modules.items() if name.endswith(".relation_parts")]
    with contextlib.ExitStack() as stack:
        for module in modules:
            stack.enter_context(replace_functions(vars(module), {"PIECE": 1}))
        yield


@contextlib.contextmanager
def unwritten_memory_as_nan() -> Iterator[None]:
    """Fill new memory with NaN: what is read before it is written may otherwise be right by chance."""
    mode = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(mode=mode, warn_only=warn_only)


@contextlib.contextmanager
def cast_attentions(attentions: Sequence[Any], dtype: torch.dtype) -> Iterator[None]:
    """Compute attentions in another type: their inputs are samples, and their outputs are cast back."""
    if dtype == torch.float32:
        yield
        return
    cast = lambda _, __, output: (output[0].float(), *output[1:])  # noqa: E731
    hooks = [attention.to(dtype).register_forward_hook(cast) for attention in attentions]
    try:
        yield
    finally:
        for hook, attention in zip(hooks, attentions, strict=True):
            hook.remove()
            attention.float()


def run_calls(
    way: Way, cache: Mapping[str, Any], run: Callable[[int, int, list[int], bool], Any]
) -> Iterator[tuple[str, list[int], int, int, Any]]:
    """Run the calls of a way. Yield the name of each, the order of the texts, the range of tokens, and the output.

    Args:
        way: The calls, drafts and swaps.
        cache: Contains the cache as its only value after the first call.
        run: Runs tokens; its arguments are their first index and their end, the order of the texts, and whether they
            are a draft, which has other tokens.
    """
    start, order = 0, list(range(way.batch))
    for name, count in way.calls:
        if way.swaps and start and order[0] == 0:
            order.reverse()
            next(iter(cache.values())).reorder_cache(torch.tensor(order))
        is_decoded = "decoded" in name
        ends = [(at, at + 1) for at in range(start, start + count)] if is_decoded else [(start, start + count)]
        for first, last in ends:
            end = first
            for size in way.drafts[name][first > start :] if way.drafts and first else ():
                run(end, end + size, order, True)
                end += size
            if end > first:
                crop(next(iter(cache.values())), end - first)
            yield name, order, first, last, run(first, last, order, False)
        start += count


def run_way(model: Any, samples: Samples, text: Text, way: Way, calls: Any, forms: dict[str, Any]) -> None:
    """Run a text in one way, and add the outputs of its calls to `forms`."""
    numbers, limit = calls
    takes_positions = "position_ids" in inspect.signature(model.forward).parameters
    end, cache = sum(count for _, count in way.calls) + max(map(sum, way.drafts.values()), default=0), dict[str, Any]()
    place = torch.arange(end)[None] - torch.tensor([0, way.padding][: way.batch])[:, None]
    token = place.clamp(min=0) + text.length * torch.arange(way.batch)[:, None]

    def see_cache(_: Any, args: Any, named: dict[str, Any]) -> None:
        found = next((value for value in (*named.values(), *args) if hasattr(value, "get_seq_length")), None)
        if found is not None:
            cache[cache_argument(model)] = found

    def run(first: int, last: int, order: list[int], is_draft: bool) -> list[Any]:
        given: dict[str, Any] = {}
        if way.padding:
            given["attention_mask"] = (place[order, :last] >= 0).long()
        elif way.batch > 1:
            given["attention_mask"] = torch.ones(way.batch, last, dtype=torch.long)
        if takes_positions:  # As in `generate`; without them some families count from 0 again (Bamba).
            given["position_ids"] = text.positions[place[order].clamp(min=0)][:, first:last]
        samples.begin((token[order, first:last] + text.length * is_draft) % (2 * text.length))
        ids = torch.zeros(way.batch, last - first, dtype=torch.long)
        with hook_attentions(model, enter=see_cache):
            forward: Any = functools.partial(model, ids, use_cache=True, **cache, **given)
            forward = torch.enable_grad()(forward) if way.trains else forward
            return run_and_record(model, forward, limit=limit)[1]

    for name, order, first, last, outputs in run_calls(way, cache, run):
        for row, number in enumerate(order):
            lost = first - way.padding * number
            at = torch.tensor([r for r in text.rows(number) if lost <= r < lost + last - first])
            kept = forms.setdefault(f"{name} ({way.name})", [])
            shown = numbers[: 1 if number else None] if len(at) else []
            kept += [(number, layer, at, outputs[layer][row, at - lost].detach().clone()) for layer in shown]


def expected_outputs(
    expected: Expected, text: Text, num_texts: int, *, is_stock: bool = False
) -> dict[tuple[int, int, int], Any]:
    """Return the expected output of each compared row, by the numbers of its text, its call and its token.

    Those of the unmodified model have no methods.
    """
    model = expected.model
    samples, found = Samples(model, 2 * text.length, SPREAD), dict[tuple[int, int, int], Any]()
    numbers, limit = compared_calls(model, text)
    expected.use([] if is_stock else text.steps)
    for number in range(num_texts):
        if number == 1:
            numbers = numbers[:1]
            limit = limit and numbers[0] + 1
        rows = text.rows(number)
        expected.rows = rows
        if text.is_ordered_by_prompt:
            expected.prompt = text.prompt - PADDING * number
        samples.begin(torch.arange(text.length)[None] + number * text.length)
        outputs = expected.outputs(samples, text.positions[None], limit)
        found |= {(number, call, row): outputs[call][0, row] for call in numbers for row in rows}
    expected.angles.clear()
    expected.rows = expected.prompt = None
    return found


def compare_forms(forms: dict[str, Any], expected: dict[tuple[int, int, int], Any], text: Text) -> dict[str, Any]:
    """Return the largest difference in each form, relative to the largest expected value of a row; errors stay.

    If the text is longer than `PRECISE`, it is less by as many times.
    """
    differences = dict[str, Any]()
    precise = PRECISE if any("original_length" in step for step in text.steps) else PRECISE // 4
    precise //= 2 if any(isinstance(step.get("rescale"), list) for step in text.steps) else 1
    for name, parts in forms.items():
        if isinstance(parts, str):
            differences[name] = parts
            continue
        each = []
        for number, call, rows, outputs in parts:
            right = torch.stack([expected[number, call, row] for row in rows.tolist()])
            scale = right.abs().amax(-1).clamp(min=1e-30) * max(text.length / precise, 1.0)
            each.append(((outputs - right).abs().amax(-1) / scale).max())
        if each:
            differences[name] = torch.stack(each).max().item()  # Python's max would lose NaN.
    return differences
