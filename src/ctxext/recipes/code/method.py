"""A method that a checkpoint carries as code: what it adds to a method that configuration keys can carry."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from importlib.abc import Traversable
from typing import Any, ClassVar

from ctxext.checkpoint.families import Family, rotated_layers
from ctxext.errors import CtxextError
from ctxext.recipes.base import Method
from ctxext.recipes.code import layout as code_layout
from ctxext.recipes.encodings.rotary import Config, ModelConfig

_ALL_SLIDING = "every layer with a rotary embedding sees a window only, and those keep their own"

PORTABLE: Traversable = resources.files("ctxext.portable")
"""Where the modeling code that travels inside checkpoints is kept."""


@dataclass(frozen=True, kw_only=True)
class CodeMethod(Method):
    """A step whose numbers go to a class of portable code, beside those of the other steps with code."""

    code: ClassVar[tuple[Traversable, ...]]
    """The files that travel: the one with the class first, then what it imports beside `method.py`."""
    code_class: ClassVar[str]
    """The name of the class, a `Method` of `portable/method.py` with the same `name` as this one."""
    learned_tensors: ClassVar[tuple[str, ...]] = ()
    """The last parts of the names of weights that are the method's own, and are trained whole."""

    @property
    def depends_on_prompt(self) -> bool:
        """Whether it chooses something by each prompt, which then belongs to that prompt's cache."""
        return False

    @property
    def is_trainable(self) -> bool:
        """Whether a checkpoint may be fine-tuned as it is: not where each sequence would be read otherwise."""
        return not self.depends_on_prompt

    def settings(self, model: ModelConfig) -> dict[str, Any]:
        """The numbers that the portable class reads, as plain JSON; `layers` lists the layers that take part.

        Raises:
            CtxextError: the options do not fit the model.
        """
        raise NotImplementedError

    @classmethod
    def refusal(cls, config: Config, family: Family) -> str:
        """Why the family cannot carry the code; empty where it can."""
        reason = super().refusal(config, family) or code_layout.refusal(family)
        return reason or ("" if rotated_layers(config, family) else _ALL_SLIDING)

    def edit(self, model: ModelConfig) -> ModelConfig:
        """Write the layout of a checkpoint with code (`code_layout`), with this step's numbers in it.

        Raises:
            CtxextError: the family cannot carry it, or the options do not fit the model.
        """
        if reason := self.refusal(model.config, model.family):
            raise CtxextError(
                f'"{model.family.model_type}" cannot carry {self.name}: {reason}.', hint="Choose another method."
            )
        settings = {**self.settings(model), **({"per_prompt": True} if self.depends_on_prompt else {})}
        edited = code_layout.with_step(model, self.name, settings)
        reach = self.reach(model.encoding)
        return edited if reach == model.encoding.context_length else code_layout.with_length(edited, reach)


def code_files(steps: Iterable[Method], config: Config) -> Mapping[str, str]:
    """The modeling code of a recipe: file name and content. Empty where no step needs any.

    Args:
        steps: The recipe's.
        config: The configuration of the model, whichever the steps before those with code.

    Raises:
        CtxextError: transformers has no classes for this family.
    """
    own = [step for step in steps if isinstance(step, CodeMethod)]
    if not own:
        return {}
    shared = code_layout.SHARED_FILES[own[0].encoding]
    files = [PORTABLE / name for name in shared]
    files += [file for step in own for file in step.code]
    methods = [(step.title, step.code[0].name.removesuffix(".py"), step.code_class) for step in own]
    modules = [file.name.removesuffix(".py") for file in files]
    home = shared[-1].removesuffix(".py")
    stub = code_layout.render_stub(code_layout.family_classes(config), methods, modules, home)
    return {**{file.name: file.read_bytes().decode() for file in files}, code_layout.STUB_FILE: stub}
