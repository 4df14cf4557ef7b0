"""What a run of an evaluation notes, written by hand, and the report of it."""

from ctxext.report.report import make_report
from ctxext.tasks.settings import Settings

VERSIONS = {"ctxext": "0.2", "transformers": "5.23", "torch": "2.9"}


def facts(name, **more):
    """Return the facts about a model in the header of a log."""
    made = {"name": name, "revision": None, "kind": "causal", "model_type": "llama", "recipe": None, "summary": "stock"}
    made |= {"source": None, "trained_length": 512, "context_length": 1024, "digest": name[0] * 64}
    return {**made, **more}


def answers(model, length, depth, right, task="needle", first=0):
    """Return the record of consecutive questions; `right` has the score of each."""
    samples = list(range(first, first + len(right)))
    line = {"model": model, "task": task, "length": length, "depth": depth, "samples": samples, "correct": right}
    return {**line, "seconds": 1.0}


def losses(model, task, length, sample=0, **sums):
    """Return the record of one document."""
    line = {"model": model, "task": task, "length": length, "depth": None, "samples": [sample]}
    return {**line, "seconds": 1.0, **sums}


def report_of(models, records, settings=None, **more):
    """Return the report of models, given by name or by facts."""
    settings = settings or Settings(tasks=("needle", "short"))
    content = settings if isinstance(settings, dict) else settings.to_dict()
    models = [facts(model) if isinstance(model, str) else model for model in models]
    return make_report({"settings": content, "loading": {}, "models": models, "versions": VERSIONS, **more}, records)
