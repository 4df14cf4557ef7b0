"""LongPPL against a small independent version of its rules, with evaluators of another tokenizer."""

import json
import random

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from ctxext.api import Settings, evaluate
from ctxext.data.encoding import Encoder
from ctxext.errors import CtxextError
from ctxext.models import token_losses as scoring
from ctxext.report.page import render_page
from ctxext.tasks import longppl
from hand_made import tiny_llama


@pytest.fixture(scope="module")
def letters(tmp_path_factory):
    """A model that reads bytes: another tokenizer than the other models have."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({"<s>": 0, **{letter: n for n, letter in enumerate(alphabet, 1)}}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    folder = tmp_path_factory.mktemp("models") / "letters"
    tiny_llama(vocab_size=257, max_position_embeddings=2048).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>").save_pretrained(folder)
    return folder


def joined_by_hand(spans):
    """Every run of spans without a gap, as one span."""
    runs = []
    for span in spans:
        (runs[-1] if runs and runs[-1][-1][1] == span[0] else runs.append([]) or runs[-1]).append(span)
    return [(run[0][0], run[-1][1]) for run in runs]


def tokens_of_a_text(rng, length):
    """Places of tokens as fast tokenizers return them: some without their space, some of several tokens."""
    offsets, at = [], 0
    while at < length:
        end = at + rng.randint(1, 6)
        offsets += [(at + (rng.random() < 0.3 and end - at > 1), end)] * (2 if rng.random() < 0.1 else 1)
        at = end
    return offsets


def test_tokens_inside_key_tokens_of_another_tokenizer_on_200_texts():
    rng, num_chosen = random.Random(0), 0
    for _ in range(200):
        of_evaluator, of_model = tokens_of_a_text(rng, 120), tokens_of_a_text(rng, 120)
        keys = [span for span in of_evaluator if rng.random() < 0.4]
        spans = longppl.join_spans(keys)
        assert list(spans) == joined_by_hand(keys)
        inside = [n for n, (a, b) in enumerate(of_model) if any(x <= a and b <= y for x, y in spans)]
        assert longppl.select_tokens(of_model, spans) == inside
        num_chosen += len(inside)
    assert num_chosen > 1000


def test_the_window_is_the_published_one_if_the_texts_are_long_enough():
    windows = [longppl.choose_window(length) for length in (131072, 5120, 5119, 400)]
    assert windows == [(4096, 1024), (4096, 1024), (1279, 319), (100, 25)]


def losses_by_hand(model, ids):
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].double()
    return torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(ids[1:]), reduction="none")


@pytest.mark.thorough
def test_an_evaluator_of_another_tokenizer_and_its_file(checkpoint, letters, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(scoring, "GAIN", 0.05)
    monkeypatch.setattr(scoring, "LOSS", 8.0)
    file, options = tmp_path / "keys.jsonl", {"tasks": ("longppl",), "lengths": (120, 400), "samples": 2}
    chosen = {"evaluator": str(letters), "key_tokens": file}
    first = evaluate([str(checkpoint), str(letters)], Settings(**options, **chosen), out=tmp_path / "first")
    measured = first["models"][0]["longppl"]["400"]
    assert (measured["evaluator"], measured["window"]) == ("letters", [100, 25])
    assert "with short contexts of 100 to 124 tokens, as the texts are too short for 4096" in render_page(first)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["tokens"] for line in lines] == [400, 400]

    judge, encoder = tiny_llama(vocab_size=257, max_position_embeddings=2048), Encoder(tokenizer)
    total = count = 0
    for number in range(2):
        text = longppl_text(number)[:399]
        bytes_of = [0, *(Encoder(PreTrainedTokenizerFast.from_pretrained(letters)).encode_document(text)[1:])]
        whole, keys = losses_by_hand(judge, bytes_of), []
        for begin in range(0, 300, 25):
            short = losses_by_hand(judge, bytes_of[begin : begin + 125])[99:]
            alone = whole[begin + 99 : begin + 124]
            keys += [begin + 100 + n for n in range(25) if short[n] - alone[n] > 0.05 and alone[n] < 8.0]
        spans = joined_by_hand([(token - 1, token) for token in keys])
        places = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        inside = [n for n, (a, b) in enumerate(places) if any(x <= a and b <= y for x, y in spans)]
        total += float(losses_by_hand(tiny_llama(), encoder.encode_document(text))[inside].sum())
        count += len(inside)
    assert count > 10
    assert measured["count"] == count
    assert measured["loss"] == pytest.approx(total / count, abs=1e-5)

    longppl._find_spans.cache_clear()
    monkeypatch.setattr(scoring, "load_evaluator", lambda *_: pytest.fail("the evaluator was loaded"))
    again = evaluate([str(checkpoint)], Settings(**options, key_tokens=file), out=tmp_path / "again")
    assert again["models"][0]["longppl"] == first["models"][0]["longppl"]
    evaluate([str(checkpoint)], Settings(**options, **chosen), out=tmp_path / "with")
    assert len(file.read_text().splitlines()) == 2

    def refusal(**changes):
        with pytest.raises(CtxextError) as error:
            evaluate([str(checkpoint)], Settings(**{**options, "key_tokens": file, **changes}))
        return error.value.message.replace(str(tmp_path), "")

    assert refusal(seed=5) == '"/keys.jsonl" contains the key tokens of 0 of the 2 texts.'
    assert refusal(samples=3) == '"/keys.jsonl" contains the key tokens of 2 of the 3 texts.'
    assert refusal(lengths=(512,)) == '"/keys.jsonl" contains key tokens up to 400 tokens, but a prompt length is 512.'
    other = refusal(evaluator=str(checkpoint))
    assert other == '"/keys.jsonl" contains key tokens of "letters", not of "tiny".'
    file.write_text(file.read_text() + '{"spans": [[1, 2]]}\n')
    assert refusal().startswith('Line 3 of "/keys.jsonl"')
    assert refusal(key_tokens=tmp_path / "none") == 'The task "longppl" needs an evaluator.'


def longppl_text(number):
    from ctxext.data.texts import _join_prose

    return _join_prose(f"0 prose {number}", 2000)


@pytest.mark.parametrize("suffix", ["txt", "jsonl"])
@pytest.mark.thorough
def test_texts_of_a_file_are_found_again_without_the_evaluator(suffix, checkpoint, letters, tmp_path, monkeypatch):
    monkeypatch.setattr(scoring, "GAIN", 0.05)
    monkeypatch.setattr(scoring, "LOSS", 8.0)
    texts = [longppl_text(number) for number in (3, 4)]
    data, file = tmp_path / f"texts.{suffix}", tmp_path / "keys"
    rows = ["short", *texts]
    data.write_text("\n".join(json.dumps({"text": row}) for row in rows) if suffix == "jsonl" else " ".join(texts))
    options = {"tasks": ("longppl",), "lengths": (300,), "samples": 2, "data": str(data), "key_tokens": file}
    first = evaluate([str(checkpoint)], Settings(**options, evaluator=str(letters)))
    again = evaluate([str(checkpoint)], Settings(**options))
    assert again["models"][0]["longppl"] == first["models"][0]["longppl"]
    assert first["models"][0]["longppl"]["300"]["count"] > 10


def test_a_tokenizer_without_places_is_refused():
    class Slow:
        is_fast = False

    encoder = Encoder.__new__(Encoder)
    encoder.tokenizer = Slow()
    with pytest.raises(CtxextError, match="does not return the places"):
        encoder.encode_with_offsets("a text")
