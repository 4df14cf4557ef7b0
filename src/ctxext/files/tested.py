"""The versions of transformers that ctxext was tested with, and whether the installed one is newer."""

import contextlib
import importlib.metadata

TESTED = ("5.24.0", "4.57.6")
"""The newest tested release of each major version of transformers, the newest first."""


def installed_version(package: str) -> str | None:
    """Return the installed version of a package; None without one."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def untested_notice() -> str:
    """Return one sentence if the installed transformers is newer than the newest tested one; otherwise empty."""
    from packaging.version import InvalidVersion, Version

    version = installed_version("transformers") or ""
    with contextlib.suppress(InvalidVersion):
        if Version(version) > Version(TESTED[0]):
            return f"transformers {version} is newer than {TESTED[0]}, the newest version that ctxext was tested with"
    return ""
