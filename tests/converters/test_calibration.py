"""A calibrated order is the statistic averaged over text, and nothing else."""

import json
import sys
from types import ModuleType

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.models.llama import modeling_llama as llama

from ctxext.api import Recipe, convert
from ctxext.converters.calibration import head_scores, order_heads, read_text
from ctxext.converters.options import Calibration
from ctxext.errors import CtxextError
from ctxext.methods import MsPoE, Yarn
from small_llama import make_llama, read_json


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = make_llama(
        tmp_path_factory.mktemp("calibration") / "llama", vocab_size=256, num_key_value_heads=4, num_hidden_layers=3
    )
    letters_of(256).save_pretrained(folder)
    return folder


def letters_of(count) -> PreTrainedTokenizerFast:
    """A tokenizer with one token per character."""
    tokenizer = Tokenizer(models.BPE(vocab={chr(number): number for number in range(count)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=128)


def order_of(scores) -> list[int]:
    """Each head's place by falling score, ties by number."""
    order = sorted(range(len(scores)), key=lambda head: (-scores[head], head))
    return [order.index(head) for head in range(len(scores))]


def shares(folder, pieces) -> torch.Tensor:
    """(layers, heads): the share of keys above three times the mean, from whole attention matrices.

    It is averaged over every second of the last rows, at most 64 and half of them.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    original = llama.apply_rotary_pos_emb
    counts = []

    def unrotated(query, key, cos, sin, *args, **kwargs):
        scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
        size = scores.shape[-1]
        rows = [scores[0, :, end - 1, :end].softmax(-1) for end in range(size, size - min(64, size // 2), -2)]
        each = [(row > 3 * row.mean(-1, keepdim=True)).double().mean(-1) for row in rows]
        counts.append(torch.stack(each).mean(0))
        return original(query, key, cos, sin, *args, **kwargs)

    llama.apply_rotary_pos_emb = unrotated  # The statistic is that of queries and keys before their rotation.
    try:
        with torch.no_grad():
            for piece in pieces:
                model(piece[None])
    finally:
        llama.apply_rotary_pos_emb = original
    return torch.stack(counts).unflatten(0, (len(pieces), -1)).mean(0)


@pytest.mark.thorough
def test_the_first_layer_equals_the_plain_statistic(source, tmp_path):
    """Layer 0 sees the same hidden states with and without Ms-PoE, so a reference on the stock model is exact there."""
    text = "".join(chr(33 + (7 * i * i) % 90) for i in range(2 * 150))
    (tmp_path / "text.txt").write_text(text)
    done = convert(
        str(source),
        tmp_path / "out",
        Recipe([MsPoE(head_order="calibrated", first_layer=0)]),
        check=False,
        calibration=Calibration(tmp_path / "text.txt"),
    )
    ids = torch.tensor(PreTrainedTokenizerFast.from_pretrained(source)(text)["input_ids"])
    wanted = shares(source, [ids[start : start + 128] for start in (0, 150)])[0].tolist()
    assert len(set(wanted)) > 1
    ranks = read_json(tmp_path / "out" / "config.json")["ctxext_code"]["steps"][0]["ranks"]
    assert ranks[0] == order_of(wanted)
    assert [list(row) for row in done.plan.recipe.steps[-1].ranks] == ranks


def test_the_recipe_contains_the_calibrated_order(source, tmp_path):
    recipe = Recipe([Yarn(factor=4), MsPoE(head_order="calibrated", first_layer=1)])
    first = convert(str(source), tmp_path / "first", recipe)
    assert first.verification is not None
    again = convert(str(source), tmp_path / "again", first.plan.recipe, check=False)
    assert (tmp_path / "first" / "config.json").read_bytes() == (tmp_path / "again" / "config.json").read_bytes()
    assert len(again.plan.recipe.steps[-1].ranks) == 2


@pytest.fixture
def stand_in(monkeypatch):
    """The module of a checkpoint's code, and what makes a model with it of a forward."""
    module = ModuleType("ctxext_test_model.mspoe")
    module.MsPoE = type("MsPoE", (), {"choose": None})
    monkeypatch.setitem(sys.modules, module.__name__, module)

    def make(forward):
        members = {"__module__": "ctxext_test_model.modeling", "device": torch.device("cpu"), "dtype": torch.float32}
        return type("Model", (), {**members, "base_model": lambda self, ids, use_cache: forward(ids)})()

    return module, make


@pytest.mark.parametrize(
    ("num_tokens", "trained", "length"), [(2 * 100, 32, 32), (2 * 20, 32, 20), (2 * 2000, 8192, 512)]
)
def test_no_chunk_is_longer_than_the_model_was_trained_on(num_tokens, trained, length, stand_in):
    lengths = []
    model = stand_in[1](lambda ids: lengths.append(ids.shape[1]))
    head_scores(model, letters_of(256), "a" * num_tokens, trained)
    assert lengths == [length] * 2


def test_chunks_are_spread_over_the_text(stand_in):
    starts = []
    model = stand_in[1](lambda ids: starts.append(chr(ids[0, 0])))
    head_scores(model, letters_of(256), "a" * 50 + "b" * 50, trained_length=32)
    assert starts == ["a", "b"]


def test_a_model_that_fails_leaves_the_code_of_checkpoints_as_it_was(stand_in):
    """Other models of this process share the module: it must not go on adding to the scores of a run that ended."""
    module, make = stand_in

    def fails(ids):
        assert module.MsPoE.choose is not None
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        head_scores(make(fails), letters_of(256), "a" * 2 * 20, trained_length=32)
    assert module.MsPoE.choose is None


def test_calibration_text(tmp_path):
    assert len(read_text(None)) > 50_000
    lines = tmp_path / "lines.jsonl"
    lines.write_text(json.dumps({"text": "one"}) + "\n" + json.dumps({"text": "two"}))
    assert read_text(lines) == "one\n\ntwo"
    lines.write_text('{"text": "one"}\n{"words": 3}\n')
    with pytest.raises(CtxextError, match="Line 2"):
        read_text(lines)
    with pytest.raises(CtxextError, match="cannot be read"):
        read_text(tmp_path / "absent.txt")


def test_the_released_code_takes_the_order_for_the_ratios_numbers():
    """Heads 1, 2, 3, 0 by falling score: the paper asks for each head's place, the released code for the list."""
    scores = {0: [0.1, 0.4, 0.3, 0.2]}
    for variant, ranks in (("paper", (3, 0, 1, 2)), ("released", (1, 2, 3, 0))):
        recipe = order_heads(Recipe([MsPoE(variant=variant)]), scores)
        assert recipe.steps[0].ranks == (ranks,)


def test_the_order_does_not_depend_on_the_number_of_threads(source, tmp_path):
    (tmp_path / "text.txt").write_text("".join(chr(33 + (7 * i * i) % 90) for i in range(300)))
    before, ranks = torch.get_num_threads(), []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            calibration = Calibration(tmp_path / "text.txt")
            done = convert(str(source), tmp_path / str(count), Recipe([MsPoE()]), check=False, calibration=calibration)
            ranks.append(done.plan.recipe.steps[-1].ranks)
    finally:
        torch.set_num_threads(before)
    assert ranks[0] == ranks[1]
