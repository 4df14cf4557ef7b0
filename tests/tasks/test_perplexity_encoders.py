"""Encoders: pseudo-perplexity and the passages, by models made by hand whose answers are known beforehand."""

import json
import random
import re
import zlib
from types import SimpleNamespace

import pytest
import torch
import transformers

from ctxext.api import Recipe, convert
from ctxext.data.encoding import Encoder
from ctxext.errors import CtxextError
from ctxext.evaluate.plan import check_kind, default_tasks
from ctxext.evaluate.run import evaluate
from ctxext.models import similarity
from ctxext.models.checkpoint_info import open_infos
from ctxext.models.model import LoadedModel
from ctxext.recipes.methods.table import Table
from ctxext.tasks.passages import Passages
from ctxext.tasks.perplexity import PseudoPerplexity
from ctxext.tasks.retrieval import check_fits, make_questions
from ctxext.tasks.settings import Settings

LENGTH = 256
DEPTHS = (0.0, 0.25, 0.75, 1.0)
SETTINGS = Settings(tasks=("passages",), samples=6, depths=DEPTHS)


class Reader(torch.nn.Module):
    """Represents a text by what its fact or question is about, if it sees it; otherwise all texts alike."""

    def __init__(self, words, sees):
        super().__init__()
        self.words, self.sees = words, sees
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.config = transformers.BertConfig(num_hidden_layers=1)
        self.device, self.dtype = torch.device("cpu"), torch.float32

    @property
    def base_model(self):
        return self

    def forward(self, input_ids):
        states = torch.ones(*input_ids.shape, 64)
        for row, ids in enumerate(input_ids):
            text = self.words.decode(ids, skip_special_tokens=True)
            about = re.search(r"number for (.+?)(\?| is:)", text)
            if about[2] == "?" or self.sees(about.start() / len(text)):
                states[row] = torch.randn(64, generator=torch.Generator().manual_seed(zlib.crc32(about[1].encode())))
        return SimpleNamespace(last_hidden_state=states)


def shares(words, sees):
    model = LoadedModel("reader", Reader(words, sees), Encoder(words), can_share=False, kind="encoder")
    questions = make_questions(Passages(), model.encoder, LENGTH, range(6), SETTINGS)
    answers = Passages().score(model, questions, range(len(DEPTHS)), generate=False)
    return [sum(scored.scores) / len(scored.scores) for scored in answers]


@pytest.mark.thorough
def test_who_sees_all_finds_all_and_who_sees_half_that_half(words):
    assert shares(words, lambda place: True) == [1.0, 1.0, 1.0, 1.0]
    assert shares(words, lambda place: False) == [0.0, 0.0, 0.0, 0.0]
    assert shares(words, lambda place: place < 0.5) == [1.0, 1.0, 0.0, 0.0]
    assert shares(words, lambda place: place > 0.5) == [0.0, 0.0, 1.0, 1.0]


@pytest.mark.thorough
def test_who_guesses_is_right_by_chance(words, monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(similarity, "pool_texts", lambda _, texts: torch.randn(len(texts), 8))
    task, model = Passages(), LoadedModel("dice", None, Encoder(words), can_share=False, kind="encoder")
    questions = make_questions(task, model.encoder, 64, range(400), SETTINGS)
    (scored,) = task.score(model, questions, [0], generate=False)
    right = scored.scores
    assert sum(right) / len(right) == pytest.approx(1 / 8, abs=0.05)


def test_passages_differ_only_in_their_fact_and_have_the_requested_length(words):
    (question,) = make_questions(Passages(), Encoder(words), LENGTH, [0], SETTINGS)
    for prompt, depth in zip(question, DEPTHS, strict=True):
        assert {len(passage) for passage in prompt.passages} == {LENGTH}
        assert len(prompt.passages) == 8
        assert all((passage[0], passage[-1]) == (0, 1) for passage in prompt.passages)
        texts = [words.decode(passage, skip_special_tokens=True) for passage in prompt.passages]
        places = [text.index("The special magic number for ") / len(text) for text in texts]
        assert max(abs(place - depth) for place in places) < 0.15
        key = words.decode(prompt.queries[0], skip_special_tokens=True).split(" for ")[1].rstrip("?")
        assert [f"number for {key} is" in text for text in texts] == [True] + 7 * [False]
    again = make_questions(Passages(), Encoder(words), LENGTH, [0], SETTINGS)[0]
    assert [prompt.passages for prompt in again] == [prompt.passages for prompt in question]


def test_a_length_that_holds_no_fact_is_refused(words):
    with pytest.raises(CtxextError, match='The task "passages" needs at least'):
        check_fits(Passages(), Encoder(words), [12], SETTINGS)
    encoder, pieces = Encoder(words), Passages().pieces(random.Random(0))
    assert Passages().size(pieces, encoder) == 2 + max(len(encoder.encode_piece(fact)) for fact in pieces.needles)


class Counter(torch.nn.Module):
    """Guesses that a token is its left neighbour's number plus one, in the part it can see; elsewhere nothing."""

    def __init__(self, sees, size=700):
        super().__init__()
        self.sees, self.size, self.seen = sees, size, []
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.config = transformers.BertConfig(num_hidden_layers=1, vocab_size=size)
        self.device, self.dtype = torch.device("cpu"), torch.float32

    @property
    def base_model(self):
        return self

    def forward(self, input_ids):
        self.seen.append(input_ids)
        logits = torch.zeros(*input_ids.shape, self.size)
        for row in range(len(input_ids)):
            for place in range(1, input_ids.shape[1]):
                if self.sees(place):
                    logits[row, place, (input_ids[row, place - 1] + 1) % self.size] = 100.0
        return SimpleNamespace(logits=logits)


def counted(words, sees):
    return LoadedModel("counter", Counter(sees), Encoder(words), can_share=False, kind="masked")


@pytest.mark.parametrize(
    ("sees", "beginning", "end"),
    [(lambda place: True, 0.0, 0.0), (lambda place: False, 1.0, 1.0), (lambda place: place < 34, 0.0, 1.0)],
    ids=["all", "nothing", "half"],
)
def test_the_curve_shows_the_known_positions(words, sees, beginning, end):
    ids = list(range(9, 9 + 64))
    encoder = SimpleNamespace(get_end_tokens=lambda: [1])
    asked = SimpleNamespace(documents=lambda _: [[0, *ids]], lengths=(32, 64), longest=64, encoder=encoder, text="")
    (work,) = PseudoPerplexity().documents_to_read(asked)
    (record,) = work.run(counted(words, sees), set(work.keys))
    unknown = float(torch.tensor(700.0).log())
    buckets = [total / count for total, count in record["buckets"]]
    assert [count for _, count in record["buckets"]] == [15, 16, 16, 15]
    first_token = buckets[0] - 100.0 / 15 if beginning == 0 else buckets[0]
    assert first_token == pytest.approx(beginning * unknown, abs=0.01)
    assert buckets[3] == pytest.approx(end * unknown, abs=0.01)
    assert record["lengths"]["64"][1] == 62
    assert record["lengths"]["32"][1] == 30


def small_bert(folder, words, *, head="BertForMaskedLM", window=64):
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(words),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=48,
        max_position_embeddings=window,
        initializer_range=0.3,
    )
    getattr(transformers, head)(config).save_pretrained(folder)
    words.model_max_length = window
    words.save_pretrained(folder)
    return folder


def test_a_whole_evaluation_by_the_kind_of_model(words, tmp_path):
    source = small_bert(tmp_path / "bert", words)
    convert(str(source), tmp_path / "bert-128", Recipe([Table(factor=2)]), check=False)
    models = [str(source), str(tmp_path / "bert-128")]
    tasks = ("passages", "pseudo-perplexity", "short")
    settings = Settings(tasks=tasks, samples=2, depths=(0.0, 1.0))
    report = evaluate(models, settings, out=tmp_path / "report")
    first, second = report["models"]
    assert {cell["length"] for cell in second["cells"]} == {64, 128}
    assert second["perplexity"]["task"] == "pseudo-perplexity"
    assert [point["end"] for point in second["perplexity"]["curve"]] == list(range(16, 129, 16))
    assert second["perplexity"]["lengths"].keys() == {"64", "128"}
    assert second["short"]["length"] == 64
    # tile leaves the first rows as they are.
    assert second["short"]["against"]["loss"] == pytest.approx(0, abs=1e-6)
    assert first["short"]["loss"] == pytest.approx(second["short"]["loss"], abs=1e-6)
    assert first["kind"] == second["kind"] == "masked"
    page = (tmp_path / "report" / "report.html").read_text()
    assert "Pseudo-perplexity" in page
    assert "chance is one in eight" in page
    assert json.loads((tmp_path / "report" / "report.json").read_text()) == json.loads(json.dumps(report))
    again = evaluate(models, settings, out=tmp_path / "report", resume=True)
    assert again["models"][1]["perplexity"] == second["perplexity"]


def test_the_default_tasks_are_those_of_the_kind_and_others_are_refused(words, tmp_path):
    from ctxext.models.model import Loading

    masked = str(small_bert(tmp_path / "masked", words))
    bare = str(small_bert(tmp_path / "bare", words, head="BertModel"))
    assert default_tasks([masked], Loading()) == ("passages", "short")
    assert default_tasks([bare], Loading()) == ("passages", "topics")
    assert default_tasks([masked, bare], Loading()) == ("passages",)
    assert default_tasks(["demo", masked], Loading()) == ("short",)
    for model, task in ((masked, "needle"), (masked, "perplexity"), (bare, "short"), (bare, "pseudo-perplexity")):
        with pytest.raises(CtxextError, match=f'"{task}" does not support') as caught:
            evaluate([model], Settings(tasks=(task,)))
        assert "passages" in caught.value.hint
    with pytest.raises(CtxextError, match='"passages" does not support "demo"'):
        evaluate(["demo"], Settings(tasks=("passages",)))
    assert default_tasks(["demo"], Loading()) == ("needle", "short")
    (info,) = open_infos([masked])
    for settings, loading, what in (
        (Settings(tasks=("passages",), harness=("longbench",)), Loading(), "--harness"),
        (Settings(tasks=("passages",)), Loading(engine="vllm"), "--engine vllm"),
    ):
        with pytest.raises(CtxextError, match=f"{what} supports only causal language models"):
            check_kind(info, settings, loading)
    report = evaluate([bare], Settings(tasks=("passages",), samples=1, depths=(0.5,)))
    assert report["models"][0]["kind"] == "encoder"
    classifier = str(small_bert(tmp_path / "judge", words, head="BertForSequenceClassification"))
    with pytest.raises(CtxextError, match="neither a causal nor a masked language model"):
        evaluate([classifier], SETTINGS)
