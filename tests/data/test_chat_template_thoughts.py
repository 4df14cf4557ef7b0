"""Prompts that end within a thought are named, as the model would think instead of answering."""

import json
import shutil

import pytest

from ctxext.data.encoding import Encoder
from ctxext.data.thoughts import find_open_thought
from hand_made import make_tokenizer

PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<answer>"
OPEN = PLAIN + "<think>\n{% endif %}"
CLOSED = PLAIN + "{% if not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"


@pytest.mark.parametrize(
    ("text", "mark"),
    [
        ("Q<answer><think>\n", "<think>"),
        ("Q<answer><think>\n\n</think>\n\n", ""),
        ("Q</think><answer>", ""),
        ("<think></think><think>", "<think>"),
        ("[INST]Q[/INST][THINK]", "[THINK]"),
        ("<|CHATBOT_TOKEN|><|START_THINKING|><|END_THINKING|>", ""),
        ("<|CHATBOT_TOKEN|><|START_THINKING|>", "<|START_THINKING|>"),
        ("Q<answer>", ""),
    ],
)
def test_marks(text, mark):
    assert find_open_thought(text) == mark


@pytest.mark.parametrize(("template", "mark"), [(OPEN, "<think>"), (CLOSED, ""), (PLAIN + "{% endif %}", "")])
def test_templates(template, mark):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    facts = Encoder(tokenizer).facts()
    assert facts == {"chat_template": "yes", **({"open_thought": mark} if mark else {})}
    assert Encoder(tokenizer, chat_template=False).facts() == {"chat_template": "no"}


@pytest.fixture
def thinker(checkpoint, tmp_path):
    folder = tmp_path / "thinker"
    shutil.copytree(checkpoint, folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": OPEN}))
    (folder / "chat_template.jinja").write_text(OPEN)
    return folder


ASKED = ("--task", "passkey", "--lengths", "300", "--samples", "1", "--depths", "1", "--allow-beyond", "--json")


@pytest.mark.thorough
def test_eval_warns_and_reports(thinker, tmp_path, run):
    result = run("eval", str(thinker), *ASKED, "--out", str(tmp_path / "report"))
    assert result.exit_code == 0, result.output
    assert 'warning: The prompts of thinker end within "<think>"' in " ".join(result.stderr.split())
    assert json.loads(result.stdout)["models"][0]["open_thought"] == "<think>"
    result = run("eval", str(thinker), *ASKED, "--no-chat-template", "--out", str(tmp_path / "plain"))
    assert "within" not in result.stderr
