"""What needs a package of an extra says so in one line, and what does not runs without it."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from ctxext.data.records import read_records
from ctxext.errors import CtxextError
from ctxext.files.packages import EXTRAS
from ctxext.finetune.run import finetune
from ctxext.merge.tensors import AdapterConfig
from ctxext.report.page import write_report
from ctxext.search.run import search
from small_llama import read_json

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DECLARED_AS = {"yaml": "pyyaml", "pyarrow": "datasets", "sqlalchemy": "optuna", "tokenizers": "transformers"}
DECLARED_AS |= {"fsspec": "huggingface_hub", "pydantic_core": "pydantic", "typing_extensions": "pydantic"}
"""The distribution that brings a module, where the two have different names."""


def declared(requirements: list[str]) -> set[str]:
    return {re.split(r"[\[<>=]", requirement)[0] for requirement in requirements}


def read_data(folder: Path) -> None:
    list(read_records(str(folder)))


def read_parquet(folder: Path) -> None:
    (folder / "a.parquet").touch()
    list(read_records(str(folder / "a.parquet")))


def train(folder: Path) -> None:
    finetune("demo", folder / "out", "demo")


def scale_adapter(folder: Path) -> None:
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "lora_alpha": 2, "r": 1}')
    AdapterConfig(folder).scale("q", 1)


@pytest.mark.parametrize(
    ("package", "action", "said"),
    [
        ("datasets", read_data, "Reading a folder of data needs datasets"),
        ("datasets", lambda _: list(read_records("user/data")), '"user/data" is not a file; reading it as a data set'),
        ("datasets", read_parquet, "Reading parquet files needs datasets"),
        ("datasets", train, "Training needs datasets"),
        ("peft", train, "Training needs peft"),
        ("peft", scale_adapter, "Merging an adapter needs peft"),
        ("optuna", lambda _: search("demo", target_length=2048), "A search needs optuna"),
    ],
)
def test_a_missing_package_is_named_with_its_extra(package, action, said, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(CtxextError, match=said) as raised:
        action(tmp_path)
    extra = raised.value.hint.removeprefix('pip install "ctxext[').removesuffix(']"')
    assert package in declared(PROJECT["optional-dependencies"][extra])


def test_a_report_without_matplotlib_has_its_heat_maps(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    files = write_report(read_json(ROOT / "tests" / "resources" / "report" / "report.json"), tmp_path)
    assert [file.name for file in files] == ["report.json", "report.html"]
    page = files[1].read_text()
    assert 'class="maps"' in page
    assert page.count("ctxext[plot]") == 1


def test_every_import_is_of_a_declared_package():
    """A package that another one brings today may be gone with its next release, as numpy was from nowhere."""
    modules = set()
    for path in (ROOT / "src" / "ctxext").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [str(node.module)]
            modules |= {name.partition(".")[0] for name in names}
    used = {DECLARED_AS.get(module, module) for module in modules} - set(sys.stdlib_module_names) - {"ctxext"}
    extras = PROJECT["optional-dependencies"]
    core = declared(PROJECT["dependencies"])
    assert used <= core | {name for extra in extras.values() for name in declared(extra)}
    assert all(package in declared(extras[extra]) for package, extra in EXTRAS.items())
    assert core <= used, "a dependency that nothing imports"


@pytest.mark.slow
def test_the_first_commands_run_with_nothing_but_the_dependencies(tmp_path):
    hidden = f"import sys\nfor name in {tuple(EXTRAS)}: sys.modules[name] = None\n"
    run = hidden + "from ctxext.cli.app import main\nsys.argv = ['ctxext', *sys.argv[1:]]\nmain()"
    for words in (
        "inspect demo",
        "convert demo yarn --method yarn --target-length 2k",
        "eval demo yarn --task needle,short,perplexity --lengths 512,2k --samples 1 --allow-beyond --out report",
        "verify yarn --against demo",
    ):
        command = [sys.executable, "-c", run, *words.split()]
        result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
    assert (tmp_path / "report" / "report.html").is_file()
