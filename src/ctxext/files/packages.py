"""Packages of the extras, and the tested releases of transformers."""

import contextlib
import importlib.metadata
import importlib.util
from collections.abc import Mapping

from ctxext.errors import CtxextError

EXTRAS: Mapping[str, str] = {"datasets": "train", "matplotlib": "plot", "optuna": "search", "peft": "train"}
"""Extra by package."""


def is_installed(package: str) -> bool:
    """Return whether a package can be imported, without importing it."""
    return importlib.util.find_spec(package) is not None


def install_command(package: str) -> str:
    """Return the command that installs a package of an extra."""
    return f'pip install "ctxext[{EXTRAS[package]}]"'


def require(package: str, purpose: str) -> None:
    """Raise if a package is not installed.

    Args:
        package: A key of `EXTRAS`.
        purpose: The feature that requires it, as the beginning of a sentence.
    """
    if not is_installed(package):
        raise CtxextError(f"{purpose} needs {package}, which is not installed.", hint=install_command(package))


OLDEST, NEWEST = "5.9.0", "5.24.0"
"""The oldest and the newest release of transformers that ctxext is tested with."""
TESTED_TORCH = ("2.13.0", "2.15.0")
"""The releases of torch under which all quick tests were run."""


def installed_version(package: str) -> str | None:
    """Return the installed version of a package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def untested_notice() -> str:
    """Return a notice if the installed transformers is outside the tested range; otherwise empty."""
    from packaging.version import InvalidVersion, Version

    version = installed_version("transformers") or ""
    with contextlib.suppress(InvalidVersion):
        if Version(version) > Version(NEWEST):
            return f"transformers {version} is newer than {NEWEST}, the newest version tested with ctxext"
        if Version(version) < Version(OLDEST):
            return f"transformers {version} is older than {OLDEST}, the oldest version tested with ctxext"
    return ""
