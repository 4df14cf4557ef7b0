"""Similarity of texts: the cosine of their pooled vectors."""

from collections.abc import Sequence

import torch

from ctxext.models.model import LoadedModel

_ROUNDING = 1e-6
"""Rounding error of similarities: a passage within it does not count as more similar."""

Question = tuple[Sequence[int], Sequence[Sequence[int]]]
"""The tokens of a query and of passages; the first passage is the correct one."""


@torch.inference_mode()
def are_most_similar(loaded: LoadedModel, questions: Sequence[Question], long_texts: str = "cut") -> list[bool]:
    """Return for each question whether the correct passage is the most similar to the query.

    Args:
        loaded: The model.
        questions: Queries and passages.
        long_texts: The treatment of passages beyond the context length: "cut", "average" or "best".
    """
    answers, ends = [], (loaded.encoder.get_start_tokens(), loaded.encoder.get_end_tokens())
    last = 1 if long_texts == "cut" else None
    queries = [loaded.pooler.cut(query, *ends) for query, _ in questions]
    read = [[loaded.pooler.chunks(passage, *ends)[:last] for passage in passages] for _, passages in questions]
    # Questions may share passages.
    texts = list(
        dict.fromkeys(map(tuple, [*queries, *(chunk for passages in read for text in passages for chunk in text)]))
    )
    vectors = dict(zip(texts, pool_texts(loaded, texts), strict=True))
    for query, passages in zip(queries, read, strict=True):
        similar = []
        for chunks in passages:
            rows = torch.stack([vectors[tuple(chunk)] for chunk in chunks])
            rows = torch.nn.functional.normalize(rows.mean(0, keepdim=True)) if long_texts == "average" else rows
            similar.append(float((rows @ vectors[tuple(query)]).max()))
        answers.append(similar[0] > max(similar[1:]) + _ROUNDING)
    return answers


@torch.inference_mode()
def pool_texts(loaded: LoadedModel, texts: Sequence[Sequence[int]]) -> torch.Tensor:
    """Compute the normalized vectors of texts, of shape (texts, width), in float64 on the CPU.

    Args:
        loaded: The model.
        texts: Tokens of each text, special tokens included.
    """
    base = getattr(loaded.model, "base_model", loaded.model)
    vectors: dict[int, torch.Tensor] = {}
    for length in {len(text) for text in texts}:
        numbers = [number for number, text in enumerate(texts) if len(text) == length]
        ids = torch.tensor([list(texts[number]) for number in numbers], device=loaded.device)
        batches = torch.split(ids, loaded.rows_that_fit(length))
        states = [loaded.pooler(base(input_ids=rows).last_hidden_state.double()).cpu() for rows in batches]
        vectors.update(zip(numbers, torch.cat(states), strict=True))
    stacked = torch.stack([vectors[number] for number in range(len(texts))])
    loaded.check_finite(stacked)
    return torch.nn.functional.normalize(stacked)
