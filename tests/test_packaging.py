"""What a package index shows of a release, and what pyproject.toml promises."""

import importlib.util
import re
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
import yaml

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
HERE = "https://example.org/me/ctxext"


@pytest.fixture
def build_hook(monkeypatch):
    """hatch_build.py; hatchling itself is there only while a wheel is built."""
    interface = ModuleType("hatchling.metadata.plugin.interface")
    interface.MetadataHookInterface = object
    monkeypatch.setitem(sys.modules, interface.__name__, interface)
    for name in ("CTXEXT_REPOSITORY", "GITHUB_REPOSITORY"):
        monkeypatch.delenv(name, raising=False)
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def metadata_of(build_hook) -> dict:
    hook = build_hook.Metadata()
    hook.root = str(ROOT)
    metadata = {}
    hook.update(metadata)
    return metadata


def test_every_link_of_the_readme_works_on_an_index(build_hook, monkeypatch):
    monkeypatch.setenv("CTXEXT_REPOSITORY", HERE + "/")
    metadata = metadata_of(build_hook)
    targets = re.findall(r"\]\(([^)]*)\)", metadata["readme"]["text"])
    assert targets
    assert all(target.startswith(("https://", "#")) for target in targets)
    for target in targets:
        if target.startswith(HERE):
            assert (ROOT / target.split("/", 7)[7].partition("#")[0]).exists(), target
    assert all(address.startswith(HERE) for address in metadata["urls"].values())


def test_without_an_address_links_are_plain_text(build_hook):
    metadata = metadata_of(build_hook)
    assert metadata["urls"] == {}
    assert not re.search(r"\]\((?!https?:|#)", metadata["readme"]["text"])
    page = "[a page](docs/a.md) ![a picture](b.png) [far](https://c.d) [`code`](e)"
    assert build_hook.with_absolute_links(page, "", "v1") == "a page  [far](https://c.d) `code`"


def test_pythons_that_are_promised_are_those_that_are_tried():
    classifiers = [entry.rpartition(" ")[2] for entry in PROJECT["project"]["classifiers"] if ":: 3." in entry]
    (workflow,) = (ROOT / ".github" / "workflows").glob("*.yml")
    jobs = yaml.safe_load(workflow.read_text())["jobs"]
    tried = re.search(r"^PYTHONS \?= (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1].split()
    assert classifiers == tried == jobs["pythons"]["strategy"]["matrix"]["python"]
    lowest = classifiers[0]
    assert PROJECT["project"]["requires-python"] == f">={lowest}"
    assert PROJECT["tool"]["mypy"]["python_version"] == lowest
    assert PROJECT["tool"]["ruff"]["target-version"] == f"py{lowest.replace('.', '')}"


def test_a_source_archive_holds_what_building_and_testing_needs():
    included = set(PROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["include"])
    assert all((ROOT / name).exists() for name in included)
    needed = {"Makefile", "constraints.txt", "tools", "examples", "hatch_build.py"}
    assert needed <= included
    assert (ROOT / "src" / "ctxext" / "py.typed").is_file()
