"""MRCR as messages through chat templates, GraphWalks with reasoning, and both scores by small implementations here."""

import random
import re
import zipfile
from collections import Counter
from difflib import SequenceMatcher
from pathlib import Path
from types import SimpleNamespace

import pytest

from ctxext.data.encoding import Encoder
from ctxext.data.turns import PLAIN_TURNS
from ctxext.errors import CtxextError
from ctxext.tasks.forms import choose_form
from ctxext.tasks.graphwalks import GraphWalks, graphwalks_score
from ctxext.tasks.mrcr import MRCR, MRCR_FLAT, mrcr_score
from ctxext.tasks.retrieval import check_fits, make_questions
from ctxext.tasks.settings import Settings
from hand_made import make_tokenizer

with zipfile.ZipFile(Path(__file__).parents[1] / "resources" / "chat_templates.zip") as archive:
    TEMPLATES = {
        name.removesuffix(".jinja"): archive.read(name).decode()
        for name in archive.namelist()
        if name.endswith(".jinja") and "training" not in name
    }
PICTURES = ("idefics3", "llava_next", "smolvlm")
"""Templates that take only lists of texts and pictures."""
IN_TURN = ("cohere", "cohere2", "gemma", "gemma3")
"""Templates that refuse two messages of the user in a row."""
LENGTH = 9000


def with_template(name):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATES.get(name)
    return tokenizer


def prompts_of(task, tokenizer, length=LENGTH, count=3, **settings):
    settings, encoder = Settings(tasks=(task.name,), depths=(0.5,), **settings), Encoder(tokenizer)
    task = in_form(settings, encoder)
    return [prompt for (prompt,) in make_questions(task, encoder, length, range(count), settings)]


def in_form(settings, encoder):
    (task,) = settings.retrieval_tasks()
    return task.use_form(choose_form(task, "it", encoder, prompt=settings.prompt, reason=settings.reason))


def text_of(prompt, tokenizer):
    return tokenizer.decode(prompt.ids[: -prompt.num_answer])


def read_messages(text):
    """The messages of a ChatML text."""
    parts = re.findall(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>\n", text, re.DOTALL)
    return [{"role": role, "content": content} for role, content in parts if role != "system"]


@pytest.mark.parametrize("name", sorted({*TEMPLATES} - {*PICTURES}))
def test_a_layout_is_what_the_template_renders(name):
    tokenizer = with_template(name)
    layout = Encoder(tokenizer).turn_layout
    first, *others = [f"Text {number}." for number in range(10)]
    joined = "".join(f"{text}{layout.request if number % 2 else layout.answer}" for number, text in enumerate(others))
    text = f"{layout.begin}{first}{layout.first_request}{joined.removesuffix(layout.answer)}{layout.end}"
    messages = [
        {"role": "assistant" if number % 2 else "user", "content": content} for number, content in enumerate(others)
    ]
    if name in IN_TURN:
        messages[0]["content"] = f"{first}\n\n{others[0]}"
    else:
        messages.insert(0, {"role": "user", "content": f"{first}\n"})
    options = {"tokenize": False, "add_generation_prompt": True, "enable_thinking": False}
    assert text == tokenizer.apply_chat_template(messages, **options)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        *((TEMPLATES[name], "(cannot be rendered|omits a message)") for name in PICTURES),
        ("{{ messages[0].content }}", "omits a message"),
        ("{% for m in messages %}{{ loop.index }}{{ m.content }}{% endfor %}", "changes its text between turns"),
    ],
)
def test_a_template_without_a_layout_is_one_line(template, reason):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(CtxextError, match=rf"^The tokenizer's chat template {reason}") as error:
        prompts_of(MRCR[0], tokenizer)
    assert error.value.hint == "Evaluate with --no-chat-template."


@pytest.mark.parametrize("task", MRCR, ids=lambda task: task.name)
def test_the_conversation_is_that_of_the_data_set(task):
    """Two user's messages first, the first with two worked examples; then requests and answers in turn."""
    tokenizer, numbers = with_template("qwen2_5"), set()
    for prompt in prompts_of(task, tokenizer, 16000, 6):
        assert len(prompt.ids) == 16000
        text = text_of(prompt, tokenizer)
        messages = read_messages(text)
        assert text == tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        roles = [message["role"] for message in messages]
        assert roles == ["user", *["user", "assistant"] * ((len(roles) - 2) // 2), "user"]
        examples, *turns, question = (message["content"] for message in messages)
        assert examples.startswith("Here are some examples of conversations succeeded by a follow-up question")
        assert examples.count("======EXAMPLE======\nUser: ") == examples.count("======END EXAMPLE======") == 2
        assert examples.endswith("======END EXAMPLE======\n")
        for example in examples.split("======EXAMPLE======")[1:]:
            assert_solved(example.split("======END")[0])
        prefix, number, asked = re.fullmatch(
            r"Prepend (\w{10}) to the (\d)\w\w \(1 indexed\) (.+)\. Do not include any other text in your response\.",
            question,
        ).groups()
        same = [
            answer for request, answer in zip(turns[::2], turns[1::2], strict=True) if request == f"write a {asked}"
        ]
        assert len(same) == len({*same}) == task.num_texts
        assert prompt.answers == (prefix + same[int(number) - 1],)
        assert prompt.required == (prefix,)
        assert tokenizer.decode(prompt.ids[-prompt.num_answer :]).startswith(prompt.answers[0])
        assert all(1295 < len(answer) < 1400 for answer in turns[3::2]), "pages"
        assert 1295 < len(turns[1]) < 3500, "the first one fills the prompt"
        assert turns[0] != f"write a {asked}"
        numbers.add(number)
    assert len(numbers) > 1


def assert_solved(example):
    turns = re.findall(r"User: (.*?)\nAssistant: (.*?)(?=\n\nUser: |\n\n$)", example, re.DOTALL)
    prefix, number, asked = re.match(
        r"Prepend (\w{10}) to the (\d)\w\w \(1 indexed\) (.+?)\. Do", turns[-1][0]
    ).groups()
    same = [answer for request, answer in turns if request == f"write a {asked}"]
    assert turns[-1][1] == prefix + same[int(number) - 1]
    assert len({*same}) == 2


@pytest.mark.parametrize("name", ["gemma3", "llama3_1", "qwen3", "plain"])
def test_prompts_are_exact_and_the_same_for_the_same_seed(name):
    tokenizer = with_template(name)
    for length in (LENGTH, LENGTH + 1, LENGTH + 17, LENGTH + 700):
        one, again = (prompts_of(MRCR[1], tokenizer, length) for _ in range(2))
        assert one == again
        assert {len(prompt.ids) for prompt in one} == {length}
    other = prompts_of(MRCR[1], tokenizer, LENGTH + 700, seed=1)
    assert not {text_of(prompt, tokenizer) for prompt in one} & {text_of(prompt, tokenizer) for prompt in other}


@pytest.mark.thorough
def test_every_length_from_the_shortest_on():
    """Even without room for any other turn."""
    tokenizer = with_template("gemma3")
    settings = Settings(tasks=("mrcr-2",), depths=(0.5,), samples=1)
    with pytest.raises(CtxextError, match="needs at least") as error:
        check_fits(MRCR[0], Encoder(tokenizer), [400], settings)
    assert error.value.hint.endswith("Or use short texts: --task mrcr-flat-2.")
    least = int(re.search(r"at least (\d+)", error.value.message)[1])
    for length in range(least + 300, least + 1800, 113):
        (prompt,) = prompts_of(MRCR[0], tokenizer, length, 1)
        assert len(prompt.ids) == length
        turns = text_of(prompt, tokenizer).split("<start_of_turn>")
        assert all(turn.endswith("<end_of_turn>\n") for turn in turns[1:-1])
        assert [turn.split("\n")[0] for turn in turns[1:]] == ["user", "model"] * ((len(turns) - 1) // 2)


def test_without_a_template_it_is_a_plain_text():
    tokenizer = make_tokenizer()
    prompt = prompts_of(MRCR[0], tokenizer, 9000, 1)[0]
    text = text_of(prompt, tokenizer)
    turns = re.split(r"\n\n?User: |\n\nAssistant:", text.split("END EXAMPLE======")[-1])
    assert turns[0] == ""
    assert turns[-1] == ""
    assert turns[-2].startswith(f"Prepend {prompt.required[0]} to the ")
    assert prompt.next_turn == PLAIN_TURNS.next_turn
    answer = tokenizer.decode(prompt.ids[-prompt.num_answer :])
    assert answer.startswith(f" {prompt.answers[0]}")
    more = f" {prompt.answers[0]}\n\nUser: write a poem about wool\n\nAssistant: It is warm."
    assert MRCR[0].grade(more, prompt) == 1.0, "a model without end tokens writes on"
    assert MRCR[0].grade(f" {more}", prompt) == 0.0


def test_the_chat_form_is_scored_as_written():
    (prompt,) = prompts_of(MRCR[0], with_template("qwen3"), count=1)
    answer = prompt.answers[0]
    assert prompt.next_turn == ""
    assert MRCR[0].grade(answer, prompt) == 1.0
    assert MRCR[0].grade(f" {answer}", prompt) == 0.0
    assert MRCR[0].grade(f"{answer}\n\nUser: more", prompt) < 1.0


def test_the_question_is_in_the_first_message_too():
    tokenizer = with_template("qwen2_5")
    (prompt,) = prompts_of(MRCR[0], tokenizer, count=1, repeat_question=True)
    examples, *_, question = read_messages(text_of(prompt, tokenizer))
    assert examples["content"].startswith(f"{question['content']}\n\nHere are some examples")


def test_the_flat_form_has_the_questions_of_before(tokenizer):
    """The prefix, kind and topic of `mrcr-2` at this length before there was another form."""
    (prompt,) = prompts_of(MRCR_FLAT[0], tokenizer, 3000, 1)
    question = "Prepend MvHC6M3iMb to the 1st (1 indexed) blog post about barley. Do not include any other text in your"
    assert text_of(prompt, tokenizer).endswith(f"\n\nUser: {question} response.\n\nAssistant:")
    assert MRCR_FLAT[0].grade(f" {prompt.answers[0]}\n\nUser: more", prompt) == 1.0


WORDS = [f"{number:010x}" for number in range(30)]


def f1_of(text, truth):
    """The F1 score of a set by precision and recall, of the last line with an answer."""
    lines = [line for line in text.splitlines() if "Final Answer:" in line]
    if not lines or "[" not in lines[-1] or "]" not in lines[-1]:
        return 0.0
    inside = lines[-1][lines[-1].index("[") + 1 : lines[-1].rindex("]")]
    said = {word.strip() for word in inside.split(",")} - {""}
    if not said and not truth:
        return 1.0
    hits = len(said & truth)
    precision, recall = (hits / len(names) if names else 0.0 for names in (said, truth))
    return 2 * precision * recall / (precision + recall) if hits else 0.0


def test_sets_score_as_by_precision_and_recall():
    rng, seen = random.Random(0), Counter()
    for _ in range(400):
        truth = {*rng.sample(WORDS, rng.choice((0, 0, 1, 2, 5)))}
        lines = []
        for _ in range(rng.randint(0, 4)):
            said = rng.sample([*truth], rng.randint(0, len(truth))) + rng.sample(WORDS, rng.choice((0, 0, 1, 3)))
            form = rng.choice(
                ("Final Answer: [{}]", "So **Final Answer:** [{}].", "Edges: [{}]", "Final Answer: {}", "")
            )
            lines.append(form.format(rng.choice((", ", ",", " , ")).join(said)))
        text = "\n".join(lines)
        expected = f1_of(text, truth)
        assert graphwalks_score(text, truth) == pytest.approx(expected, abs=1e-12), text
        seen[expected, bool(truth), sum("Final Answer:" in line for line in lines) > 1] += 1
    assert sum(count for (score, truth, _), count in seen.items() if score == 1 and not truth) > 10
    assert sum(count for (score, _, several), count in seen.items() if 0 < score < 1 and several) > 10
    assert len({score for score, *_ in seen}) > 8


def ratio_of(sampled, answer, prefix):
    if sampled[: len(prefix)] != prefix:
        return 0
    matcher = SequenceMatcher(a=sampled[len(prefix) :], b=answer[len(prefix) :])
    matches = sum(block.size for block in matcher.get_matching_blocks())
    total = len(sampled) + len(answer) - 2 * len(prefix)
    return 2 * matches / total if total else 1


def test_texts_score_as_by_matching_blocks():
    rng, scores = random.Random(0), []
    pieces = MRCR[0].pieces(random.Random(1))
    pages = [needle.split("\x00")[-1] for needle in pieces.needles] + [next(pieces.haystack)[-900:] for _ in range(6)]
    for _ in range(200):
        prefix, answer = "".join(rng.choices("abcXYZ019", k=10)), rng.choice(pages)
        said = rng.choice([answer, answer[: rng.randint(0, 900)], rng.choice(pages), "", f"{answer} And more."])
        said = rng.choice([prefix, prefix, prefix, "", f" {prefix}", prefix[:9], prefix * 2]) + said
        expected = ratio_of(said, prefix + answer, prefix)
        assert mrcr_score(said, prefix + answer, prefix) == pytest.approx(expected, abs=1e-12)
        scores.append(expected)
    assert scores.count(0) > 20
    assert scores.count(1) > 10
    assert len({*scores}) > 50


def test_reasoning_has_room_and_the_last_answer_counts(tokenizer):
    ((plain,), (prompt,)) = (prompts_of(GraphWalks(), tokenizer, 4000, 1, **more) for more in ({}, {"reason": 1024}))
    assert prompt.num_answer == 1024
    assert len(prompt.ids) == len(plain.ids) == 4000
    assert prompt.required == plain.required
    text = text_of(prompt, tokenizer)
    assert text.endswith("the last line is:\nFinal Answer: []\n")
    assert text_of(plain, tokenizer).endswith(".\nFinal Answer:")
    nodes = ", ".join(prompt.required)
    task = in_form(Settings(tasks=("graphwalks",), reason=True), Encoder(tokenizer))
    assert task.answer_room == 4096
    for answer, expected in (
        (f"I begin at the node.\nFinal Answer: [{nodes}]", 1.0),
        (f"Final Answer: []\nNo, wait.\nFinal Answer: [{nodes}]\nThat is all.", 1.0),
        (f"Final Answer: [{nodes}]\nFinal Answer: []", 0.0),
        (f" [{nodes}]", 0.0),
    ):
        assert task.grade(answer, SimpleNamespace(required=prompt.required)) == expected
    assert GraphWalks().grade(f" [{nodes}]\nFinal Answer: []", SimpleNamespace(required=prompt.required)) == 1.0


def test_reasoning_is_first_in_the_assistant_message():
    tokenizer = with_template("qwen2_5")
    (prompt,) = prompts_of(GraphWalks(), tokenizer, 6000, 1, reason=True)
    assert text_of(prompt, tokenizer).endswith("Final Answer: []<|im_end|>\n<|im_start|>assistant\n")
    (prompt,) = prompts_of(GraphWalks(), tokenizer, 4000, 1, prompt="base")
    assert text_of(prompt, tokenizer).endswith("<|im_start|>assistant\nFinal Answer:")
    (prompt,) = prompts_of(GraphWalks(), tokenizer, 4000, 1)
    text = text_of(prompt, tokenizer)
    assert text.endswith("Final Answer: []<|im_end|>\n<|im_start|>assistant\n")
    assert "step by step" not in text


@pytest.mark.parametrize("tasks", [("perplexity",), ("passages", "short")])
def test_reasoning_needs_a_task_that_generates(tasks):
    with pytest.raises(CtxextError, match=r"^--reason has no effect on the selected tasks") as error:
        Settings(tasks=tasks, reason=True)
    assert error.value.hint == "Add a retrieval task, for example --task needle."


def test_reasoning_without_room_is_one_line(tokenizer):
    settings, encoder = Settings(tasks=("graphwalks",), reason=True, samples=1), Encoder(tokenizer)
    with pytest.raises(CtxextError, match="needs at least") as error:
        check_fits(in_form(settings, encoder), encoder, [1200], settings)
    assert error.value.hint.endswith("Or use fewer tokens: --reason N, or --no-think.")
