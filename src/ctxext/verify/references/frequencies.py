"""Rotary schedules: the base, the inverse frequencies and the factor on cos and sin; for Ms-PoE by KV head."""

import math
from types import SimpleNamespace as Reference


def plain_frequencies(model, base=None):
    """Return the unscaled inverse frequencies: θ_i = b^(-2i / d) for every rotated pair of dimensions."""
    base = model["theta"] if base is None else base
    return [base ** (-2 * i / model["span"]) for i in range(model["dim"] // 2)]


def yarn_temperature(s):
    """Return YaRN's factor on cos and sin: Peng et al. 2023, section 3.4."""
    return 0.1 * math.log(s) + 1 if s > 1 else 1.0


def abf(numbers, model):
    """Return the base of the recipe: adjusted base frequency (Xiong et al. 2023, section 4.1)."""
    return numbers["theta"]


def pi(numbers, model, at):
    """Return the schedule of Position Interpolation (Chen et al. 2023, section 2.3): θ_i / s."""
    return [theta / numbers["factor"] for theta in plain_frequencies(model)], 1.0


def ntk(numbers, model, at):
    """Return the schedule of NTK-aware scaling: bloc97, June 2023; Peng et al. 2023, section 3.1.

    The base b becomes b · s^(d / (d - 2)), so that the slowest frequency is θ / s and the fastest stays.
    """
    return plain_frequencies(model, model["theta"] * numbers["factor"] ** (model["span"] / (model["dim"] - 2))), 1.0


def dynamic(numbers, model, at):
    """Return the schedule of dynamic NTK (emozilla, July 2023, as in transformers), for the current length."""
    d, s, length = model["dim"], numbers["factor"], model["length"]
    needed = s * max(at, length) / length - (s - 1)
    base = model["theta"] * needed ** (d / (d - 2))
    return [base ** (-2 * i / d) for i in range(d // 2)], 1.0


def ramp(numbers: dict, pairs: int, d: int, base: float, length: int) -> list[float]:
    """Return YaRN's ramp: the share of each pair's frequency that is divided by s.

    It is linear in the dimension's index, with the ends rounded outwards and clamped to 0 and d - 1 as in transformers.
    """

    def index(rotations):
        return d / 2 * math.log(length / (2 * math.pi * rotations)) / math.log(base)

    start, end = index(numbers["beta_fast"]), index(numbers["beta_slow"])
    if numbers.get("truncate", True):
        start, end = math.floor(start), math.ceil(end)
    start, end = max(0, start), min(d - 1, end)
    return [0.0 if i <= start else 1.0 if i >= end else (i - start) / (end - start) for i in range(pairs)]


def ntk_by_parts(numbers, model, at):
    """Return the schedule of NTK-by-parts: Peng et al. 2023, section 3.2, as in the authors' code."""
    gone = ramp(numbers, model["dim"] // 2, model["span"], model["theta"], model["length"])
    s = numbers["factor"]
    return [(1 - g) * theta + g * theta / s for theta, g in zip(plain_frequencies(model), gone, strict=True)], 1.0


def yarn(numbers, model, at):
    """Return the schedule of YaRN (Peng et al. 2023, sections 3.2 to 3.4).

    By parts, with the factor `attention_factor` on cos and sin, by default 0.1 ln(s) + 1.
    """
    s, mscale, mscale_all = numbers["factor"], numbers.get("mscale"), numbers.get("mscale_all_dim")
    attention_factor = yarn_temperature(s)
    if mscale and mscale_all and s > 1:  # As in the code of DeepSeek-V2.
        attention_factor = (0.1 * mscale * math.log(s) + 1) / (0.1 * mscale_all * math.log(s) + 1)
    return ntk_by_parts(numbers, model, at)[0], numbers.get("attention_factor") or attention_factor


def yarn_scores(numbers):
    """DeepSeek-V2's factor on all scores of latent attention (its modeling code): the square of its second mscale."""
    weight = numbers.get("mscale_all_dim") or 0
    return (0.1 * weight * math.log(numbers["factor"]) + 1) ** 2 if numbers["factor"] > 1 else 1.0


def llama3(numbers, model, at):
    """Return the schedule of Llama 3.1 (its model code, 2024).

    Long wavelengths are divided, short ones kept, and the rest blended.
    """
    low, high, s, length = numbers["low_freq_factor"], numbers["high_freq_factor"], numbers["factor"], model["length"]
    frequencies = []
    for theta in plain_frequencies(model):
        wavelength = 2 * math.pi / theta
        if wavelength < length / high:
            frequencies.append(theta)
        elif wavelength > length / low:
            frequencies.append(theta / s)
        else:
            smooth = (length / wavelength - low) / (high - low)
            frequencies.append((1 - smooth) * theta / s + smooth * theta)
    return frequencies, 1.0


def longrope(numbers, model, at):
    """Return the schedule of LongRoPE: Ding et al. 2024, section 3.

    The frequencies are θ_i / λ̂_i, with the long list beyond the original context length. The factor on cos and sin is
    sqrt(1 + ln s / ln L).
    """
    s, length, thetas = numbers["factor"], model["length"], plain_frequencies(model)
    divisors = numbers["long_factor"] if at > length else numbers.get("short_factor") or [1.0] * len(thetas)
    scaling = math.sqrt(1 + math.log(s) / math.log(length)) if s > 1 else 1.0
    frequencies = [theta / divisor for theta, divisor in zip(thetas, divisors, strict=True)]
    return frequencies, numbers.get("attention_factor") or scaling


def mrrope(numbers, model, at):
    """Return the schedule of MrRoPE (arXiv 2601.22181, equations 13 to 26).

    The frequencies are θ_i / s^e; e rises over the indices between the last fast and the first slow dimension.
    """
    s, thetas = numbers["factor"], plain_frequencies(model)
    low, high = -1, len(thetas)
    for i, theta in enumerate(thetas):
        rotations = theta * model["length"] / (2 * math.pi)
        if rotations > numbers["beta_fast"]:
            low = i
        if rotations < numbers["beta_slow"] and high == len(thetas):
            high = i
    frequencies = []
    for i, theta in enumerate(thetas):
        if i <= low:
            e = 0.0
        elif i >= high:
            e = 1.0
        elif numbers["variant"] == "uni":
            e = (i - low) / (high - low)
        else:
            # The product of radices that rise as s^(2 j / (n (n + 1))).
            e = sum(2 * j / ((high - low) * (high - low + 1)) for j in range(1, i - low + 1))
        frequencies.append(theta / s**e)
    return frequencies, yarn_temperature(s)


def choose(settings, layer, queries, keys, scaling):
    """Return the ratio of each KV head in this layer, or None for other layers: Ms-PoE (Zhang et al. 2024, section 3).

    The statistic is computed on full causal attention matrices of un-rotated queries (1, h, l, d) and keys
    (1, g, l, d). The head with the largest one gets the first ratio.
    """
    import torch

    if layer not in settings["layers"]:
        return None
    at = settings["layers"].index(layer)
    if settings.get("ranks") is not None:
        return [settings["ratios"][rank] for rank in settings["ranks"][at]]
    group, length, counts = queries.shape[1] // keys.shape[1], keys.shape[2], []
    for head in range(keys.shape[1]):
        count = 0  # An integer, so that ties are exact.
        for query in range(head * group, (head + 1) * group):
            scores = queries[0, query].float() @ keys[0, head].float().T * scaling
            scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -math.inf)
            count += int((scores.softmax(-1)[-1] * length > 3).sum())
        counts.append(count)
    order = sorted(range(len(counts)), key=lambda head: (-counts[head], head))
    ranks = order if settings["variant"] == "released" else [order.index(head) for head in range(len(order))]
    return [settings["ratios"][rank] for rank in ranks]


def mspoe(settings, chosen, head, positions, frequencies, theta):
    """Return a head's positions and inverse frequencies in Ms-PoE, or in a schedule instead of its linear ratios.

    With `rescale`, only the range between two positions is compressed.
    """
    if chosen is None:
        return positions, frequencies
    ratio, pairs = chosen[head], len(frequencies)
    if settings["rescale"] != "uniform":
        start, end = settings["rescale"]
        inside = positions.clamp(start, end) - start
        return positions - inside + inside / ratio, frequencies
    if settings["schedule"] == "ntk":  # The slowest pair that rotates gets the whole ratio.
        last = sum(f != 0 for f in frequencies) - 1
        return positions, [f / ratio ** min(i / last, 1.0) for i, f in enumerate(frequencies)]
    if settings["schedule"] == "by-parts":
        gone = ramp(settings, pairs, 2 * pairs, theta, settings["trained_length"])
        return positions, [f / ratio * g + f * (1 - g) for f, g in zip(frequencies, gone, strict=True)]
    return positions, [f / ratio for f in frequencies]


REFERENCES = {
    "pi": Reference(schedule=pi),
    "ntk": Reference(schedule=ntk),
    "abf": Reference(base=abf),
    "ntk-by-parts": Reference(schedule=ntk_by_parts),
    "yarn": Reference(schedule=yarn, scores=yarn_scores),
    "llama3": Reference(schedule=llama3),
    "longrope": Reference(schedule=longrope),
    "mrrope": Reference(schedule=mrrope),
    "dynamic": Reference(schedule=dynamic),
    "mspoe": Reference(choose=choose, rotation=mspoe),
}
