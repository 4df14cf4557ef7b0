"""Scoring by generation: generate answers and compare them."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ctxext.data.prompt import Prompt
from ctxext.evaluate.model import LoadedModel
from ctxext.evaluate.scoring.exact_match import num_common, num_own, run, tokens_of, walk
from ctxext.evaluate.scoring.prefix_cache import forget_longer_prompts, new_cache


def generate_exact(
    loaded: LoadedModel, questions: Sequence[Sequence[Prompt]], wanted: Sequence[int]
) -> Iterator[tuple[int, list[bool]]]:
    """Whether greedy decoding returns exactly the answer's tokens; arguments as in `exact_match.score_depths`."""
    for depth, rows in loaded.write(questions, wanted):
        prompts = [question[depth] for question in questions]
        yield depth, [ids == prompt.ids[-prompt.num_answer :] for ids, prompt in zip(rows, prompts, strict=True)]


def generate_graded(
    loaded: LoadedModel,
    questions: Sequence[Sequence[Prompt]],
    wanted: Sequence[int],
    grade: Callable[[str, Prompt], float],
) -> Iterator[tuple[int, list[float]]]:
    """The grade of the text of greedy decoding; what the prompts of a question have in common is read once."""
    for depth, rows in _written(loaded, questions, wanted):
        texts = [loaded.encoder.tokenizer.decode(ids, skip_special_tokens=True) for ids in rows]
        yield depth, [grade(text, question[depth]) for text, question in zip(texts, questions, strict=True)]


def _written(
    loaded: LoadedModel, questions: Sequence[Sequence[Prompt]], wanted: Sequence[int]
) -> Iterator[tuple[int, list[list[int]]]]:
    """As `LoadedModel.write`, on one reading of what prompts have in common if they may share a cache."""
    ids, num_last = tokens_of(questions), num_own(questions)
    if ids.shape[1] > 1 and loaded.may_share(min(num_common(ids, num_last)[0]), ids.shape[2]):
        return _write_on_shared(loaded, questions, wanted)
    return loaded.write(questions, wanted)


@torch.inference_mode()
def _write_on_shared(
    loaded: LoadedModel, questions: Sequence[Sequence[Prompt]], wanted: Sequence[int]
) -> Iterator[tuple[int, list[list[int]]]]:
    """The same on one reading; questions whose answers have the same sizes run together."""
    model, ends = loaded.model, torch.tensor(loaded.ends, device=loaded.device, dtype=torch.long)
    forget_longer_prompts(model)
    sizes = [tuple(prompt.num_answer for prompt in question) for question in questions]
    written: dict[tuple[int, int], list[int]] = {}
    for alike in dict.fromkeys(sizes):
        rows = [row for row, of_row in enumerate(sizes) if of_row == alike]
        ids = tokens_of([questions[row] for row in rows]).to(loaded.device)

        def write(depth: int, rest: torch.Tensor, cache: Any, alike: tuple[int, ...] = alike) -> list[list[int]]:
            # A prompt that shares nothing needs a cache too, for the tokens that it writes.
            cache = new_cache(model) if cache is None else cache
            tokens, new = rest[:, : -alike[depth]], rest[:, :0]
            while new.shape[1] < alike[depth] and not bool(torch.isin(new, ends).any(1).all()):
                logits = run(model, tokens, 1, cache)[:, -1]
                loaded.check_finite(logits.amax(-1))
                tokens = logits.argmax(-1, keepdim=True)
                new = torch.cat([new, tokens], dim=1)
            return [_up_to_end(row, loaded.ends) for row in new.tolist()]

        for depth, texts in walk(model, ids, num_own(questions), set(wanted), write):
            written |= {(row, depth): text for row, text in zip(rows, texts, strict=True)}
    for depth in wanted:
        yield depth, [written[row, depth] for row in range(len(questions))]


def _up_to_end(ids: Sequence[int], ends: Sequence[int]) -> list[int]:
    """The tokens up to the first that ends a text."""
    last = next((place for place, token in enumerate(ids) if token in ends), len(ids))
    return list(ids[: last + 1])
