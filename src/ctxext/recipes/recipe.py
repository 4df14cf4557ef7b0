"""A recipe: methods in the order of their application, with their parameters, as Python objects or as a YAML file."""

import contextlib
import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from ctxext.checkpoint.opening import Checkpoint
from ctxext.errors import CtxextError, suggest
from ctxext.files.length import check_length
from ctxext.files.strict import parse_yaml, read_text
from ctxext.files.tensor_files import NewTensor
from ctxext.options import option_name, value_type
from ctxext.recipes.base import Method, Scaling
from ctxext.recipes.code.layout import SHARED_FILES, STUB_FILE, family_classes, render_stub, without_code
from ctxext.recipes.code.method import PORTABLE, CodeMethod
from ctxext.recipes.encodings.base import Config, provenance
from ctxext.recipes.encodings.rotary import Rotary, without_derived
from ctxext.recipes.model_config import ModelConfig
from ctxext.recipes.param import parameter_of
from ctxext.recipes.registry import method_named

FILE_KEYS = ("description", "source", "steps")


@dataclass(frozen=True)
class Recipe:
    """Steps to apply in order.

    Attributes:
        steps: The methods with their parameters.
        description: The purpose of the recipe, from a recipe file.
        source: The origin of its parameter values, from a recipe file.
    """

    steps: tuple[Method, ...]
    description: str = ""
    source: str = ""

    def __init__(self, steps: Method | Iterable[Method], description: str = "", source: str = "") -> None:
        object.__setattr__(self, "steps", (steps,) if isinstance(steps, Method) else tuple(steps))
        for step in self.steps:
            if not isinstance(step, Method):
                raise CtxextError(f'"{step}" is not a method.', hint="Pass methods, for example Yarn(factor=4).")
        object.__setattr__(self, "description", description)
        object.__setattr__(self, "source", source)
        if not self.steps:
            raise CtxextError("The recipe has no steps.", hint="Add a method, for example --method yarn.")
        _check_order(self.steps)

    @property
    def needs_code(self) -> bool:
        """Whether the result must contain modeling code."""
        return any(step.needs_code() for step in self.steps)

    @property
    def needs_calibration(self) -> bool:
        """Whether the model must be loaded first, to measure parameters of a step."""
        return any(step.needs_calibration for step in self.steps)

    @property
    def changes_frequencies(self) -> bool:
        """Whether some step writes a RoPE schedule."""
        return any(step.kind in ("base", "schedule") for step in self.steps)

    @property
    def replaces_encoding(self) -> bool:
        """Whether some step replaces the encoding and must start from an unscaled one."""
        return any(not step.needs_code() for step in self.steps)

    @property
    def rewrites_weights(self) -> bool:
        """Whether some step changes weights, which no configuration can restore."""
        return any(type(step).new_tensors is not Method.new_tensors for step in self.steps)

    def resolve(self, model: ModelConfig) -> "Recipe":
        """Return the recipe with every model-dependent parameter filled in."""
        encoding, steps = model.encoding, []
        for step in self.steps:
            steps.append(step.adapt(model).resolve(encoding))
            length = steps[-1].length_after(encoding)
            check_length(length)
            encoding = encoding.at_length(length)
        return Recipe(steps, self.description, self.source)

    def take_over(self, model: ModelConfig) -> tuple["Recipe", dict[str, Any]]:
        """Return the recipe with unset parameters from the schedule that it replaces, and those parameters.

        Only a schedule of the same type is used.
        """
        recorded = (provenance(model.config).get("recipe") or {}).get("steps", [])
        names = [str(step.get("method")) for step in recorded]
        schedules = [name for name in names if not method_named(name).needs_code()]
        previous = schedules[-1] if schedules else None
        steps, parameters = [], dict[str, Any]()
        schedule = without_derived(model.rotary) if isinstance(model.encoding, Rotary) else {}
        if model.family.scales_scores and schedule.get("rope_type") == "yarn":
            schedule = {"mscale_all_dim": 0.0, **schedule}  # The class default: scores keep their scale.
        for step in self.steps:
            inherited = step.inherit_from(schedule, previous) if isinstance(step, Scaling) else {}
            steps.append(dataclasses.replace(step, **inherited))
            parameters |= inherited
        return Recipe(steps, self.description, self.source), parameters

    def edit(self, model: ModelConfig, *, with_code: bool = True) -> ModelConfig:
        """Return the configuration after all steps.

        If `with_code` is false, only the steps that unmodified transformers supports are applied.
        """
        model = _apply_steps(model, (step for step in self.steps if not step.needs_code()))
        return self.add_code(model) if with_code else model

    def add_code(self, model: ModelConfig) -> ModelConfig:
        """Return the configuration after the steps with code, which come last."""
        return _apply_steps(model, (step for step in self.steps if step.needs_code()))

    def new_tensors(self, source: Checkpoint, model: ModelConfig) -> tuple[NewTensor, ...]:
        """Return the tensors that differ between the result and its source.

        The recipe must be resolved for `model`, the source's configuration.
        """
        return tuple(tensor for step in self.steps for tensor in step.new_tensors(source, model))

    def cautions(self, model: ModelConfig) -> list[str]:
        """Return the warnings of the steps for users of the result."""
        return [f"{step.name}: {caution}" for step in self.steps if (caution := step.caution_for(model))]

    def code_files(self, config: Config) -> Mapping[str, str]:
        """Return the modeling code that the result must contain, by file name; empty if no step needs any."""
        with_code = [step for step in self.steps if isinstance(step, CodeMethod)]
        if not with_code:
            return {}
        shared = SHARED_FILES[with_code[0].encoding]
        files = [*(PORTABLE / name for name in shared), *(file for step in with_code for file in step.code)]
        methods = [(step.title, step.code[0].name.removesuffix(".py"), step.code_class) for step in with_code]
        modules = [file.name.removesuffix(".py") for file in files]
        stub = render_stub(family_classes(config), methods, modules, shared[-1].removesuffix(".py"))
        return {**{file.name: file.read_bytes().decode() for file in files}, STUB_FILE: stub}

    def to_dict(self) -> dict[str, Any]:
        """Return the content of the recipe file."""
        notes = {"description": self.description, "source": self.source}
        return {**{key: note for key, note in notes.items() if note}, "steps": [step.to_dict() for step in self.steps]}

    def summary(self) -> str:
        """Return the recipe in a few words, for one line of output: "yarn ×4, mspoe 1.2-1.8"."""
        return ", ".join(step.summary() for step in self.steps)


def describe_steps(steps: Iterable[Mapping[str, Any]]) -> str:
    """Describe the steps of a recipe file in a few words; empty if there are none."""

    def describe(step: Mapping[str, Any]) -> str:
        try:
            return step_from_dict(step, "recipe").summary()
        except CtxextError:
            return str(step.get("method"))

    return ", ".join(map(describe, steps))


def _apply_steps(model: ModelConfig, steps: Iterable[Method]) -> ModelConfig:
    for step in steps:
        model = step.edit(model)
        check_length(model.encoding.usable_length)
    return model


def _check_order(steps: Sequence[Method]) -> None:
    """Raise if steps conflict, or if one comes before a step that it depends on."""
    exclusive = {
        "schedule": "scale the same frequencies",
        "attention": "replace the same attention",
        "slopes": "change the same slopes",
    }
    for kind, effect in exclusive.items():
        same = [step.name for step in steps if step.kind == kind]
        if len(same) > 1:
            raise CtxextError(
                f"{' and '.join(same)} would {effect} twice.",
                hint="Keep one of them.",
            )
    names = [step.name for step in steps]
    if twice := [name for name in names if names.count(name) > 1]:
        raise CtxextError(f"{twice[0]} is named twice.", hint="Keep one of them.")
    for before, after in itertools.pairwise(steps):
        if before.needs_code() and not after.needs_code():
            raise CtxextError(
                f"{before.name} must come after {after.name}: methods with code apply to the scaled model.",
                hint=f"Use --method {after.name} --method {before.name}",
            )


def command_options(steps: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the options of `ctxext convert` that are equivalent to steps of a recipe file; empty if a file is needed.

    A file is needed for lists, measured values, one parameter with two values, and factors that multiply.
    """
    methods = [(method_named(str(step["method"])), step) for step in steps]
    fields = [
        (field, step.get(field.name, field.default)) for method, step in methods for field in dataclasses.fields(method)
    ]
    changed = {field: value for field, value in fields if value is not None and value != field.default}
    named = {field.name: value for field, value in changed.items()}
    # An option applies to every step that has it, so no step with the default may have an option of this name.
    is_shared = any(named.get(field.name, value) != value for field, value in fields)
    is_long = any(parameter_of(field).internal or isinstance(value, list | tuple) for field, value in changed.items())
    if is_shared or is_long or multiplying_steps([method for method, _ in methods]):
        return []
    return [
        *(word for method, _ in methods for word in ("--method", method.name)),
        *(word for name, value in named.items() for word in _option(name, value)),
    ]


def _option(name: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [option_name(name if value else f"no_{name}")]
    # As a user writes it: 4 instead of 4.0, but with all digits.
    is_whole = isinstance(value, float) and value == int(value) and abs(value) < 1e15
    return [option_name(name), str(int(value) if is_whole else value)]


def multiplying_steps(steps: Iterable[Method | type[Method]]) -> list[str]:
    """Return the names of steps with factors that multiply.

    They are a schedule of the configuration, and code that scales it again. A new base and a schedule both scale the
    original context length, so their factors do not multiply.
    """
    scaling = [step for step in steps if hasattr(step, "factor")]
    return [step.name for step in scaling] if len({step.needs_code() for step in scaling}) > 1 else []


def plain_config(model: ModelConfig) -> ModelConfig:
    """Return the configuration of an extended model without its extension.

    It has no code, no schedule and the original length. If ctxext added only code, the source's schedule stays.
    """
    record = provenance(model.config)
    steps = [method_named(str(step.get("method"))) for step in (record.get("recipe") or {}).get("steps", [])]
    config = {key: value for key, value in without_code(model.config).items() if key != "ctxext"}
    if isinstance(model.encoding, Rotary) and steps and all(method.needs_code() for method in steps):
        length, declared = record.get("source_length") or model.rotary.trained_length, record.get("declared_length")
        plain = ModelConfig(config, model.family, model.rotary)
        if (theta := record.get("source_theta")) and theta != model.rotary.theta:
            plain = plain.with_encoding(dataclasses.replace(model.rotary, theta=theta))
        plain = plain.with_context_length(int(declared or length))
        rotary = dataclasses.replace(plain.rotary, context_length=int(length), declared_length=declared)
        return dataclasses.replace(plain, encoding=rotary)
    encoding = model.encoding.restore_source(record)
    return ModelConfig(config, model.family, encoding).with_encoding(encoding)


def starting_model(model: ModelConfig, recipe: Recipe) -> ModelConfig:
    """Return the configuration to which a recipe applies: without code, and without a schedule that it replaces.

    It is `model` itself if nothing has to be removed.
    """
    if not model.code and not (model.encoding.is_scaled and recipe.replaces_encoding):
        return model
    start = plain_config(model)
    # Without ctxext's code, the source still has its schedule.
    return plain_config(start) if start.encoding.is_scaled and recipe.replaces_encoding else start


def step_from_dict(entry: Any, place: str) -> Method:
    """Create a step from an entry of a recipe file; errors name its place there."""
    if not isinstance(entry, Mapping) or "method" not in entry:
        raise CtxextError(f'{place}: each step needs a "method".')
    method = method_named(str(entry["method"]))
    names = {field.name for field in dataclasses.fields(method)}
    numbers = {key: value for key, value in entry.items() if key != "method"}
    for key in numbers:
        if key not in names:
            raise CtxextError(
                f'{place}: {method.name} has no parameter "{key}".',
                hint=suggest(str(key), names, f"Parameters: {', '.join(sorted(names))}."),
            )
        if value_type(method, key) is float and isinstance(numbers[key], str):
            with contextlib.suppress(ValueError):  # YAML 1.1 reads "1e6" as text; other text fails the checks.
                numbers[key] = float(numbers[key])
    required = [
        field.name
        for field in dataclasses.fields(method)
        if field.default is dataclasses.MISSING and numbers.get(field.name) is None
    ]
    if required:
        options = " ".join(f"--{name.replace('_', '-')} …" for name in required)
        raise CtxextError(f"{method.name} needs {', '.join(required)}.", hint=f"Add {options}.")
    return method(**numbers)


def recipe_of(recipe: "Recipe | Method | Iterable[Method] | str | Path") -> Recipe:
    """Return a recipe from a recipe, a method, methods in order, or the name of a file or a preset.

    >>> from ctxext.methods import Yarn
    >>> recipe_of(Yarn(factor=4)).summary()
    'yarn ×4'
    """
    if isinstance(recipe, Recipe):
        return recipe
    return load_recipe(str(recipe)) if isinstance(recipe, str | Path) else Recipe(recipe)


def load_recipe(name: str) -> Recipe:
    """Read a recipe file or a preset of the package.

    Args:
        name: A path, or a preset's name.

    Raises:
        CtxextError: the file does not exist or is not a recipe.
    """
    path = Path(name)
    preset_texts = presets()
    if path.exists() and not path.is_dir():
        text = read_text(path)
    elif name in preset_texts:
        text = preset_texts[name]
    else:
        raise CtxextError(f'There is no recipe file "{name}".', hint=f"Presets: {', '.join(sorted(preset_texts))}.")
    return recipe_from_dict(parse_yaml(text, name), name)


def recipe_from_dict(content: Any, place: str) -> Recipe:
    """Build a recipe from a file's content."""
    if not isinstance(content, Mapping) or not isinstance(content.get("steps"), list):
        raise CtxextError(f'"{place}" is not a recipe: it has no list of "steps".')
    unknown = [str(key) for key in content if key not in FILE_KEYS]
    if unknown:
        raise CtxextError(f'"{place}": unknown key "{unknown[0]}".', hint=f"Known keys: {', '.join(FILE_KEYS)}.")
    steps = [step_from_dict(entry, f"{place}, step {number}") for number, entry in enumerate(content["steps"], 1)]
    return Recipe(steps, str(content.get("description", "")), str(content.get("source", "")))


def presets() -> dict[str, str]:
    """Return the recipes of the package: file content by name."""
    folder = resources.files("ctxext.recipes") / "presets"
    files = [entry for entry in folder.iterdir() if entry.name.endswith(".yaml")]
    return {file.name.removesuffix(".yaml"): file.read_text(encoding="utf-8") for file in files}
