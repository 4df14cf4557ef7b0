"""Learned parts of conversations, with the chat templates of published models.

`data/chat_templates.zip` has the templates that TRL 1.16.0 ships, and their licence. Those named `…_training` mark the
answers themselves, so transformers' own masks are the reference; for the others what is learned is written out here.
"""

import re
from types import SimpleNamespace

import pytest

from chat_tokenizers import TEMPLATES, answer, tokenizer_for, user
from ctxext.errors import CtxextError
from ctxext.finetune.chats import BadRecord, ChatReader
from ctxext.finetune.data import write_sequences
from ctxext.finetune.options import TrainingOptions
from ctxext.finetune.prepare import format_data_lines
from tiny_base import documents_of, write_records

CALL = {"type": "function", "id": "abcdef123", "function": {"name": "add", "arguments": {"a": "2"}}}
TOOL = {
    "name": "add",
    "description": "Adds.",
    "parameters": {"type": "object", "properties": {"a": {"type": "string", "description": "A."}}, "required": ["a"]},
}


def thought(number):
    return answer(f"Ans{number}.", reasoning_content=f"Hmm{number}.", thinking=f"Hmm{number}.")


CHATS = {
    "one": {"messages": [user("Q1?"), answer("Ans1.")]},
    "two": {"messages": [user("Q1?"), answer("Ans1."), user("Q2?"), answer("Ans2.")]},
    "tools": {
        "messages": [
            user("Q1?"),
            answer("", tool_calls=[CALL]),
            {"role": "tool", "name": "add", "tool_call_id": "abcdef123", "content": "4"},
            answer("Ans2."),
        ],
        "tools": [{"type": "function", "function": TOOL}],
    },
    "thinking": {"messages": [user("Q1?"), thought(1), user("Q2?"), thought(2)]},
    "thinking inside": {
        "messages": [
            user("Q1?"),
            answer("<think>\nHmm1.\n</think>\n\nAns1."),
            user("Q2?"),
            answer("<think>\nHmm2.\n</think>\n\nAns2."),
        ]
    },
}


def learned(name, chat, **changes):
    reader = ChatReader(tokenizer_for(name))
    return [text for text, is_answer in reader.split({**CHATS[chat], **changes}) if is_answer], reader


def says(text, end="<|im_end|>\n", begin=""):
    return f"{begin}{text}{end}"


NO_THOUGHT = "<think>\n\n</think>\n\n"
EXPECTED = {
    ("llama3", "two"): ["Ans1.<|eot_id|>", "Ans2.<|eot_id|>"],
    ("qwen2_5", "tools"): [
        '<tool_call>\n{"name": "add", "arguments": {"a": "2"}}\n</tool_call><|im_end|>\n',
        "Ans2.<|im_end|>\n",
    ],
    # The thinking of all answers except the last is dropped, even if it is empty.
    ("qwen3", "one"): [says("Ans1.", begin=NO_THOUGHT)],
    ("qwen3", "two"): [says("Ans2.", begin=NO_THOUGHT)],
    ("qwen3", "thinking"): ["<think>\nHmm2.\n</think>\n\nAns2.<|im_end|>\n"],
    ("qwen3", "thinking inside"): ["<think>\nHmm2.\n</think>\n\nAns2.<|im_end|>\n"],
    # The generation prompt ends with "<think>\n", or with an empty thought if the answer has none.
    ("qwen3_5_think", "two"): ["\n</think>\n\nAns2.<|im_end|>\n"],
    ("qwen3_5_nothink", "two"): ["Ans2.<|im_end|>\n"],
    ("qwen3_5_nothink", "thinking"): ["Hmm2.\n</think>\n\nAns2.<|im_end|>\n"],
    ("qwen3_6", "thinking"): ["Hmm2.\n</think>\n\nAns2.<|im_end|>\n"],
    ("qwen3_8", "thinking"): [f"Hmm{number}.\n</think>\n\nAns{number}.<|im_end|>\n" for number in (1, 2)],
    ("nemotron_3_nano", "two"): [f"</think>Ans{number}.<|im_end|>\n" for number in (1, 2)],
    ("nemotron_3_nano", "thinking"): ["Hmm2.\n</think>\nAns2.<|im_end|>\n"],
    # Only the last answer ends with the stop token; the others end with "<|end|>".
    ("gptoss", "one"): ["<|channel|>final<|message|>Ans1.<|return|>"],
    ("gptoss", "two"): ["<|channel|>final<|message|>Ans1.", "<|channel|>final<|message|>Ans2.<|return|>"],
    ("gptoss", "thinking"): [
        "<|channel|>analysis<|message|>Hmm2.<|end|><|start|>assistant<|channel|>final<|message|>Ans2.<|return|>"
    ],
    # The end of the text is added to the last answer.
    ("phi3", "two"): ["Ans1.<|end|>\n", "Ans2.<|end|>\n<|endoftext|>"],
    # The generation prompt ends with "<think>\n", which the answer does not repeat.
    ("deepseek_r1_distill", "two"): [f"Ans{number}.<｜end▁of▁sentence｜>" for number in (1, 2)],
    ("deepseekv3", "tools"): [
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
        '{"a": "2"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>',
        "Ans2.<｜end▁of▁sentence｜>",
    ],
    # The stop token is the first token of the next message.
    ("glm4moe", "two"): [f"\n<think></think>\nAns{number}.<|user|>" for number in (1, 2)],
    ("glm4moe", "tools"): [
        "\n<think></think>\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>2</arg_value>\n</tool_call><|observation|>",
        "\n<think></think>\nAns2.<|user|>",
    ],
    ("glm4moe", "thinking"): ["\n<think>Hmm2.</think>\nAns2.<|user|>"],
    ("glm4moe_training", "two"): [f"\n<think></think>\nAns{number}.<|user|>" for number in (1, 2)],
    # Its messages are lists of parts; plain text is not rendered.
    ("smolvlm", "two"): [f" Ans{number}.<end_of_utterance>\n" for number in (1, 2)],
    ("phi3_training", "tools"): ["Ans2.<|end|>\n<|endoftext|>"],
}


@pytest.mark.parametrize(("name", "chat"), EXPECTED)
def test_what_is_learned(name, chat):
    assert learned(name, chat)[0] == EXPECTED[name, chat]


REFUSED = ("cohere", "cohere2", "gemma", "gemma3", "llava_next")
"""Templates that do not support tools and raise an error."""


@pytest.mark.thorough
def test_every_template_trains_every_conversation():
    for name in TEMPLATES:
        for chat, record in CHATS.items():
            reader = ChatReader(tokenizer_for(name))
            if chat == "tools" and name.removesuffix("_training") in REFUSED:
                with pytest.raises(BadRecord, match="cannot be rendered"):
                    reader.split(record)
                continue
            parts = reader.split(record)
            answers = [text for text, is_answer in parts if is_answer]
            special = {str(token) for token in reader.tokenizer.added_tokens_decoder.values() if token.special}
            where = (name, chat, answers)
            assert f"Ans{1 if chat == 'one' else 2}." in answers[-1], where
            assert answers[-1].rstrip().endswith(tuple(special)), where
            assert not any("Q1?" in text or "Q2?" in text for text in answers), where
            whole = "".join(text for text, _ in parts)
            assert whole.count("Q1?") == 1, where
            num_answers = sum(bool(re.search(r"Ans\d\.|add", text)) for text in answers)
            left_out = reader.num_turns_left_out + reader.left_out["calls of tools"]
            assert num_answers == len(answers) == (1 if chat == "one" else 2) - left_out, where


@pytest.mark.thorough
def test_marked_answers_equal_those_of_transformers():
    compared = 0
    for name, template in TEMPLATES.items():
        if not re.search("{%-? generation", template) or name.startswith("glm"):
            continue
        for chat in ("one", "two", "thinking"):
            tokenizer = tokenizer_for(name)
            messages = CHATS[chat]["messages"]
            reader = ChatReader(tokenizer)
            if reader._needs_parts:
                messages = [
                    {**message, "content": [{"type": "text", "text": message["content"]}]} for message in messages
                ]
            expected = tokenizer.apply_chat_template(
                messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
            )
            marks = [
                (token, int(is_answer))
                for text, is_answer in reader.split(CHATS[chat])
                for token in tokenizer(text, add_special_tokens=False)["input_ids"]
            ]
            assert marks == list(zip(expected["input_ids"], expected["assistant_masks"], strict=True)), (name, chat)
            compared += 1
    assert compared >= 90


def test_answers_of_weight_zero_are_recognized_by_marks_of_the_template():
    messages = [{**message, "weight": 1} for message in CHATS["two"]["messages"]]
    for number, expected in ((1, ["Ans2.<|end|>\n<|endoftext|>"]), (3, ["Ans1.<|end|>\n"])):
        weighted = [{**message, "weight": int(at != number)} for at, message in enumerate(messages)]
        assert learned("phi3_training", "two", messages=weighted)[0] == expected


def learned_with(template, messages):
    parts = ChatReader(tokenizer_for("plain", template)).split({"messages": messages})
    return [text for text, is_answer in parts if is_answer]


def test_an_answer_that_begins_like_the_question_ends():
    """Characters that are equal by chance belong to the answer."""
    messages = [user("Q1?"), answer("<thing> is a tag.")]
    assert learned("deepseek_r1_distill", "one", messages=messages)[0] == ["<thing> is a tag.<｜end▁of▁sentence｜>"]
    plain = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '</s>' }}{% endfor %}" + (
        "{% if add_generation_prompt %}assistant: Thinking{% endif %}"
    )
    assert learned_with(plain, [user("Q1?"), answer("This is it.")]) == ["This is it.</s>"]


def test_an_end_that_a_template_does_not_mark_is_learned_too():
    marked = (
        "{% for m in messages %}{{ m['role'] }}: {% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}"
        "{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}{{ '<|end|>' }}{% endfor %}"
    )
    assert learned_with(marked, CHATS["two"]["messages"]) == ["Ans1.<|end|>", "Ans2.<|end|>"]


def test_an_answer_without_an_end_learns_the_end_of_the_text():
    plain = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] }}{% endfor %}" + (
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    reader = ChatReader(tokenizer_for("plain", plain))
    assert reader.split(CHATS["one"])[-1] == ("Ans1.</s>", True)


def read(tmp_path, name, *records, **more):
    path, tokenizer = write_records(tmp_path / "data.jsonl", records), tokenizer_for(name)
    return documents_of(tokenizer, path, **more), tokenizer


def test_omitted_records_are_reported(tmp_path):
    documents, _ = read(tmp_path, "qwen3", CHATS["two"], CHATS["thinking"], CHATS["one"])
    report = write_sequences(documents, tmp_path, num_needed={512: 9}, pack="restart", end=0)
    options = TrainingOptions(length=512, steps=1, batch_size=1, pack="restart").resolve(window=512, trained_length=512)
    lines = format_data_lines(report, options)
    assert any("2 answers not learned: the chat template changes them" in line for line in lines)
    documents, _ = read(tmp_path, "llama3", CHATS["tools"], CHATS["thinking"], CHATS["one"])
    assert len(list(documents)) == 3
    assert documents.chats.left_out == {"tools": 1, "calls of tools": 1, "thinking": 1}


def test_the_first_reason_is_reported_if_all_records_are_skipped(tmp_path):
    documents, _ = read(
        tmp_path, "llama3", {"messages": [user("Hi")]}, {"messages": [user("Hello")]}, skip_bad_rows=True
    )
    with pytest.raises(CtxextError, match=r"All 2 records were skipped. The first: .*no assistant message"):
        write_sequences(documents, tmp_path, num_needed={512: 9}, pack="off", end=0)


def test_calls_of_the_older_form_that_are_not_rendered_are_no_empty_answers(tmp_path):
    call = answer(None, function_call={"name": "add", "arguments": "{}"})
    result = {"role": "function", "name": "add", "content": "1"}
    documents, tokenizer = read(tmp_path, "llama3", {"messages": [user("Add."), call, result, answer("It is 1.")]})
    (document,) = documents
    ids = [token for token, is_learned in zip(document.ids, document.is_learned, strict=True) if is_learned]
    assert tokenizer.decode(ids) == "It is 1.<|eot_id|>"
    assert documents.chats.left_out == {"calls of tools": 1}


def test_calls_that_are_not_rendered_leave_nothing_to_learn(tmp_path):
    documents, _ = read(tmp_path, "llama3", {**CHATS["tools"], "messages": CHATS["tools"]["messages"][:2]})
    with pytest.raises(CtxextError, match="has no answer that the chat template renders"):
        list(documents)


def test_prompts_and_completions_may_be_messages(tmp_path):
    two = CHATS["two"]["messages"]
    documents, tokenizer = read(tmp_path, "llama3", {"prompt": two[:3], "completion": two[3:]})
    (document,) = documents
    answers = [token for token, is_learned in zip(document.ids, document.is_learned, strict=True) if is_learned]
    assert tokenizer.decode(answers) == "Ans2.<|eot_id|>"
    assert tokenizer.decode(document.ids) == tokenizer.apply_chat_template(two, tokenize=False)


@pytest.mark.parametrize(
    ("following", "stop"), [("<s>[INST]", "</s>"), ("<|end|>[INST]", "<|end|>"), ("[INST]", "</s>")]
)
def test_the_token_that_begins_a_message_is_no_end_token(following, stop):
    """The token after an answer with a reply ends it, unless it is the BOS token."""
    reader = ChatReader.__new__(ChatReader)
    reader.tokenizer = SimpleNamespace(bos_token="<s>", eos_token="</s>")
    reader._special, reader._needs_parts = {"<s>", "</s>", "<|end|>"}, False
    reader._render = lambda messages, more: "[INST]x[/INST]y" + (following + "x" if len(messages) > 2 else "")
    assert reader._find_last_stop("y", [answer("y")], {}) == stop
