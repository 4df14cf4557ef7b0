"""NTK-aware scaling: bloc97, June 2023; Peng et al. 2023, section 3.1."""


def schedule(numbers, model, at):
    """The base b becomes b · s^(d / (d - 2)), so that the slowest frequency is θ / s and the fastest stays."""
    pairs, d = model["dim"] // 2, model["span"]
    base = model["theta"] * numbers["factor"] ** (d / (model["dim"] - 2))
    return [base ** (-2 * i / d) for i in range(pairs)], 1.0
