"""Print the packages with a newer release than the tested one in constraints.txt.

    python tools/newest.py

The exit code is 0 if there is a newer release, so that the tests must run (`make newest`), 1 if there is none, and 2 if
pip fails. Only packages that load and run models are compared. torch is excluded, as its default build needs several
gigabytes.
"""

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

CONSTRAINTS = Path(__file__).resolve().parents[1] / "constraints.txt"
PACKAGES = ("transformers", "tokenizers", "huggingface_hub", "safetensors", "accelerate", "peft", "datasets")


def read_tested_versions() -> dict[str, str]:
    """Return the tested version of each package."""
    pinned = dict(re.findall(r"^([\w-]+)==(\S+)$", CONSTRAINTS.read_text(encoding="utf-8"), re.MULTILINE))
    return {name: pinned[name] for name in PACKAGES}


def newest() -> dict[str, str]:
    """Return the version of each package that pip would install today.

    Raises:
        subprocess.CalledProcessError: pip fails, for example without the network.
    """
    words = ["--dry-run", "--ignore-installed", "--no-deps", "--quiet", "--disable-pip-version-check", "--report", "-"]
    command = [sys.executable, "-m", "pip", "install", *words, *PACKAGES]
    report = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
    entries = (entry["metadata"] for entry in report["install"])
    return {entry["name"].replace("-", "_"): entry["version"] for entry in entries}


def differences(tested_versions: Mapping[str, str], newest_versions: Mapping[str, str]) -> list[str]:
    """Return one line for each package with a newest release that is not the tested one."""
    return [
        f"{name} {newest_versions[name]} is the newest release; {version} is tested"
        for name, version in tested_versions.items()
        if newest_versions[name] != version
    ]


def main() -> int:
    """Print the differences, and return the exit code."""
    try:
        lines = differences(read_tested_versions(), newest())
    except subprocess.CalledProcessError:
        return 2
    sys.stdout.write("\n".join(lines or ["The newest releases are the tested ones."]) + "\n")
    return 0 if lines else 1


if __name__ == "__main__":
    sys.exit(main())
