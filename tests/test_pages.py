"""Commands of the pages: each is one that ctxext takes, and those of docs/ run, page by page, in an empty folder."""

import os
import subprocess
from pathlib import Path

import pytest
import typer

from ctxext.cli.app import app
from pages import PAGES, ROOT, SMALL, STORIES, arguments, blocks, mentioned, programs
from stand_ins import write_stand_ins

COMMANDS = typer.main.get_command(app)
OF_DOCS = [page for page in PAGES if page.is_relative_to(ROOT / "docs")]
NEEDS = {"a GPU", "a server", "llama.cpp", "vLLM", "the network", "a large model", "sentence-transformers"}


def parse(words, *, is_whole):
    """Refuse what the command line would; what a sentence leaves out of a command is missing in nobody's eyes."""
    group = COMMANDS
    while getattr(group, "commands", None):
        assert words, "no command"
        assert words[0] in group.commands, f'there is no command "{words[0]}"'
        group, words = group.commands[words[0]], words[1:]
    try:
        group.make_context(group.name, list(words))
    except Exception as error:
        kind = type(error).__name__
        if kind != "Exit" and (is_whole or kind != "MissingParameter"):
            raise AssertionError(f"{kind}: {getattr(error, 'message', error)}") from error


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_command_of_a_page_is_one(page):
    for block in blocks(page):
        assert block.needs is None or block.needs in NEEDS, f"needs: {block.needs}"
        for words in block.commands():
            if (given := arguments(words)) is not None:
                parse(given, is_whole=words[0] == "ctxext")
            elif words[0] == "python" and words[1].endswith(".py"):
                source = (ROOT / words[1]).read_text()
                assert [word for word in words if word.startswith("--") and f'"{word}"' not in source] == [], words
    for words in mentioned(page):
        parse(arguments(words), is_whole=False)


def test_commands_that_do_not_exist_are_refused():
    for words in (["no-such"], ["eval", "demo", "--no-such", "1"], ["eval", "demo", "--samples", "many"], ["convert"]):
        with pytest.raises(AssertionError):
            parse(words, is_whole=True)
    parse(["convert"], is_whole=False)
    parse(["finetune", "--help"], is_whole=True)


def test_commands_are_read_from_pages():
    """So that a page with a new shape of block is not passed over."""
    assert sum(len(block.commands()) for page in OF_DOCS for block in blocks(page)) >= 30
    lines = [line for page in PAGES for line in page.read_text().splitlines() if line.startswith("$ ctxext ")]
    commands = [words for page in PAGES for block in blocks(page) for words in block.commands()]
    assert len(lines) == sum(words[0] == "ctxext" for words in commands)
    assert arguments(["accelerate", "launch", "-m", "ctxext", "methods", "yarn"]) == ["methods", "yarn"]


def runnable(page: Path) -> list[list[str]]:
    """The commands of a page that are ours and need nothing else; none where the tests of stories type all of them."""
    elsewhere = [words for page in STORIES for block in blocks(page) for words in block.commands()]
    commands = [words for block in blocks(page) if not block.needs for words in block.commands()]
    ours = [words for words in commands if words[0] in ("ctxext", "python")]
    return ours if any(words not in elsewhere for words in ours) else []


@pytest.mark.slow
@pytest.mark.parametrize("page", filter(runnable, OF_DOCS), ids=lambda page: page.relative_to(ROOT / "docs").as_posix())
def test_every_command_of_a_page_runs(page, tmp_path):
    program, python = programs()
    commands, runs = runnable(page), []
    for words in commands:
        if words[0] == "ctxext":
            writes = words[1] in ("convert", "finetune", "search") or "--out" in words
            runs.append([*program, *words[1:], *SMALL.get(words[1], []), *(["--overwrite"] if writes else [])])
        else:
            script = [str(ROOT / words[1])] if words[1].endswith(".py") else [words[1]]
            runs.append([python, *script, *words[2:], *SMALL.get(words[1], [])])
    write_stand_ins(commands, tmp_path)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "NO_COLOR": "1"}
    for command in runs:
        result = subprocess.run(
            command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False, timeout=600
        )
        assert result.returncode == 0, f"{command}\n{result.stdout[-3000:]}\n{result.stderr[-3000:]}"
