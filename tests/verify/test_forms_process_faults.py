"""The check after converting compares every form of attention with the reference: faults in one form are refused.

Each fault is planted in a copy of the code of a converted checkpoint. Most change one form only, some of them only
after a number of tokens, in the second row of a batch or at one level.
"""

import itertools
import math
import shutil
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ctxext.api import Recipe, convert
from ctxext.checkpoint.opening import open_checkpoint
from ctxext.converters.plan import make_plan
from ctxext.errors import CtxextError
from ctxext.recipes.code.method import PORTABLE
from ctxext.recipes.registry import method_named
from ctxext.verify import isolated_checks
from ctxext.verify.expected_process import Expected
from ctxext.verify.forms_process import Text, compare_forms, expected_outputs, run_forms
from ctxext.verify.isolated_process import learned_weights
from ctxext.verify.model_process import load_stock, replace_functions
from ctxext.verify.run import verify
from small_llama import make_llama

pytestmark = pytest.mark.usefixtures("every_form")

SIZES = {"max_position_embeddings": 64, "head_dim": 16, "num_hidden_layers": 2, "rope_theta": 1e4}
CASES = {
    "self-extend": {"factor": 8.0},
    "self-extend-wide": {"factor": 8.0, "window": 44, "temperature": "logn"},
    "self-extend-fixed": {"factor": 4.0, "group": 6, "window": 10},
    "self-extend-one": {"factor": 8.0, "window": 1},
    "dca": {"factor": 8.0},
    "dca-one": {"factor": 8.0, "chunk_size": 64, "local": 63},
    "dca-short": {"factor": 8.0, "chunk_size": 40, "local": 8},
    "bifocal": {"factor": 8.0},
    "rerope": {"factor": 8.0, "window": 50},
    "sinks": {"factor": 4.0},
    "window": {"factor": 4.0, "window": 41},
    "adaptive": {"factor": 8.0, "temperature": "yarn"},
    "distance-aware": {},
    "mspoe": {"head_order": "fixed", "first_layer": 0, "ratio_max": 3.0},
    "mspoe-middle": {"head_order": "fixed", "first_layer": 0, "schedule": "linear", "rescale": "middle"}
    | {"rescale_start": 300, "rescale_end": 3000},
    "mspoe-prompt": {"head_order": "prompt", "first_layer": 0, "ratio_max": 3.0, "schedule": "linear"},
}
# The name of a fault, the cases in which it is planted, the file, the code and what is there instead.
FAULTS = (
    ("tiles drop a near key", "self-extend-wide rerope window", "relation_maps.py",
     "yield part, row, end, first, first + width", "yield part, row, end, first + (width >= 40), first + width"),
    ("whole tiles end a key too early", "self-extend dca", "relation_maps.py",
     "low, high - int(high_moves)", "low, high - int(high_moves) - (high - low > 70)"),
    ("only the second tile of a band is one off", "self-extend-fixed rerope", "relation_maps.py",
     "first = low - 1 + row - start", "first = low - 1 + row - start - (row > start)"),
    ("a band sees one key more", "self-extend bifocal", "relation_parts.py",
     "(keys > row + total - rows)", "(keys > row + total - rows + 1)"),
    ("tiles are merged wrongly", "self-extend dca", "relation_parts.py",
     "torch.logaddexp(sums, more, out=sums)", "torch.maximum(sums, more, out=sums)"),
    ("no tile of the middle", "dca dca-one dca-short", "relation_maps.py",
     'yield from cover_keys("middle"',
     'yield from () if run.near[1] or run.stop - run.start > 1 else cover_keys("middle"'),
    ("the second text of a batch reads the first", "self-extend adaptive dca", "relation.py",
     "keys[i, :, low:high], value", "keys[0, :, low:high], value"),
    ("a decoded token is one off before the next 16", "self-extend dca", "relation.py",
     "level, far, middle, near = borders[at]\n", "level, far, middle, near = borders[at]\n        near += at == 15\n"),
    ("one matrix of 16 is the one before", "self-extend rerope bifocal", "relation.py",
     "level, parts, matrices[at])", "level, parts, matrices[at - (at == 9)])"),
    ("the key that a step adds is turned wrongly", "adaptive", "relation.py",
     ")[number - start]", ")[number - start - (number - start == 3)]"),
    ("a step's matrix turns with the last level", "self-extend adaptive", "relation.py",
     "rules.keys(n, n, levels), n, rules.frequency_factors(levels), name",
     "rules.keys(n, n, levels - (levels > 1).long()), n, rules.frequency_factors(levels - (levels > 1).long()), name"),
    ("longer room loses a key", "self-extend-fixed dca", "relation_parts.py",
     "longer[:, :, :filled] = buffer[:, :, :filled]", "longer[:, :, :filled] = buffer[:, :, :filled].roll(1, 2)"),
    ("a turned key too many is kept", "self-extend bifocal dca rerope adaptive", "relation.py",
     "keep_side(call, side._replace(filled=end))", "keep_side(call, side._replace(filled=end + 1))"),
    ("products leave out the first near key", "self-extend dca", "relation_parts.py",
     "output = torch.bmm(shares[0], parts[0][2])", "output = torch.bmm(shares[0][..., 1:], parts[0][2][:, 1:])"),
    ("parts of halves are merged wrongly", "self-extend dca", "relation_parts.py",
     "total.lerp(output, torch.sigmoid(more - sums)[..., None])",
     "total.lerp(output, torch.sigmoid(more - sums + 0.01)[..., None])"),
    ("tiles of halves are not merged in the last layer", "self-extend", "relation.py",
     "changed.copy_(total.flatten(1, 2))", "changed[:, :, 1:].copy_(total.flatten(1, 2)[:, :, 1:])"),
    ("turned keys of removed tokens are kept", "self-extend self-extend-fixed bifocal dca rerope", "method.py",
     'if name in ("crop", "reset"):', 'if name == "reset":'),
    ("matrices of keys are those of another level", "adaptive", "relation.py", "(start, level),\n", "start,\n"),
    ("keys of another level are kept", "self-extend adaptive bifocal", "relation_parts.py",
     "facts != [levels, origins]", "facts[1:] != [origins]"),
    ("blocks: a level of the last query only", "self-extend adaptive bifocal", "relation.py",
     "row[start:stop].unique()", "row[start : max(stop - 1, start + 1)].unique()"),
    ("blocks: a level of the first query only", "self-extend adaptive bifocal", "relation.py",
     "row[start:stop].unique()", "row[min(start + 1, stop - 1) : stop].unique()"),
    ("one call: the border", "self-extend rerope", "relation.py",
     "ends = [torch.where(n < rows.far", "ends = [torch.where(n <= rows.far"),
    ("one call: kept keys", "self-extend bifocal dca", "relation.py",
     "is_far = keys < rows.far ", "is_far = keys <= rows.far "),
    ("one call: the middle", "dca dca-short", "relation.py",
     "is_middle = (n >= rows.middle) & (n < rows.near)\n        return",
     "is_middle = (n > rows.middle) & (n < rows.near)\n        return"),
    ("one call: the hole", "sinks window", "relation.py",
     "for border in (rows.far, rows.near)] if plain", "for border in (rows.far, rows.near + 1)] if plain"),
    ("one call: the levels of the first text", "self-extend adaptive", "relation.py",
     "slowed = plan.map.frequency_factors(rows.level)\n        key = rotate_in_pieces",
     "rows = rows._replace(at_far=rows.at_far[:1].expand_as(rows.at_far))\n        slowed = "
     "plan.map.frequency_factors(rows.level)\n        key = rotate_in_pieces"),
    ("blocks: the border of the second", "self-extend dca", "relation.py",
     "(n[..., low:high] >= rows.near[..., None])[:, None]",
     "(n[..., low:high] >= (rows.near + (start >= 128))[..., None])[:, None]"),
    ("blocks: the hole", "sinks window", "relation.py",
     "(n < rows.middle[..., None]) if", "(n <= rows.middle[..., None]) if"),
    ("blocks: hidden keys", "self-extend dca", "relation.py",
     "else min(base + stop, total)", "else min(base + stop - 1, total)"),
    ("blocks: the scale of the block before", "self-extend-wide adaptive", "relation.py",
     "scales = [scale if scale is None else scale[:, start:stop]",
     "scales = [scale if scale is None else scale[:, max(start - 1, 0) : stop - (start > 0)]"),
    ("queries of the middle", "dca dca-short", "relation.py",
     "rotate_in_pieces(call, query, rows.at_middle, m, name",
     "rotate_in_pieces(call, query, rows.at_middle + 1, m, name"),
    ("unchanged queries are joined one late", "self-extend rerope", "relation_parts.py",
     "here = changed[:, plan.first : plan.served]", "here = changed[:, plan.first : plan.served].roll(1, -1)"),
    ("the second piece of a turned tensor", "self-extend-wide", "relation_parts.py",
     "ends = (x if x is None or x.shape[1] == 1 else x[:, piece] for x in",
     "ends = (x if x is None or x.shape[1] == 1 else x[:, piece].roll(int(row > 0), 1) for x in"),
    ("positions after a gap", "self-extend dca", "relation_parts.py",
     "pad(last[..., :1] - last[..., 1:], (0, 1))", "pad(last[..., :1] - last[..., 1:] + 1, (0, 1))"),
    ("a level begins one late", "adaptive", "adaptive.py", "(m >= end)", "(m > end)"),
    ("the temperature of a step", "self-extend-wide", "relation.py",
     "query = scale_query(call, query, scales)\n        ends", "ends"),
    ("heads of a group", "self-extend dca", "relation_parts.py",
     "heads = left.shape[1] // right.shape[1]\n    grouped = left.unflatten(1, (-1, heads))",
     "heads = left.shape[1] // right.shape[1]\n    grouped = left.flip(1).unflatten(1, (-1, heads))"),
    ("distance: the second block", "distance-aware", "distance.py",
     "positions = places.rows[:, span[0] : span[1]]",
     "positions = places.rows[:, span[0] : span[1]] + (span[0] >= 128)"),
    ("distance: a decoded token", "distance-aware", "distance.py",
     "places.keys[:, None]).clamp", "places.keys[:, None] - int(positions.shape[1] == 1)).clamp"),
    ("distance: padded rows", "distance-aware", "distance.py",
     "(positions[:, :, None] - places", "(positions[:1, :, None] - places"),
    ("heads: a row of tables", "mspoe", "mspoe.py",
     "else ranks)", "else ranks.roll(1, -1))"),
    ("heads: positions after a range", "mspoe-middle", "mspoe.py",
     "positions.clamp(start, end)", "positions.clamp(min=start)"),
    ("heads: the kept order", "mspoe-prompt", "mspoe.py",
     "ranks = torch.cat(kept)", "ranks = torch.cat(kept).flip(-1)"),
    ("heads: the second piece", "mspoe mspoe-prompt", "mspoe.py",
     "pick_piece(start, count)", "pick_piece(max(start - 1, 0), count)"),
    ("heads: the order of a padded text", "mspoe-prompt", "mspoe.py",
     "end = (seen * torch.arange(key.shape[2], device=key.device)).amax(-1)",
     "end = (seen * torch.arange(key.shape[2], device=key.device)).amax(-1) - 1"),
)  # fmt: skip
QUICK = {"tiles drop a near key", "blocks: the hole", "one matrix of 16 is the one before", "one call: the border"}


def step_of(case):
    name = next(name for name in sorted(CASES, key=len) if case.startswith(name) and "-" not in case[len(name) + 1 :])
    return method_named(name)(**CASES[case])


@pytest.fixture(scope="module")
def checked(tmp_path_factory):
    """A converted checkpoint with its texts and the expected outputs, made once for each case."""
    made = {}

    def get(case):
        if case not in made:
            made[case] = check_of(case, tmp_path_factory.mktemp("forms"))
        return made[case]

    return get


def check_of(case, folder):
    # Pieces of a rotation are shorter if heads are wider.
    sizes = SIZES | {
        "head_dim": {"mspoe": 32, "mspoe-middle": 32, "mspoe-prompt": 32, "self-extend-wide": 64}.get(case, 16)
    }
    source, out, recipe = make_llama(folder / "source", **sizes), folder / "out", Recipe([step_of(case)])
    convert(str(source), out, recipe, check=False)
    plan, tasks = make_plan(open_checkpoint(str(source)), recipe), []
    answer = {"difference": 0.0, "scale": 1.0, "change": 0.0, "decoding": ""}
    with replace_functions(vars(isolated_checks), {"run_script": lambda _, task, **__: tasks.append(task) or answer}):
        isolated_checks.compare_logits(out, plan.source, plan.recipe, plan.model, plan.stock)
    (task,) = tasks
    texts = [Text(**text) for text in task["forms"]]
    torch.manual_seed(0)
    loaded, info = load(out, texts[0].steps)
    task["numbers"] = learned_weights(loaded, info)
    stock = load_stock(out, task["stock"], attn_implementation="sdpa")
    expected = Expected(stock, task)
    return SimpleNamespace(
        out=out, texts=texts, numbers=task["numbers"], expected=[expected_outputs(expected, text, 2) for text in texts]
    )


def load(folder, steps):
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    config.get_text_config().ctxext_code["steps"] = steps
    options = {"trust_remote_code": True, "dtype": torch.float32, "output_loading_info": True}
    loaded, info = AutoModelForCausalLM.from_pretrained(folder, config=config, **options)
    return loaded.eval(), info


def compare(check, folder):
    """The difference of each form, infinite for an error, of a folder with other code."""
    differences = {}
    for text, expected in zip(check.texts, check.expected, strict=True):
        loaded, info = load(folder, text.steps)
        learned_weights(loaded, info, check.numbers)
        forms = run_forms(loaded, text)
        errors = {name: math.inf for name, parts in forms.items() if isinstance(parts, str)}
        forms = {name: parts for name, parts in forms.items() if name not in errors}
        for name, difference in {**compare_forms(forms, expected, text), **errors}.items():
            seen = math.inf if math.isnan(difference) else difference
            differences[name] = max(seen, differences.get(name, 0.0))
    return differences


def planted(check, folder, file, before, after):
    """A copy of a checkpoint with a fault."""
    shutil.copytree(check.out, folder)
    content = (folder / file).read_text()
    assert content.count(before) == 1, before
    (folder / file).write_text(content.replace(before, after))
    return folder


@pytest.mark.parametrize("case", CASES)
def test_every_form_of_the_right_code_equals_the_reference(case, checked):
    check = checked(case)
    differences = compare(check, check.out)
    assert max(differences.values()) < 3e-5, differences  # Ms-PoE's angles are rounded otherwise.
    ways = {name.partition("(")[2] for name in differences}
    assert {"sdpa)", "eager)", "sdpa, padded)"} <= ways


PLANTED = list(itertools.chain(*([(fault, case) for case in fault[1].split()] for fault in FAULTS)))


@pytest.mark.parametrize(
    ("fault", "case"),
    [
        pytest.param(fault, case, marks=[] if fault[0] in QUICK else pytest.mark.thorough, id=f"{fault[0]}-{case}")
        for fault, case in PLANTED
    ],
)
@pytest.mark.thorough
def test_a_fault_in_one_form_is_seen(fault, case, checked, tmp_path):
    check = checked(case)
    folder = planted(check, tmp_path / f"planted_{PLANTED.index((fault, case))}", *fault[2:])
    assert max(compare(check, folder).values()) > 2 * isolated_checks.TOLERANCE


@pytest.mark.thorough
def test_convert_and_verify_refuse_a_fault_of_one_form(tmp_path, monkeypatch):
    """By both commands, and what they say of right code: the forms that they compared."""
    source, recipe = make_llama(tmp_path / "source", **SIZES), Recipe([step_of("self-extend-wide")])
    result = convert(str(source), tmp_path / "right", recipe)
    assert {"one call (sdpa)", "decoded (sdpa)", "decoded (sdpa, padded)", "one call (eager)"} <= {
        *result.verification.forms
    }
    assert not result.verification.length
    found = {finding.check: finding for finding in verify(tmp_path / "right")}["logits"]
    assert found.status == "passed"
    assert "one call, decoded, continued" in found.detail
    fault = next(fault for fault in FAULTS if fault[0] == "tiles drop a near key")
    portable = shutil.copytree(PORTABLE, tmp_path / "portable")
    content = (portable / fault[2]).read_text()
    (portable / fault[2]).write_text(content.replace(*fault[3:]))
    code = tuple(portable / path.name for path in type(recipe.steps[0]).code)
    monkeypatch.setattr(type(recipe.steps[0]), "code", code)
    message = r"attention outputs of the converted model differ from the reference by \S+: \w+ .*sdpa"
    with pytest.raises(CtxextError, match=message):
        convert(str(source), tmp_path / "wrong", recipe)
    convert(str(source), tmp_path / "wrong", recipe, check=False)
    found = {finding.check: finding for finding in verify(tmp_path / "wrong")}["logits"]
    assert found.status == "failed"
    assert "differ from the reference" in found.detail
