"""Frequencies and factors on cosine and sine, by formulas from the papers: in floats, without code of the package."""

import math


def ramp(base, span, pairs, length, fast, slow, truncate):
    """YaRN's (section 3.2): how far each pair is interpolated, from 0 to 1, over a pair's index.

    Ends are rounded outwards and clamped at 0 and d - 1, which is what the runtime does (docs/traps.md, trap 6).
    """
    ends = [span * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base)) for turns in (fast, slow)]
    if truncate:
        ends = [math.floor(ends[0]), math.ceil(ends[1])]
    low, high = max(ends[0], 0), min(ends[1], span - 1)
    return [min(max((pair - low) / ((high - low) or 0.001), 0), 1) for pair in range(pairs)]


def by_hand(method, factor, base, size, length, at, span=None, **numbers):
    """The frequencies and the factor on cosine and sine of a method.

    Args:
        method: The method's name.
        factor: How many times longer than the original context length.
        base: The model's own base.
        size: How many dimensions of a head rotate.
        length: The original context length in tokens.
        at: The length of the sequence in tokens.
        span: Over how many dimensions the exponents run.
        numbers: Numbers of the schedule, by their names in config.json.
    """
    span, pairs = span or size, size // 2
    plain = [base ** (-2 * pair / span) for pair in range(pairs)]
    said = numbers.get("attention_factor")
    if method == "abf":
        return [numbers["theta"] ** (-2 * pair / span) for pair in range(pairs)], 1.0
    if method == "ntk":
        return [(base * factor ** (span / (size - 2))) ** (-2 * pair / span) for pair in range(pairs)], 1.0
    if method == "dynamic":  # emozilla, July 2023.
        stretch = factor * max(at, length) / length - (factor - 1)
        return [(base * stretch ** (size / (size - 2))) ** (-2 * pair / size) for pair in range(pairs)], 1.0
    if method == "longrope":
        divisors = numbers["long_factor" if at > length else "short_factor"]
        scaling = math.sqrt(1 + math.log(factor) / math.log(length)) if said is None else said
        return [theta / divisor for theta, divisor in zip(plain, divisors, strict=True)], scaling
    if method == "llama3":  # Llama 3.1's code: by rotations within the original length.
        low, high = numbers.get("low_freq_factor", 1), numbers.get("high_freq_factor", 4)
        turns = [length * theta / (2 * math.pi) for theta in plain]
        shares = [1 - min(max((turn - low) / (high - low), 0), 1) for turn in turns]
    elif method == "pi":
        shares = [1.0] * pairs
    else:
        ends = numbers.get("beta_fast") or 32, numbers.get("beta_slow") or 1
        shares = ramp(base, span, pairs, length, *ends, numbers.get("truncate", True))
    frequencies = [theta * (1 - share) + theta / factor * share for theta, share in zip(plain, shares, strict=True)]
    if method != "yarn" or factor <= 1:
        return frequencies, 1.0
    ones = [numbers.get(key) or 0 for key in ("mscale", "mscale_all_dim")]
    both = [0.1 * one * math.log(factor) + 1 for one in ones]
    scaling = both[0] / both[1] if all(ones) else 0.1 * math.log(factor) + 1
    return frequencies, scaling if said is None else said
