"""No phrase of the project's list of phrases to avoid, and no function named by a participle or an adjective alone."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "ctxext"

PHRASES = """
in the place of|what comes of|beyond doubt|for no \\w+ that can be|stands? (?:in|on|beside)|hangs? on|go(?:es)? on with
go(?:es)? without|by itself|by themselves|all the same|as it is|as they are|(?:is|are|was) said|says?|tells|told
tell (?:you|the|us|how|what|which|whether)|(?:is|are|was|were) asked|asked for|asks for|hands? on|nobody|strangers?'s?
worked out|works out|at which|of which|whose|that there (?:is|are) not|everything included|as a text is read
mend(?:s|ed)?|a part of|otherwise than|of (?:its|their|our) own|so much the more|as busy as|cannot be said|the house
"""
AVOIDED = re.compile(rf"\b(?:{'|'.join(PHRASES.split(chr(10))).strip('|')})\b", re.IGNORECASE)

# Prompts of tasks are measured as they are, and quoted texts are not ours.
PROMPTS = {
    "src/ctxext/tasks/documents.py": ("of which", "says"),
    "src/ctxext/tasks/graphwalks.py": ("asked for",),
    "src/ctxext/tasks/mrcr.py": ("asks for",),
    "src/ctxext/tasks/needle.py": ("the house",),
}

PARTICIPLE = re.compile(r"_?(?:[a-z]+(?:ed|en|own)|said|told|made|found|kept|cut|put|left|held|meant|built|sought|set)")
ADJECTIVE = re.compile(
    r"short|plain|whole|full|new|old|one|other|own|like|last|first|worst|best|between|relative|quiet|what"
)
VERB = re.compile(r"open|cut|put|set|shorten|lengthen|need|exceed|feed|embed|seed|proceed|len")
VAGUE = re.compile(r"_?(?:asked|wanted|told|said|noted)")


def text_files():
    for path in [*SOURCE.rglob("*"), *(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]:
        if path.suffix in (".py", ".toml", ".jinja", ".md") and "demo/checkpoint" not in path.as_posix():
            yield path


def phrases_of(text):
    return AVOIDED.findall(re.sub(r"[\s#]+", " ", text))


def test_avoided_phrases_are_absent():
    hits = {}
    for path in text_files():
        found = phrases_of(path.read_text(encoding="utf-8"))
        found = [phrase for phrase in found if phrase not in PROMPTS.get(path.relative_to(ROOT).as_posix(), ())]
        if found:
            hits[path.relative_to(ROOT).as_posix()] = found
    assert not hits


def functions():
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                yield path.relative_to(ROOT).as_posix(), node


def is_bare(name):
    word = name.strip("_")
    return not VERB.fullmatch(word) and bool(PARTICIPLE.fullmatch(word) or ADJECTIVE.fullmatch(word))


def test_functions_are_not_named_by_a_bare_participle_or_adjective():
    assert not [(path, node.name) for path, node in functions() if is_bare(node.name)]


def test_values_are_not_named_by_vague_participles():
    names = [
        (path, name.id if isinstance(name, ast.Name) else name.arg)
        for path, node in functions()
        for name in ast.walk(node)
        if (isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)) or isinstance(name, ast.arg)
    ]
    assert not [(path, name) for path, name in names if VAGUE.fullmatch(name)]
