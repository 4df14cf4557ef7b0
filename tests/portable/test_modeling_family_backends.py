"""Attention backends, compilation and precision."""

import pytest
import torch

from portable_checkpoints import convert, llama, load, ranks_of, tokens

ORDERS = ["prompt", "fixed"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("backends")
    source = llama(root / "source", num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4)
    return {order: convert(source, root / order, first_layer=0, head_order=order) for order in ORDERS}


@torch.no_grad()
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("implementation", ["eager", pytest.param("flex_attention", marks=pytest.mark.slow)])
def test_backend(folders, order, implementation):
    ids, mask = tokens(40, rows=2), torch.ones(2, 40, dtype=torch.long)
    mask[0, :11] = 0
    expected = load(folders[order], attn_implementation="sdpa")(ids, attention_mask=mask)
    output = load(folders[order], attn_implementation=implementation)(ids, attention_mask=mask)
    torch.testing.assert_close(output.logits[:, 11:], expected.logits[:, 11:], rtol=1e-4, atol=1e-4)
    if order == "prompt":
        ranks = ranks_of(expected.past_key_values)
        assert all(torch.equal(ranks_of(output.past_key_values)[layer], ranks[layer]) for layer in ranks)


@torch.no_grad()
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.thorough
def test_compiled_without_a_graph_break(folders, order, backend):
    """A prompt and a step after it, in one graph each, against the model as it is; `eager` generates no code."""
    model, ids, step = load(folders[order]), tokens(24), tokens(1, seed=1)
    near = {"rtol": 1e-4, "atol": 1e-4} if backend == "inductor" else {}
    expected = model(ids, use_cache=True)
    after = model(step, past_key_values=expected.past_key_values).logits
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    output = compiled(ids, use_cache=True)
    torch.testing.assert_close(output.logits, expected.logits, **near)
    torch.testing.assert_close(compiled(step, past_key_values=output.past_key_values).logits, after, **near)


@torch.no_grad()
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(folders, order, dtype):
    model, exact = load(folders[order], dtype=dtype), load(folders[order])
    ids = tokens(40)
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, pad_token_id=0, return_dict_in_generate=True
    )
    logits = model(ids).logits
    assert logits.dtype == dtype
    assert output.sequences.shape == (1, 44)
    if order == "fixed":
        error = (logits.float() - exact(ids).logits).norm() / exact(ids).logits.norm()
        assert error < (0.05 if dtype == torch.bfloat16 else 0.01)
