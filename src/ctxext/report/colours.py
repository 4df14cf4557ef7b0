"""Colours of scores and curves, distinguishable by colour-blind readers, and of readable text on them."""

_STOPS = ((0.0, (161, 72, 36)), (0.5, (244, 226, 180)), (1.0, (28, 112, 122)))
SERIES = ("#1c707a", "#c8641e", "#8459a0", "#5b8c2a", "#d14d72", "#3f6fd0", "#8a6d1f", "#6b6b6b")
"""Colours of curves, in the order of the models."""
_DASHES: tuple[tuple[float, ...], ...] = ((), (6, 2), (2, 1.5), (6, 2, 1.5, 2))


def series_style(number: int) -> tuple[str, tuple[float, ...]]:
    """Return the colour and the dashes of a curve, one of thirty-two combinations.

    Dashes are alternating lengths of lines and gaps; an empty tuple is a solid line.
    """
    return SERIES[number % len(SERIES)], _DASHES[number // len(SERIES) % len(_DASHES)]


def shade(share: float) -> tuple[int, int, int]:
    """Compute the colour of a share of correct answers, as red, green and blue from 0 to 255."""
    share = min(1.0, max(0.0, share))
    (start, low), (end, high) = _STOPS[:2] if share <= _STOPS[1][0] else _STOPS[1:]
    at = (share - start) / (end - start)
    red, green, blue = (round(a + at * (b - a)) for a, b in zip(low, high, strict=True))
    return red, green, blue


def hexadecimal(colour: tuple[int, int, int]) -> str:
    """Format a colour for style sheets and terminals: "#1c707a"."""
    return "#{:02x}{:02x}{:02x}".format(*colour)


def ink(colour: tuple[int, int, int]) -> str:
    """Return black or white, whichever has more contrast: at least 4.58, while WCAG requires 4.5."""
    parts = [part / 3294.6 if part <= 10 else ((part / 255 + 0.055) / 1.055) ** 2.4 for part in colour]
    luminance = 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]
    return "#ffffff" if 1.05 / (luminance + 0.05) > (luminance + 0.05) / 0.05 else "#000000"
