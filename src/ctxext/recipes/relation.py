"""Methods that change which distance a query sees: near keys at their own, far ones regrouped. No training.

Every rule is a function of the row, the query's own position, never of the call: inputs inside the context length
that the model had are answered bit for bit as before, and a prompt gives the same logits however it arrives: whole, in
chunks or from a cache. `portable/relation_maps.py` holds the maps, `portable/relation.py` the attention.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from typing_extensions import Self

from ctxext.errors import CtxextError
from ctxext.families import Family, rotated_layers
from ctxext.recipes.base import Kind
from ctxext.recipes.code import PORTABLE, CodeMethod
from ctxext.recipes.encoding import Encoding
from ctxext.recipes.param import SearchRange, param
from ctxext.recipes.rotary import Config, ModelConfig, Rotary

_REFERENCE = Path(__file__).parents[1] / "verify" / "references" / "relation.py"


@dataclass(frozen=True, kw_only=True)
class Relation(CodeMethod):
    """What all of these methods share: how far they reach, and the temperature of rows beyond the old length.

    L below is the context length that the model reads before this step, schedules that stand before it included.
    """

    kind: ClassVar[Kind] = "attention"
    code = (PORTABLE / "relation.py", PORTABLE / "relation_maps.py", PORTABLE / "relation_parts.py")
    reference = _REFERENCE
    is_published = False
    neutral: ClassVar[Mapping[str, Any]] = {"factor": 1}
    example: ClassVar[Mapping[str, Any]] = {"factor": 4}

    factor: float | None = param(None, help="How many times longer the new context is.", min=1.0)
    target_length: int | None = param(None, help="The new context length in tokens, for example 32k.", min=1)
    temperature: str = param(
        "none",
        help="What sharpens rows beyond the old length: nothing, or YaRN's, log-n's or Llama 4's rule on the row.",
        choices=("none", "yarn", "logn", "llama4"),
    )

    @classmethod
    def refusal(cls, config: Config, family: Family) -> str:
        """Why the attention of the family cannot be reached; empty where it can."""
        if family.shared_rotary_key:
            return LATENT
        return super().refusal(config, family) or UNREACHED_ATTENTION.get(family.model_type, "")

    def resolved(self, encoding: Encoding) -> Self:
        """The same step with its factor and everything else that follows from the context length filled in.

        Raises:
            CtxextError: no length was given, or the geometry cannot reach it.
        """
        length = encoding.context_length
        if self.factor is not None:
            factor = self.factor
        elif self.target_length is not None:
            factor = self.target_length / length
        else:
            raise CtxextError(
                f"{self.name} needs to know how far to reach.",
                hint=f"Add --factor 4 or --target-length {4 * length}.",
            )
        if self.target_length and self.factor and self.target_length != round(self.factor * length):
            raise CtxextError(
                f"A factor of {self.factor:g} and a target length of {self.target_length} disagree: "
                f"the model reads {length} tokens before this step.",
                hint="Give one of --factor and --target-length.",
            )
        if factor < 1:
            raise CtxextError(
                f'The target length "{self.target_length}" is below the {length} tokens that the model reads already.',
                hint=f"Choose a longer one, for example --target-length {4 * length}.",
            )
        step = dataclasses.replace(self, factor=factor, target_length=None)
        step = dataclasses.replace(step, **{k: v for k, v in step.defaults(length).items() if getattr(step, k) is None})
        if problem := step.problem(length, round(factor * length)):
            raise CtxextError(f"{self.name}: {problem[0]}", hint=problem[1])
        return step

    def defaults(self, length: int) -> dict[str, Any]:
        """What follows from L where it was not given."""
        return {}

    @classmethod
    def search_space(cls, rotary: Rotary, factor: float) -> dict[str, SearchRange]:
        """Windows from a thirty-second of L to a half of it; words as they are declared."""
        ranges, length = super().search_space(rotary, factor), rotary.context_length
        if "window" in ranges:
            start = cls(factor=factor).defaults(length)["window"]
            ranges["window"] = SearchRange((max(length // 32, 1), max(length // 2, 2)), start)
        return ranges

    @classmethod
    def from_search(cls, numbers: Mapping[str, Any], rotary: Rotary, factor: float) -> Self:
        """The step with numbers from its search space, for the wanted factor."""
        return cls(**{**numbers, "factor": factor})

    def problem(self, length: int, target: int) -> tuple[str, str] | None:
        """Why the numbers cannot reach the target from L, and the numbers that would; None where they can."""
        return None

    def reach(self, encoding: Encoding) -> int:
        """The new context length in tokens."""
        assert self.factor is not None, "resolve the step first"
        return round(self.factor * encoding.context_length)

    def summary(self) -> str:
        """The step with how far it reaches, and its temperature if it has one."""
        reach = f"×{self.factor:g}" if self.factor is not None else f"to {self.target_length}"
        return f"{self.name} {reach}" + (f" ({self.temperature})" if self.temperature != "none" else "")

    def settings(self, model: ModelConfig) -> dict[str, Any]:
        """The numbers of the map, the layers, and L.

        Raises:
            CtxextError: no layer looks back over the whole context with a rotary embedding, or the schedule goes by the
                whole input.
        """
        if model.rotary.rope_type == "dynamic":  # Its formula starts from the length that the map raises, besides.
            raise CtxextError(
                f"{self.name} goes by each row, and this model's dynamic schedule by the length of the whole input.",
                hint="adaptive does row by row what dynamic means to do: convert a copy without the schedule with it.",
            )
        layers = rotated_layers(model.config, model.family)
        if not layers:
            raise CtxextError(
                f"Every layer with a rotary embedding has a sliding window, which {self.name} would not widen."
            )
        length = model.rotary.context_length
        step = self.resolved(model.rotary)
        own = {name: value for name, value in step.to_dict().items() if name not in _NOT_IN_MAPS}
        lengths = {"original_length": length, "target_length": step.reach(model.rotary)}
        return {"layers": layers, **lengths, "temperature": self.temperature, **own}


_NOT_IN_MAPS = frozenset({"method", "factor", "temperature"})

LATENT = "latent attention: its attention is computed from compressed keys, where positions cannot be moved"
"""Why the attention of families whose heads share one rotated key cannot be reached."""

UNREACHED_ATTENTION: dict[str, str] = dict.fromkeys(
    ("falcon", "gpt_neox_japanese"), "its attention is its own, and does not go through transformers' interface"
)
"""Families whose attention does not go through transformers' attention interface, and why."""


def given(number: int | None) -> int:
    """A number that `defaults` fills in where the user did not."""
    assert number is not None, "resolve the step first"
    return number


def _window_problem(window: int, length: int) -> tuple[str, str] | None:
    if window >= length:
        return f'a window of "{window}" leaves nothing of {length} tokens to regroup.', f"--window {length // 8}"
    return None


@dataclass(frozen=True, kw_only=True)
class SelfExtend(Relation):
    """Keep near keys at their own distance and group the positions of far ones; both meet at the border. No training.

    Far keys stand at floor(n / G), queries at floor(m / G) + w - w / G, in one softmax; G is the smallest that the
    row's own length needs. Jin et al. 2024, section 3.2, with the group chosen by the row.
    """

    name = "self-extend"
    title = "Self-Extend"
    paper = "https://arxiv.org/abs/2401.01325"
    code_class = "SelfExtend"

    window: int | None = param(
        None,
        help="Tokens within which distances stay exact, w; an eighth of L where not given.",
        min=1,
        search=(16, 512),
    )
    group: int | None = param(
        None, help="A fixed number of far positions that share one, G, in the place of the row's own.", min=1
    )

    def defaults(self, length: int) -> dict[str, Any]:
        """An eighth of L."""
        return {"window": max(length // 8, 1)}

    def problem(self, length: int, target: int) -> tuple[str, str] | None:
        """A fixed group reaches w + (L - w) · G."""
        window = given(self.window)
        if found := _window_problem(window, length):
            return found
        if self.group is not None and window + (length - window) * self.group < target:
            needed = -(-(target - window) // (length - window))
            reach = window + (length - window) * self.group
            return f"a window of {window} and a group of {self.group} reach {reach} tokens, not {target}.", (
                f"--group {needed}, or leave it out: every row then takes the smallest that it needs."
            )
        return None


@dataclass(frozen=True, kw_only=True)
class Bifocal(Relation):
    """Keep near keys exact and divide far positions by the row's group, as Jet-Long does. No training.

    As published, far scores are those of floor(m / G) and floor(n / G), G = ceil((m + 1) / L), by the row and not by
    the call, behind a jump at the border; the continuous border is Self-Extend's. A file with --groups gives every
    rotated pair a group of its own (DPE, arXiv 2504.18857). Jet-Long 2026, section 3.
    """

    name = "bifocal"
    title = "Bifocal attention (Jet-Long)"
    paper = "https://arxiv.org/abs/2607.07740"
    code_class = "Bifocal"

    window: int | None = param(
        None, help="The farthest exact distance; a sixteenth of L where not given.", min=1, search=(16, 512)
    )
    border: str = param(
        "continuous",
        help="Behind the border go on from there (Self-Extend's way), or jump as published.",
        choices=("continuous", "published"),
        search=("continuous", "published"),
    )
    groups: tuple[float, ...] | None = param(
        None, help="One group per rotated pair of dimensions: a file with a list of whole numbers."
    )

    def summary(self) -> str:
        """The step with its border where it is the published one."""
        return super().summary() + (", border as published" if self.border == "published" else "")

    def defaults(self, length: int) -> dict[str, Any]:
        """A sixteenth of L, the proportion of the paper."""
        return {"window": max(length // 16, 1)}

    def problem(self, length: int, target: int) -> tuple[str, str] | None:
        """The window must leave something to regroup, and groups must be whole."""
        if self.groups and any(group < 1 or group != int(group) for group in self.groups):
            return "groups must be whole numbers of at least 1.", "Jet-Long's own rule needs no --groups."
        return _window_problem(given(self.window), length)

    def settings(self, model: ModelConfig) -> dict[str, Any]:
        """Groups as whole numbers, one per pair.

        Raises:
            CtxextError: there are not as many as rotated pairs.
        """
        found = super().settings(model)
        if self.groups:
            pairs = model.rotary.dim // 2
            if len(self.groups) != pairs:
                raise CtxextError(
                    f"bifocal: groups has {len(self.groups)} numbers, but this model rotates {pairs} pairs."
                )
            found["groups"] = [int(group) for group in self.groups]
        return found


@dataclass(frozen=True, kw_only=True)
class ReRope(Relation):
    """Show all far keys at one distance, that of the window's edge. No training.

    Rows inside L stay as they were. Su 2023, "ReRoPE".
    """

    name = "rerope"
    title = "ReRoPE"
    paper = "https://kexue.fm/archives/9708"
    code_class = "Rerope"

    window: int | None = param(
        None,
        help="Tokens within which distances stay exact, w; a quarter of L where not given.",
        min=1,
        search=(16, 512),
    )

    def defaults(self, length: int) -> dict[str, Any]:
        """A quarter of L."""
        return {"window": max(length // 4, 1)}

    def problem(self, length: int, target: int) -> tuple[str, str] | None:
        """The window must leave something to regroup."""
        return _window_problem(given(self.window), length)


@dataclass(frozen=True, kw_only=True)
class String(Relation):
    """Move far distances down, over those that were rarely trained. Uses a window better; hardly extends it.

    Distances beyond S become d - S + w. By default for rows beyond L only, so that short inputs stay as they were; with
    --start all rows from there on. An et al. 2024, section 4.
    """

    name = "string"
    title = "STRING"
    paper = "https://arxiv.org/abs/2410.18745"
    code_class = "String"
    is_experimental = True
    example: ClassVar[Mapping[str, Any]] = {"factor": 1.2}  # It reaches little farther.

    shift: int | None = param(None, help="Distances up to here stay exact, S; a third of L where not given.", min=1)
    window: int | None = param(None, help="Where farther distances begin again, w; an eighth of L, at most 128.", min=0)
    start: int | None = param(None, help="The first row that does so; L where not given.", min=0)

    def defaults(self, length: int) -> dict[str, Any]:
        """The proportions of the paper."""
        shift = self.shift or max(length // 3, 1)
        return {"shift": shift, "window": min(length // 8, 128, shift), "start": length}

    def problem(self, length: int, target: int) -> tuple[str, str] | None:
        """Distances up to L reach L + S - w tokens."""
        shift, window = given(self.shift), given(self.window)
        if window > shift:
            return f'window "{window}" is above shift "{shift}".', f"--window {shift // 3}"
        if target > length + shift - window:
            reach = length + shift - window
            return f"a shift of {shift} reaches {reach} tokens, not {target}.", f"--target-length {reach}"
        return None


@dataclass(frozen=True, kw_only=True)
class Sinks(Relation):
    """Read the first few tokens and the most recent ones only. Fluent for ever, forgets all between. A baseline.

    Distances count what is read. Xiao et al. 2023, section 3 (StreamingLLM).
    """

    name = "sinks"
    title = "StreamingLLM"
    paper = "https://arxiv.org/abs/2309.17453"
    code_class = "Sinks"
    is_experimental = True
    caution = "what lies between the first tokens and the recent ones is not read at all."

    sinks: int = param(4, help="How many of the first tokens are always read.", min=1)
    window: int | None = param(
        None, help="How many recent tokens are read; all but the sinks of L where not given.", min=1
    )

    def defaults(self, length: int) -> dict[str, Any]:
        """All of L."""
        return {"window": max(length - self.sinks, 1)}

    def problem(self, length: int, target: int) -> tuple[str, str] | None:
        """What is read at once must fit into L."""
        if self.sinks + given(self.window) > length:
            return (
                f"{self.sinks} sinks and a window of {self.window} are more than the {length} tokens that it reads.",
                f"--window {length - self.sinks}",
            )
        return None


@dataclass(frozen=True, kw_only=True)
class Window(Relation):
    """Read the most recent tokens only. The approximate attention that every comparison needs. A baseline.

    Beltagy et al. 2020, section 3.1, on a model that was not trained for it.
    """

    name = "window"
    title = "Sliding window"
    paper = "https://arxiv.org/abs/2004.05150"
    code_class = "Window"
    is_experimental = True
    caution = "what lies before the window is not read at all, and without the first tokens many models break."

    window: int | None = param(None, help="How many recent tokens are read; L where not given.", min=1)

    def defaults(self, length: int) -> dict[str, Any]:
        """All of L."""
        return {"window": length}

    def problem(self, length: int, target: int) -> tuple[str, str] | None:
        """What is read at once must fit into L."""
        if given(self.window) > length:
            return f"a window of {self.window} is more than the {length} tokens that it reads.", f"--window {length}"
        return None
