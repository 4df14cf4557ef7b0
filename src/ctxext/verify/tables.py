"""Whether the position tables of a loaded model are what the recipe makes of the source's."""

import json
import tempfile
from pathlib import Path
from typing import Any

from ctxext.checkpoint.auto_class import auto_class
from ctxext.checkpoint.opening import Checkpoint, read_safetensors_header
from ctxext.recipes.code.staging import staged
from ctxext.recipes.encodings.biases import Buckets
from ctxext.recipes.encodings.learned import LearnedTable
from ctxext.system.files import as_json
from ctxext.system.isolated import fault_within, last_line_of_errors, run_isolated
from ctxext.verify.reference import reference_error, reference_file
from ctxext.verify.subject import FAILED, PASSED, SKIPPED, Finding, Subject, training_of

_BUCKETS_SCRIPT = Path(__file__).with_name("buckets_process.py")


def check_buckets(subject: Subject) -> Finding | None:
    """Whether each stack of the family's class looks its biases up where the reference says."""
    name = "buckets"
    if not subject.has_recipe or all(step.kind != name for step in subject.recipe.steps):
        return None
    (step,) = (step for step in subject.recipe.steps if step.kind == name)
    plain = subject.plain.encoding
    assert isinstance(plain, Buckets)
    task: dict[str, Any] = {
        "numbers": step.to_dict(),
        "reference": str(reference_file(step)),
        "source": {"distance": plain.distance, "num_buckets": plain.num_buckets},
    }
    with tempfile.TemporaryDirectory() as place, staged(subject.checkpoint) as stage:
        task["folder"] = str(stage.folder)
        written = Path(place) / "task.json"
        written.write_text(as_json(task), encoding="utf-8")
        result = run_isolated(_BUCKETS_SCRIPT, str(written))
    if result.returncode != 0:
        if fault := fault_within(result, [task["reference"]]):
            raise reference_error([task["numbers"]["method"]], fault[1])
        return Finding(name, FAILED, f"the buckets cannot be compared: {last_line_of_errors(result)}")
    found = json.loads(result.stdout.strip().splitlines()[-1])
    if not found["stacks"]:
        return Finding(name, FAILED, "nothing was seen to look a bias up")
    if found["wrong"]:
        return Finding(name, FAILED, f"a distance of {found['wrong'][0]} tokens lies in another bucket")
    return Finding(name, PASSED, f"{found['distances']} distances in {found['stacks']} stacks as the recipe says")


_SCRIPT = Path(__file__).with_name("table_process.py")


def check_tables(subject: Subject) -> Finding | None:
    """Whether each row of the loaded tables is what its reference says, by the source's rows where they are given."""
    name = "tables"
    if not subject.has_recipe or not subject.recipe.rewrites_weights or not _endings(subject):
        return None
    if not subject.may_load:
        return Finding(name, SKIPPED, "it carries code that is not this version's own")
    if training_of(subject):
        return Finding(name, SKIPPED, "it was trained, so its rows are no longer those of the recipe")
    task = _task(subject)
    with tempfile.TemporaryDirectory() as place, staged(subject.checkpoint) as stage:
        task["folder"] = str(stage.folder)
        written = Path(place) / "task.json"
        written.write_text(as_json(task), encoding="utf-8")
        result = run_isolated(_SCRIPT, str(written))
    if result.returncode != 0:
        if fault := fault_within(result, [task["reference"]]):
            raise reference_error([task["numbers"]["method"]], fault[1])
        return Finding(name, FAILED, f"the tables cannot be compared: {last_line_of_errors(result)}")
    found = json.loads(result.stdout.strip().splitlines()[-1])
    return next((finding for one in found["tables"] if (finding := _judged(one, task, found["epsilon"]))), None) or (
        Finding(name, PASSED, _told(found["tables"], task, by_source=subject.source is not None))
    )


def _task(subject: Subject) -> dict[str, Any]:
    (step,) = (step for step in subject.recipe.steps if step.kind == "table")
    table = subject.model.encoding
    assert isinstance(table, LearnedTable)
    stored = [one for one in subject.new_tensors if one.endswith(table.layout.tensors)]
    named = stored or table.layout.tensors  # Computed tables need not lie among the weights.
    return {
        "auto": auto_class(subject.checkpoint.config),
        "tables": {one: _file_of(subject.source, one) for one in named},
        "endings": list(table.layout.tensors),
        "special": table.num_special,
        "length": table.trained_length,
        "count": table.context_length,
        "numbers": step.to_dict(),
        "reference": str(reference_file(step)),
    }


def _endings(subject: Subject) -> tuple[str, ...]:
    """How the names of the family's tables end; none where the model makes them for any length."""
    table = subject.model.encoding
    return table.layout.tensors if isinstance(table, LearnedTable) else ()


def _file_of(source: Checkpoint | None, name: str) -> str | None:
    """The file of the source that holds a tensor."""
    for path in source.loaded_safetensors if source else ():
        assert source is not None
        if name in read_safetensors_header(source.folder / path):
            return str((source.folder / path).resolve())
    return None


def _judged(found: dict[str, Any], task: dict[str, Any], epsilon: float) -> Finding | None:
    """What is wrong with a table, or why nothing can be said; None where it is right."""
    name, own = "tables", found["name"]
    if found["rows"] != task["count"]:
        return Finding(name, FAILED, f'"{own}" has {found["rows"]} rows for positions, the recipe {task["count"]}')
    if found.get("unknown"):
        return Finding(name, SKIPPED, "the source's rows are not all among the new ones; --against SOURCE compares")
    if not found["same"]:
        return Finding(name, FAILED, f'"{own}": the rows before position 0 are not the source\'s')
    if not found["difference"] <= epsilon * max(found["scale"], 1e-30):
        return Finding(name, FAILED, f'"{own}" differs from the recipe by up to {found["difference"]:.1e}')
    return None


def _told(tables: list[dict[str, Any]], task: dict[str, Any], *, by_source: bool) -> str:
    rows = ", ".join(f"{one['name']}: {one['rows']} rows" for one in tables)
    worst = max(one["difference"] for one in tables)
    kept = by_source and all(one["kept"] for one in tables)
    note = f", the first {task['length']} bit for bit the source's" if kept else ""
    return f"{rows} as the recipe says (largest difference {worst:.0e}){note}"
