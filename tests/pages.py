"""The commands and the Python of a page, as tests read and type them.

What a console block types runs in `make story`, on models of a megabyte that have the names of the page's. A block that
cannot run here has a line above it that says what it needs: `<!-- needs: vLLM -->`.
"""

import os
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    [*ROOT.glob("[!C]*.md"), ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md"), *ROOT.glob("benchmarks/*.md")]
)
STORIES = (ROOT / "README.md", ROOT / "docs" / "getting-started.md")
"""Pages whose commands run in one empty folder, with a Hub to push to."""

# Given last, so that they replace what the page says: here everything must run, and is measured elsewhere.
SMALL = {
    "demo": ["--samples", "2"],
    "finetune": ["--steps", "2"],
    "eval": ["--samples", "1", "--depths", "1"],
    "compare": ["--samples", "2", "--depths", "1", "--minutes", "1"],
    "search": ["--trials", "1", "--samples", "1", "--checked", "2"],
    "tools/train_small.py": ["--scale", "0.002"],
}
_BLOCK = re.compile(r"(?:^<!-- needs: ([^\n]+) -->\n)?^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_LEFT_OUT = ("…", "...")


@dataclass(frozen=True)
class Block:
    """A fenced part of a page.

    Attributes:
        kind: The word behind the fence.
        text: What it holds.
        needs: What it cannot run without; None where it runs everywhere.
    """

    kind: str
    text: str
    needs: str | None = None

    def commands(self) -> list[list[str]]:
        """What is typed behind a $, word by word, without comments and without what the page leaves out."""
        if self.kind != "console":
            return []
        lines = self.text.replace("\\\n", " ").splitlines()
        return [_words(line[2:]) for line in lines if line.startswith("$ ")]


def blocks(page: Path) -> list[Block]:
    """The fenced parts of a page."""
    return blocks_of(page.read_text(encoding="utf-8"))


def blocks_of(text: str) -> list[Block]:
    """The fenced parts of a text in Markdown."""
    return [Block(kind, inner, needs or None) for needs, kind, inner in _BLOCK.findall(text)]


def section(page: Path, heading: str) -> str:
    """The text of a page below a heading, up to the next one."""
    return page.read_text(encoding="utf-8").partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def mentioned(page: Path) -> list[list[str]]:
    """Commands of ctxext between the lines, in code spans."""
    prose = _BLOCK.sub("", page.read_text(encoding="utf-8"))
    spans = (" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose))
    return [_words(span) for span in spans if re.match(r"(accelerate launch .*-m )?ctxext [a-z-]", span)]


def _words(line: str) -> list[str]:
    words = shlex.split(line, comments=True)
    return [word for i, word in enumerate(words) if word not in _LEFT_OUT or words[i - 1].startswith("--")]


def arguments(words: list[str]) -> list[str] | None:
    """What ctxext is given, also where another program starts it; None where it does not run."""
    return words[words.index("ctxext") + 1 :] if words[0] in ("ctxext", "accelerate") else None


def programs() -> tuple[list[str], str]:
    """ctxext and Python: those of CTXEXT_BIN, where `make story` tries a fresh environment."""
    place = os.environ.get("CTXEXT_BIN")
    return ([f"{place}/ctxext"], f"{place}/python") if place else ([sys.executable, "-m", "ctxext"], sys.executable)
