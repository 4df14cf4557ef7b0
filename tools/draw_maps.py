"""Draw the maps of docs/methods.md: the distance between query m and key n, computed from the references only."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from ctxext.recipes.base import Method
from ctxext.recipes.methods.relation import Relation
from ctxext.recipes.model_config import model_config
from ctxext.verify.rotation import reference_of

FOLDER = Path(__file__).parents[1] / "docs" / "maps"
LENGTH, TOTAL = 64, 192
SMALL = {"model_type": "llama", "hidden_size": 2, "num_attention_heads": 1, "num_hidden_layers": 2}
SMALL |= {"max_position_embeddings": LENGTH, "rope_theta": 1e4}


def distances(method: type[Relation]) -> list[list[float]]:
    """Return the distance of each query to each key in the first layer; NaN if the key is not read."""
    model, step = model_config(SMALL), method(**{**method.example, "factor": min(3, method.example["factor"])})
    settings = {"method": method.name, **step.settings(model)}
    reference, layer, found = reference_of(method), settings["layers"][0], []
    for m in range(TOTAL):
        row = [float("nan")] * TOTAL
        for n in range(m + 1):
            angles = reference.relation(settings, layer, m, n, [1.0])
            if angles is not None:
                row[n] = angles[0][0] - angles[1][0]
        found.append(row)
    return found


def draw(method: type[Relation]) -> None:
    """Draw the picture of one method."""
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
    """Return whether distances describe a method fully; per-position schedules also change frequencies."""
    return issubclass(method, Relation) and method.name != "adaptive"


def draw_all(methods: tuple[type[Method], ...]) -> None:
    """Draw all pictures."""
    FOLDER.mkdir(exist_ok=True)
    for method in methods:
        if issubclass(method, Relation) and has_map(method):
            draw(method)
