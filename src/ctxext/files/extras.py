"""Packages that only some commands need: extras of ctxext, asked for in one line where they are missing."""

import importlib.util
from collections.abc import Mapping

from ctxext.errors import CtxextError

EXTRAS: Mapping[str, str] = {"datasets": "train", "matplotlib": "plot", "optuna": "search", "peft": "train"}
"""The extra that brings each package."""


def is_installed(package: str) -> bool:
    """Whether a package can be imported; it is not imported."""
    return importlib.util.find_spec(package) is not None


def install_command(package: str) -> str:
    """The command that installs a package of an extra."""
    return f'pip install "ctxext[{EXTRAS[package]}]"'


def require(package: str, purpose: str) -> None:
    """Refuse to go on without a package.

    Args:
        package: A key of `EXTRAS`.
        purpose: What needs it, as the beginning of a sentence.
    """
    if not is_installed(package):
        raise CtxextError(f"{purpose} needs {package}, which is not installed.", hint=install_command(package))
