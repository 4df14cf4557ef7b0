"""Sentence encoders: their pooling and their cut, and the task of topics by models made by hand."""

import json
import re
import zlib
from types import SimpleNamespace

import pytest
import torch
import transformers

from ctxext.data.encoding import Encoder
from ctxext.errors import CtxextError
from ctxext.evaluate.run import evaluate
from ctxext.models.checkpoint_info import open_infos
from ctxext.models.model import LoadedModel, Loading, Pooler, load_model, open_pooler
from ctxext.models.similarity import pool_texts
from ctxext.tasks.passages import TOPICS, TOPICS_IN_CHUNKS, Topics
from ctxext.tasks.retrieval import make_questions
from ctxext.tasks.settings import Settings
from tiny_encodings import save, save_tokenizer

LENGTH, DEPTHS = 900, (0.1, 0.45, 0.55, 0.9)
SETTINGS = Settings(tasks=("topics",), samples=16, depths=DEPTHS)
TYPE = "sentence_transformers.models"


class Topical(torch.nn.Module):
    """Represents a text by the topics that it sees a sentence or a question about."""

    def __init__(self, words):
        super().__init__()
        self.words = words
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.config = transformers.BertConfig(num_hidden_layers=1)
        self.device, self.dtype, self.rows = torch.device("cpu"), torch.float32, 0

    def forward(self, input_ids):
        self.rows += len(input_ids)
        states = torch.full((*input_ids.shape, 256), 1e-3)
        for row, ids in enumerate(input_ids):
            text = self.words.decode(ids, skip_special_tokens=True)
            asked = re.match(r"What is known about (.+)\?", text)
            seen = [asked[1]] if asked else [topic for topic, sentence in TOPICS.items() if sentence in text]
            for topic in seen:
                states[row] += torch.randn(256, generator=torch.Generator().manual_seed(zlib.crc32(topic.encode())))
        return SimpleNamespace(last_hidden_state=states)


def shares(words, task, length=None):
    model = LoadedModel("topical", Topical(words), Encoder(words), can_share=False, kind="encoder")
    model = LoadedModel(**{**vars(model), "pooler": Pooler(length=length)})
    questions = make_questions(task, model.encoder, LENGTH, range(16), SETTINGS)
    answers = [sum(right) / len(right) for _, right, *_ in task.score(model, questions, range(4), generate=False)]
    return answers, model.model.rows


@pytest.mark.thorough
def test_what_is_read_is_found_and_what_is_cut_is_not(words):
    answers, rows = shares(words, Topics())
    assert answers == [1.0] * 4
    assert rows <= 16 + 2 * len(TOPICS), "each text is read once"
    (first, *others), _ = shares(words, Topics(), 300)
    assert first == 1.0
    assert max(others) < 0.4


@pytest.mark.parametrize("task", TOPICS_IN_CHUNKS)
def test_chunks_find_what_lies_behind_the_cut(words, task):
    assert min(shares(words, task, 300)[0]) >= 0.8


@pytest.mark.thorough
def test_the_questions_about_the_same_documents(words):
    questions = make_questions(Topics(), Encoder(words), LENGTH, range(9), SETTINGS)
    asked = [[words.decode(prompt.queries[0], skip_special_tokens=True) for prompt in prompts] for prompts in questions]
    assert len({topic for topics in asked[:8] for topic in topics}) == 32
    documents = {tuple(passage) for prompts in questions[:8] for prompt in prompts for passage in prompt.passages}
    assert len(documents) == 8
    assert not documents & set(map(tuple, questions[8][0].passages))
    for prompts, topics in zip(questions, asked, strict=True):
        for prompt, question, depth in zip(prompts, topics, DEPTHS, strict=True):
            assert {len(passage) for passage in prompt.passages} == {LENGTH}
            sentence = TOPICS[question.removeprefix("What is known about ").rstrip("?")]
            first, *others = (words.decode(passage, skip_special_tokens=True) for passage in prompt.passages)
            assert first.index(sentence) / len(first) == pytest.approx(depth, abs=0.1)
            assert not any(sentence in other for other in others)
    again = make_questions(TOPICS_IN_CHUNKS[1], Encoder(words), LENGTH, [3], SETTINGS)
    assert again[0][1].passages == questions[3][1].passages


def test_more_depths_than_topics_in_a_document(words):
    settings = Settings(tasks=("topics",), depths=tuple(n / 10 for n in range(11)))
    (prompts,) = make_questions(Topics(), Encoder(words), LENGTH, [5], settings)
    for prompt, depth in zip(prompts, settings.depths, strict=True):
        text = words.decode(prompt.passages[0], skip_special_tokens=True)
        topic = (
            words.decode(prompt.queries[0], skip_special_tokens=True).removeprefix("What is known about ").rstrip("?")
        )
        assert text.index(TOPICS[topic]) / len(text) == pytest.approx(depth, abs=0.12)


def test_a_text_is_cut_within_its_end_and_chunks_hold_all_of_it():
    text, pooler = [0, *range(10, 20), 1], Pooler(length=6)
    assert pooler.cut(text, [0], [1]) == [0, 10, 11, 12, 13, 1]
    assert pooler.chunks(text, [0], [1]) == [[0, 10, 11, 12, 13, 1], [0, 14, 15, 16, 17, 1], [0, 18, 19, 1]]
    assert Pooler().chunks(text, [0], [1]) == Pooler(length=12).chunks(text, [0], [1]) == [text]


def make_encoder(folder, modules=("Transformer", "Pooling"), **pooling):
    save_tokenizer(save("bert", folder, name="BertModel"))
    entries = [
        {"idx": n, "name": str(n), "type": f"{TYPE}.{name}", "path": f"{n}_{name}" if n else ""}
        for n, name in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(entries))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 8}))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling/config.json").write_text(json.dumps({"word_embedding_dimension": 16, **pooling}))
    return folder


def loaded_from(folder):
    (info,) = open_infos([str(folder)])
    return load_model(info, Loading())


POOLINGS = {
    "cls": {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False},
    "two": {
        "pooling_mode_cls_token": True,
        "pooling_mode_mean_sqrt_len_tokens": True,
        "pooling_mode_mean_tokens": False,
    },
    "max": {"pooling_mode": "max"},
}


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.thorough
def test_texts_are_pooled_and_truncated_as_the_files_specify(pooling, tmp_path):
    loaded = loaded_from(make_encoder(tmp_path / "m", **POOLINGS[pooling]))
    assert loaded.pooler.length == 8
    text = [2, 7, 8, 9, 3]
    with torch.no_grad():
        states = loaded.model(torch.tensor([text])).last_hidden_state[0].double()
    wanted = {
        "cls": lambda: states[0],
        "two": lambda: torch.cat([states[0], states.sum(0) / 5**0.5]),
        "max": lambda: states.max(0).values,
    }[pooling]()
    assert torch.allclose(pool_texts(loaded, [text])[0], wanted / wanted.norm(), atol=1e-6)


def test_modules_that_need_more_are_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    folder = make_encoder(tmp_path / "m", ("Transformer", "Pooling", "Dense"))
    with pytest.raises(CtxextError, match=r"needs modules of sentence-transformers: .*Dense"):
        open_pooler(*open_infos([str(folder)]))
    (folder / "modules.json").write_text(json.dumps([{"type": "mine.Transformer", "path": ""}]))
    with pytest.raises(CtxextError, match=r"mine\.Transformer, which does not belong"):
        open_pooler(*open_infos([str(folder)]))


@pytest.mark.thorough
def test_a_whole_evaluation_reads_beyond_the_cut(tmp_path, words):
    source = make_encoder(tmp_path / "m")
    words.save_pretrained(source)
    sized = transformers.BertConfig.from_pretrained(source, vocab_size=len(words))
    transformers.BertModel(sized).save_pretrained(source)
    settings = Settings(tasks=("topics", "topics-averaged"), samples=8, depths=(0.5,), lengths=(400,))
    (model,) = evaluate([str(source)], settings)["models"]
    assert {(cell["task"], cell["length"], cell["samples"]) for cell in model["cells"]} == {
        ("topics", 400, 8), ("topics-averaged", 400, 8),
    }  # fmt: skip


@pytest.mark.parametrize("modules", [("Transformer", "Pooling"), ("Transformer", "Pooling", "Dense", "Normalize")])
def test_vectors_are_those_of_sentence_transformers(modules, tmp_path):
    library = pytest.importorskip("sentence_transformers")
    folder = make_encoder(tmp_path / "m", modules, pooling_mode_mean_tokens=True)
    if "Dense" in modules:
        from sentence_transformers.sentence_transformer.modules import Dense

        torch.manual_seed(0)
        (folder / "2_Dense").mkdir()
        Dense(16, 5).save(str(folder / "2_Dense"))
    loaded, model = loaded_from(folder), library.SentenceTransformer(str(folder), device="cpu")
    for text in ("w7 w8 w9", " ".join(f"w{n}" for n in range(5, 30))):
        ids = loaded.encoder.tokenizer(text)["input_ids"]
        ends = loaded.encoder.get_start_tokens(), loaded.encoder.get_end_tokens()
        (vector,) = pool_texts(loaded, [loaded.pooler.cut(ids, *ends)])
        wanted = torch.nn.functional.normalize(torch.tensor(model.encode(text)).double(), dim=0)
        assert torch.allclose(vector, wanted, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "settings", "says"),
    [
        ("Router", {"types": {"x": "theirs.Module"}}, r"Router, which is not supported"),
        ("CLIPModel", {}, r"CLIPModel, which is not supported"),
        ("Dense", {"activation_function": "theirs.call"}, r'"theirs\.call", which does not belong to torch'),
        ("Dense", {"activation_function": "torch.hub.load"}, r'"torch\.hub\.load", which does not belong to torch'),
    ],
)
def test_modules_that_could_import_other_code_are_refused(kind, settings, says, tmp_path):
    folder = make_encoder(tmp_path / "m", ("Transformer", "Pooling", kind))
    (folder / f"2_{kind}").mkdir(exist_ok=True)
    (folder / f"2_{kind}" / "config.json").write_text(json.dumps(settings))
    with pytest.raises(CtxextError, match=says):
        open_pooler(*open_infos([str(folder)]))
