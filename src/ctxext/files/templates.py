"""The templates of model cards and reports."""

import functools
from collections.abc import Callable
from importlib import resources
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Template


@functools.cache
def load_template(
    package: str, name: str, finalize: Callable[[Any], Any] | None = None, **filters: Callable[..., Any]
) -> "Template":
    """Load a template of a package, in which an undefined name is an error; `finalize` is applied to printed values."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, undefined=StrictUndefined, finalize=finalize
    )
    environment.filters |= filters
    return environment.from_string(resources.files(package).joinpath(name).read_text("utf-8"))
