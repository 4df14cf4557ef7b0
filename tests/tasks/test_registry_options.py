"""Options of tasks: each is declared by the tasks whose prompts it changes, and refused if no selected task uses it."""

import dataclasses
import functools
import json
from pathlib import Path

import pytest

from ctxext.compare.candidates import CompareOptions
from ctxext.data.encoding import Encoder
from ctxext.errors import CtxextError
from ctxext.options import options_of
from ctxext.tasks.published import PublishedTask
from ctxext.tasks.registry import GROUPS, RETRIEVAL_TASKS, TASKS, USERS
from ctxext.tasks.retrieval import make_questions
from ctxext.tasks.settings import Settings

BOOK = " ".join(f"Sentence {number} follows." for number in range(200))
SQUAD = [{"context": f"Text {n}.", "qas": [{"question": "Who?", "answers": [{"text": f"{n}"}]}]} for n in range(9)]
HOTPOT = {"question": "Who?", "answer": "Ann", "supporting_facts": [["a", 0], ["b", 0]]}
HOTPOT["context"] = [[title, [title]] for title in "abc"]
ASKED = {
    "question": "Who?",
    "answers": ["Ann"],
    "ctxs": [{"title": "t", "text": text} for text in ("Ann.", "Bob.", "Eve.")],
}
CONTENTS = {
    **{"haystack": BOOK, "essays": BOOK, "documents": json.dumps(ASKED), "hotpot": json.dumps([HOTPOT])},
    "squad": json.dumps({"data": [{"paragraphs": SQUAD}]}),
    "words": "\n".join(f"word{number}" for number in range(60)),
}
VALUES = {"num_needles": 3, "kv_ids": "number", "filler": "same", "repeat_question": True, "reason": True}
OF_DOCUMENTS = {"data": "me/texts", "stride": 9, "evaluator": "it", "key_tokens": Path("keys")}
OF_AUTHORS = {"nolima": Path("books"), "babilong": Path("facts"), "ruler2": Path("sets")}
NAMES = [*VALUES, *CONTENTS, *OF_DOCUMENTS, *OF_AUTHORS]


def value_of(option, folder):
    """Return a value of an option other than its default; of a file its place in a folder."""
    if option in CONTENTS:
        (folder / option).write_text(CONTENTS[option])
        return folder / option
    return {**VALUES, **OF_DOCUMENTS, **OF_AUTHORS}[option]


@pytest.fixture(scope="module")
def prompts(tokenizer):
    """Return a function that makes a prompt of each task, with or without an option."""
    kinds = {(type(task), task.options): name for name, task in RETRIEVAL_TASKS.items() if task.name[-1] not in "48"}
    names = [name for (kind, _), name in kinds.items() if not issubclass(kind, PublishedTask)]

    @functools.cache
    def make(**option):
        settings = Settings(tasks=names, depths=(0.5,), **option)
        tasks = {task.name: task for task in settings.retrieval_tasks()}
        return {name: make_questions(task, Encoder(tokenizer), 4200, [0], settings) for name, task in tasks.items()}

    return make


@pytest.mark.parametrize("option", [*VALUES, *CONTENTS])
def test_tasks_declare_the_options_that_change_their_prompts(option, prompts, tmp_path):
    plain, given = prompts(), prompts(**{option: value_of(option, tmp_path)})
    changed = {name for name in plain if given[name] != plain[name]}
    assert changed == {name for name in plain if option in RETRIEVAL_TASKS[name].options}


def test_these_are_all_options_of_tasks():
    panel = {name for name, option in options_of(Settings).items() if option.panel == "Task options"}
    assert {*NAMES} == {*USERS} == panel - {"harness"}
    assert all(name in GROUPS or name in TASKS for name in USERS.values())
    assert (USERS["essays"], USERS["babilong"], USERS["data"]) == ("ruler", "babilong", "perplexity")


@pytest.mark.parametrize("option", NAMES)
def test_an_option_that_no_selected_task_uses_is_refused(option, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for folder in OF_AUTHORS.values():
        folder.mkdir()
    needed = {"longppl": {"evaluator": "it"}, **{user: {user: folder} for user, folder in OF_AUTHORS.items()}}
    given = {option: value_of(option, tmp_path)}
    user = USERS[option]
    flag = "--needles" if option == "num_needles" else f"--{option.replace('_', '-')}"
    for name in ("passkey", "perplexity", "topics"):
        if option not in TASKS[name].options:
            for owner in (Settings, CompareOptions):
                more = {} if owner is Settings else {"target_length": 64}
                with pytest.raises(CtxextError) as error:
                    owner(tasks=(name,), **given, **more)
                assert error.value.message == f"No selected task uses {flag}."
                assert error.value.hint == f"Add --task {user}, or omit {flag}."
    Settings(tasks=("passkey", user), **{**needed.get(user, {}), **given})


def test_tasks_that_are_chosen_later_may_use_an_option(tmp_path):
    """Tasks of Settings() are needle and short, or passages with short or topics; compare adds perplexity."""
    used = {"num_needles", "filler", "haystack", "repeat_question", "data"}
    for option in NAMES:
        given = {option: value_of(option, tmp_path)}
        for owner, names in ((Settings, used), (CompareOptions, used | {"stride"})):
            if option in names:
                owner(**given, **({} if owner is Settings else {"target_length": 64}))
            else:
                with pytest.raises(CtxextError, match="No selected task uses"):
                    owner(**given, **({} if owner is Settings else {"target_length": 64}))


def test_options_are_checked_again_with_the_tasks_of_the_model(tmp_path):
    settings = Settings(num_needles=3)
    with pytest.raises(CtxextError, match="No selected task uses --needles"):
        dataclasses.replace(settings, tasks=("passages", "short"))
    options = CompareOptions(target_length=2048, num_needles=3)
    assert options.settings("causal", 512).num_needles == 3
    with pytest.raises(CtxextError, match="No selected task uses --needles"):
        options.settings("masked", 512)


def test_a_comparison_has_its_own_defaults():
    options = CompareOptions(target_length=2048)
    assert options.settings("causal", 512).tasks == ("needle", "short", "perplexity")
    assert options.settings("masked", 512).tasks == ("passages", "short")
    assert options.settings("causal", 512).samples == Settings().samples
    assert len(options.settings("causal", 512).depths) == 10
    assert CompareOptions(target_length=2048, tasks=("passkey",)).settings("causal", 512).tasks == ("passkey",)
