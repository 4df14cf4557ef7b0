"""DeBERTa and XLNet in float64: their attention with distances, computed for every pair of tokens.

Weights are the parameters of a base model by name, as float64 tensors; `config` has the keys of its config.json.
"""

import math


def deberta_states(weights, config, ids, mask, rows):
    """Return the last hidden states (batch, length, width) of DeBERTa v1, v2 or v3: 2006.03654, equations 2 to 4.

    `ids` and `mask` are (batch, length), with 0 in the mask for padding. `rows(d)` is the row of the table of a query
    that is d tokens after its key. As in the published code, both position terms use the row of this distance.
    """
    import torch

    is_first = config["model_type"] == "deberta"
    norm = lambda name, x: layer_norm(x, weights, name, config["layer_norm_eps"])  # noqa: E731
    apply = lambda name, x: linear(x, weights, name)  # noqa: E731
    hidden = norm("embeddings.LayerNorm", weights["embeddings.word_embeddings.weight"][ids]) * mask[..., None]
    table = weights["encoder.rel_embeddings.weight"]
    if "layer_norm" in str(config.get("norm_rel_ebd", "none")):
        table = norm("encoder.LayerNorm", table)
    length, heads = ids.shape[1], config["num_attention_heads"]
    place = torch.tensor([[rows(query - key) for key in range(length)] for query in range(length)])
    kinds = config["pos_att_type"] or []
    scale = math.sqrt(config["hidden_size"] // heads * (1 + len(kinds)))
    split = lambda x: x.unflatten(-1, (heads, -1)).transpose(-2, -3)  # noqa: E731
    allowed = (mask[:, None, :, None] * mask[:, None, None, :]).bool()
    for layer in range(config["num_hidden_layers"]):
        name, own = f"encoder.layer.{layer}", f"encoder.layer.{layer}.attention.self"
        if is_first:  # The projections of each head are neighbours.
            query, key, value = split(apply(f"{own}.in_proj", hidden)).chunk(3, -1)
            query = query + split(weights[f"{own}.q_bias"][None])
            value = value + split(weights[f"{own}.v_bias"][None])
        else:
            query, key, value = (split(apply(f"{own}.{each}_proj", hidden)) for each in ("query", "key", "value"))
        names = ("pos_proj", "pos_q_proj") if is_first else ("pos_key_proj", "pos_query_proj")
        if config.get("share_att_key") and not is_first:
            names = ("key_proj", "query_proj")
        scores = query @ key.transpose(-1, -2)
        if "c2p" in kinds:
            of_keys = split(apply(f"{own}.{names[0]}", table))
            scores = scores + torch.einsum("bhqd,hqkd->bhqk", query, of_keys[:, place])
        if "p2c" in kinds:
            of_queries = split(apply(f"{own}.{names[1]}", table))
            scores = scores + torch.einsum("bhkd,hqkd->bhqk", key, of_queries[:, place])
        # A query that is padding reads all keys alike, and no other token reads its result.
        weighed = (scores / scale).masked_fill(~allowed, torch.finfo(torch.float32).min).softmax(-1) @ value
        merged = weighed.transpose(1, 2).flatten(-2)
        after = norm(f"{name}.attention.output.LayerNorm", hidden + apply(f"{name}.attention.output.dense", merged))
        inner = torch.nn.functional.gelu(apply(f"{name}.intermediate.dense", after))
        hidden = norm(f"{name}.output.LayerNorm", after + apply(f"{name}.output.dense", inner))
    return hidden


def xlnet_states(weights, config, segments, kept):
    """Return the last hidden states (1, length, width) of each segment: Transformer-XL (1901.02860), section 3.3.

    Each layer reads its inputs of the segment and of at most `kept` tokens before it; XLNet (1906.08237) reads all
    tokens of the segment itself. The states of the memory are those that the layer read before, not computed again.
    """
    import torch

    heads, width = config["n_head"], config["d_model"]
    size, results = width // heads, []
    memory = [torch.zeros(0, width, dtype=torch.float64) for _ in range(config["n_layer"])]
    for segment in segments:
        hidden, inputs = weights["word_embedding.weight"][segment[0]], []
        for layer in range(config["n_layer"]):
            of = lambda name, layer=layer: weights[f"layer.{layer}.rel_attn.{name}"]  # noqa: E731
            inputs.append(hidden)
            read = torch.cat([memory[layer], hidden])
            queries, keys, values = (
                torch.einsum("ih,hnd->nid", x, of(name)) for x, name in ((hidden, "q"), (read, "k"), (read, "v"))
            )
            positions = torch.arange(len(read))
            distances = positions[len(memory[layer]) :, None] - positions[None]
            frequencies = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
            angles = distances[..., None] * frequencies
            of_distances = torch.cat([angles.sin(), angles.cos()], -1)
            projected = torch.einsum("ijh,hnd->nijd", of_distances, of("r"))
            scores = torch.einsum("nid,njd->nij", queries + of("r_w_bias")[:, None], keys)
            scores = scores + torch.einsum("nid,nijd->nij", queries + of("r_r_bias")[:, None], projected)
            weighed = (scores / math.sqrt(size)).softmax(-1) @ values
            attended = hidden + torch.einsum("nid,hnd->ih", weighed, of("o"))
            attended = layer_norm(attended, weights, f"layer.{layer}.rel_attn.layer_norm", config["layer_norm_eps"])
            inner = torch.nn.functional.gelu(linear(attended, weights, f"layer.{layer}.ff.layer_1"))
            outer = attended + linear(inner, weights, f"layer.{layer}.ff.layer_2")
            hidden = layer_norm(outer, weights, f"layer.{layer}.ff.layer_norm", config["layer_norm_eps"])
        memory = [torch.cat([old, new])[-kept:] for old, new in zip(memory, inputs, strict=True)]
        results.append(hidden[None])
    return results


def linear(x, weights, name):
    """Return a projection with its bias, if it has one."""
    projected = x @ weights[f"{name}.weight"].T
    return projected + weights[f"{name}.bias"] if f"{name}.bias" in weights else projected


def layer_norm(x, weights, name, epsilon):
    """Return the normalised vectors, with the learned scale and shift."""
    centred = x - x.mean(-1, keepdim=True)
    normalised = centred / (centred.pow(2).mean(-1, keepdim=True) + epsilon).sqrt()
    return normalised * weights[f"{name}.weight"] + weights[f"{name}.bias"]
