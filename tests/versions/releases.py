"""Install and run releases of transformers besides the installed one: the packages that differ, in one folder each.

torch and all other packages come from the running environment, so a release costs seconds and about 120 MB.
`python tests/versions/releases.py` (`make releases`) installs all of them.
"""

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from ctxext.files.isolated import last_line_of_errors, run_isolated
from ctxext.files.packages import NEWEST

RELEASES = ("4.57.6", "5.2.0", "5.9.0", "5.16.1", "5.20.2")
"""Releases that read checkpoints, besides the installed one: docs/versions.md has the tools that require them."""

IS_OLDER = Version(importlib.metadata.version("transformers")) < Version(NEWEST)
"""Whether the installed release is older than the newest tested one."""

FOLDER = Path(os.environ.get("CTXEXT_RELEASES", Path(__file__).resolve().parents[2] / ".venv-releases"))
READER = Path(__file__).with_name("read_checkpoints.py")
_SEPARATE = ("tokenizers", "huggingface-hub")
_MODULES = {"huggingface-hub": "huggingface_hub", "pyyaml": "yaml", "typer-slim": "typer"}


def install(release: str) -> Path:
    """Install a release of transformers with its tokenizers and huggingface_hub, once, and return its folder."""
    folder = FOLDER / release
    if not (folder / "installed").exists():
        _pip(folder, "--no-deps", f"transformers=={release}")
        needed = _requirements(folder, "transformers")
        _pip(folder, "--no-deps", *(needed[name] for name in _SEPARATE))
        needed |= _requirements(folder, "huggingface_hub")
        # Older clients of the Hub need requests or httpx, which no other package needs.
        if missing := [needed[name] for name in needed if importlib.util.find_spec(_MODULES.get(name, name)) is None]:
            _pip(folder, *missing)
        (folder / "installed").touch()
    return folder


def _requirements(folder: Path, package: str) -> dict[str, str]:
    """Return the requirements of a package in a folder, by name, without those for some platforms or extras."""
    distribution = next(importlib.metadata.distributions(name=package, path=[str(folder)]))
    requirements = [Requirement(line) for line in distribution.requires or ()]
    return {each.name: f"{each.name}{each.specifier}" for each in requirements if not each.marker}


def require_release(release: str | None) -> None:
    """Skip a test if its release is not installed; None is the installed one."""
    if release is not None and not (FOLDER / release / "installed").exists():
        pytest.skip(f"transformers {release} is not installed: make releases")


def run_in(release: str | None, *words: str) -> str:
    """Return the output of Python with a release of transformers, None for the installed one."""
    packages = {} if release is None else {"PYTHONPATH": str(FOLDER / release)}
    done = subprocess.run(
        [sys.executable, *words], env={**os.environ, **packages}, stdout=subprocess.PIPE, text=True, check=True
    )
    return done.stdout


def _pip(folder: Path, *words: str) -> None:
    options = ["--quiet", "--disable-pip-version-check", "--no-compile", "--target", str(folder)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, *words], check=True)


def read(checkpoints: Mapping[str, Path], out: Path, release: str | None = None) -> dict[str, str]:
    """Load checkpoints in a process without ctxext, and write their logits to OUT/NAME.safetensors.

    Args:
        checkpoints: Folders by name.
        out: A folder for the results; it is created.
        release: The release of transformers; None for the installed one.

    Returns:
        The errors of the checkpoints that cannot be loaded or run, by name.

    Raises:
        RuntimeError: the process failed as a whole.
    """
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", suffix=".json") as task:
        json.dump({name: str(folder.resolve()) for name, folder in checkpoints.items()}, task)
        task.flush()
        packages = {} if release is None else {"PYTHONPATH": str(install(release))}
        result = run_isolated(READER, task.name, str(out.resolve()), environment=packages)
    if result.returncode:
        raise RuntimeError(last_line_of_errors(result))
    errors: dict[str, str] = json.loads(result.stdout.strip().splitlines()[-1])
    return errors


if __name__ == "__main__":
    for name in RELEASES:
        install(name)
