"""Generate the pages of docs/ that are read from the classes. `--check` only says whether they are current."""

import ast
import dataclasses
import inspect
import sys
from pathlib import Path
from typing import Any

from ctxext.cli.method_options import option_name
from ctxext.cli.methods import carried_by, summary_of
from ctxext.families import FAMILIES, Family
from ctxext.recipes.base import Method
from ctxext.recipes.code import CodeMethod
from ctxext.recipes.code_layout import SHARED_FILES, STUB_FILE
from ctxext.recipes.encoding import POSITIONS
from ctxext.recipes.known_models import known_models
from ctxext.recipes.methods import METHODS
from ctxext.recipes.mspoe import FIXED_ONLY, MsPoE
from ctxext.recipes.param import default_of, limits_of, options_of
from ctxext.recipes.recipe import presets
from ctxext.recipes.rotary import CODE_KEY

HOOKS = ("positions", "tables", "rotate", "merge", "attend")
DOCS = Path(__file__).parents[1] / "docs"


def methods_page() -> str:
    """docs/methods.md."""
    lines = [
        "# Methods",
        "",
        "Generated from the classes in `src/ctxext/recipes/` by `make docs`; do not edit by hand. Where the last",
        "column of a table is empty, a search leaves the number alone or takes a range from the model and the target.",
        "",
        "| method | what it does | carried by | paper |",
        "|---|---|---|---|",
        *(f"| [`{m.name}`](#{m.name}) | {summary_of(m)} | {carried_by(m)} | <{m.paper}> |" for m in METHODS),
        "",
    ]
    for method in METHODS:
        lines += _section(method)
    lines += ["## Presets", "", "Recipes that ship with the package: `ctxext convert SOURCE --recipe NAME`.", ""]
    for name, text in sorted(presets().items()):
        lines += [f"### {name}", "", "```yaml", text.rstrip(), "```", ""]
    return "\n".join(lines)


def _section(method: type[Method]) -> list[str]:
    lines = [f"## {method.name}", "", f"**{method.title}.** {inspect.getdoc(method)}", ""]
    if method.aliases:
        lines += [f"Also called: {', '.join(method.aliases)}.", ""]
    if method.caution:
        lines += [f"Mind: {method.caution}", ""]
    if method.kind == "attention" and method.name != "adaptive":  # Drawn by draw_maps.py.
        lines += [f"![Distance that each row sees each key at](maps/{method.name}.png)", ""]
    lines += [*(_with_code(method) if issubclass(method, CodeMethod) else _by_keys(method)), _families_line(method), ""]
    lines += ["| option | default | meaning | a search tries |", "|---|---|---|---|"]
    for field in options_of(method):
        default = "required" if field.default is dataclasses.MISSING else default_of(field)
        shown, limits = "" if default is None else default, limits_of(field)
        cells = (f"`{option_name(field.name)}`", shown, limits.describe(), _searched(limits.search))
        lines.append(f"| {' | '.join(str(cell) for cell in cells)} |")
    measured = [field for field in dataclasses.fields(method) if limits_of(field).measured]
    lines += ["", *(f"In recipe files also `{field.name}`: {limits_of(field).help}" for field in measured)]
    return [*lines, ""] if measured else lines


def _searched(values: tuple[Any, ...]) -> str:
    """The range or the words that a search tries."""
    if values and all(isinstance(value, str) for value in values):
        return ", ".join(values)
    return " to ".join(f"{value:g}" for value in values)


def _by_keys(method: type[Method]) -> list[str]:
    """What a configuration says."""
    if method.encoding != "rotary":
        return [f"Kind: {method.kind}. Carried by {carried_by(method)}."]
    rope_type = getattr(method, "rope_type", "default")
    carried = "`rope_theta` alone" if rope_type == "default" else f"the rope type `{rope_type}`"
    return [f"Kind: {method.kind}. Carried by {carried}, in both dialects of config.json."]


def _with_code(method: type[CodeMethod]) -> list[str]:
    """Which files travel, and where they take hold."""
    files = ", ".join(f"`{file.name}`" for file in method.code)
    shared = ", ".join(f"`{name}`" for name in (*SHARED_FILES, STUB_FILE))
    hooks = ", ".join(f"`{hook}`" for hook in _hooks(method))
    return [
        f"Kind: {method.kind}. Hooks: {hooks}. Carried by {files} beside {shared};",
        f"its numbers stand in `{CODE_KEY}` of config.json. Loading needs `trust_remote_code=True`.",
    ]


def _families_line(method: type[Method]) -> str:
    """How many families can carry it."""
    like = [family for family in FAMILIES.values() if family.positions == method.encoding]
    able = [family for family in like if not method.refusal({"model_type": family.model_type}, family)]
    if method.encoding != "rotary":
        named = ", ".join(f"`{family.model_type}`" for family in sorted(able, key=lambda one: one.model_type))
        return f"For models with {POSITIONS[method.encoding]}: {named}."
    return f"{len(able)} of {len(like)} rotary [families](families.md) can carry it."


def _hooks(method: type[CodeMethod]) -> list[str]:
    """The hooks that its portable class overrides, itself or by a base in its file."""
    tree = ast.parse(method.code[0].read_text(encoding="utf-8"))
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    # A class that is made when its file runs is found by those that stand in the file.
    names, found = [method.code_class] if method.code_class in classes else [*classes], set()
    for name in names:
        if name in classes:
            found |= {node.name for node in classes[name].body if isinstance(node, ast.FunctionDef)}
            names += [base.id for base in classes[name].bases if isinstance(base, ast.Name)]
    return [hook for hook in HOOKS if hook in found]


def families_page() -> str:
    """docs/families.md."""
    rotary = {name: family for name, family in FAMILIES.items() if family.positions == "rotary"}
    rows = {name: _family_row(family) for name, family in sorted(rotary.items())}
    able = [name for name, row in rows.items() if row[0] != "none"]
    with_code = [name for name, row in rows.items() if row[2].startswith("yes")]
    others: dict[str, list[str]] = {}
    for name, family in sorted(FAMILIES.items()):
        if family.positions != "rotary":
            others.setdefault(family.positions, []).append(name)
    return "\n".join(
        [
            "# Families",
            "",
            "Generated by `make docs` from `src/ctxext/families.json`, which is measured on tiny random models under",
            "transformers 5.23.0 and 4.57.6; do not edit by hand. The tests convert every family in the table by every",
            "method (`tests/converters/test_families.py`) and hold Ms-PoE at ratio 1 against the source and at one",
            "ratio for all heads against `pi` (`tests/portable/test_families_mspoe.py`).",
            "",
            f"{len(rows)} causal language model types of transformers are rotary; {len(able)} can be converted by",
            f"configuration, {len(with_code)} can carry Ms-PoE.",
            "",
            "| model type | methods by configuration | under 4.57 | Ms-PoE | note |",
            "|---|---|---|---|---|",
            *(f"| `{name}` | " + " | ".join(row) + " |" for name, row in rows.items()),
            "",
            "## Not rotary",
            "",
            *(f"- **{kind}**: {', '.join(names)}" for kind, names in others.items()),
            "",
            "What is done to them: " + _others_line(),
            "",
        ]
    )


def _others_line() -> str:
    """Which methods are for encodings other than rotary, and for how many of their families."""
    told = []
    for method in (method for method in METHODS if method.encoding != "rotary"):
        able = [one for one in FAMILIES.values() if not method.refusal({"model_type": one.model_type}, one)]
        told.append(f"[`{method.name}`](methods.md#{method.name}) for {len(able)} with {POSITIONS[method.encoding]}")
    return "; ".join(told) + "."


def _family_row(family: Family) -> list[str]:
    """Methods by configuration, what 4.57 makes of them, Ms-PoE, and a note."""
    config = {"model_type": family.model_type}
    by_config = [method for method in METHODS if not method.needs_code() and method.encoding == "rotary"]
    able = [method.name for method in by_config if not method.refusal(config, family)]
    shown = "all" if len(able) == len(by_config) else ", ".join(able) or "none"
    if family.rope_types_4x is None or not able:
        old = "the same" if able else ""
    else:
        old = ", ".join(family.rope_types_4x).replace("default", "a changed base") or "not carried"
    reason = MsPoE.refusal(config, family)
    fixed = family.model_type in FIXED_ONLY
    code = f"no: {reason}" if reason else "yes, in fixed order" if fixed else "yes"
    return [shown, old, code if able or not reason else "", family.reason or family.note]


def lengths_page() -> str:
    """docs/lengths.md."""
    rows = [
        f"| {', '.join(known.names)} | {known.facts['max_position_embeddings']} | {known.original_length} | "
        f"{known.source} |"
        for known in known_models()
    ]
    return "\n".join([*_LENGTHS.splitlines(), *rows, ""])


_LENGTHS = """# Lengths

Generated by `make docs`; the table is `src/ctxext/recipes/known_models.json`. Do not edit by hand.

Every factor counts from the **original context length**: what a model was trained on before any schedule. Five places
may say it, and the first that does is used; `ctxext inspect` shows which.

1. `--original-length 32k`, of `convert`, `inspect`, `eval`, `search` and `finetune`
2. what ctxext noted when it converted the model
3. `original_max_position_embeddings` in config.json
4. the table of published models below, by the facts of config.json and never by name
5. `max_position_embeddings`, or Cohere's `model_max_length`

What config.json *declares* beyond that, without a schedule, stays there as long as nothing stretches the model.

## Models that came with a schedule

Llama 3.1, gpt-oss, Gemma 3, Phi-3-128k, DeepSeek and others read their long context by a schedule of their own.

- Methods with code stand on it: `mspoe`, `self-extend`, `adaptive` and the others take what the model reads for the
  length that they start from, and at their neutral numbers nothing changes, bit for bit.
- Another schedule cannot: `yarn` on Llama 3.1 is refused. `--replace-scaling` takes the model's own schedule away,
  and with it what the weights learned; it says which, and from how many tokens to how many. A schedule of the same
  type keeps the numbers that the step does not name: `mscale`, `mscale_all_dim`, `truncate`, `beta_fast`,
  `beta_slow`, `attention_factor`, `short_factor`.
- A result that reads less than its source is refused. `--allow-shorter` is for those who mean it.
- A `linear` schedule does not say from which length it stretches: where the table does not know it either,
  `--original-length` must.

A recipe file may give a step both `factor` and `target_length`, as Llama 3.1 has a factor of 8 over 8192 tokens and
reads 131072.

## Published models whose config.json says something else

| model | declared | trained on | source |
|---|---|---|---|"""

PAGES = {"methods.md": methods_page, "families.md": families_page, "lengths.md": lengths_page}


def main() -> None:
    """Write the pages, or say which are out of date."""
    stale = []
    for name, render in PAGES.items():
        path, text = DOCS / name, render()
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            stale.append(name)
            if "--check" not in sys.argv:
                path.write_text(text, encoding="utf-8")
    if "--check" not in sys.argv:
        from draw_maps import draw_all  # Only drawing takes matplotlib.

        draw_all(METHODS)
    if "--check" in sys.argv and stale:
        sys.exit(f"out of date: {', '.join(stale)}; run make docs")


if __name__ == "__main__":
    main()
