"""Exact match with one teacher-forced forward per prompt, where common prefixes run once.

Greedy decoding returns an answer if and only if each of its tokens is the arg-max given the tokens before it, so
nothing is generated. The prompts of one haystack have a common prefix up to a needle or up to the question. If the
position encoding allows it, the prefix runs once, and its cache is cropped to where the next prompt differs.

If heads are ordered by the prompt, or the schedule depends on the length, one forward over prompt and answer differs
from generation: the answer's last token would decide. Then each prompt runs as in generation: first the prompt, then
the answer on its cache, token by token if the schedule depends on the length.
"""

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from ctxext.checkpoint.loading import quiet_transformers
from ctxext.data.prompt import Prompt
from ctxext.errors import CtxextError
from ctxext.evaluate.model import LoadedModel
from ctxext.evaluate.scoring.prefix_cache import (
    follows_length,
    forget_longer_prompts,
    is_static,
    is_static_for,
    new_cache,
)
from ctxext.verify.decoding_process import cache_argument, cache_of


@dataclass(frozen=True)
class Branch:
    """Tokens that some prompts have in common, and the branches that follow.

    Attributes:
        start: The index of the first token.
        end: The index behind the last token.
        prompts: Indices of the prompts.
        children: The branches that follow; empty if a single prompt ends here.
    """

    start: int
    end: int
    prompts: list[int]
    children: "list[Branch]" = field(default_factory=list)


def grow(ids: torch.Tensor, num_last: int) -> Branch:
    """The tree of the common prefixes of prompts.

    Args:
        ids: Tokens of shape (batch, prompts, length). A prefix must be common to all rows of a batch.
        num_last: The number of tokens at the end that prompts never share.
    """
    count, length = ids.shape[1], ids.shape[2]
    common = [[_common(ids[:, i], ids[:, j], length - num_last) for j in range(count)] for i in range(count)]
    return _grow(common, list(range(count)), 0, length)


def _grow(common: list[list[int]], prompts: list[int], start: int, length: int) -> Branch:
    first = prompts[0]
    if len(prompts) == 1:
        return Branch(start, length, prompts)
    end = min(common[first][other] for other in prompts[1:])
    groups: list[list[int]] = []
    for prompt in prompts:
        group = next((group for group in groups if common[group[0]][prompt] > end), None)
        if group is None:
            groups.append([prompt])
        else:
            group.append(prompt)
    return Branch(start, end, prompts, [_grow(common, group, end, length) for group in groups])


def _common(first: torch.Tensor, second: torch.Tensor, most: int) -> int:
    """How many of the first tokens are the same in every row, at most `most`."""
    differs = (first != second).any(0).nonzero()
    return min(most, int(differs[0])) if len(differs) else most


_WORTH = 1 / 8
"""The share of a prompt below which a common prefix runs again for each: a first piece needs no mask and is faster."""

_PIECE = {"cpu": 512}
_LARGE_PIECE = 2048
"""The size of the pieces that continue a cache: the mask of a piece is computed even where it hides everything."""

Scores = Iterator[tuple[int, list[bool]]]
Finished = TypeVar("Finished")


@torch.inference_mode()
def score_depths(
    loaded: LoadedModel, questions: Sequence[Sequence[Prompt]], wanted: Sequence[int], *, share: bool | None = None
) -> Scores:
    """Score questions at some depths.

    The result of a depth does not depend on which other depths are wanted, so that a resumed run is bit-equal.

    Args:
        loaded: The model.
        questions: The prompts of each question, one per depth; all of the same length.
        wanted: Indices of the depths to score.
        share: Whether prompts share a cache; by default if the model allows it.

    Yields:
        The index of a depth, and for each question whether the answer is correct.
    """
    ids = torch.tensor([[prompt.ids for prompt in question] for question in questions], device=loaded.device)
    for depth, logits in _run_all(loaded, questions, ids, set(wanted), share):
        yield depth, are_exact(loaded.name, logits, ids[:, depth], _num_answers(questions, depth))


@torch.inference_mode()
def answer_losses(
    loaded: LoadedModel, questions: Sequence[Sequence[Prompt]]
) -> Iterator[tuple[int, list[float], list[bool]]]:
    """The loss of the correct answers, at every depth.

    Args:
        loaded: The model.
        questions: The prompts of each question, one per depth; all of the same length.

    Yields:
        The index of a depth, the mean loss in nats of each question's answer, and whether each answer is correct.
    """
    ids = torch.tensor([[prompt.ids for prompt in question] for question in questions], device=loaded.device)
    for depth, logits in _run_all(loaded, questions, ids, set(range(ids.shape[1])), None):
        counts = _num_answers(questions, depth)
        correct = are_exact(loaded.name, logits, ids[:, depth], counts)
        scores = logits[:, :-1].float().log_softmax(-1)
        targets = ids[:, depth, -scores.shape[1] :, None]
        losses = -scores.gather(-1, targets)[..., 0].double()
        yield depth, [float(losses[row, -count:].mean()) for row, count in enumerate(counts)], correct


def _run_all(
    loaded: LoadedModel, questions: Sequence[Sequence[Prompt]], ids: torch.Tensor, wanted: set[int], share: bool | None
) -> Iterator[tuple[int, torch.Tensor]]:
    """The last logits of the wanted prompts."""
    num_kept = num_own(questions)
    is_fixed = _is_fixed(loaded, ids, num_kept)
    if not (may_share(loaded, ids, num_kept) if share is None else share):
        for prompt in wanted:
            if is_fixed:
                forget_longer_prompts(loaded.model)
                yield prompt, run(loaded.model, ids[:, prompt], num_kept)
            else:
                yield prompt, run_as_written(loaded.model, ids[:, prompt], _num_answers(questions, prompt), num_kept)
        return
    forget_longer_prompts(loaded.model)
    yield from walk(
        loaded.model, ids, num_kept, wanted, lambda prompt, rest, cache: run(loaded.model, rest, num_kept, cache)
    )


def num_own(questions: Sequence[Sequence[Prompt]]) -> int:
    """How many tokens at the end prompts never share: the longest answer, and the token that it is read from."""
    return max(prompt.num_answer for question in questions for prompt in question) + 1


def may_share(loaded: LoadedModel, ids: torch.Tensor, num_last: int) -> bool:
    """Whether prompts may share the cache of a prefix; arguments as in `grow`."""
    return loaded.can_share or (_is_fixed(loaded, ids, num_last) and _can_crop(loaded, ids))


def _is_fixed(loaded: LoadedModel, ids: torch.Tensor, num_kept: int) -> bool:
    """Whether the encoding of each token of these prompts is independent of what follows it."""
    common = grow(ids, num_kept).end if ids.shape[1] > 1 else ids.shape[2] - num_kept
    return is_static_for(loaded.model.config.to_dict(), common, ids.shape[2])


def _can_crop(loaded: LoadedModel, ids: torch.Tensor) -> bool:
    """Whether prompts may share a cache under a schedule that depends on the length, but not at these lengths."""
    return ids.shape[1] > 1 and not is_static(loaded.model.config.to_dict()) and new_cache(loaded.model) is not None


def _num_answers(questions: Sequence[Sequence[Prompt]], depth: int) -> list[int]:
    return [question[depth].num_answer for question in questions]


def _roots(branch: Branch, worth: float) -> Iterator[Branch]:
    """The tree without common prefixes that are too short to be worth a cache."""
    if branch.children and branch.end < worth:
        for child in branch.children:
            yield from _roots(child, worth)
    else:
        yield dataclasses.replace(branch, start=0)


def walk(
    model: Any,
    ids: torch.Tensor,
    num_last: int,
    wanted: set[int],
    finish: Callable[[int, torch.Tensor, Any], Finished],
) -> Iterator[tuple[int, Finished]]:
    """Read what prompts have in common once, and finish each of the wanted on a cache of it.

    Args:
        model: A causal language model whose caches can be cropped.
        ids: Tokens of shape (batch, prompts, length), without padding.
        num_last: The number of tokens at the end that prompts never share.
        wanted: Indices of the prompts to finish.
        finish: Called with the index of a prompt, its own tokens of shape (batch, rest), and the cache of those before
            or None. It may add to the cache.

    Yields:
        The index of a prompt, and what `finish` returned.
    """
    for root in _roots(grow(ids, num_last), _WORTH * ids.shape[2]):
        yield from _visit(model, ids, wanted, finish, root, None)


def _visit(
    model: Any,
    ids: torch.Tensor,
    wanted: set[int],
    finish: Callable[[int, torch.Tensor, Any], Finished],
    branch: Branch,
    cache: Any,
) -> Iterator[tuple[int, Finished]]:
    """Run a branch on the cache of its prefix, then the branches that follow."""
    if not wanted & set(branch.prompts):
        return
    prompt = branch.prompts[0]
    if not branch.children:
        yield prompt, finish(prompt, ids[:, prompt, branch.start :], cache)
        return
    cache = new_cache(model) if cache is None else cache
    run(model, ids[:, prompt, branch.start : branch.end], 1, cache)
    for child in branch.children:
        surplus = cache.get_seq_length() - branch.end
        if surplus:
            cache.crop(-surplus)
        yield from _visit(model, ids, wanted, finish, child, cache)


def run(model: Any, ids: torch.Tensor, num_kept: int, cache: Any = None) -> torch.Tensor:
    """The logits after the last tokens of some prompts, of shape (batch, num_kept, vocabulary).

    Args:
        model: A causal language model.
        ids: Tokens of shape (batch, length), without padding.
        num_kept: The number of last tokens to return logits of.
        cache: The cache of the tokens before; it grows by these tokens.
    """
    options: dict[str, Any] = _keep_last(model, num_kept)
    if cache is None:
        return _last(model(input_ids=ids, use_cache=False, **options), num_kept)
    options[cache_argument(model)] = cache
    start, length = 0, ids.shape[1]
    size = length if cache.get_seq_length() == 0 else max(num_kept, _PIECE.get(ids.device.type, _LARGE_PIECE))
    # Pieces are counted from the end, so that the last one holds every kept token.
    for end in range(length, 0, -size)[::-1]:
        output = model(input_ids=ids[:, start:end], use_cache=True, **options)
        start = end
    return _last(output, num_kept)


def run_as_written(model: Any, ids: torch.Tensor, num_answers: Sequence[int], num_kept: int) -> torch.Tensor:
    """The logits from which each answer would be generated, of shape (batch, num_kept, vocabulary).

    They are at the end of each row. Before them, and for the logits after the answer, whose last token is never read,
    there are zeros.

    Args:
        model: A causal language model.
        ids: Prompts of shape (batch, length), without padding, each ending with its answer.
        num_answers: The number of tokens of each answer; answers of the same size run together.
        num_kept: At least one more than the tokens of the longest answer.
    """
    token_by_token = follows_length(model.config.to_dict())
    logits: torch.Tensor | None = None
    for size in sorted(set(num_answers)):
        rows = [row for row, num_answer in enumerate(num_answers) if num_answer == size]
        with quiet_transformers():  # A warning that the prompt alone orders the heads is of no use here.
            answer = _answer_logits(model, ids[rows], size, token_by_token=token_by_token)
        if logits is None:
            logits = answer.new_zeros(len(num_answers), num_kept, answer.shape[-1])
        logits[rows, -size - 1 : -1] = answer
    assert logits is not None
    return logits


def _answer_logits(model: Any, ids: torch.Tensor, size: int, *, token_by_token: bool) -> torch.Tensor:
    forget_longer_prompts(model)
    first = model(input_ids=ids[:, :-size], use_cache=True, **_keep_last(model, 1))
    cache, logits = cache_of(first), [first.logits[:, -1:]]
    if size > 1:
        pieces = torch.split(ids[:, -size:-1], 1 if token_by_token else size, dim=1)
        logits += [run(model, piece, piece.shape[1], cache) for piece in pieces]
    return torch.cat(logits, dim=1)


def _keep_last(model: Any, count: int) -> dict[str, Any]:
    return {"logits_to_keep": count} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}


def _last(output: Any, num_kept: int) -> torch.Tensor:
    logits: torch.Tensor = output.logits
    return logits[:, -num_kept:]


def are_exact(name: str, logits: torch.Tensor, ids: torch.Tensor, num_answers: Sequence[int]) -> list[bool]:
    """Whether every token of each answer is the arg-max given the tokens before it.

    Args:
        name: The name of the model, for errors.
        logits: Logits after the last tokens, of shape (batch, kept, vocabulary).
        ids: The prompts, of shape (batch, length), each ending with its answer.
        num_answers: The number of tokens of each answer.
    """
    # Some families mask unused words with minus infinity; the largest number is finite all the same.
    check_finite(name, logits.amax(-1))
    best = logits[:, :-1].argmax(-1)
    return [bool((best[row, -n:] == ids[row, -n:]).all()) for row, n in enumerate(num_answers)]


def check_finite(name: str, numbers: torch.Tensor) -> None:
    """Refuse numbers that overflowed."""
    if not bool(numbers.isfinite().all()):
        raise CtxextError(
            f'"{name}" returns logits that are not numbers (NaN or infinite).',
            hint="Try --dtype bf16 or --dtype fp32, or check the weights.",
        )
