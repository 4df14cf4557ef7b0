"""Draw the maps of docs/methods.md: which distance row m sees key n at, from the references alone."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from ctxext.recipes.base import Method
from ctxext.recipes.relation import Relation
from ctxext.recipes.rotary import Rotary
from ctxext.verify.reference import reference_of

FOLDER = Path(__file__).parents[1] / "docs" / "maps"
LENGTH, TOTAL = 64, 192
NUMBERS = {"string": {"factor": 1.2}}


def distances(method: type[Method]) -> list[list[float]]:
    """For each row its distance to each key; not a number where the key is not read."""
    step = method(**NUMBERS.get(method.name, {"factor": 3}))
    plain = Rotary(
        theta=1e4, dim=2, span=2, trained_length=LENGTH, context_length=LENGTH, parameters={"rope_type": "default"}
    )
    settings = {**step.resolved(plain).to_dict(), "original_length": LENGTH}
    reference, found = reference_of(method), []
    for m in range(TOTAL):
        row = [float("nan")] * TOTAL
        for n in range(m + 1):
            angles = reference.relation(settings, m, n, [1.0])
            if angles is not None:
                row[n] = angles[0][0] - angles[1][0]
        found.append(row)
    return found


def draw(method: type[Method]) -> None:
    """Write the picture of one method."""
    figure, axes = plt.subplots(figsize=(3.6, 3.1), dpi=110, layout="constrained")
    picture = axes.imshow(distances(method), cmap="viridis", vmin=0, vmax=LENGTH, interpolation="nearest")
    axes.axhline(LENGTH - 0.5, color="tab:red", linewidth=0.8)
    axes.set_xlabel("key n")
    axes.set_ylabel("row m")
    axes.set_title(method.name, fontsize=10)
    figure.colorbar(picture, label=f"distance seen (trained to {LENGTH})")
    figure.savefig(FOLDER / f"{method.name}.png")
    plt.close(figure)


def has_map(method: type[Method]) -> bool:
    """Whether distances are all there is to say; row-wise schedules change frequencies."""
    return issubclass(method, Relation) and method.name != "adaptive"


def draw_all(methods: tuple[type[Method], ...]) -> None:
    """Write every picture."""
    FOLDER.mkdir(exist_ok=True)
    for method in methods:
        if has_map(method):
            draw(method)
