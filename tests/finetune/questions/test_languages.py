"""Templates of questions: every language is complete and recognised, and has none of the material of `eval`."""

import ast
import random
import re
import string
from pathlib import Path

import pytest

import ctxext.tasks
from ctxext.data import prose
from ctxext.finetune.questions.languages import read_languages, recognise_language
from ctxext.tasks.babilong import LABELS
from ctxext.tasks.mrcr import KINDS
from ctxext.tasks.passages import TOPICS
from question_texts import PARAGRAPHS, UNKNOWN, write_story

LANGUAGES = read_languages()
TASKS = sorted(Path(ctxext.tasks.__file__).parent.glob("*.py"))


def slots_of(text):
    return {name for _, name, _, _ in string.Formatter().parse(text) if name}


def words_of(text):
    return re.findall(r"\w+", text.lower())


@pytest.mark.parametrize("code", LANGUAGES)
def test_a_language_has_all_it_needs(code):
    language = LANGUAGES[code]
    assert {*language.slots} == {"person", "thing", "topic", "word"}
    assert len(language.facts) >= 8
    assert language.most_facts >= 400
    for form in language.facts:
        asked = slots_of(form.question)
        assert asked | slots_of(form.answer) <= slots_of(form.fact) <= {*language.slots, "number"}
        assert asked & {"person", "thing", "topic"}, "the question names the fact"
        assert slots_of(form.answer) - asked, "the answer is new"
    assert all(slots_of(quote) == {"before"} for quote in language.quotes)
    assert len(language.openings) >= 3
    assert len(language.closings) >= 3
    for slot in language.slots.values():
        for words in slot.parts.values():
            assert len({*words}) == len(words) >= 20


@pytest.mark.parametrize("code", LANGUAGES)
def test_every_form_is_filled(code):
    language = LANGUAGES[code]
    texts = []
    for seed in range(60):
        facts = language.draw_facts(random.Random(seed), 12)
        assert len({fact.fact for fact in facts}) == 12
        texts += [text for fact in facts for text in (fact.fact, fact.question, fact.answer)]
    assert not [text for text in texts if re.search(r"[{}|]|  ", text)]
    for form in language.facts:
        fixed = max(string.Formatter().parse(form.fact), key=lambda part: len(part[0]))[0]
        assert any(fixed in text for text in texts)


def test_facts_are_about_different_things():
    """All persons and all things that a fact names are different, at any length."""
    language = LANGUAGES["en"]
    for slot in ("person", "thing", "topic"):
        size = language.slots[slot].size
        assert len({*language.slots[slot].sample(random.Random(0), size)}) == size


@pytest.mark.parametrize("code", PARAGRAPHS)
def test_a_paragraph_is_recognised(code):
    assert {*PARAGRAPHS} == {*LANGUAGES}
    assert recognise_language(PARAGRAPHS[code]).name == LANGUAGES[code].name
    assert recognise_language(PARAGRAPHS[code] * 30).name == LANGUAGES[code].name
    assert recognise_language(PARAGRAPHS[code].upper()).name == LANGUAGES[code].name


@pytest.mark.parametrize("name", UNKNOWN)
def test_other_texts_are_not(name):
    assert recognise_language(UNKNOWN[name]) is None
    assert recognise_language(UNKNOWN[name] * 30) is None


def test_the_language_is_that_of_the_whole_text():
    """A licence in English does not make a German book English."""
    assert recognise_language(PARAGRAPHS["en"] + 50 * PARAGRAPHS["de"]).name == "German"


def words_of_eval():
    """The names, things, goods and places that `eval` hides and asks about."""
    lists = ("first", "last", "place", "adjective", "object", "trade", "goods", "site", "mood", "weather")
    listed = [word for name in lists for phrase in prose.WORDS[name] for word in words_of(phrase)]
    topics = [word for topic in TOPICS for word in words_of(topic)]
    labels = [word for answers in LABELS.values() for answer in answers for word in words_of(answer)]
    kinds = [word for kind in KINDS for word in words_of(kind)]
    return {*listed, *topics, *labels, *kinds} - LANGUAGES["en"].function_words


@pytest.mark.parametrize("code", LANGUAGES)
def test_no_word_of_eval_is_in_a_slot(code):
    parts = [words for slot in LANGUAGES[code].slots.values() for words in slot.parts.values()]
    ours = {word for words in parts for phrase in words for word in words_of(phrase)}
    assert not ours & words_of_eval()


def runs_of(text, length=4):
    """The sequences of words in a text, with all slots alike."""
    words = words_of(re.sub(r"\{\w*\}", " slot ", text))
    return {tuple(words[at : at + length]) for at in range(len(words) - length + 1)}


GENERIC = "read the following text"
"""Words that the authors of LongBench v2 share with any request to read."""


def phrasings_of_eval():
    """All texts in the code of tasks, and the sentences of the package's prose."""
    constants = [
        node.value
        for path in TASKS
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    return [*constants, *prose.PATTERNS, *TOPICS.values()]


def test_no_phrasing_of_eval_is_in_a_template():
    theirs = set().union(*map(runs_of, phrasings_of_eval())) - runs_of(GENERIC)
    assert ("number", "of", "the", "slot") in theirs
    for language in LANGUAGES.values():
        forms = [text for form in language.facts for text in (form.fact, form.question, form.answer)]
        for text in [*forms, *language.openings, *language.closings, *language.quotes]:
            assert not runs_of(text) & theirs, text


def test_the_story_of_other_tests_is_english():
    assert recognise_language(write_story(20)).name == "English"
