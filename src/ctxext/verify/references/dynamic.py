"""Dynamic NTK: emozilla, July 2023, as transformers runs it."""


def schedule(numbers, model, at):
    """NTK-aware scaling with the factor that the current length needs."""
    d, s, length = model["dim"], numbers["factor"], model["length"]
    needed = s * max(at, length) / length - (s - 1)
    base = model["theta"] * needed ** (d / (d - 2))
    return [base ** (-2 * i / d) for i in range(d // 2)], 1.0
