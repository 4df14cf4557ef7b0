"""A caller's mask of pairs (4D) × positions × cache × method: each text of it says what it says alone, or is refused.

Masks pad texts on the left or the right or pack them, as bool or as numbers. Without position_ids the family rotates by
columns, and methods must find where each text begins. Where the mask does not say it, they refuse it by name.
"""

import pytest
import torch
from transformers import DynamicCache

from portable_checkpoints import tokens
from test_modeling_family_padding import RELATIONS, SLOPES, STEPS, TOLERANCE, models, names_itself, vocabulary  # noqa: F401

SIZES = 44, 37  # Tokens of two texts, both beyond the original context length of 32.
QUICK = ("self-extend", "adaptive", "dca", "distance-aware", "mspoe middle", "mspoe calibrated")


def laid(layout):
    """Where the texts of each row are: for each row the columns of its texts, and the width."""
    first, second = SIZES
    if layout == "packed":
        return [[range(first), range(first, first + second)], [range(second), range(second, first + second)]]
    width = max(SIZES) + 5
    begins = [width - size if layout == "left" else 0 for size in SIZES]
    return [[range(begin, begin + size)] for begin, size in zip(begins, SIZES, strict=True)]


def square(rows, width, padding):
    """The mask (b, 1, l, l) in which texts see themselves, and padding sees itself, nothing or everything."""
    seen = torch.zeros(len(rows), width, width, dtype=torch.bool)
    for mask, texts in zip(seen, rows, strict=True):
        for text in texts:
            mask[text.start : text.stop, text.start : text.stop] = torch.ones(len(text), len(text)).tril().bool()
        empty = ~mask.any(-1)
        if padding == "itself":
            mask |= torch.diag(empty)
        elif padding == "everything":
            mask[empty] = True
    return seen[:, None]


def asked(model, ids, mask, positions, first, kind):
    """The logits of ids in one call, or where `first` is given in a call, single tokens and a call, with a cache."""
    if kind == "float":
        mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    ends = [ids.shape[1]] if first is None else [first, first + 1, first + 2, ids.shape[1]]
    cache, at, parts = None if first is None else DynamicCache(config=model.config), 0, []
    for end in ends:
        given = {} if positions is None else {"position_ids": positions[:, at:end]}
        part = mask[:, :, at:end, :end]
        parts.append(
            model(
                ids[:, at:end], attention_mask=part, past_key_values=cache, use_cache=cache is not None, **given
            ).logits
        )
        at = end
    return torch.cat(parts, 1)


@torch.no_grad()
def problem(model, name, layout, positions, first, kind, padding="itself"):
    """What is wrong, or an empty text."""
    rows = laid(layout)
    width = max(max(text.stop for text in texts) for texts in rows) + (5 if layout == "right" else 0)
    ids, places = torch.ones(len(rows), width, dtype=torch.long), torch.zeros(len(rows), width, dtype=torch.long)
    for row, texts in enumerate(rows):
        for text in texts:
            ids[row, list(text)] = tokens(len(text), seed=len(text), vocabulary=vocabulary(model))[0]
            places[row, list(text)] = torch.arange(len(text))
    mask = square(rows, width, padding)
    try:
        logits = asked(model, ids, mask, places if positions else None, first, kind)
    except ValueError as error:
        return "" if name == "mspoe prompt" and names_itself(error, name) else str(error)
    differences = [0.0]
    for row, texts in enumerate(rows):
        for text in texts:
            plain = model(ids[row, list(text)][None], use_cache=False).logits[0]
            differences.append(float((logits[row, list(text)] - plain).abs().max() / plain.abs().max()))
    return f"off by {max(differences):.1e}" if max(differences) > TOLERANCE else ""


CELLS = [
    (layout, positions, first, kind)
    for layout in ("left", "right", "packed")
    for positions in (True, False)
    for first in (None, 40)
    for kind in ("bool", "float")
]


def check(model, name, cells, **more):
    problems = [(cell, problem(model, name, *cell, **more)) for cell in cells]
    problems = [f"{cell}: {text}" for cell, text in problems if text]
    assert not problems, "\n".join(problems)


# In prompt order the first call of a cache orders the heads for texts that go on.
NAMES = [name for name in STEPS if name != "mspoe prompt"]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.thorough) for name in NAMES]
)
def test_every_cell(models, name):  # noqa: F811
    check(models("llama", name), name, CELLS)


@pytest.mark.parametrize("name", ["self-extend", "mspoe middle", "distance-aware"])
@pytest.mark.parametrize("padding", ["nothing", "everything"])
def test_whatever_padding_sees(models, name, padding):  # noqa: F811
    check(
        models("llama", name), name, [cell for cell in CELLS if cell[0] == "left" and cell[2] is None], padding=padding
    )


@pytest.mark.parametrize("family", ["gpt_neox", "qwen3"])  # Layers with a window take a 4D mask as it is.
@pytest.mark.thorough
def test_other_families(models, family):  # noqa: F811
    check(models(family, "self-extend"), "self-extend", CELLS[::5])


@pytest.mark.parametrize("name", ["self-extend", "dca", "distance-aware", "mspoe middle"])
def test_eager_attention_adds_numbers(models, name):  # noqa: F811
    model = models("llama", name)
    model.set_attn_implementation("eager")
    try:
        check(model, name, [cell for cell in CELLS if cell[3] == "float"])
    finally:
        model.set_attn_implementation("sdpa")


def unclear(kind, size=60):
    """Masks that do not say where texts begin."""
    mask = torch.ones(size, size).tril().bool()
    if kind == "sliding":
        return mask & ~torch.ones(size, size).tril(-20).bool()
    if kind == "prefix":
        mask[:20, :20] = True
        return mask
    if kind == "everything":
        return torch.ones_like(mask)
    if kind == "blind":
        mask[30, 30] = False  # A row that does not see itself.
        return mask
    mask[30:, :10] = False  # A row that begins later than what it sees.
    return mask


@pytest.mark.parametrize("name", [*RELATIONS, "distance-aware", "mspoe middle"])
def test_a_mask_without_the_starts_of_texts_is_refused(models, name):  # noqa: F811
    model = models("llama", name)
    ids = tokens(60, vocabulary=vocabulary(model))
    for kind in ("sliding", "prefix", "everything", "blind", "later"):
        with pytest.raises(ValueError, match="4D mask without position_ids"):
            model(ids, attention_mask=unclear(kind)[None, None])
        model(ids, attention_mask=unclear(kind)[None, None], position_ids=torch.arange(60)[None])


def test_a_cached_text_that_a_later_mask_cuts_is_refused(models):  # noqa: F811
    model, cache = models("llama", "self-extend"), DynamicCache()
    ids = tokens(60, vocabulary=vocabulary(model))
    model(ids[:, :59], past_key_values=cache)
    with pytest.raises(ValueError, match="4D mask without position_ids"):
        model(ids[:, 59:], attention_mask=(torch.arange(60) > 20)[None, None, None], past_key_values=cache)
