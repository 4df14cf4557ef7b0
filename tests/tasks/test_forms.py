"""The form of prompts: in chat RULER's as NVIDIA's NeMo-Skills makes them, by rules written from its source."""

import re
import zipfile
from pathlib import Path

import pytest

import ruler_rules as rules
from ctxext.data.encoding import BASE_FORM, Encoder
from ctxext.errors import CtxextError
from ctxext.models.answers import generate_graded
from ctxext.models.model import Written
from ctxext.tasks.forms import choose_form
from ctxext.tasks.registry import GROUPS, RETRIEVAL_TASKS
from ctxext.tasks.retrieval import make_questions
from ctxext.tasks.settings import Settings
from hand_made import make_tokenizer

with zipfile.ZipFile(Path(__file__).parents[1] / "resources" / "chat_templates.zip") as archive:
    TEMPLATES = {
        name: archive.read(f"{name}.jinja").decode()
        for name in ("llama3_1", "qwen3", "gemma3", "phi3", "glm4moe", "deepseek_r1_distill")
    }
FAMILIES = ("llama3_1", "qwen3", "gemma3", "phi3", "glm4moe")
LENGTH = 8200


def with_template(name):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATES.get(name)
    return Encoder(tokenizer)


def prompts_of(name, encoder, length=LENGTH, count=1, **options):
    settings = Settings(tasks=(name,), depths=(0.3,), seed=length, **options)
    (task,) = settings.retrieval_tasks()
    chosen = {"prompt": settings.prompt, "reason": settings.reason, "no_think": settings.no_think}
    task = task.use_form(choose_form(task, "it", encoder, **chosen))
    return task, [prompt for (prompt,) in make_questions(task, encoder, length, range(count), settings)]


def answer_prefix(name, text):
    """The text that NVIDIA cuts off its prompts for chat, of scripts/data/synthetic/constants.py."""
    if name.startswith("niah"):
        verb, _, kind, query = re.search(
            r"What (is|are) (the|all the) special magic (\w+) for (.+) mentioned in the provided text\?$", text
        ).groups()
        return f" The special magic {kind} for {query} mentioned in the provided text {verb}"
    value = re.search(r"assigned the value (\d+) in the text above\.$", text)
    return {
        "ruler-vt": " Answer: According to the chain(s) of variable assignment in the text above, 5 variables are "
        f"assigned the value {value and value[1]}, they are: ",
        "ruler-cwe": " Answer: The top 10 words that appear most often in the list are:",
        "ruler-fwe": " Answer: According to the coded text above, the three most frequently appeared words are:",
        "ruler-qa-1": " Answer:",
        "ruler-qa-2": " Answer:",
    }[name]


@pytest.mark.parametrize("name", GROUPS["ruler"])
@pytest.mark.parametrize("family", FAMILIES)
def test_chat_prompts_are_those_of_nemo_skills(family, name):
    """Its `--data_format chat`: the prompt before its answer prefix, as the only message (prompt generic/default)."""
    encoder = with_template(family)
    task, (prompt,) = prompts_of(name, encoder, prompt="chat", no_think=True)
    (message,) = prompt.messages
    content = message["content"]
    rendered = encoder.tokenizer.apply_chat_template(
        [message], add_generation_prompt=True, tokenize=False, enable_thinking=False
    )
    assert encoder.tokenizer.decode(prompt.ids[: -prompt.num_answer]) == rendered
    assert len(prompt.ids) == LENGTH
    assert message["role"] == "user"
    assert prompt.num_answer == task.answer_room == max(256, rules.budget(name))
    blank = r"\n+(?=\n\nAnswer the)" if "qa" in name else r"\n+(?=\n(Question|What))"
    content = re.sub(blank, "", content)
    written, correct = rules.rewrite(name, content + answer_prefix(name, content), LENGTH, LENGTH)
    cut = written[: written.rfind(answer_prefix(name, content)[:10])]
    assert re.sub("(?<=afterwards.\n) | (?=\nWhat)", "", content) == cut
    if correct is not None:
        assert sorted(prompt.required) == sorted(correct)


@pytest.mark.parametrize(
    ("family", "name", "options", "form"),
    [
        ("qwen3", "needle", {}, (False, False, 0)),
        ("qwen3", "needle", {"prompt": "chat"}, (True, None, 4096)),
        ("qwen3", "needle", {"prompt": "chat", "no_think": True}, (True, False, 256)),
        ("qwen3", "needle", {"reason": 900}, (True, True, 900)),
        ("qwen3", "needle", {"prompt": "base"}, (False, False, 0)),
        ("llama3_1", "needle", {"prompt": "chat"}, (True, None, 256)),
        ("llama3_1", "mrcr-2", {}, (True, None, 448)),
        ("qwen3", "mrcr-2", {"no_think": True}, (True, False, 448)),
        ("qwen3", "mrcr-2", {}, (True, None, 4096)),
        ("none", "needle", {}, (False, False, 0)),
        ("none", "graphwalks", {"reason": 2000}, (False, False, 2000)),
        ("qwen3", "passages", {}, (False, False, 0)),
    ],
)
def test_the_default_form_is_that_of_the_model_and_of_the_authors(family, name, options, form):
    task = RETRIEVAL_TASKS[name]
    chosen = choose_form(task, "it", with_template(family), **options)
    room = max(chosen.room, task.answer_room) if chosen.room or "mrcr" in name else 0
    assert (chosen.is_chat, chosen.thinks, room) == form


@pytest.mark.parametrize(("options", "flag"), [({"prompt": "chat"}, "--prompt chat"), ({"reason": 512}, "--reason")])
def test_without_a_template_there_is_no_chat(options, flag):
    with pytest.raises(CtxextError, match=f'^{flag} needs a chat template, but "it" has none') as caught:
        choose_form(RETRIEVAL_TASKS["needle"], "it", with_template("none"), **options)
    assert caught.value.hint == f"Omit {flag}."


@pytest.mark.parametrize("name", ["passkey", "needle", "kv", "association", "documents"])
def test_free_answers_are_correct_if_they_contain_the_answer(name):
    encoder = with_template("llama3_1")
    task, (prompt,) = prompts_of(name, encoder, 2000, prompt="chat")
    assert task.is_generated
    right = prompt.answers[0].strip()
    assert task.grade(f"I think it is **{right.upper()}**.", prompt) == 1
    assert task.grade("I do not know.", prompt) == 0
    assert task.grade("", prompt) == 0
    assert not RETRIEVAL_TASKS["needle"].is_generated


def test_conversations_keep_their_messages():
    """A server renders them itself."""
    encoder = with_template("qwen3")
    _, (prompt,) = prompts_of("mrcr-2", encoder, 9000, no_think=True)
    text = encoder.tokenizer.apply_chat_template(
        list(prompt.messages), add_generation_prompt=True, tokenize=False, enable_thinking=False
    )
    assert text == encoder.tokenizer.decode(prompt.ids[: -prompt.num_answer])
    assert [message["role"] for message in prompt.messages[:4]] == ["user", "user", "assistant", "user"]
    _, (prompt,) = prompts_of("mrcr-2", with_template("gemma3"), 9000)
    assert [message["role"] for message in prompt.messages[:3]] == ["user", "assistant", "user"]


class Stub:
    """A model that generates these texts."""

    def __init__(self, encoder, texts, size):
        self.encoder, self.texts, self.size = encoder, texts, size

    def may_share(self, *_):
        return False

    def write(self, questions, depths, form):
        for depth in depths:
            rows = [self.encoder.encode_piece(text) for text in self.texts]
            yield depth, [Written(ids, is_cut=len(ids) >= self.size) for ids in rows]


def test_thoughts_are_not_scored_and_cut_answers_are_counted():
    encoder = with_template("deepseek_r1_distill")
    task, prompts = prompts_of("niah-multivalue", encoder, 6000, 4, reason=500)
    right = ", ".join(prompts[0].required)
    prompts = [prompts[0]] * 4
    texts = [f"{right}</think>No idea.", f"No idea.</think>{right}", f"{right} {'and so on ' * 500}", ""]
    ((_, scores, cut, *_),) = generate_graded(
        Stub(encoder, texts, 500), [[prompt] for prompt in prompts], [0], task.grade, task.form
    )
    assert scores == [0, 1, 0, 0]
    assert cut == [False, False, True, False]
    ((_, scores, cut, *_),) = generate_graded(
        Stub(encoder, texts, 500), [[prompt] for prompt in prompts], [0], task.grade, BASE_FORM
    )
    assert (scores, cut) == ([1, 1, 1, 0], ())
