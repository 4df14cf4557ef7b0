import json
import random
from itertools import islice
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import ctxext.demo
from ctxext.data.encoding import Encoder
from ctxext.demo.corpus import TASKS, _make_facts_then_questions, long_examples, make_example, make_prompt

CHECKPOINT = Path(ctxext.demo.__file__).parent / "checkpoint"
LARGEST = 8 * 1024 * 1024
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(CHECKPOINT)


@pytest.fixture(scope="module")
def encode(tokenizer):
    return lambda text: tokenizer.encode(text, add_special_tokens=False)


def test_everything_that_ships_is_small():
    assert sum(path.stat().st_size for path in CHECKPOINT.rglob("*")) <= LARGEST


@pytest.mark.parametrize(
    "text",
    [
        "Plain words, and numbers 0 12 345 6789.",
        " leading,  double and trailing spaces ",
        "tabs\tand\r\nline\n\n\nends",
        "Ünïcödé, 漢字, العربية, हिन्दी",
        "emoji 🧭👩‍👩‍👧‍👦🏳️‍🌈",
        "\x00\x7f controls",
        "",
    ],
)
def test_tokenizer_encodes_any_text_without_loss(tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode(text) == [tokenizer.bos_token_id, *ids]


def test_numbers_are_groups_of_three_digits(tokenizer):
    assert tokenizer.tokenize("48213") == ["482", "13"]


def test_config_is_what_was_trained():
    written = json.loads((CHECKPOINT / "config.json").read_text(encoding="utf-8"))
    assert written["rope_theta"] == written["rope_parameters"]["rope_theta"] == 10000.0
    config = AutoConfig.from_pretrained(CHECKPOINT)
    tokenizer_config = json.loads((CHECKPOINT / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert config.max_position_embeddings == tokenizer_config["model_max_length"] == 512
    assert (config.num_attention_heads, config.num_key_value_heads) == (8, 4)
    assert config.tie_word_embeddings


def test_weights_are_bfloat16_and_complete():
    with safe_open(CHECKPOINT / "model.safetensors", "pt") as file:
        dtypes = {file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118 - not a mapping
    assert dtypes == {"BF16"}
    _, report = AutoModelForCausalLM.from_pretrained(CHECKPOINT, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))


def test_model_and_tokenizer_agree(tokenizer):
    model = AutoModelForCausalLM.from_pretrained(CHECKPOINT)
    assert model.config.vocab_size == len(tokenizer) == model.get_input_embeddings().num_embeddings
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id


@pytest.mark.parametrize("length", [64, 100, 512, 2048])
def test_training_text_is_seeded_and_of_the_exact_length(encode, length):
    for prompt_share in (0.0, 1.0):
        examples = [make_example(encode, [0], random.Random(seed), length, prompt_share) for seed in (1, 1, 2, 3, 4, 5)]
        assert examples[0] == examples[1] != examples[2]
        assert all(len(example.ids) == len(example.is_answer) == length for example in examples)
        assert any(any(example.is_answer) for example in examples)


@pytest.mark.parametrize("name", TASKS)
def test_prompts_hold_their_needle_at_the_depth(encode, tokenizer, name):
    task = TASKS[name][0]
    places = []
    for depth in DEPTHS:
        prompt = make_prompt(encode, [0], random.Random(1), 512, task, depth)
        assert prompt is not None
        assert len(prompt.ids) == 512
        text = tokenizer.decode(prompt.ids)
        assert text.endswith(task.pieces(random.Random(1)).questions[0].answer)
        places.append(text.index(task.pieces(random.Random(1)).needles[0]))
    assert places == sorted(places)
    assert make_prompt(encode, [0], random.Random(1), 16, task, 0.5) is None


@pytest.mark.slow
@pytest.mark.parametrize("name", ["passkey", "needle", "kv-number"])
def test_recall_inside_the_window(encode, name):
    model = AutoModelForCausalLM.from_pretrained(CHECKPOINT).eval()
    for depth in DEPTHS:
        right = 0
        for seed in range(100):
            prompt = make_prompt(encode, [0], random.Random(f"test {depth} {seed}"), 512, TASKS[name][0], depth)
            right += answers_exactly(model, prompt)
        assert right >= 95, (name, depth)


def answers_exactly(model, prompt):
    """Whether greedy decoding would return the answer: each of its tokens is the arg-max given those before it."""
    count = sum(prompt.is_answer)
    with torch.inference_mode():
        logits = model(torch.tensor([prompt.ids]), logits_to_keep=count + 1).logits
    return logits[0, :-1].argmax(-1).tolist() == prompt.ids[-count:]


def test_examples_have_the_requested_lengths_and_some_answers(tokenizer):
    documents = list(islice(long_examples(tokenizer, {128: 4, 512: 2}, seed=0), 12))
    assert [len(document.ids) for document in documents] == [128] * 4 + [512] * 2 + [128] * 4 + [512] * 2
    assert all(0 < sum(document.is_answer) < len(document.ids) for document in documents)
    assert documents[0] != documents[6]
    assert documents == list(islice(long_examples(tokenizer, {128: 4, 512: 2}, seed=0), 12))
    assert documents != list(islice(long_examples(tokenizer, {128: 4, 512: 2}, seed=1), 12))


@pytest.mark.parametrize("length", [256, 2048])
@pytest.mark.thorough
def test_every_answer_occurs_once_and_some_are_distant(tokenizer, length):
    encoder = Encoder(tokenizer, chat_template=False)
    furthest = 0
    for seed in range(20):
        start = encoder.get_start_tokens()
        example = _make_facts_then_questions(encoder.encode_piece, start, random.Random(seed), length)
        assert len(example.ids) == len(example.is_answer) == length
        text = ",".join(map(str, example.ids))
        first = example.is_answer.index(True)
        size = next(n for n in range(1, 9) if first + n == length or not example.is_answer[first + n])
        answer = ",".join(map(str, example.ids[first : first + size]))
        place = text.index(answer)
        assert place < len(",".join(map(str, example.ids[:first])))
        furthest = max(furthest, first - text[:place].count(","))
    assert furthest > 0.6 * length
