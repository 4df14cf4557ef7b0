"""Padding × positions × cache × method: a batch says of every real token what one plain call per sequence says.

Each cell feeds a batch of three sequences, which cross the original context length and go on beyond it, and compares
the logits of its real tokens with those of one call for each sequence alone, without padding and without a cache. A
cell is right, or the method refuses it by name; there is no third outcome. Where stock transformers is wrong itself
(`stock_counts_padding`), the answer is the one that stock's positions stand for, or a refusal. Within the original
context length everything is the source model's, bit for bit.
"""

import copy
import functools
import itertools
import json
import shutil
import uuid
from collections import namedtuple

import pytest
import torch
from transformers import DynamicCache, GenerationConfig, StaticCache

import tiny_encodings
from ctxext.recipes.methods.relation import Relation
from ctxext.recipes.registry import METHODS, method_named
from portable_checkpoints import half_of, load, plain_source, tokens, write
from releases import IS_OLDER

LENGTH = 32
TOLERANCE = 1e-4  # Of the largest logit.
STEPS = {
    "mspoe calibrated": {"head_order": "calibrated", "ratio_max": 3.0, "first_layer": 0},
    "mspoe prompt": {"head_order": "prompt", "ratio_max": 3.0, "first_layer": 0},
    "self-extend": {"factor": 4, "window": 8},
    "bifocal": {"factor": 4, "window": 6, "temperature": "yarn"},
    "dca": {"factor": 4, "chunk_size": 24, "local": 4},
    "rerope": {"factor": 4, "window": 10, "temperature": "logn"},
    "sinks": {"factor": 4},
    "window": {"factor": 4},
    "adaptive": {"factor": 4},
    "distance-aware": {},
    "mspoe middle": {
        **{"schedule": "linear", "head_order": "fixed", "ratio_max": 3.0, "first_layer": 0},
        **{"rescale": "middle", "rescale_start": 5, "rescale_end": 30},
    },
}
for each in METHODS:  # What no numbers are written for is tried as it is by default.
    if each.encoding == "rotary" and each.needs_code() and not any(name.split()[0] == each.name for name in STEPS):
        STEPS[each.name] = dict(each.example)
RELATIONS = [name for name in STEPS if issubclass(method_named(name.split()[0]), Relation)]
ROTARY = ("llama", "qwen3", "gemma2", "gpt_neox")
RANKS = dict.fromkeys(ROTARY, ((1, 0), (0, 1))) | {"gemma2": ((1, 0),), "gpt_neox": ((3, 1, 0, 2), (0, 2, 1, 3))}
ALIBI = ("bloom", "falcon", "mpt")
SLOPES = ("ntk-alibi",)

Cell = namedtuple("Cell", ["padding", "positions", "cache"])
CELLS = list(
    itertools.starmap(
        Cell,
        itertools.product(
            ("none", "left", "right", "holes"), ("given", "not given"), ("none", "dynamic", "static", "turns")
        ),
    )
)
# Two halves, in each of which every two words of a cell meet: one more or less in one word changes the half.
WORDS = [list(dict.fromkeys(words)) for words in zip(*CELLS, strict=True)]
HALVES = [[], []]
for each in CELLS:
    HALVES[sum(words.index(word) for words, word in zip(WORDS, each, strict=True)) % 2].append(each)
# How many tokens each sequence has in the first part and in the second turn, and how many are decoded after each.
Sizes = namedtuple("Sizes", ["first", "second", "decoded"])
BEYOND = Sizes((44, 34, 28), (9, 5, 13), (6, 3, 4))
INSIDE = Sizes((12, 9, 5), (5, 3, 4), (4, 2, 2))


def stock_counts_padding(cell, family):
    """Why stock transformers is wrong in a cell, or an empty text."""
    has_hole = cell.padding == "holes" or (cell.padding == "right" and cell.cache != "none")
    has_hole |= cell.padding == "left" and cell.cache == "turns"
    if has_hole and family == "gemma2":
        return "a sliding window counts the padding between tokens"
    if has_hole and family == "mpt":
        return "its bias counts the padding between tokens"
    if has_hole and cell.positions == "not given" and family not in ALIBI:
        return "positions that nobody gives count the padding between tokens"
    return ""


def stock_cannot(cell, family):
    """Whether stock transformers stops with an error in a cell: biases that do not fit a static cache's room."""
    is_padded_bloom = family == "bloom" and cell.padding != "none"
    return cell.cache == "static" and family in ALIBI and (family not in ("bloom", "mpt") or is_padded_bloom)


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """The model of a family and a method, or of the source where the method is None; each is made once."""
    place = tmp_path_factory.mktemp("matrix")

    @functools.cache
    def source(family):
        if family in ALIBI:
            more = {"mpt": {"max_seq_len": 256}}.get(family, {})
            return tiny_encodings.save(family, place / family, more=more)
        folder, _ = plain_source(family, place / family)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": LENGTH}))
        return folder

    @functools.cache
    def get(family, name):
        if name is None:
            return load(source(family))
        folder = shutil.copytree(source(family), place / f"matrix_{uuid.uuid4().hex[:8]}")
        if name in SLOPES:
            return load(write(folder, method_named(name)(factor=4)))
        ranks = {"ranks": RANKS[family]} if name == "mspoe calibrated" else {}
        model = load(write(folder, method_named(name.split()[0])(**STEPS[name], **ranks)))
        draw = torch.Generator().manual_seed(1)
        for key, weight in model.named_parameters():
            if key.endswith("distance.weight"):
                weight.data = torch.randn(weight.shape, generator=draw)
        return model

    return get


def laid(padding, counts, extra=6):
    """Where tokens are (b, width): `counts` of them in each row, all else is padding."""
    counts = [max(counts)] * len(counts) if padding == "none" else counts
    width = max(counts) + (extra if padding == "holes" else 0)
    rows = torch.zeros(len(counts), width, dtype=torch.bool)
    for i, (row, count) in enumerate(zip(rows, counts, strict=True)):
        if padding == "holes":  # One hole near the front and one near the end, elsewhere in every row.
            row[:] = True
            front, gap = count // (i + 3), (width - count) // 2
            row[front : front + gap] = False
            row[width - 2 - (width - count - gap) : width - 2] = False
        else:
            row[slice(width - count, None) if padding == "left" else slice(count)] = True
    return rows


def calls(cell, sizes):
    """Where tokens are in each call of a cell, (b, l) each."""
    first, second, (alone, answer, rest) = sizes
    one = torch.ones(len(first), 1, dtype=torch.bool)
    if cell.cache == "none":
        return [laid(cell.padding, [count + alone for count in first])]
    if cell.cache != "turns":
        return [laid(cell.padding, first), *[one] * alone]
    answers = [one.clone() for _ in range(answer)]
    answers[-1][1] = cell.padding == "none"  # An answer that ends early.
    shorter = [count * 2 // 3 for count in first]
    return [laid(cell.padding, shorter), *answers, laid(cell.padding, second), *[one] * rest]


def cache_of(kind, model):
    if kind == "none":
        return None
    return StaticCache(model.config, max_cache_len=96) if kind == "static" else DynamicCache(config=model.config)


def counted(mask):
    """Positions as `generate` makes them."""
    return (mask.cumsum(-1) - 1).clamp(min=0)


def vocabulary(model):
    return model.config.get_text_config().vocab_size


def batch_of(model, steps):
    """Token ids (b, total) of a batch; a sequence has the same tokens wherever its padding is."""
    real = torch.cat(steps, 1)
    ids = torch.ones(real.shape, dtype=torch.long)
    for i, row in enumerate(real):
        ids[i, row] = tokens(int(row.sum()), seed=i, vocabulary=vocabulary(model))[0] + 1
    return ids % vocabulary(model), real


@torch.no_grad()
def run(model, cell, steps, compiled=None):
    """The logits (b, total, v) of a batch, as the cell feeds it; single tokens through a compiled model if given."""
    ids, real = batch_of(model, steps)
    cache, at, parts = cache_of(cell.cache, model), 0, []
    for step in steps:
        span = slice(at, at + step.shape[1])
        at = span.stop
        given = {} if cell.positions == "not given" else {"position_ids": counted(real)[:, span]}
        if cell.padding != "none" or cell.positions == "given":
            given["attention_mask"] = real[:, :at].long()
        called = compiled if compiled is not None and step.shape[1] == 1 else model
        if compiled is not None:  # One graph for all steps: `generate` gives the mask its final size, too.
            given["attention_mask"] = torch.nn.functional.pad(real[:, :at].long(), (0, real.shape[1] - at))
        parts.append(called(ids[:, span], past_key_values=cache, use_cache=cache is not None, **given).logits)
    return torch.cat(parts, 1)


def alone(model, cell, steps, name, as_counted=False):
    """The logits of each sequence by itself in one call: at positions 0, 1, 2 ... or as stock counts its positions.

    Ms-PoE in prompt order reads as its first part has ordered the heads, so that gets two calls where there is a cache.
    """
    ids, real = batch_of(model, steps)
    keeps = as_counted and model.config.model_type in ("gemma2", "mpt")  # Their layers count padding at any position.
    is_ordered = name == "mspoe prompt" and len(steps) > 1
    made = []
    for row, (padded, own) in enumerate(zip(ids, real, strict=True)):
        first = int(own[: steps[0].shape[1]].sum())
        if not as_counted:
            made.append(plain(model, row, int(own.sum()), first if is_ordered else None))
            continue
        here = torch.ones_like(own) if keeps else own
        given = {"attention_mask": (own.long() if keeps else torch.ones_like(padded[own]))[None]}
        if model.config.model_type not in ALIBI:
            index = (torch.arange(len(own)) - own.long().argmax()).clamp(min=0)  # What is left of a text moves nothing.
            given["position_ids"] = (counted(own) if cell.positions == "given" else index)[None, here]
        first = int(here[: steps[0].shape[1]].sum()) if is_ordered else None
        made.append(called(model, padded[here][None], given, first)[0, own[here]])
    return made


@functools.cache
def plain(model, row, count, first):
    """The logits of a row's text (`batch_of`) without any padding: the same, whatever cell it is compared in."""
    text = tokens(count, seed=row, vocabulary=vocabulary(model)) + 1
    return called(model, text % vocabulary(model), {}, first)[0]


@torch.no_grad()
def called(model, ids, given, first):
    """The logits of one call, or of two with a cache between them, of which the first has so many tokens."""
    given = {"attention_mask": torch.ones_like(ids)} | given
    if first is None:
        return model(ids, use_cache=False, **given).logits
    cache, parts = DynamicCache(config=model.config), []
    for span in (slice(first), slice(first, None)):
        part = {key: value[:, : span.stop] if key == "attention_mask" else value[:, span]
                for key, value in given.items()}  # fmt: skip
        parts.append(model(ids[:, span], past_key_values=cache, **part).logits)
    return torch.cat(parts, 1)


def off(logits, real, rows):
    """The largest difference from the rows that are expected, as a part of the largest logit."""
    pairs = [(logits[i, real[i]], row) for i, row in enumerate(rows)]
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


def names_itself(error, name):
    """Whether an error is a refusal in one line that names the method."""
    words = (name.split()[0], "Ms-PoE") if name.startswith("mspoe") else (name,)
    return isinstance(error, ValueError) and "\n" not in str(error) and any(word in str(error) for word in words)


def tried(name, function, *args):
    """What a function returns, or "refused", or any other error in a line."""
    try:
        return function(*args)
    except Exception as error:
        return "refused" if names_itself(error, name) else f"{type(error).__name__}: {error}".splitlines()[0][:150]


@functools.cache
def of_stock(model, cell, sizes):
    """What stock says in a cell, how far it is off, and how far from what its positions stand for."""
    steps = calls(cell, sizes)
    logits = tried("stock", run, model, cell, steps)
    if isinstance(logits, str):
        return logits, 0.0, 0.0
    real = torch.cat(steps, 1)
    expected = (alone(model, cell, steps, "stock", as_counted) for as_counted in (False, True))
    return logits, *(off(logits, real, rows) for rows in expected)


def problem_of(model, stock, family, name, cell):
    """What is wrong with a cell, in a line, or an empty text."""
    steps = calls(cell, BEYOND)
    real, reason = torch.cat(steps, 1), stock_counts_padding(cell, family)
    theirs, wrong, elsewhere = of_stock(stock, cell, BEYOND)
    if isinstance(theirs, str) or stock_cannot(cell, family):
        may_fail = stock_cannot(cell, family) or (IS_OLDER and cell.cache == "static" and family in ALIBI)
        return "" if isinstance(theirs, str) and may_fail else f"stock: {theirs}"
    if bool(reason) != (wrong > TOLERANCE):
        return f"the table says of stock: {reason or 'right'}; it is off by {wrong:.1e}"
    if reason and elsewhere > TOLERANCE:
        return f"stock is off by {wrong:.1e}, and by {elsewhere:.1e} from what its positions stand for"
    logits = tried(name, run, model, cell, steps)
    if isinstance(logits, str):
        return "" if logits == "refused" and reason else logits
    if not logits[real].isfinite().all():
        return "not finite"
    difference = off(logits, real, alone(model, cell, steps, name))
    if reason and difference > TOLERANCE:
        as_stock = off(logits, real, alone(model, cell, steps, name, as_counted=True))
        if as_stock > TOLERANCE:
            return f"off by {difference:.1e}, and by {as_stock:.1e} from what stock's positions stand for ({reason})"
    elif difference > TOLERANCE:
        return f"off by {difference:.1e}, stock by {wrong:.1e}"
    return other_bits(logits, theirs, real, name) if name in RELATIONS else ""


def other_bits(logits, theirs, real, name):
    """Say if a token within the original context length has other logits than stock's."""
    inside = real & (torch.arange(real.shape[1]) - real.long().argmax(1, keepdim=True) < MAPS_FIRST.get(name, LENGTH))
    different = [i for i, own in enumerate(inside) if not torch.equal(logits[i, own], theirs[i, own])]
    most = (logits - theirs)[inside].abs().max()
    return f"inside the original length sequences {different} are off by {most:.1e}" if different else ""


MAPS_FIRST = {"dca": 24, "bifocal": LENGTH}  # Rows from here on change; others from the original length on.


def table(problems):
    lines = [
        f"{name:<16} {cell.padding:<6} {cell.positions:<10} {cell.cache:<8} {text}" for name, cell, text in problems
    ]
    return f"{len(lines)} cells are wrong:\n" + "\n".join(lines)


def check(models, family, name, cells=CELLS):
    model, stock = models(family, name), models(family, None)
    problems = [(name, cell, problem_of(model, stock, family, name, cell)) for cell in cells]
    problems = [problem for problem in problems if problem[2]]
    assert not problems, f"{family}: {table(problems)}"


@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("name", STEPS)
def test_every_cell(models, name, half):
    check(models, "llama", name, HALVES[(half + list(STEPS).index(name)) % 2])


@pytest.mark.parametrize(("family", "name"), [("gemma2", "self-extend"), ("gpt_neox", "adaptive"), ("qwen3", "sinks")])
def test_some_cells_of_other_families(models, family, name):
    check(models, family, name, CELLS[1::5])


def check_inside(models, family, name, cells=CELLS):
    model, stock, problems = models(family, name), models(family, None), []
    for cell in cells:
        steps = calls(cell, INSIDE)
        theirs, _, _ = of_stock(stock, cell, INSIDE)
        logits = tried(name, run, model, cell, steps)
        text = logits if isinstance(logits, str) else other_bits(logits, theirs, torch.cat(steps, 1), name)
        problems += [(name, cell, text)] if text else []
    assert not problems, f"{family}: {table(problems)}"


@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("name", RELATIONS)
def test_cells_within_the_original_length_equal_the_unmodified_model(models, name, half):
    check_inside(models, "llama", name, HALVES[(half + RELATIONS.index(name)) % 2])


@pytest.mark.parametrize("name", SLOPES)
@pytest.mark.thorough
def test_every_cell_with_slopes(models, name):
    check(models, "bloom", name, [cell for cell in CELLS if cell.positions == "not given"])


NAMES = ["stock", *STEPS]
LAST = 127  # The end token, which is never chosen, so that all texts are as long.


def named(models, name):
    return models("llama", None if name == "stock" else name)


def written(model, ids, mask=None, **options):
    """What `generate` writes, and its cache."""
    settings = {"do_sample": False, "pad_token_id": 0, "eos_token_id": LAST, "suppress_tokens": [LAST]}
    settings |= {"max_new_tokens": 5, "return_dict_in_generate": True}
    config = GenerationConfig(**settings | {key: value for key, value in options.items() if key != "past_key_values"})
    given = {"past_key_values": options["past_key_values"]} if "past_key_values" in options else {}
    mask = torch.ones_like(ids) if mask is None else mask
    output = model.generate(ids, attention_mask=mask, generation_config=config, **given)
    return output.sequences[:, ids.shape[1] :], output.past_key_values


@torch.no_grad()
def greedy(model, ids, count=5, first=0):
    """What one plain call for each token writes; with `first`, after a cache which so many tokens have begun."""
    start = ids.shape[1]
    for _ in range(count):
        cache = DynamicCache(config=model.config) if first else None
        if first:
            model(ids[:, :first], past_key_values=cache)
        logits = model(ids[:, first:], past_key_values=cache, use_cache=cache is not None).logits[:, -1]
        logits[:, LAST] = -torch.inf
        ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], 1)
    return ids[:, start:]


def lefts(texts):
    """Texts (1, n) as a batch padded on the left, and its mask."""
    width = max(text.shape[1] for text in texts)
    pad = [width - text.shape[1] for text in texts]
    ids = [torch.nn.functional.pad(text, (count, 0)) for text, count in zip(texts, pad, strict=True)]
    masks = [(torch.arange(width) >= count).long()[None] for count in pad]
    return torch.cat(ids), torch.cat(masks)


def texts(*counts, seed=20):
    return [tokens(count, seed=seed + i, vocabulary=LAST) for i, count in enumerate(counts)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("beams", [1, 2])
def test_a_batch_writes_what_each_text_does_alone(models, name, beams):
    model, prompts = named(models, name), texts(46, 38, 29)
    together, _ = written(model, *lefts(prompts), num_beams=beams)
    for row, prompt in zip(together, prompts, strict=True):
        is_plain = beams == 1 and name != "mspoe prompt"  # In prompt order a text that grows orders heads anew.
        options = {"use_cache": name == "mspoe prompt", "num_beams": beams}
        assert torch.equal(row, (greedy(model, prompt) if is_plain else written(model, prompt, **options)[0])[0])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("keeps", ["with the cache of the first turn", "without it"])
def test_two_messages_of_a_chat(models, name, keeps):
    """The second turn comes after padding, in a row whose answer has ended early and in those with a shorter text."""
    model, prompts, more = named(models, name), texts(30, 24, 17), texts(7, 4, 9, seed=30)
    ids, mask = lefts(prompts)
    answers, cache = written(model, ids, mask, max_new_tokens=5)
    answered = torch.ones_like(answers)
    answered[1, 3:] = 0
    both = [torch.cat(parts, 1) for parts in zip((ids, mask), (answers * answered, answered), lefts(more), strict=True)]
    options = {"past_key_values": cache} if keeps.startswith("with ") else {}
    together, _ = written(model, *both, **options)
    for i, row in enumerate(together):
        text = both[0][i : i + 1, both[1][i] == 1]
        if name == "mspoe prompt":
            alone = greedy(model, text, first=prompts[i].shape[1]) if options else written(model, text)[0]
        else:
            alone = greedy(model, text)
        assert torch.equal(row, alone[0]), f"sequence {i}"


@torch.no_grad()
def fed(model, ids, mask, cache, start, step=1):
    """Logits of what comes after `start` in a padded batch, in steps, at positions as `generate` makes them."""
    parts, positions = [], counted(mask)
    for at in range(start, ids.shape[1], step):
        span = slice(at, at + step)
        given = {"attention_mask": mask[:, : at + step], "position_ids": positions[:, span]}
        parts.append(model(ids[:, span], past_key_values=cache, **given).logits)
    return torch.cat(parts, 1)


def expected_of(model, name, ids, mask, first, start):
    """The same logits from one plain call for each row; in prompt order after its first part."""
    rows = []
    for row, own in zip(ids, mask == 1, strict=True):
        text, count = row[own][None], int(own[:first].sum())
        cache = DynamicCache(config=model.config) if name == "mspoe prompt" else None
        if cache is not None:
            model(text[:, :count], past_key_values=cache)
        logits = model(text if cache is None else text[:, count:], past_key_values=cache, use_cache=cache is not None)
        rows.append(logits.logits[0, int(own[:start].sum()) - text.shape[1] :])
    return rows


def same(model, name, logits, ids, mask, first, start):
    for row, wanted in zip(logits, expected_of(model, name, ids, mask, first, start), strict=True):
        torch.testing.assert_close(row, wanted, rtol=0, atol=TOLERANCE * float(wanted.abs().max()))


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_a_cache_is_cropped_and_copied_behind_a_hole(models, name):
    """Right-padded texts with a cache, of which two copies go on otherwise; one is cropped, and others come in."""
    model, first = named(models, name), laid("right", (40, 33, 20)).long()
    prompts = texts(40, 33, 20)
    ids = torch.cat([torch.nn.functional.pad(text, (0, 40 - text.shape[1])) for text in prompts])
    cache = DynamicCache(config=model.config)
    fed(model, ids, first, cache, 0, 40)
    mask = torch.nn.functional.pad(first, (0, 12), value=1)
    branches = [torch.cat([ids, tokens(12, rows=3, seed=seed, vocabulary=LAST)], 1) for seed in (40, 50)]
    caches = [copy.deepcopy(cache), copy.deepcopy(cache)]
    for branch, own in zip(branches, caches, strict=True):
        same(model, name, fed(model, branch, mask, own, 40), branch, mask, 40, 40)
    caches[0].crop(-5)
    branch = torch.cat([branches[0][:, :47], branches[1][:, 47:]], 1)
    same(model, name, fed(model, branch, mask, caches[0], 47), branch, mask, 40, 47)
    order = torch.tensor([2, 0, 0])
    caches[1].reorder_cache(order)
    branch, mask = (torch.nn.functional.pad(one[order], (0, 5), value=9) for one in (branches[1], mask))
    mask = (mask > 0).long()
    same(model, name, fed(model, branch, mask, caches[1], 52), branch, mask, 40, 52)


def packed(counts):
    return torch.cat([torch.arange(count) for count in counts])[None]


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_packed_sequences_are_read_apart_or_refused(models, name):
    """As trainers pack them: `position_ids` alone, no cache."""
    model, parts = named(models, name), texts(40, 13, 37)
    ids, positions = torch.cat(parts, 1), packed([part.shape[1] for part in parts])
    together = tried(name, lambda: model(ids, position_ids=positions, use_cache=False).logits)
    if name == "mspoe prompt":
        assert together == "refused"
        return
    expected = torch.cat([model(part, use_cache=False).logits for part in parts], 1)
    torch.testing.assert_close(together, expected, rtol=0, atol=TOLERANCE * float(expected.abs().max()))


@torch.no_grad()
def test_packed_sequences_with_a_mask_of_tokens_are_refused_with_what_works(models):
    """transformers separates texts by `position_ids` only if there is neither a cache nor a mask."""
    model, parts = named(models, "self-extend"), texts(40, 37)
    ids, positions = torch.cat(parts, 1), packed([part.shape[1] for part in parts])
    with pytest.raises(ValueError, match=r"pass use_cache=False and no mask, or a 4D mask\.$"):
        model(ids, position_ids=positions, attention_mask=torch.ones_like(ids), use_cache=False)
    text = torch.arange(77)[None] >= 40
    pairs = ((text == text.T) & torch.ones(77, 77).tril().bool())[None, None]
    expected = torch.cat([model(part, use_cache=False).logits for part in parts], 1)
    for mask, use_cache in ((None, False), (pairs, False), (pairs, True)):
        together = model(ids, position_ids=positions, attention_mask=mask, use_cache=use_cache).logits
        torch.testing.assert_close(together, expected, rtol=0, atol=TOLERANCE * float(expected.abs().max()))


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_packed_sequences_with_a_cache_are_one_text_or_refused(models, name):
    """Stock reads them as one text whose positions restart, which is no way to ask; nothing else may come of it."""
    model, ids = named(models, name), texts(69)[0]
    positions = packed((24, 45))

    def cached():
        cache = DynamicCache(config=model.config)
        spans = (slice(60), *(slice(at, at + 1) for at in range(60, 69)))
        parts = [model(ids[:, at], position_ids=positions[:, at], past_key_values=cache).logits for at in spans]
        return torch.cat(parts, 1)

    outcome = tried(name, cached)
    if name == "mspoe prompt" or outcome == "refused":
        assert outcome == "refused"
        return
    one = model(ids, position_ids=positions, attention_mask=torch.ones_like(ids), use_cache=False).logits
    torch.testing.assert_close(outcome, one, rtol=0, atol=TOLERANCE * float(one.abs().max()))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("step", [1, 7])
@torch.no_grad()
def test_gaps_of_positions_are_the_same_to_one_call_and_to_a_cache(models, name, step):
    model, ids = named(models, name), torch.cat(texts(44, 44))
    positions = torch.arange(44) + torch.stack([(torch.arange(44) > at) * gap for at, gap in ((19, 11), (4, 30))])
    cache, other = DynamicCache(config=model.config), DynamicCache(config=model.config)
    parts = [model(ids[:, :16], position_ids=positions[:, :16], past_key_values=cache).logits]
    for at in range(16, 44, step):
        span = slice(at, at + step)
        parts.append(model(ids[:, span], position_ids=positions[:, span], past_key_values=cache).logits)
    if name == "mspoe prompt":
        spans = (slice(16), slice(16, None))
        one = [model(ids[:, span], position_ids=positions[:, span], past_key_values=other).logits for span in spans]
        one = torch.cat(one, 1)
    else:
        one = model(ids, position_ids=positions, attention_mask=torch.ones_like(ids), use_cache=False).logits
    torch.testing.assert_close(torch.cat(parts, 1), one, rtol=0, atol=TOLERANCE * float(one.abs().max()))


@torch.no_grad()
def test_a_query_after_a_jump_is_not_the_next_position(models):
    """Decoding expects the next position; any other is read as without a step before it."""
    model, cache, ids = models("llama", "self-extend"), DynamicCache(), texts(50)[0]
    for span in (slice(46), slice(46, 47)):
        model(ids[:, span], past_key_values=cache)
    turned = cache.ctxext_state.common["rotated keys", 0][2]
    assert turned == 47, "all keys, so that none turns again for a window's length"
    for position in (49, 70):
        jump, fresh = {"position_ids": torch.tensor([[position]])}, copy.deepcopy(cache)
        fresh.ctxext_state.common.clear()
        logits, expected = (model(ids[:, 47:48], past_key_values=one, **jump).logits for one in (cache, fresh))
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
        cache.crop(-1)
        model(ids[:, 47:48], past_key_values=cache)


@pytest.mark.parametrize("name", STEPS)
def test_gradients_do_not_depend_on_checkpointing(models, name):
    model, ids, gradients = models("llama", name).train(), torch.cat(texts(60, 60)), []
    try:
        for reentrant in (None, False, True):
            if reentrant is not None:
                model.gradient_checkpointing_enable({"use_reentrant": reentrant})
                model.enable_input_require_grads()
            model(ids, labels=ids, use_cache=False).loss.backward()
            gradients.append({name: weight.grad.clone() for name, weight in model.named_parameters()})
            model.zero_grad()
            if reentrant is not None:
                model.disable_input_require_grads()
    finally:
        model.gradient_checkpointing_disable()
        model.eval()
    assert all(gradient.abs().max() > 0 for name, gradient in gradients[0].items() if "proj" in name)
    for others in gradients[1:]:
        for name, gradient in others.items():
            torch.testing.assert_close(gradient, gradients[0][name], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", [pytest.param(name, marks=half_of(at)) for at, name in enumerate(NAMES)])
@torch.no_grad()
def test_compiled_steps_with_a_static_cache(models, name):
    """The first part as it is, then compiled steps."""
    model, problems = named(models, name), []
    compiled = torch.compile(model, fullgraph=True, dynamic=False, backend="eager")
    for cell in (Cell("left", "not given", "static"), Cell("right", "given", "static")):
        torch._dynamo.reset()
        steps = calls(cell, Sizes((44, 30, 21), None, (8, 0, 0)))
        logits = tried(name, functools.partial(run, compiled=compiled), model, cell, steps)
        if not isinstance(logits, str):
            difference = off(logits, torch.cat(steps, 1), alone(model, cell, steps, name))
            logits = f"off by {difference:.1e}" if difference > TOLERANCE else ""
        problems += [(name, cell, logits)] if logits else []
    assert not problems, table(problems)


def half_of_cells(half, family, name):
    """Half of the cells, another one for the next family and the next method."""
    return HALVES[(half + ROTARY.index(family) + list(STEPS).index(name)) % 2]


@pytest.mark.parametrize("half", [pytest.param(half, marks=half_of(half)) for half in (0, 1)])
@pytest.mark.parametrize("name", [*STEPS, "inside"])
@pytest.mark.parametrize("family", ROTARY[1:])
def test_every_cell_of_other_families(models, family, name, half):
    if name == "inside":
        for own in RELATIONS:
            check_inside(models, family, own, half_of_cells(half, family, own))
    else:
        check(models, family, name, half_of_cells(half, family, name))


@pytest.mark.thorough
@pytest.mark.parametrize("name", SLOPES)
@pytest.mark.parametrize("family", ALIBI[1:])
def test_every_cell_of_other_families_with_slopes(models, family, name):
    check(models, family, name, [cell for cell in CELLS if cell.positions == "not given"])
