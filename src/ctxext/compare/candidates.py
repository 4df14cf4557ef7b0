"""The options of a comparison, and its recipes: each with its `ctxext convert` options or the reason against it."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from ctxext.checkpoint.families import family_of
from ctxext.checkpoint.opening import Checkpoint
from ctxext.converters.calibration import set_head_order
from ctxext.converters.convert import check_frequencies
from ctxext.converters.plan import Plan, make_plan
from ctxext.errors import CtxextError
from ctxext.files.length import format_length
from ctxext.options import Rule, option, target_length_option, with_documented_options
from ctxext.recipes.encodings.base import POSITIONS
from ctxext.recipes.methods.fills import FILLS
from ctxext.recipes.recipe import Recipe, command_options, load_recipe, presets, recipe_from_dict, recipe_of
from ctxext.recipes.registry import BY_NAME, method_named
from ctxext.tasks.perplexity import Perplexity
from ctxext.tasks.registry import NAMES
from ctxext.tasks.settings import Settings, even_depths, find_length_above_target

STOCK = "unmodified"
"""Name of the unmodified model."""

_ROTARY = ("yarn", "self-extend", "dca", "ntk", "ntk-by-parts", "llama3", "mrrope", "adaptive")
DEFAULTS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "rotary": {name: {"method": name} for name in _ROTARY},
    "learned": {f"table-{fill}": {"method": "table", "fill": fill} for fill in FILLS},
    "sinusoidal": {"range": {"method": "range"}},
    "alibi": {"ntk-alibi": {"method": "ntk-alibi"}},
    "buckets": {"buckets": {"method": "buckets"}},
}
"""The published methods by position encoding, those that most likely matter first, with the parameters of `convert`."""

_MINUTES = 10.0
"""Default time limit."""
_REACH = ("factor", "target_length")


@with_documented_options
@dataclass(frozen=True, kw_only=True)
class CompareOptions(Settings):
    """Options of a comparison.

    In Python `methods` may also map a name of your choice to each recipe.
    """

    default_tasks: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **Settings.default_tasks,
        "causal": (*Settings.default_tasks["causal"], Perplexity.name),
    }

    target_length: int = target_length_option()
    methods: "tuple[str, ...] | Mapping[str, Any]" = option(
        (),
        help="Methods, presets or recipe files, for example yarn,dca,mine.yaml. Default: the published methods for the "
        "model's position encoding.",
        kind="names",
        repeats=True,
    )
    minutes: float | None = option(
        None, help="Total time limit in minutes. Default: 10, or none with --harness.", above=0
    )
    tasks: tuple[str, ...] = option(
        (),
        help=f"{', '.join(NAMES)}; separate several with commas. Default: needle,perplexity,short; for encoders "
        "passages,short.",
        flags=("--task", "-t"),
        kind="names",
        repeats=True,
    )
    depths: tuple[float, ...] = option(
        even_depths(10),
        help="Number of depths, or a list of percentages: 0,50,100.",
        kind="depths",
        shown="10",
    )
    lengths: tuple[int, ...] = option(
        (),
        help="Prompt lengths, for example 4k,32k. Default: the original context length and doublings up to the target.",
        kind="lengths",
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        *Settings.rules,
        Rule(
            lambda options: options.minutes is not None and options.harness,
            "--minutes cannot be combined with --harness.",
            "Remove one of them.",
        ),
        Rule(
            find_length_above_target,
            "--lengths contains {found}, more than the target length of {target_length} tokens.",
            "Use shorter --lengths or a longer --target-length.",
        ),
    )

    @property
    def time_limit(self) -> float | None:
        """The time limit in minutes; None for none."""
        return None if self.harness else self.minutes or _MINUTES

    def settings(self, kind: str, trained_length: int | None) -> Settings:
        """Return the settings of the evaluation for every model, with the default tasks of this kind of model."""
        lengths = self.lengths or double_lengths(trained_length, self.target_length)
        options = replace(self, tasks=self.tasks or self.default_tasks[kind], lengths=lengths, allow_beyond=True)
        # Defaults of `eval` differ, so options of other tasks are omitted.
        names = [field.name for field in dataclasses.fields(Settings) if options.uses(field.name)]
        return Settings(**{name: getattr(options, name) for name in names})


def double_lengths(trained_length: int | None, target_length: int) -> tuple[int, ...]:
    """Return the original context length and its doublings up to the target length, which is included."""
    lengths, length = {target_length}, trained_length or target_length
    while length < target_length:
        lengths.add(length)
        length *= 2
    return tuple(sorted(lengths))


@dataclass(frozen=True)
class Candidate:
    """A recipe for a model.

    Attributes:
        name: The name in the report.
        words: The options of `ctxext convert` for it; empty if only a recipe file can specify it.
        recipe: The recipe; None if it does not apply.
        plan: The plan of its conversion; None if it does not apply.
        refusal: The reason why it does not apply; empty if it does.
    """

    name: str
    words: tuple[str, ...]
    recipe: Recipe | None = None
    plan: Plan | None = None
    refusal: str = ""


def candidates_of(
    source: Checkpoint, methods: Sequence[str] | Mapping[str, Any], target_length: int
) -> list[Candidate]:
    """Return the recipes to compare on a checkpoint.

    Args:
        source: The checkpoint.
        methods: Names of methods, presets or recipe files, or recipes by name. By default the published methods for
            the encoding.
        target_length: The new context length in tokens, for recipes that specify none.
    """
    contents: dict[str, tuple[dict[str, Any], str]] = {}
    if isinstance(methods, Mapping):
        contents = {name: (recipe_of(recipe).to_dict(), "") for name, recipe in methods.items()}
    elif methods:
        contents = {_shorten_name(name, methods): _read_recipe(name) for name in dict.fromkeys(methods)}
    else:
        family = family_of(source.config)
        positions = family.encoding
        if positions not in DEFAULTS:
            hint = "Raise its length: ctxext convert MODEL --method declare" if positions == "none" else ""
            reason = family.reason or f"it has {POSITIONS[positions]}"
            raise CtxextError(f'There is nothing to compare for "{source.name}": {reason}.', hint=hint)
        contents = {name: ({"steps": [dict(step)]}, "") for name, step in DEFAULTS[positions].items()}
    if STOCK in contents:
        raise CtxextError(f'"{STOCK}" is reserved for the unmodified model.', hint="Choose another name.")
    candidates = [_candidate(source, name, *entry, target_length) for name, entry in contents.items()]
    if not any(candidate.plan for candidate in candidates):
        raise CtxextError(
            f'No method applies to "{source.name}": {candidates[0].refusal}',
            hint="See ctxext inspect, or specify --original-length if the model was trained on another length.",
        )
    return candidates


def _shorten_name(name: str, names: Sequence[str]) -> str:
    """Return the name of a recipe file without its folder and suffix, unless another file has the same name."""
    stems = [_stem(path) for path in dict.fromkeys(names)]
    return _stem(name) if stems.count(_stem(name)) == 1 else name


def _stem(name: str) -> str:
    return Path(name).stem if name.endswith((".yaml", ".yml")) else name


def _read_recipe(name: str) -> tuple[dict[str, Any], str]:
    """Return the content of a recipe by its name, and its file or preset; empty for a method."""
    if name.lower() not in BY_NAME and (name in presets() or Path(name).is_file()):
        return load_recipe(name).to_dict(), name
    return {"steps": [{"method": method_named(name).name}]}, ""


def _candidate(source: Checkpoint, name: str, content: dict[str, Any], file: str, target_length: int) -> Candidate:
    steps = [dict(step) for step in content["steps"]]
    takers = [step for step in steps if hasattr(method_named(str(step["method"])), "target_length")]
    reaches = [] if any(step.get(key) for step in takers for key in _REACH) else takers
    words = ["--recipe", file] if file else command_options(steps)
    words += ["--target-length", format_length(target_length)] if reaches and words else []
    if words and source.original_length:
        words += ["--original-length", str(source.original_length)]
    for step in reaches:
        step["target_length"] = target_length
    try:
        recipe = recipe_from_dict({**content, "steps": steps}, name)
        plan = make_plan(source, set_head_order(recipe, "fixed"))
        check_frequencies(plan)
    except CtxextError as error:
        return Candidate(name, tuple(words), refusal=error.message)
    return Candidate(name, tuple(words), recipe, plan)
