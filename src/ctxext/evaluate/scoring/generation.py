"""Scoring by generation: generate answers and compare them."""

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any

import torch

from ctxext.data.prompt import Prompt
from ctxext.evaluate.model import LoadedModel
from ctxext.evaluate.scoring.as_written import forget_longer_prompts
from ctxext.evaluate.scoring.exact_match import check_finite
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
    """The grade of the text of greedy decoding."""
    for depth, prompts, written in _written(loaded, questions, wanted):
        texts = [loaded.encoder.tokenizer.decode(ids, skip_special_tokens=True) for ids in written]
        yield depth, [grade(text, prompt) for text, prompt in zip(texts, prompts, strict=True)]


def _written(
    loaded: LoadedModel, questions: Sequence[Sequence[Prompt]], wanted: Sequence[int]
) -> Iterator[tuple[int, list[Prompt], list[list[int]]]]:
    """The prompts of each depth and their generated tokens.

    An engine gets all prompts at once, with common prefixes next to each other, and shares the prefixes itself.
    """
    if isinstance(loaded, ServedModel):
        rows = loaded.write([question[depth] for question in questions for depth in wanted])
        for place, depth in enumerate(wanted):
            yield depth, [question[depth] for question in questions], rows[place :: len(wanted)]
        return
    for depth in wanted:
        prompts = [question[depth] for question in questions]
        yield depth, prompts, _generate(loaded, prompts)


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
    end = config.eos_token_id[0] if isinstance(config.eos_token_id, list) else config.eos_token_id
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
