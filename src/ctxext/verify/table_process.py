"""Run by `clean_load.py`, never imported by ctxext: compares the position tables of a loaded model with a reference.

The task has `folder`, `auto`, the Auto class that loads it, `tables`, for each its name in the weights and,
where it is known, the file of the source that holds it; `endings`, `special`, `length` and `count`, the old and the new
number of positions, `numbers`, the step, and `reference`, its file.
"""

from typing import Any

from .script import answer, reference_at


def table_of(model: Any, name: str, endings: list[str]) -> Any:
    """A table of a loaded model; classes differ in the prefix of its name."""
    ending = next(ending for ending in endings if name.endswith(ending))
    return next(
        weight
        for full_name, weight in model.named_parameters()
        if full_name == ending or full_name.endswith("." + ending)
    ).detach()


def compared(task: dict[str, Any], model: Any, name: str, origin: str | None) -> dict[str, Any]:
    """The difference of a table from the one that the reference builds from the original rows."""
    import torch
    from safetensors import safe_open

    reference, special = reference_at(task["reference"]), task["special"]
    table = table_of(model, name, task["endings"])
    rows = table[special:].double()
    if len(rows) != task["count"]:
        return {"name": name, "rows": len(rows)}
    if origin is None:
        where = reference.original(task["numbers"], rows, task["length"], task["count"])
        if where is None:
            return {"name": name, "rows": len(rows), "unknown": True}
        old, same = rows[where], True
    else:
        with safe_open(origin, framework="pt") as file:
            source = file.get_tensor(name)
        old, same = source[special:].double(), torch.equal(source[:special].to(table.dtype), table[:special])
    wanted = reference.rows(task["numbers"], old, task["count"])
    difference = (rows - wanted.to(table.dtype).double()).abs().max().item()
    kept = bool(torch.equal(rows[: len(old)], old))
    scale = wanted.abs().max().item()
    return {"name": name, "rows": len(rows), "difference": difference, "scale": scale, "same": same, "kept": kept}


def compare(task: dict[str, Any]) -> dict[str, Any]:
    """Load a checkpoint and compare its tables with the reference."""
    import torch
    import transformers

    model = getattr(transformers, task["auto"]).from_pretrained(task["folder"], dtype="auto")
    tables = [compared(task, model, name, origin) for name, origin in task["tables"].items()]
    epsilon = torch.finfo(next(iter(model.parameters())).dtype).eps
    return {"tables": tables, "epsilon": epsilon}


if __name__.endswith("__main__"):
    answer(compare)
