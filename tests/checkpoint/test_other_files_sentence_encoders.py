"""Sentence encoders, cross-encoders and ColBERT as their libraries save them: every file that states a length."""

import json
import random

import pytest
import torch
from safetensors.torch import load_file

from ctxext.api import Recipe, convert, verify
from ctxext.checkpoint.families import family_of
from ctxext.checkpoint.opening import claimed_lengths, open_checkpoint
from ctxext.checkpoint.other_files import read_lengths, read_pipeline
from ctxext.converters.convert import plan_conversion
from ctxext.converters.inspection import inspect_checkpoint
from ctxext.errors import CtxextError
from ctxext.models.checkpoint_info import info_of
from ctxext.models.model import open_pooler
from ctxext.recipes.methods.fills import KEEPS_ROWS
from ctxext.recipes.methods.table import Table
from pages import ROOT, blocks
from tiny_encodings import save, save_tokenizer

TABLE = "bert.embeddings.position_embeddings.weight"
STATED = {
    "sentence_bert_config.json": {"max_seq_length": 6, "document_length": 7, "query_length": 4},
    "config_sentence_transformers.json": {"document_length": 300, "query_length": 32, "prompts": {"query": "q: "}},
    "artifact.metadata": {"doc_maxlen": 180, "query_maxlen": 32, "dim": 8},
}
MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
]


def make_encoder(folder, **config):
    """A tiny BERT with the files of sentence-transformers, which cuts at 6 of its 12 tokens."""
    save_tokenizer(save("bert", folder))
    (folder / "1_Pooling").mkdir()
    files = {
        "sentence_bert_config.json": {"max_seq_length": 6, "do_lower_case": False},
        "modules.json": MODULES,
        "1_Pooling/config.json": {"word_embedding_dimension": 16, "pooling_mode_mean_tokens": True, **config},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return folder


def status(folder, check):
    return next(found.status for found in verify(str(folder), load=False) if found.check == check)


def test_every_file_that_cuts_texts_follows_and_lengths_of_queries_stay(tmp_path):
    source, out = make_encoder(tmp_path / "source"), tmp_path / "out"
    for name, content in STATED.items():
        (source / name).write_text(json.dumps(content))
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    cut = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    (source / "tokenizer.json").write_text(json.dumps({**tokenizer, "truncation": cut}))
    plan = plan_conversion(str(source), None, Recipe([Table(factor=2)]))
    assert {(change.file, change.key, change.new) for change in plan.changes if change.file in STATED} == {
        ("sentence_bert_config.json", "max_seq_length", 24), ("sentence_bert_config.json", "document_length", 24),
        ("config_sentence_transformers.json", "document_length", 24), ("artifact.metadata", "doc_maxlen", 24),
    }  # fmt: skip
    convert(str(source), out, Recipe([Table(factor=2)]))
    read = {name: json.loads((out / name).read_text()) for name in (*STATED, "tokenizer.json", "1_Pooling/config.json")}
    assert read["sentence_bert_config.json"] == {"max_seq_length": 24, "document_length": 24, "query_length": 4}
    assert read["config_sentence_transformers.json"] == {
        **STATED["config_sentence_transformers.json"],
        "document_length": 24,
    }
    assert read["artifact.metadata"] == {"doc_maxlen": 24, "query_maxlen": 32, "dim": 8}
    assert read["tokenizer.json"]["truncation"]["max_length"] == 24
    assert status(out, "lengths") == "passed"
    (out / "sentence_bert_config.json").write_text(json.dumps(STATED["sentence_bert_config.json"]))
    assert status(out, "lengths") == "failed"


def test_inspect_shows_the_pipeline_and_what_cuts(tmp_path, run):
    source = make_encoder(tmp_path / "source", pooling_mode_cls_token=True)
    shown = " ".join(run("inspect", source).output.split())
    assert "Transformer → Pooling (cls, mean); limit 6 tokens" in shown
    assert "sentence_bert_config.json: 6" in shown
    assert "6 of them trained" in " ".join(run("inspect", source, "--original-length", 6).output.split())


@pytest.mark.parametrize("lengths", [(6, 9), (9, 6)])
def test_of_two_stated_lengths_the_smaller_one_cuts(tmp_path, run, lengths):
    """In one file, in two, and against what config.json claims (12)."""
    folder = make_encoder(tmp_path / "m")
    first, second = lengths
    for files in (
        {"sentence_bert_config.json": {"max_seq_length": first, "document_length": second}},
        {
            "sentence_bert_config.json": {"max_seq_length": first},
            "config_sentence_transformers.json": {"document_length": second},
        },
    ):
        for name, content in files.items():
            (folder / name).write_text(json.dumps(content))
        assert "; limit 6 tokens" in " ".join(run("inspect", folder).stdout.split())
        checkpoint = open_checkpoint(str(folder))
        assert open_pooler(info_of("m", checkpoint)).length == 6
        claimed = claimed_lengths(checkpoint, family_of(checkpoint.config))
        assert claimed == {name: min(content.values()) for name, content in files.items()} | {
            name: length for name, length in claimed.items() if name not in files
        }
    assert claimed["config.json"] == 12


@pytest.mark.parametrize(
    "content",
    [{}, [], [{"type": 1}], [{"type": "a.Pooling", "path": "../other"}], "x", [{"type": "a.Pooling", "path": "a\0b"}]],
)
def test_modules_that_are_none_are_refused(content, tmp_path):
    (tmp_path / "modules.json").write_text(json.dumps(content))
    with pytest.raises(CtxextError, match=r"modules\.json"):
        read_pipeline(tmp_path)


def test_the_newer_way_to_write_a_pooling(tmp_path):
    source = make_encoder(tmp_path / "source", pooling_mode=["cls", "max"])
    assert read_pipeline(source).pooling == ("cls", "max")


@pytest.mark.parametrize("fill", ["tile", "linear"])
@pytest.mark.thorough
def test_a_table_with_fewer_trained_rows(fill, tmp_path):
    """The new rows are made of the trained ones, also in the place of those that came untrained."""
    source = make_encoder(tmp_path / "source")
    old = load_file(source / "model.safetensors")[TABLE]
    for factor in (2, 4):
        out = tmp_path / f"x{factor}"
        convert(str(source), out, Recipe([Table(factor=factor, fill=fill)]), original_length=6)
        new = load_file(out / "model.safetensors")[TABLE]
        assert len(new) == 6 * factor
        if fill in KEEPS_ROWS:
            assert torch.equal(new, old[:6].repeat(factor, 1))
        else:
            assert torch.equal(new[::factor], old[:6])
        assert json.loads((out / "sentence_bert_config.json").read_text())["max_seq_length"] == 6 * factor
        found = {one.check: one.status for one in verify(str(out), against=str(source))}
        assert (found["tables"], found["against"], found["configuration"]) == ("passed", "passed", "passed")
        with pytest.raises(CtxextError, match="already extended"):
            convert(str(out), tmp_path / "twice", Recipe([Table(factor=9)]))


def test_what_no_table_holds_is_refused(tmp_path):
    source = make_encoder(tmp_path / "source")
    for factor, words in ((2, "fewer than the 13"), (1.5, "supports 12 tokens, but the result would have 9")):
        length = 13 if factor == 2 else 6
        with pytest.raises(CtxextError, match=words):
            convert(str(source), tmp_path / "out", Recipe([Table(factor=factor)]), original_length=length)


def test_a_model_in_a_separate_folder_is_refused_with_a_hint(tmp_path):
    make_encoder(tmp_path / "0_Transformer")
    with pytest.raises(CtxextError) as caught:
        open_checkpoint(str(tmp_path))
    assert "0_Transformer" in caught.value.hint


def test_sentence_transformers_reads_the_new_length(tmp_path):
    """In the library itself, where it is installed: as many tokens as were asked for, the first ones as before."""
    library = pytest.importorskip("sentence_transformers")
    source, out = make_encoder(tmp_path / "source"), tmp_path / "out"
    convert(str(source), out, Recipe([Table(target_length=20)]))
    before, after = (library.SentenceTransformer(str(folder), device="cpu") for folder in (source, out))
    assert (before.max_seq_length, after.max_seq_length) == (6, 20)
    text = " ".join(["a"] * 50)
    assert after.preprocess([text])["input_ids"].shape[1] == 20
    short = " ".join(["a"] * 2)
    assert torch.equal(*(model.encode([short], convert_to_tensor=True) for model in (before, after)))
    assert len(after.encode([text])[0]) == 16
    reranker = library.CrossEncoder(str(out), device="cpu", num_labels=1)
    assert reranker.max_seq_length == 20
    assert reranker.predict([(text, text)]).shape == (1,)


def test_the_trainer_of_sentence_transformers_trains_the_whole_table(tmp_path, monkeypatch):
    """The code of docs/training.md as it stands, with two steps."""
    library = pytest.importorskip("sentence_transformers")
    convert(str(make_encoder(tmp_path / "source")), tmp_path / "m1k", Recipe([Table(factor=2)]))
    rng = random.Random(0)
    words = [" ".join(f"w{rng.randrange(5, 40)}" for _ in range(30)) for _ in range(32)]
    pairs = [{"anchor": text[:11], "positive": text} for text in words]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    (code,) = [
        block.text for block in blocks(ROOT / "docs" / "training.md") if "SentenceTransformerTrainer" in block.text
    ]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    exec(code.replace("max_steps=15", "max_steps=2, use_cpu=True"))
    old, new = (load_file(tmp_path / name / "model.safetensors") for name in ("m1k", "m1k-tuned"))
    table = next(name for name in new if name.endswith("position_embeddings.weight"))
    before = next(weight for name, weight in old.items() if name.endswith("position_embeddings.weight"))
    assert (new[table] != before).any(1).all()
    assert library.SentenceTransformer("m1k-tuned", device="cpu").max_seq_length == 24
    assert checkpoint_lengths(tmp_path / "m1k-tuned") == {24}


def checkpoint_lengths(folder):
    return set(inspect_checkpoint(open_checkpoint(str(folder))).windows.values())


@pytest.mark.parametrize("number", [0, -1, True, "6", 6.5, None])
def test_what_is_no_length_cuts_nothing(tmp_path, number):
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": number, "document_length": 7}))
    assert read_lengths(tmp_path) == {("sentence_bert_config.json", "document_length"): 7}
