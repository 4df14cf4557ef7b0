"""Ms-PoE: Zhang et al. 2024, section 3, and per-head schedules that replace its linear ratios."""

import math

import torch


def choose(settings, layer, queries, keys, scaling):
    """The ratio of each KV head in this layer, or None where the layer takes no part.

    The statistic is worked out on whole causal attention matrices of un-rotated states, queries (1, h, l, d) and keys
    (1, g, l, d): the head that stands out most gets the first ratio.
    """
    if layer not in settings["layers"]:
        return None
    if "heads" in settings:
        at = settings["layers"].index(layer)
        return list(zip(*(settings["heads"][name][at] for name in ("ratios", "ramps", "temperatures")), strict=True))
    if settings.get("ranks") is not None:
        ranks = settings["ranks"][settings["layers"].index(layer)]
        return [settings["ratios"][rank] for rank in ranks]
    group, length, counts = queries.shape[1] // keys.shape[1], keys.shape[2], []
    for head in range(keys.shape[1]):
        count = 0  # Counted in whole numbers, so that equal heads are equal.
        for query in range(head * group, (head + 1) * group):
            scores = queries[0, query].float() @ keys[0, head].float().T * scaling
            scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -math.inf)
            count += int((scores.softmax(-1)[-1] * length > 3).sum())
        counts.append(count)
    order = sorted(range(len(counts)), key=lambda head: (-counts[head], head))
    ranks = order if settings["variant"] == "released" else [order.index(head) for head in range(len(order))]
    return [settings["ratios"][rank] for rank in ranks]


def loudness(settings, chosen, head):
    """What a head's cos and sin are multiplied by."""
    return chosen[head][2] if chosen is not None and "heads" in settings else 1.0


def rotation(settings, chosen, head, positions, frequencies, theta):
    """A head's positions and its inverse frequencies, one by one from the formulas of the methods.

    With `rescale`, only the range between two positions is compressed.
    """
    if chosen is None:
        return positions, frequencies
    if "heads" in settings:
        ratio, ramp, _ = chosen[head]
        keeps, gives = ramp * settings["beta_fast"], ramp * settings["beta_slow"]
        slowed = []
        for frequency in frequencies:
            turns = frequency * settings["trained_length"] / (2 * math.pi)
            gone = min(max(math.log(keeps / turns) / math.log(keeps / gives), 0.0), 1.0) if turns else 1.0
            slowed.append(frequency / ratio * gone + frequency * (1 - gone))
        return positions, slowed
    ratio, pairs = chosen[head], len(frequencies)
    if settings["rescale"] != "uniform":
        start, end = settings["rescale"]
        inside = positions.clamp(start, end) - start
        return positions - inside + inside / ratio, frequencies
    if settings["schedule"] == "ntk":  # The slowest pair that rotates gets the whole ratio.
        last = sum(f != 0 for f in frequencies) - 1
        return positions, [f / ratio ** min(i / last, 1.0) for i, f in enumerate(frequencies)]
    if settings["schedule"] == "by-parts":
        bounds = [
            pairs * math.log(settings["trained_length"] / (2 * math.pi * rotations)) / math.log(theta)
            for rotations in (settings["beta_fast"], settings["beta_slow"])
        ]
        low, high = max(math.floor(bounds[0]), 0), min(math.ceil(bounds[1]), 2 * pairs - 1)
        gone = [min(max((i - low) / ((high - low) or 0.001), 0.0), 1.0) for i in range(pairs)]
        return positions, [f / ratio * g + f * (1 - g) for f, g in zip(frequencies, gone, strict=True)]
    return positions, [f / ratio for f in frequencies]
