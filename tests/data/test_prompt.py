import random
from itertools import islice

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, trainers
from transformers import PreTrainedTokenizerFast

from ctxext.checkpoint.opening import open_checkpoint
from ctxext.data import encoding, prose
from ctxext.data.encoding import Encoder, open_tokenizer, split_question
from ctxext.data.prompt import encode_parts, lay_out
from ctxext.data.texts import read_corpus
from ctxext.demo.corpus import long_examples
from ctxext.errors import CtxextError
from ctxext.tasks.documents import Documents
from ctxext.tasks.kv import KeyValue
from ctxext.tasks.needle import Needle, PassKey
from ctxext.tasks.retrieval import check_fits, make_questions
from ctxext.tasks.settings import Settings, even_depths

TASKS = [PassKey(), Needle(), Needle(num_needles=1), KeyValue(ids="number"), KeyValue(), Documents()]
TASKS += [KeyValue(ids="number", num_needles=4), Documents(num_needles=2)]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


@pytest.fixture(scope="module")
def word_start_tokenizer():
    """In the manner of Llama 2: every text it is given begins with a word start, wanted or not."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=False, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Replace("▁", " ")
    alphabet = [chr(code) for code in range(32, 127)] + ["\n", "▁"]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<unk>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(list(islice(prose.sentences(random.Random(0)), 200)), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
@pytest.mark.parametrize("length", [640, 801])
@pytest.mark.parametrize("chat", [False, True])
def test_prompts_have_the_exact_length_and_end_with_the_answer(tokenizer, task, length, chat):
    tokenizer = type(tokenizer)(tokenizer_object=tokenizer._tokenizer, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = TEMPLATE if chat else None
    encoder = Encoder(tokenizer)
    assert encoder.uses_chat == chat
    settings = Settings(depths=even_depths(4), seed=3)
    for number, question in enumerate(make_questions(task, encoder, length, range(2), settings)):
        pieces = task.fit_to_length(encoder, length).pieces(random.Random(f"3 {task.name} {length} {number} question"))
        texts = [tokenizer.decode(prompt.ids) for prompt in question]
        asks = pieces.questions
        num_texts = -(-4 // len(asks))
        asked_for = [(pieces.needles[n // num_texts], *asks[n // num_texts][:2]) for n in range(4)]
        for prompt, text, (_, wanted, expected) in zip(question, texts, asked_for, strict=True):
            assert len(prompt.ids) == length
            assert prompt.ids[0] == 0
            assert prompt.ids[1] != 0
            answer = tokenizer.decode(prompt.ids[-prompt.num_answer :])
            assert answer.startswith(expected)
            asked, lead_in = split_question(wanted)
            tail = f"{asked}\n[assistant] {lead_in}" if chat else wanted
            assert text.endswith(tail + answer)
            for needle in pieces.needles:
                assert text.count(needle.strip()) == 1
        where = [text.index(needle.strip()) for text, (needle, _, _) in zip(texts, asked_for, strict=True)]
        assert where == sorted(where)
        assert where[0] < where[-1]


@pytest.mark.parametrize("num_needles", [1, 3, 4])
def test_needles_are_at_their_depths(tokenizer, num_needles):
    depths = even_depths(5)
    task = Needle(num_needles=num_needles)
    pieces = task.pieces(random.Random("0 needle 2000 0 question"))
    num_texts = -(-5 // num_needles)
    (question,) = make_questions(task, Encoder(tokenizer), 2000, [0], Settings(depths=depths))
    for number, (depth, prompt) in enumerate(zip(depths, question, strict=True)):
        text = tokenizer.decode(prompt.ids)
        start, end = text.index("afterwards.\n") + 12, text.index("\nWhat is")
        at = text.index(pieces.needles[number // num_texts])
        needles = sum(len(needle) for needle in pieces.needles if text.index(needle) < at)
        filler = end - start - sum(map(len, pieces.needles))
        assert (at - start - needles) / filler == pytest.approx(depth, abs=0.04)


def test_pieces_of_a_tokenizer_that_marks_word_starts(word_start_tokenizer):
    encoder = Encoder(word_start_tokenizer)
    assert encoder._needs_anchor
    pieces = PassKey().pieces(random.Random(0))
    prompt = lay_out(pieces, encode_parts(pieces, encoder), encoder, 900, [0.5], random.Random(0))[0]
    # The decoder of this tokenizer joins its tokens with spaces, so the text is put together by hand.
    text = "".join(word_start_tokenizer.convert_ids_to_tokens(prompt.ids)).replace("▁", " ")
    assert len(prompt.ids) == 900
    assert text.startswith(f" {pieces.opening}")
    assert "  " not in text
    assert f".{pieces.needles[0]}" in text
    assert text.endswith(pieces.questions[0].question + pieces.questions[0].answer)
    assert " \n" not in text


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_a_too_small_length_is_refused_with_the_smallest_possible(tokenizer, task):
    encoder, settings = Encoder(tokenizer), Settings(samples=3)
    with pytest.raises(CtxextError, match="needs at least") as caught:
        check_fits(task, encoder, [30], settings)
    minimum = int(caught.value.message.split("at least ")[1].split()[0])
    # Questions differ by length, so the largest question at the smallest length may need a token or two more.
    fits = next(n for n in range(minimum, minimum + 40) if _fits(task, encoder, n, settings))
    for question in make_questions(task, encoder, fits, range(3), settings):
        assert len(question[0].ids) == fits
    if task == KeyValue():
        uuid = Settings(samples=3, kv_ids="uuid")
        with pytest.raises(CtxextError) as caught:
            check_fits(task, encoder, [30], uuid)
        assert "--kv-ids number" in caught.value.hint


def _fits(task, encoder, length, settings):
    try:
        check_fits(task, encoder, [length], settings)
    except CtxextError:
        return False
    return True


def test_a_users_haystack_is_used(tokenizer, tmp_path):
    (tmp_path / "own.txt").write_text("Alpha beta gamma. Delta\nepsilon! Zeta eta theta?\n\nIota kappa")
    (task,) = Settings(tasks=("needle",), haystack=tmp_path / "own.txt", num_needles=1).retrieval_tasks()
    assert task.text == ("Alpha beta gamma.", "Delta epsilon!", "Zeta eta theta?", "Iota kappa")
    prompt = make_questions(task, Encoder(tokenizer), 400, [0], Settings())[0][0]
    assert "Delta epsilon! Zeta eta theta? Iota kappa Alpha" in tokenizer.decode(prompt.ids)


def made_of(vocabulary, **more):
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(vocab=vocabulary, merges=[], **more)))


def test_a_tokenizer_that_makes_nothing_of_text_is_refused():
    """Loops that write until there are tokens enough would not end."""
    deaf = Encoder(made_of({"<s>": 0}))
    assert deaf.encode_document("a b") == []
    with pytest.raises(CtxextError, match="returns no tokens for"):
        read_corpus(None, deaf, count=1, length=8, most=8, seed=0)
    with pytest.raises(CtxextError, match="returns no tokens for"):
        make_questions(PassKey(), deaf, 200, [0], Settings(depths=(0.5,)))
    with pytest.raises(CtxextError, match="returns no tokens for"):
        next(iter(long_examples(made_of({"<s>": 0}), {64: 1}, seed=0)))


def test_a_failing_tokenizer_is_reported_in_one_line():
    broken = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordPiece(vocab={"b": 0}, unk_token="[UNK]")))
    with pytest.raises(CtxextError, match=r"The tokenizer fails: .*\[UNK\]"):
        Encoder(broken)


@pytest.mark.parametrize("kind", ["words", "word starts", "bytes"])
def test_a_long_text_is_tokenized_in_parts_to_the_same_tokens(kind, tokenizer, word_start_tokenizer, monkeypatch):
    chosen = {"words": tokenizer, "word starts": word_start_tokenizer, "bytes": demo_tokenizer()}[kind]
    rng, ends = random.Random(1), (" ", "\n", "\n\n", "  ", " -- ")
    text = "".join(sentence + rng.choice(ends) for sentence in islice(prose.sentences(rng), 300))
    whole = list(chosen(text, add_special_tokens=False)["input_ids"])
    calls = []
    counted = encoding.tokenize
    monkeypatch.setattr(
        encoding, "tokenize", lambda *given, **more: calls.append(len(given[1])) or counted(*given, **more)
    )
    monkeypatch.setattr(encoding, "_AT_ONCE", 2500)
    encoder = Encoder(chosen)
    assert encoder._encode(text) == whole
    assert max(calls) < len(text) / 4


def test_a_long_text_without_a_place_to_cut_it(monkeypatch):
    monkeypatch.setattr(encoding, "_AT_ONCE", 1000)
    monkeypatch.setattr(encoding, "_MOST_AT_ONCE", 4000)
    encoder = Encoder(demo_tokenizer())
    assert len(encoder._encode("x" * 3900)) > 900
    with pytest.raises(CtxextError, match="4000 characters have no safe boundary"):
        encoder._encode("x" * 9000)


def test_a_cut_that_would_change_tokens_is_not_made(monkeypatch):
    """Two spaces are one token: behind the first of them no text may be cut, before it any."""
    vocabulary = {"<unk>": 0, "x": 1, "y": 2, " ": 3, "  ": 4, "a": 5}
    tokenizer = Tokenizer(models.BPE(vocabulary, [(" ", " ")], unk_token="<unk>"))
    chosen = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")
    monkeypatch.setattr(encoding, "_AT_ONCE", 1000)
    assert Encoder(chosen)._encode("x  y" * 900) == [1, 4, 2] * 900


def demo_tokenizer():
    return open_tokenizer(open_checkpoint("demo").folder)
