"""Scoring by generation: generate answers and compare them."""

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any

import torch

from ctxext.data.prompt import Prompt
from ctxext.evaluate.model import LoadedModel
from ctxext.evaluate.scoring.exact_match import check_finite, may_share, num_own, run, walk
from ctxext.evaluate.scoring.prefix_cache import forget_longer_prompts, new_cache
from ctxext.evaluate.served import ServedModel


def generate_exact(
    loaded: LoadedModel, questions: Sequence[Sequence[Prompt]], wanted: Sequence[int]
) -> Iterator[tuple[int, list[bool]]]:
    """Whether greedy decoding returns exactly the answer's tokens; arguments as in `exact_match.score_depths`."""
    for depth, prompts, written in _written(loaded, questions, wanted):
        yield (
            depth,
            [ids == prompt.ids[-prompt.num_answer :] for ids, prompt in zip(written, prompts, strict=True)],
        )


def generate_graded(
    loaded: LoadedModel,
    questions: Sequence[Sequence[Prompt]],
    wanted: Sequence[int],
    grade: Callable[[str, Prompt], float],
) -> Iterator[tuple[int, list[float]]]:
    """The grade of the text of greedy decoding; what the prompts of a question have in common is read once."""
    for depth, prompts, written in _written(loaded, questions, wanted, share=True):
        texts = [loaded.encoder.tokenizer.decode(ids, skip_special_tokens=True) for ids in written]
        yield depth, [grade(text, prompt) for text, prompt in zip(texts, prompts, strict=True)]


def _written(
    loaded: LoadedModel, questions: Sequence[Sequence[Prompt]], wanted: Sequence[int], *, share: bool = False
) -> Iterator[tuple[int, list[Prompt], list[list[int]]]]:
    """The prompts of each depth and their generated tokens.

    An engine gets all prompts at once, with common prefixes next to each other, and shares the prefixes itself.
    Here they are shared if that is asked for: otherwise each prompt is written as `generate` writes it.
    """
    if isinstance(loaded, ServedModel):
        rows = loaded.write([question[depth] for question in questions for depth in wanted])
        for place, depth in enumerate(wanted):
            yield depth, [question[depth] for question in questions], rows[place :: len(wanted)]
        return
    if share and len(questions[0]) > 1 and all(_may_share(loaded, question) for question in questions):
        shared = _write_on_shared(loaded, questions, set(wanted))
        for depth in wanted:
            yield (
                depth,
                [question[depth] for question in questions],
                [shared[row, depth] for row in range(len(questions))],
            )
        return
    for depth in wanted:
        prompts = [question[depth] for question in questions]
        yield depth, prompts, _generate(loaded, prompts)


def _may_share(loaded: LoadedModel, question: Sequence[Prompt]) -> bool:
    return may_share(loaded, torch.tensor([[prompt.ids for prompt in question]]), num_own([question]))


@torch.inference_mode()
def _write_on_shared(
    loaded: LoadedModel, questions: Sequence[Sequence[Prompt]], wanted: set[int]
) -> dict[tuple[int, int], list[int]]:
    """A continuation of each wanted prompt, by question and depth, on a cache of what prompts have in common.

    Questions whose answers have the same sizes run together.
    """
    model, ends = loaded.model, torch.tensor(_ends(loaded.model), device=loaded.device, dtype=torch.long)
    forget_longer_prompts(model)
    sizes = [tuple(prompt.num_answer for prompt in question) for question in questions]
    written: dict[tuple[int, int], list[int]] = {}
    for alike in dict.fromkeys(sizes):
        rows = [row for row, of_row in enumerate(sizes) if of_row == alike]
        ids = torch.tensor([[prompt.ids for prompt in questions[row]] for row in rows], device=loaded.device)

        def write(depth: int, rest: torch.Tensor, cache: Any, alike: tuple[int, ...] = alike) -> list[list[int]]:
            # A prompt that shares nothing needs a cache too, for the tokens that it writes.
            cache = new_cache(model) if cache is None else cache
            tokens, new = rest[:, : -alike[depth]], rest[:, :0]
            while new.shape[1] < alike[depth] and not bool(torch.isin(new, ends).any(1).all()):
                logits = run(model, tokens, 1, cache)[:, -1]
                check_finite(loaded.name, logits.amax(-1))
                tokens = logits.argmax(-1, keepdim=True)
                new = torch.cat([new, tokens], dim=1)
            return [_up_to_end(row, ends.tolist()) for row in new.tolist()]

        for depth, texts in walk(model, ids, num_own(questions), wanted, write):
            written |= {(row, depth): text for row, text in zip(rows, texts, strict=True)}
    return written


def _up_to_end(ids: Sequence[int], ends: Sequence[int]) -> list[int]:
    """The tokens up to the first that ends a text."""
    last = next((place for place, token in enumerate(ids) if token in ends), len(ids))
    return list(ids[: last + 1])


def _ends(model: Any) -> list[int]:
    """The tokens at which writing ends."""
    end = model.generation_config.eos_token_id
    return end if isinstance(end, list) else [] if end is None else [end]


@torch.inference_mode()
def _generate(loaded: LoadedModel, prompts: Sequence[Prompt]) -> list[list[int]]:
    """Generate a continuation of each prompt, as long as its answer may be; answers of the same size run together."""
    written: list[list[int]] = [[] for _ in prompts]
    by_size = sorted(range(len(prompts)), key=lambda row: prompts[row].num_answer)
    for size, group in groupby(by_size, key=lambda row: prompts[row].num_answer):
        rows = list(group)
        ids = torch.tensor([prompts[row].ids[:-size] for row in rows], device=loaded.device)
        for row, new in zip(rows, _greedy(loaded, ids, size), strict=True):
            written[row] = new
    return written


def _greedy(loaded: LoadedModel, ids: torch.Tensor, num_new: int) -> list[list[int]]:
    from transformers import GenerationConfig

    model: Any = loaded.model
    config = model.generation_config
    # The checkpoint's settings may include penalties and sampling, which are not greedy decoding.
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    forget_longer_prompts(model)
    end = next(iter(_ends(model)), None)
    try:
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_new,
            do_sample=False,
            pad_token_id=config.pad_token_id if config.pad_token_id is not None else (end or 0),
            return_dict_in_generate=True,
            output_logits=True,
        )
    finally:
        model.generation_config = config
    for logits in output.logits:
        check_finite(loaded.name, logits.amax(1))
    return [row.tolist() for row in output.sequences[:, ids.shape[1] :]]
