"""Scoring of answers: one teacher-forced forward pass per prompt, or generation; common prefixes run once.

Greedy decoding returns an answer if and only if each of its tokens is the arg-max given the tokens before it, so
exact match needs no generation. Prompts of one haystack have a common prefix up to a needle or up to the question. If
the position encoding allows it, the prefix runs once, and its cache goes back to the prefix of the next prompt.

If the prompt determines the order of heads, or the schedule depends on the length, a forward pass over prompt and
answer differs from generation, because it depends on the answer's last token. Then each prompt runs as in generation:
first the prompt, then the answer on its cache, token by token if the schedule depends on the length.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import torch

from ctxext.checkpoint.loading import quiet_transformers
from ctxext.data.encoding import BASE_FORM, PromptForm
from ctxext.data.prompt import Prompt
from ctxext.models.model import LoadedModel, Written, end_answer
from ctxext.models.prefix_cache import (
    PrefixCache,
    follows_length,
    forget_longer_prompts,
    is_static_for,
    limit_logits,
    new_cache,
)
from ctxext.models.reading import run
from ctxext.verify.decoding_process import cache_of

_WORTH = 1 / 8
"""Minimum share of a reused prefix in a prompt: a first piece needs no mask and is faster."""

Finished = TypeVar("Finished")
_Grade = Callable[[Sequence[int], Prompt], float]
"""Grades the tokens of an answer, from 0 to 1."""


class Scored(NamedTuple):
    """The results of several questions at one depth.

    Attributes:
        depth: The index of the depth.
        scores: Whether each answer is correct, or the share of correct parts.
        cut: Whether each wrong answer ended at the maximum number of tokens; empty if that is not meaningful.
        read: The number of tokens of each prompt that a server counted; empty if they are the prompts' own.
        thought: Whether each answer has thoughts although they are switched off; empty if they are not.
    """

    depth: int
    scores: Sequence[float]
    cut: Sequence[bool] = ()
    read: Sequence[int] = ()
    thought: Sequence[bool] = ()


_GRADED_EACH = 128
"""Number of tokens up to which an answer is graded after each one, and after so many more."""


@torch.inference_mode()
def score_depths(
    loaded: LoadedModel, questions: Sequence[Sequence[Prompt]], depths: Sequence[int]
) -> Iterator[tuple[int, list[bool]]]:
    """Score questions at some depths.

    The result of a depth does not depend on the other depths, so that a resumed run is bit-identical.

    Args:
        loaded: The model.
        questions: The prompts of each question, one per depth; all of the same length.
        depths: Indices of the depths to score.

    Yields:
        The index of a depth, and for each question whether the answer is correct.
    """
    for depth, ids, logits in _run_all(loaded, questions, set(depths)):
        yield depth, are_exact(loaded, logits, ids, _count_answers(questions, depth))


@torch.inference_mode()
def answer_losses(
    loaded: LoadedModel, questions: Sequence[Sequence[Prompt]]
) -> Iterator[tuple[int, list[float], list[bool]]]:
    """Yield the loss on the correct answers at every depth.

    Args:
        loaded: The model.
        questions: The prompts of each question, one per depth; all of the same length.

    Yields:
        The index of a depth, the mean loss in nats of each answer, and whether each answer is correct.
    """
    for depth, ids, logits in _run_all(loaded, questions, set(range(len(questions[0])))):
        counts = _count_answers(questions, depth)
        correct = are_exact(loaded, logits, ids, counts)
        yield depth, [_mean_loss(logits[row], ids[row], count) for row, count in enumerate(counts)], correct


def _mean_loss(logits: torch.Tensor, ids: torch.Tensor, num_answer: int) -> float:
    """Return the mean loss of one answer: float32 scores of all answers at once would take gigabytes."""
    scores = logits[-num_answer - 1 : -1].float().log_softmax(-1)
    return float(-scores.gather(-1, ids[-num_answer:, None]).double().mean())


def _run_all(
    loaded: LoadedModel, questions: Sequence[Sequence[Prompt]], depths: set[int]
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Yield the index of each depth, its prompts and their last logits."""
    ids, num_kept = tokens_of(questions).to(loaded.device), count_unshared(questions)
    common, length = min(count_common(ids, num_kept)[0]), ids.shape[2]
    if ids.shape[1] > 1 and loaded.may_share(common, length):
        forget_longer_prompts(loaded.model)
        for depth, logits in walk(
            loaded.model, ids, num_kept, depths, lambda _, rest, cache: run(loaded.model, rest, num_kept, cache)
        ):
            yield depth, ids[:, depth], logits
        return
    is_fixed = is_static_for(loaded.model.config.to_dict(), common, length)
    for depth in depths:
        prompts = ids[:, depth]
        if is_fixed:
            forget_longer_prompts(loaded.model)
            yield depth, prompts, run(loaded.model, prompts, num_kept, loaded.cache_for(length))
        else:
            yield depth, prompts, run_as_written(loaded.model, prompts, _count_answers(questions, depth), num_kept)


def tokens_of(questions: Sequence[Sequence[Prompt]]) -> torch.Tensor:
    """Return the tokens of prompts of the same length, of shape (questions, depths, length)."""
    return torch.tensor([[prompt.ids for prompt in question] for question in questions])


def count_unshared(questions: Sequence[Sequence[Prompt]]) -> int:
    """Count the last tokens that prompts never share: the longest answer, and the token before it."""
    return max(prompt.num_answer for question in questions for prompt in question) + 1


def _count_answers(questions: Sequence[Sequence[Prompt]], depth: int) -> list[int]:
    return [question[depth].num_answer for question in questions]


def count_common(ids: torch.Tensor, num_last: int) -> list[list[int]]:
    """Count the common first tokens of any two prompts, in every row of a batch.

    Args:
        ids: Tokens of shape (batch, prompts, length).
        num_last: The number of last tokens that prompts never share.
    """
    most = ids.shape[2] - num_last
    counts = []
    for first in ids[:, :, :most].unbind(1):
        differs = [(first != second).any(0).nonzero() for second in ids[:, :, :most].unbind(1)]
        counts.append([int(places[0]) if len(places) else most for places in differs])
    return counts


def walk(
    model: Any,
    ids: torch.Tensor,
    num_last: int,
    chosen: set[int],
    finish: Callable[[int, torch.Tensor, PrefixCache | None], Finished],
) -> Iterator[tuple[int, Finished]]:
    """Read the common tokens of prompts once, and finish each chosen prompt on their cache.

    Each prompt is followed by the one with the longest common prefix. Tokens shared with any other prompt run
    separately, so that the cache can go back there, and the pieces do not depend on the chosen prompts.

    Args:
        model: A causal language model with caches that can be continued.
        ids: Tokens of shape (batch, prompts, length), without padding.
        num_last: The number of last tokens that prompts never share.
        chosen: Indices of the prompts to finish.
        finish: Called with the index of a prompt, its remaining tokens of shape (batch, rest), and the cache of the
            tokens before them, or None for no cache. It may extend the cache.

    Yields:
        The index of a prompt, and the result of `finish`.
    """
    unit, waiting = new_cache(model).unit, list(range(ids.shape[1]))
    common = [[count - count % unit for count in counts] for counts in count_common(ids, num_last)]
    prompt = read = 0
    cache: PrefixCache | None = None
    while waiting:
        prompt = max(waiting, key=common[prompt].__getitem__)
        waiting.remove(prompt)
        if prompt not in chosen:
            continue
        shared = {count for index, count in enumerate(common[prompt]) if index != prompt}
        ends = sorted(end for end in shared if end >= _WORTH * ids.shape[2])
        done = common[prompt][read]
        if cache is not None and done in cache.marks:
            cache.go_back(done)
        else:
            done, cache = 0, new_cache(model)
        for start, end in pairwise([done, *(end for end in ends if end > done)]):
            run(model, ids[:, prompt, start:end], 1, cache)
            cache.mark()
        # What shares nothing is read in one call, unless a window makes pieces faster.
        needs_cache = bool(ends) or cache.has_window_within(ids.shape[2])
        yield prompt, finish(prompt, ids[:, prompt, ends[-1] if ends else 0 :], cache if needs_cache else None)
        read = prompt


def run_as_written(model: Any, ids: torch.Tensor, num_answers: Sequence[int], num_kept: int) -> torch.Tensor:
    """Return the logits of generation for each answer, of shape (batch, num_kept, vocabulary).

    They are at the end of each row, after zeros. The last logits are zeros too, as the answer's last token is not read.

    Args:
        model: A causal language model.
        ids: Prompts of shape (batch, length), without padding, each ending with its answer.
        num_answers: The number of tokens of each answer; answers of the same size run together.
        num_kept: At least the number of tokens of the longest answer plus one.
    """
    token_by_token = follows_length(model.config.to_dict())
    logits: torch.Tensor | None = None
    for size in sorted(set(num_answers)):
        rows = [row for row, num_answer in enumerate(num_answers) if num_answer == size]
        with quiet_transformers():  # The warning that only the prompt orders the heads does not apply.
            answer = _answer_logits(model, ids[rows], size, token_by_token=token_by_token)
        if logits is None:
            logits = answer.new_zeros(len(num_answers), num_kept, answer.shape[-1])
        logits[rows, -size - 1 : -1] = answer
    assert logits is not None
    return logits


def _answer_logits(model: Any, ids: torch.Tensor, size: int, *, token_by_token: bool) -> torch.Tensor:
    forget_longer_prompts(model)
    first = model(input_ids=ids[:, :-size], use_cache=True, **limit_logits(model, 1))
    cache, logits = PrefixCache(cache_of(first), ids.shape[1] - size), [first.logits[:, -1:]]
    if size > 1:
        pieces = torch.split(ids[:, -size:-1], 1 if token_by_token else size, dim=1)
        logits += [run(model, piece, piece.shape[1], cache) for piece in pieces]
    return torch.cat(logits, dim=1)


def are_exact(loaded: LoadedModel, logits: torch.Tensor, ids: torch.Tensor, num_answers: Sequence[int]) -> list[bool]:
    """Return whether every token of each answer is the arg-max given the tokens before it.

    Args:
        loaded: The model.
        logits: Logits after the last tokens, of shape (batch, kept, vocabulary).
        ids: The prompts, of shape (batch, length), each ending with its answer.
        num_answers: The number of tokens of each answer.
    """
    # Some families mask unused words with minus infinity; the largest number is still finite.
    loaded.check_finite(logits.amax(-1))
    best = logits[:, :-1].argmax(-1)
    return [bool((best[row, -n:] == ids[row, -n:]).all()) for row, n in enumerate(num_answers)]


def generate_exact(
    loaded: LoadedModel, questions: Sequence[Sequence[Prompt]], depths: Sequence[int]
) -> Iterator[tuple[int, list[bool]]]:
    """Yield whether greedy decoding returns exactly the answer's tokens; arguments as in `score_depths`."""
    for depth, rows in loaded.write(questions, depths):
        prompts = [question[depth] for question in questions]
        yield depth, [new.ids == prompt.ids[-prompt.num_answer :] for new, prompt in zip(rows, prompts, strict=True)]


def generate_graded(
    loaded: LoadedModel,
    questions: Sequence[Sequence[Prompt]],
    depths: Sequence[int],
    grade: Callable[[str, Prompt], float],
    form: PromptForm = BASE_FORM,
    *,
    until_right: bool = False,
) -> Iterator[Scored]:
    """Yield the grade of greedily decoded texts; common tokens of a question's prompts are read once.

    In chat, thoughts are removed before an answer is graded, and answers that reach their maximum number of tokens are
    reported. With `until_right`, generation may stop at the full grade.
    """
    encoder = loaded.encoder.use_form(form)

    def grade_tokens(ids: Sequence[int], prompt: Prompt) -> float:
        return grade(encoder.read_answer(ids), prompt)

    for depth, rows in _write(loaded, questions, depths, form, grade_tokens if until_right else None):
        pairs = [(new, question[depth]) for new, question in zip(rows, questions, strict=True)]
        scores = [grade(new.read(encoder), prompt) for new, prompt in pairs]
        is_cut = [new.is_cut and score != 1 for (new, _), score in zip(pairs, scores, strict=True)]
        read = [new.read_tokens for new in rows if new.read_tokens is not None]
        thought = [new.has_thoughts(encoder) for new in rows] if form.is_chat and form.thinks is False else ()
        yield Scored(depth, scores, is_cut if form.is_chat else (), read if len(read) == len(rows) else (), thought)


def _write(
    loaded: LoadedModel,
    questions: Sequence[Sequence[Prompt]],
    depths: Sequence[int],
    form: PromptForm = BASE_FORM,
    grade: _Grade | None = None,
) -> Iterator[tuple[int, list[Written]]]:
    """Generate as `LoadedModel.write`; prompts that may share a cache read common tokens once and may stop early."""
    if len({len(prompt.ids) for question in questions for prompt in question}) > 1:
        return loaded.write(questions, depths, form)
    ids, num_last = tokens_of(questions), count_unshared(questions)
    if loaded.may_share(min(count_common(ids, num_last)[0]), ids.shape[2]):
        return _write_on_shared(loaded, questions, depths, grade)
    return loaded.write(questions, depths, form)


@torch.inference_mode()
def _write_on_shared(
    loaded: LoadedModel, questions: Sequence[Sequence[Prompt]], depths: Sequence[int], grade: _Grade | None
) -> Iterator[tuple[int, list[Written]]]:
    """Generate after reading the common tokens once; questions with answers of the same sizes run together.

    An answer ends at an end token, and if there is a grade, at the full one.
    """
    model, ends = loaded.model, {*loaded.ends}

    def has_ended(ids: list[int], prompt: Prompt) -> bool:
        if not ends.isdisjoint(ids):
            return True
        # Decoding a long text at every token would take longer than generating it.
        if grade is None or not ids or (len(ids) > _GRADED_EACH and len(ids) % _GRADED_EACH):
            return False
        return grade(ids, prompt) == 1

    forget_longer_prompts(model)
    sizes = [tuple(prompt.num_answer for prompt in question) for question in questions]
    written: dict[tuple[int, int], Written] = {}
    for alike in dict.fromkeys(sizes):
        rows = [row for row, of_row in enumerate(sizes) if of_row == alike]
        ids = tokens_of([questions[row] for row in rows]).to(loaded.device)
        prompts = [*zip(*(questions[row] for row in rows), strict=True)]

        def write(
            depth: int,
            rest: torch.Tensor,
            cache: PrefixCache | None,
            alike: tuple[int, ...] = alike,
            prompts: Sequence[Sequence[Prompt]] = prompts,
        ) -> list[Written]:
            # A prompt that shares nothing also needs a cache, for the generated tokens.
            cache = new_cache(model) if cache is None else cache
            tokens, new = rest[:, : -alike[depth]], rest[:, :0]
            while new.shape[1] < alike[depth] and not all(map(has_ended, new.tolist(), prompts[depth])):
                logits = run(model, tokens, 1, cache)[:, -1]
                loaded.check_finite(logits.amax(-1))
                tokens = logits.argmax(-1, keepdim=True)
                new = torch.cat([new, tokens], dim=1)
            return [end_answer(row, loaded.ends, alike[depth]) for row in new.tolist()]

        for depth, texts in walk(model, ids, count_unshared(questions), set(depths), write):
            written |= {(row, depth): text for row, text in zip(rows, texts, strict=True)}
    for depth in depths:
        yield depth, [written[row, depth] for row in range(len(questions))]
