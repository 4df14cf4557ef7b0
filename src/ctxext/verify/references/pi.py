"""Position Interpolation: Chen et al. 2023, section 2.3."""


def schedule(numbers, model, at):
    """θ_i / s."""
    return [model["theta"] ** (-2 * i / model["span"]) / numbers["factor"] for i in range(model["dim"] // 2)], 1.0
