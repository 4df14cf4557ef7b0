"""The paper's method against a float64 reference in loops, which shares no code with the shipped module."""

import math

import numpy as np
import pytest
import torch

from portable_checkpoints import convert, llama, load, ranks_of, tokens


def reference(weights, config, ids, ratios, first_layer):
    """The logits (length, vocabulary) of a Llama with Ms-PoE, and each layer's ratio per key head."""
    heads, key_heads = config.num_attention_heads, config.num_key_value_heads
    size, length = config.hidden_size // heads, len(ids)
    w = {name: value.double().numpy() for name, value in weights.items()}

    def norm(x, name):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + config.rms_norm_eps) * w[name]

    def rotated(vector, position):
        out = np.empty(size)
        for i in range(size // 2):
            angle = position * 10000.0 ** (-2 * i / size)
            a, b = vector[i], vector[i + size // 2]
            out[i] = a * math.cos(angle) - b * math.sin(angle)
            out[i + size // 2] = b * math.cos(angle) + a * math.sin(angle)
        return out

    def softmax(scores):
        powers = np.exp(scores - scores.max())
        return powers / powers.sum()

    hidden, chosen = w["model.embed_tokens.weight"][ids], {}
    for layer in range(config.num_hidden_layers):
        p = f"model.layers.{layer}."
        x = norm(hidden, p + "input_layernorm.weight")
        q, k, v = (x @ w[p + f"self_attn.{n}_proj.weight"].T for n in "qkv")
        q, k, v = q.reshape(length, heads, size), k.reshape(length, key_heads, size), v.reshape(length, key_heads, size)
        ratio_of = [1.0] * key_heads
        if layer >= first_layer:
            scores = [0.0] * key_heads
            for head in range(heads):
                group = head * key_heads // heads
                row = softmax(np.array([q[-1, head] @ k[j, group] for j in range(length)]) / math.sqrt(size))
                scores[group] += sum(a > 3 * row.mean() for a in row) / length * key_heads / heads
            by_awareness = sorted(range(key_heads), key=lambda head: (-round(scores[head] * length * heads), head))
            for place, head in enumerate(by_awareness):
                ratio_of[head] = ratios[place]
            chosen[layer] = ratio_of
        out = np.zeros((length, heads * size))
        for head in range(heads):
            group = head * key_heads // heads
            ratio = ratio_of[group]
            queries = np.stack([rotated(q[i, head], i / ratio) for i in range(length)])
            keys = np.stack([rotated(k[j, group], j / ratio) for j in range(length)])
            for i in range(length):
                weights_ = softmax(keys[: i + 1] @ queries[i] / math.sqrt(size))
                out[i, head * size : (head + 1) * size] = weights_ @ v[: i + 1, group]
        hidden = hidden + out @ w[p + "self_attn.o_proj.weight"].T
        x = norm(hidden, p + "post_attention_layernorm.weight")
        gate = x @ w[p + "mlp.gate_proj.weight"].T
        gated = gate / (1 + np.exp(-gate)) * (x @ w[p + "mlp.up_proj.weight"].T)
        hidden = hidden + gated @ w[p + "mlp.down_proj.weight"].T
    return norm(hidden, "model.norm.weight") @ w["lm_head.weight"].T, chosen


@pytest.mark.parametrize("key_heads", [8, 4])
@pytest.mark.parametrize("length", [32, 200, 500])  # The model is trained to 256.
def test_logits_and_ratios(tmp_path, key_heads, length):
    source = llama(tmp_path / "source", num_attention_heads=8, num_key_value_heads=key_heads)
    model = load(convert(source, tmp_path / "out", first_layer=1))
    ids = tokens(length)
    with torch.no_grad():
        output = model(ids, use_cache=True)
    ratios = [1.2 + 0.6 * i / (key_heads - 1) for i in range(key_heads)]
    expected, chosen = reference(model.state_dict(), model.config, ids[0].numpy(), ratios, 1)
    settings = model.config.ctxext_code["steps"][0]["ratios"]
    ratios_by_layer = {
        layer: [settings[rank] for rank in ranks[0].tolist()]
        for layer, ranks in ranks_of(output.past_key_values).items()
    }
    assert ratios_by_layer.keys() == chosen.keys()
    assert all(ratios_by_layer[layer] == pytest.approx(chosen[layer]) for layer in ratios_by_layer)
    torch.testing.assert_close(output.logits[0].double(), torch.from_numpy(expected), rtol=1e-4, atol=1e-4)
