"""How a checkpoint is served, as `convert` and `inspect` print it."""

from collections.abc import Mapping

from ctxext.converters.engines import MARKS, Serving


def serving_line(serving: tuple[Serving, ...]) -> str:
    """Which engines run it, in one line."""
    return "   ".join(f"{row.engine} {MARKS[row.status]}" + (f" ({row.note})" if row.note else "") for row in serving)


def unconverted_text(lines: Mapping[str, str]) -> list[str]:
    """The commands that serve the source itself, each on a line that can be copied."""
    commands = [f"  {line}" for line in lines.values()]
    if "vLLM" in lines:
        commands.append("  (a draft model does not inherit --hf-overrides: give it its own, or convert)")
    return ["the source itself can be served so, without converting it:", *commands] if commands else []
