"""Thoughts of reasoning models: their marks in published templates, their switch, and the answer after them."""

import itertools

import pytest

from ctxext.data.encoding import Encoder, PromptForm
from ctxext.data.thoughts import MARKS, SHARED, find_open_thought, has_thoughts, read_thoughts, remove_thoughts
from ctxext.errors import CtxextError
from hand_made import make_tokenizer

PAIRS = [pair for pair in MARKS.items() if pair[1] not in SHARED]
THINK = {"<think>": "</think>"}


def with_template(template):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def written_by_hand():
    """Yield a generated text, the mark that the prompt leaves open, and the answer in it."""
    answers = ("42", "It is 42.", "", "a < b", "First line.\n\nSecond line.")
    for (begin, end), answer in itertools.product(PAIRS, answers):
        yield f"{begin}\nIs it 41?\n{end}\n\n{answer}", "", answer
        yield f"Is it 41?{end}{answer}", begin, answer
        yield f"Is it 41?\n{end}\n{answer}", "", answer
        yield f"{begin}Is it 41?", "", ""
        yield "Is it 41? No.", begin, ""
    for (begin, end), answer in itertools.product(PAIRS, answers[:2]):
        yield answer, "", answer
        yield f"{begin}41{end}{answer}{begin}40{end}", "", answer
        yield f"{begin}41{end}{begin}40{end}{answer}", "", answer
        yield f"41{end}40{end}{answer}", begin, answer
        yield f"{answer}{begin}And is it", "", answer
        yield f"{begin}{end}{answer}", "", answer


def test_the_answer_is_what_is_outside_of_thoughts():
    cases = [*written_by_hand()]
    assert len(cases) > 200
    for text, is_open, answer in cases:
        assert remove_thoughts(text, MARKS, is_open) == answer, text
        thinks = any(words in text for words in ("41", "40", "And is it"))
        assert has_thoughts(text, answer, MARKS) == thinks, text


def test_the_messages_of_harmony():
    """Of gpt-oss: https://github.com/openai/harmony. Its end of thoughts also ends every other message."""
    begin = "<|channel|>analysis<|message|>"
    text = f"{begin}Is it 41?<|end|><|start|>assistant<|channel|>final<|message|>It is 42.<|return|>"
    assert remove_thoughts(text, MARKS) == "It is 42.<|return|>"
    assert has_thoughts(text, "It is 42.<|return|>", MARKS)
    assert not has_thoughts("<|channel|>final<|message|>It is 42.<|return|>", "It is 42.<|return|>", MARKS)
    assert remove_thoughts(f"{begin}Is it 41?", MARKS) == ""
    assert remove_thoughts("It is 42.<|end|>", MARKS) == "It is 42.<|end|>"


def test_the_channels_of_muse():
    """Its messages name their recipient; the header of the first one begins in the prompt."""
    text = " to=self<|message|>Is it 41?<|eom|><|start|>assistant to=user<|message|>It is 42.<|eot|>"
    assert remove_thoughts(text, MARKS) == "It is 42.<|eot|>"
    assert remove_thoughts(" to=self<|message|>Is it 41?", MARKS).strip() == ""
    assert remove_thoughts("It is 42.<|eom|>", MARKS) == "It is 42.<|eom|>"


@pytest.mark.parametrize(
    ("template", "has_switch", "are_default"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", False, False),
        ("{{ messages[0].content }}<think>\n", False, True),
        ("{{ messages[0].content }}{% if not enable_thinking|default(true) %}<think></think>{% endif %}", True, True),
        ("{{ messages[0].content }}{% if thinking %}<think>{% else %}</think>{% endif %}", True, False),
        ("{{ messages[0].content }}{% if thinking|default(true) %}[THINK]{% endif %}", True, True),
    ],
)
def test_the_switch_of_a_template(template, has_switch, are_default):
    thoughts = read_thoughts(with_template(template))
    assert (thoughts.has_switch, thoughts.are_default) == (has_switch, are_default)


def test_marks_are_those_of_the_template():
    assert read_thoughts(with_template("{{ messages[0].content }}<think>")).marks == THINK
    assert read_thoughts(with_template("{{ messages[0].content }}")).marks == MARKS
    assert (
        "<|channel|>analysis<|message|>"
        not in read_thoughts(with_template("{{ messages[0].content }}<|end|></think>")).marks
    )


def test_the_form_switches_thoughts():
    """Base prompts switch them off, as they begin the answer; chat leaves them to the template."""
    switch = "{% if enable_thinking is defined %}{{ enable_thinking }}{% else %}none{% endif %}"
    encoder = Encoder(with_template("{{ messages[0].content }}|" + switch))
    for thinks, expected in ((False, "|False"), (True, "|True"), (None, "|none")):
        ids = encoder.use_form(PromptForm(is_chat=True, thinks=thinks)).encode_message("Hello")
        assert encoder.tokenizer.decode(ids) == f"Hello{expected}"
    assert encoder.tokenizer.decode(encoder.encode_message("Hello")) == "Hello|False"


def test_an_encoder_of_a_form_is_always_the_same():
    """Books are remembered by encoder."""
    encoder, form = Encoder(with_template("{{ messages[0].content }}<think>")), PromptForm(is_chat=True, thinks=True)
    assert encoder.use_form(form) is encoder.use_form(PromptForm(is_chat=True, thinks=True)) is not encoder
    assert encoder.use_form(form).use_form(encoder.form) is encoder
    assert encoder.use_form(form).open_thought == "<think>"


def test_answers_are_read_without_thoughts_only_in_chat():
    tokenizer = with_template("{{ messages[0].content }}<think>")
    encoder = Encoder(tokenizer)
    ids = [*encoder.encode_piece("41</think>\n\n42"), tokenizer.eos_token_id]
    assert encoder.read_answer(ids) == "41</think>\n\n42"
    assert encoder.use_form(PromptForm(is_chat=True, thinks=None)).read_answer(ids) == "42"
    assert encoder.use_form(PromptForm(is_chat=True)).clean_answer("41", is_separate=True) == "41"
    assert encoder.use_form(PromptForm(is_chat=True)).clean_answer("41") == ""


def test_marks_may_be_special_tokens():
    tokenizer = with_template("{{ messages[0].content }}[THINK]")
    assert not Encoder(tokenizer).needs_special_tokens
    tokenizer.add_special_tokens({"additional_special_tokens": ["[THINK]", "[/THINK]"]})
    encoder = Encoder(tokenizer).use_form(PromptForm(is_chat=True, thinks=None))
    assert encoder.needs_special_tokens
    ids = tokenizer("41[/THINK]42", add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "4142"
    assert encoder.read_answer(ids) == "42"


def test_a_broken_template_is_one_line():
    with pytest.raises(CtxextError, match="cannot be rendered"):
        read_thoughts(with_template("{{ nothing.content }}"))


def test_open_thoughts():
    assert find_open_thought("<think>41</think>") == ""
    assert find_open_thought("</think><think>") == "<think>"
