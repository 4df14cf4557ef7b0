"""Shifted sparse attention against a reference with explicit masks."""

import pytest
import torch

from ctxext.errors import CtxextError
from ctxext.finetune.attention import register_shifted, shifted_attention
from tiny_base import load, logits, make_base


def reference(query, key, value, mask, group, window=None):
    """Softmax of all scores, with a mask of length × length for every head, written from the paper."""
    batch, heads, length, size = query.shape
    key = key.repeat_interleave(heads // key.shape[1], dim=1)
    value = value.repeat_interleave(heads // value.shape[1], dim=1)
    out = torch.zeros_like(query)
    for row in range(batch):
        for head in range(heads):
            shift = 0 if head < heads - heads // 2 else group // 2
            for i in range(length):
                # Token i is in group (i - shift) // group; those before the first edge stand alone.
                seen = [j for j in range(i + 1) if (j - shift) // group == (i - shift) // group]
                seen = [j for j in seen if window is None or i - j < window]
                if mask is not None:
                    seen = [j for j in seen if mask[row, j] or j == i]
                scores = torch.tensor([float(query[row, head, i] @ key[row, head, j]) for j in seen]) / size**0.5
                out[row, head, i] = scores.softmax(0) @ value[row, head, seen]
    return out.transpose(1, 2)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("padding", [None, "left", "right"])
@pytest.mark.parametrize(("heads", "key_heads"), [(4, 2), (4, 4), (3, 1)])
def test_equals_the_reference(heads, key_heads, padding, window):
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, n, 18, 8) for n in (heads, key_heads, key_heads))
    mask = None
    if padding:
        mask = torch.ones(2, 18, dtype=torch.bool)
        mask[1, slice(0, 5) if padding == "left" else slice(13, 18)] = False
    attended = shifted_attention(query, key, value, mask, group=8, sliding_window=window)
    expected = reference(query, key, value, mask, 8, window)
    real = torch.ones(2, 18, dtype=torch.bool) if mask is None else mask
    assert (attended - expected)[real].abs().max() < 1e-5


def test_a_family_calls_it_and_no_token_sees_the_future(tmp_path):
    from transformers import AutoModelForCausalLM

    base = make_base(tmp_path)
    shifted = AutoModelForCausalLM.from_pretrained(base, attn_implementation=register_shifted(16)).eval()
    full = load(base)
    # Up to half a group nothing is cut off.
    assert torch.allclose(logits(shifted, length=8), logits(full, length=8), atol=1e-5)
    assert (logits(shifted) - logits(full)).abs().max() > 1e-2
    ids = torch.randint(2, 64, (1, 48))
    changed = ids.clone()
    changed[:, 30:] = 5
    with torch.no_grad():
        before, after = shifted(ids).logits, shifted(changed).logits
    assert torch.allclose(before[:, :30], after[:, :30], atol=1e-5)


def test_a_padded_batch_equals_its_rows(tmp_path):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(make_base(tmp_path), attn_implementation=register_shifted(16)).eval()
    ids = torch.randint(2, 64, (2, 40))
    mask = torch.ones_like(ids)
    mask[1, 27:] = 0
    with torch.no_grad():
        both = model(ids, attention_mask=mask).logits
        alone = model(ids[1:, :27]).logits
    assert torch.allclose(both[1, :27], alone[0], atol=1e-5)


@pytest.mark.parametrize("option", ["softcap", "s_aux"])
def test_what_it_cannot_compute_is_refused(option):
    tensors = [torch.randn(1, 2, 8, 4)] * 3
    with pytest.raises(CtxextError, match=option):
        shifted_attention(*tensors, None, group=4, **{option: torch.ones(1)})
    with pytest.raises(CtxextError, match="cache"):
        shifted_attention(tensors[0][:, :, :1], *tensors[1:], None, group=4)
