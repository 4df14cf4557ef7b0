"""The released Ms-PoE against the authors' results (tests/resources/golden), the paper's by its reference."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import ctxext.api
from ctxext.methods import MsPoE
from portable_checkpoints import convert, llama, load, ranks_of

GOLDEN = Path(__file__).parents[1] / "resources" / "golden"


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    folder = tmp_path_factory.mktemp("golden") / "released"
    return load(convert(GOLDEN / "checkpoint_mha", folder, variant="released"))


@pytest.fixture(scope="module")
def golden():
    return load_file(GOLDEN / "mspoe_mha.safetensors"), json.loads((GOLDEN / "mspoe_mha.json").read_text())["cases"]


@pytest.mark.parametrize("length", [32, 128])
@pytest.mark.thorough
def test_prefill_and_decoding(released, golden, length):
    tensors, cases = golden
    case = cases[f"from2.len{length}"]
    ids = tensors[f"len{length}.input_ids"]
    with torch.no_grad():
        prefill = released(ids, use_cache=True)
    torch.testing.assert_close(prefill.logits[0], tensors[f"from2.len{length}.logits"], rtol=1e-4, atol=1e-4)
    orders = {str(layer): ranks[0].tolist() for layer, ranks in ranks_of(prefill.past_key_values).items()}
    assert orders == {layer: values["head_order"] for layer, values in case["layers"].items()}

    output = released.generate(
        ids, max_new_tokens=16, do_sample=False, eos_token_id=None, pad_token_id=0,
        attention_mask=torch.ones_like(ids), output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    steps = torch.cat(output.logits)
    torch.testing.assert_close(steps, tensors[f"from2.len{length}.step_logits"], rtol=1e-3, atol=1e-3)


def test_ratios(released, golden):
    _, cases = golden
    settings = released.config.ctxext_code["steps"][0]
    for layer, values in cases["from2.len128"]["layers"].items():
        assert int(layer) in settings["layers"]
        torch.testing.assert_close(torch.tensor(settings["ratios"]), torch.tensor(values["ratio_table_by_index"]))
        ratios = [settings["ratios"][rank] for rank in values["head_order"]]
        torch.testing.assert_close(
            torch.tensor(ratios), torch.tensor(values["measured_ratio_of_key_head"]), rtol=1e-3, atol=0
        )


@pytest.mark.parametrize("key_heads", [8, 4])
@pytest.mark.thorough
def test_the_paper_s_order_is_that_of_the_reference(tmp_path, key_heads):
    """Converting compares logits with a method's reference, which shares no code with what travels."""
    source = llama(tmp_path / "source", num_attention_heads=8, num_key_value_heads=key_heads)
    paper = MsPoE(schedule="linear", head_order="prompt", first_layer=1)
    done = ctxext.api.convert(str(source), tmp_path / f"paper_{key_heads}", paper)
    assert done.verification.difference < 1e-4
    assert done.verification.change > 1e-2
