"""What a package index shows of a release, and what pyproject.toml promises."""

import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from ctxext.version import __version__

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
HERE = "https://example.org/me/ctxext"
WORKFLOWS = {path.stem: yaml.safe_load(path.read_text()) for path in (ROOT / ".github" / "workflows").glob("*.yml")}


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
    jobs = WORKFLOWS["ci"]["jobs"]
    tried = re.search(r"^PYTHONS \?= (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1].split()
    assert classifiers == tried == jobs["pythons"]["strategy"]["matrix"]["python"]
    lowest = classifiers[0]
    assert PROJECT["project"]["requires-python"] == f">={lowest}"
    assert PROJECT["tool"]["mypy"]["python_version"] == lowest
    assert PROJECT["tool"]["ruff"]["target-version"] == f"py{lowest.replace('.', '')}"


def test_a_notebook_opens_in_colab(build_hook):
    page = "[notebook](examples/a.ipynb) and ![picture](b.png)"
    assert build_hook.with_absolute_links(page, "https://github.com/me/ctxext", "v1") == (
        "[notebook](https://colab.research.google.com/github/me/ctxext/blob/v1/examples/a.ipynb) and "
        "![picture](https://github.com/me/ctxext/raw/v1/b.png)"
    )
    assert build_hook.with_absolute_links("[a](a.ipynb)", HERE, "v1") == f"[a]({HERE}/blob/v1/a.ipynb)"


def actions() -> dict[str, set[str]]:
    """Return the versions of each action that workflows use."""
    versions: dict[str, set[str]] = {}
    for workflow in WORKFLOWS.values():
        for step in (step for job in workflow["jobs"].values() for step in job["steps"]):
            if name := step.get("uses"):
                versions.setdefault(name.partition("@")[0], set()).add(name.partition("@")[2])
    return versions


def test_workflows_use_one_version_of_each_action():
    assert {name: version for name, version in actions().items() if len(version) > 1} == {}
    assert {"actions/deploy-pages", "pypa/gh-action-pypi-publish"} <= actions().keys()


def test_only_the_jobs_that_publish_may_write():
    """A job's permissions replace the workflow's. They may not run code of the repository, such as its build."""
    writing = {}
    for name, workflow in WORKFLOWS.items():
        assert workflow["permissions"] == {"contents": "read"}, name
        for job, content in workflow["jobs"].items():
            assert content["timeout-minutes"] <= 120, f"{name}: {job}"
            if granted := content.get("permissions"):
                writing[name, job] = {right for right, kind in granted.items() if kind == "write"}
                assert not [step for step in content["steps"] if "run" in step or "checkout" in step["uses"]]
                assert content["environment"]
    assert writing == {("docs", "deploy"): {"id-token", "pages"}, ("release", "publish"): {"id-token"}}


def test_workflows_run_targets_of_the_makefile():
    """And a release is checked and tried before it is published."""
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for workflow in WORKFLOWS.values():
        steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
        for target in re.findall(r"\bmake ([\w-]+)", " ".join(step.get("run", "") for step in steps)):
            assert target in targets
    release = WORKFLOWS["release"]["jobs"]
    assert release["publish"]["needs"] == "build"
    done = "\n".join(step.get("run", "") for step in release["build"]["steps"])
    for command in ("make check", "python -m build", "twine check --strict", "clean/bin/ctxext demo"):
        assert command in done


def test_the_tag_of_a_release_is_compared_with_the_version():
    (step,) = (
        step for step in WORKFLOWS["release"]["jobs"]["build"]["steps"] if "GITHUB_REF_NAME" in step.get("run", "")
    )
    for tag, code in ((f"v{__version__}", 0), ("v0.0.1", 1), (f"v{__version__}.post1", 1)):
        environment = {"GITHUB_REF_NAME": tag, "PATH": os.environ["PATH"]}
        result = subprocess.run(["bash", "-e", "-c", step["run"]], cwd=ROOT, env=environment, check=False)
        assert result.returncode == code, tag


def test_the_citation_names_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == __version__
    assert citation["license"] == PROJECT["project"]["license"]


def test_issue_forms_ask_for_the_environment():
    forms = {
        path.stem: yaml.safe_load(path.read_text()) for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")
    }
    assert forms.keys() == {"bug", "request"}
    for form in forms.values():
        assert {"name", "description", "body"} <= form.keys()
    required = [entry for entry in forms["bug"]["body"] if entry.get("validations", {}).get("required")]
    assert "Output of ctxext env" in [entry["attributes"]["label"] for entry in required]


def test_the_image_is_built_from_what_is_there():
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    classifiers = [entry.rpartition(" ")[2] for entry in PROJECT["project"]["classifiers"] if ":: 3." in entry]
    assert next(line for line in lines if line.startswith("FROM")) in [f"FROM python:{one}-slim" for one in classifiers]
    copied = next(line.split()[2] for line in lines if line.startswith("COPY . "))
    assert any(f'"{copied}[all]"' in line for line in lines)
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert not {*ignored} & {"src", "README.md", "LICENSE", "hatch_build.py", "pyproject.toml"}


def test_a_source_archive_holds_what_building_and_testing_needs():
    included = set(PROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["include"])
    assert all((ROOT / name).exists() for name in included)
    needed = {"Makefile", "constraints.txt", "tools", "examples", "hatch_build.py"}
    assert needed <= included
    assert (ROOT / "src" / "ctxext" / "py.typed").is_file()
