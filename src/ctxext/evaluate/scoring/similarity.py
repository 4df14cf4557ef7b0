"""Similarity of texts: the cosine of their mean-pooled last hidden states."""

from collections.abc import Sequence

import torch

from ctxext.evaluate.model import LoadedModel
from ctxext.evaluate.scoring.batch_size import rows_that_fit
from ctxext.evaluate.scoring.exact_match import check_finite

_ROUNDING = 1e-6
"""The difference of similarities that is no more than rounding: equal passages are no correct answer."""

Question = tuple[Sequence[int], Sequence[Sequence[int]]]
"""The tokens of a query and of passages of one length; the first passage is the correct one."""


@torch.inference_mode()
def are_most_similar(loaded: LoadedModel, questions: Sequence[Question]) -> list[bool]:
    """For each question, whether the correct passage is more similar to the query than every other.

    Args:
        loaded: The model.
        questions: Queries and passages.

    Raises:
        CtxextError: The model returns numbers that are not finite.
    """
    answers = []
    for query, passages in questions:
        correct, *others = (pooled(loaded, passages) @ pooled(loaded, [query])[0]).tolist()
        answers.append(correct > max(others) + _ROUNDING)
    return answers


@torch.inference_mode()
def pooled(loaded: LoadedModel, texts: Sequence[Sequence[int]]) -> torch.Tensor:
    """The mean of each text's last hidden states, of shape (texts, width), normalized; in float64 on the CPU.

    Args:
        loaded: The model.
        texts: Tokens of each text, special tokens included; all of the same length.
    """
    ids = torch.tensor([list(text) for text in texts], device=loaded.device)
    base = getattr(loaded.model, "base_model", loaded.model)
    means = [
        base(input_ids=rows).last_hidden_state.double().mean(1)
        for rows in torch.split(ids, rows_that_fit(loaded.model, ids.shape[1]))
    ]
    states = torch.cat(means).cpu()
    check_finite(loaded.name, states)
    return torch.nn.functional.normalize(states)
