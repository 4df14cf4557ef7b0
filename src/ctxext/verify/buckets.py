"""Whether a model with T5's biases puts distances into the buckets that the recipe says."""

import json
import tempfile
from pathlib import Path
from typing import Any

from ctxext.files import as_json
from ctxext.recipes.biases import Buckets
from ctxext.staging import staged
from ctxext.verify.isolated import fault_within, last_line_of_errors, run_isolated
from ctxext.verify.reference import reference_error, reference_file
from ctxext.verify.subject import FAILED, PASSED, Finding, Subject

_SCRIPT = Path(__file__).with_name("buckets_process.py")


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
        result = run_isolated(_SCRIPT, str(written))
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
