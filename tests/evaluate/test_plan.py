"""What is asked, of whom, in which portions, and what is written down and gone on with: without a model."""

import dataclasses
import json
import random
import re
from importlib import import_module
from types import SimpleNamespace

import pytest

from ctxext.checkpoint.opening import Checkpoint, open_checkpoint
from ctxext.data import prose
from ctxext.data.prompt import Prompt
from ctxext.errors import CtxextError
from ctxext.evaluate import plan
from ctxext.evaluate.plan import ModelPlan, check_context_length
from ctxext.evaluate.processes import Team
from ctxext.evaluate.results_log import ResultsLog
from ctxext.evaluate.run import Meter, _make_header
from ctxext.models import serving
from ctxext.models.checkpoint_info import info_of, open_infos
from ctxext.models.model import Loading
from ctxext.models.server_model import ServerModel
from ctxext.options import flag_of
from ctxext.server.answers import Completion, Token
from ctxext.tasks.base import DocumentPlan
from ctxext.tasks.documents import Documents, read_questions
from ctxext.tasks.kv import KeyValue
from ctxext.tasks.needle import Association, Needle, PassKey
from ctxext.tasks.passages import Passages
from ctxext.tasks.perplexity import Perplexity, bucket_width
from ctxext.tasks.registry import TASKS
from ctxext.tasks.retrieval import make_questions, num_questions
from ctxext.tasks.settings import Settings, even_depths, lengths_of, parse_depths


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"depths": ()}, "--depths is empty"),
        ({"depths": (-0.01,)}, "not between 0 and 100 %"),
        *(
            ({name: 0}, f"{flag_of(Settings, name)} must be at least 1")
            for name in ("samples", "num_needles", "stride", "batch_size")
        ),
        ({"tasks": ("kv",), "kv_ids": "words"}, "Unknown --kv-ids"),
    ],
)
def test_settings_that_mean_nothing(choices, message):
    with pytest.raises(CtxextError, match=message):
        Settings(**choices)


def test_each_task_has_separate_settings(tmp_path):
    (tmp_path / "hay.txt").write_text("One sentence. Another sentence.")
    asked = {"question": "Who?", "answers": ["me"], "ctxs": [{"title": "t", "text": "It is me."}]}
    (tmp_path / "asked.jsonl").write_text(json.dumps(asked))
    names = ("needle", "kv", "documents", "association", "passkey", "short", "needle")
    settings = Settings(
        tasks=names, num_needles=7, kv_ids="number", haystack=tmp_path / "hay.txt", documents=tmp_path / "asked.jsonl"
    )
    needle, kv, documents, association, passkey = settings.retrieval_tasks()
    text = needle.text
    assert " ".join(text) == "One sentence. Another sentence."
    assert needle == Needle(num_needles=7, text=text)
    assert kv == KeyValue(ids="number", num_needles=7, text=text)
    assert documents == Documents(
        questions=read_questions(tmp_path / "asked.jsonl"), ask="fact", num_needles=7, text=text
    )
    assert association == Association(text=text)
    assert passkey == PassKey(text=text)
    written = settings.to_dict()
    assert (written["haystack"]["name"], written["documents"]["name"]) == ("hay.txt", "asked.jsonl")
    assert len(written["haystack"]["sha256"]) == len(written["documents"]["sha256"]) == 64
    assert written["tasks"] == list(names[:-1])
    assert dataclasses.replace(settings, data="some/set", haystack=None).to_dict()["data"] == "some/set"


@pytest.mark.parametrize(
    ("text", "depths"),
    [
        ("1", (0.5,)),
        ("2", (0.0, 1.0)),
        ("5", (0.0, 0.25, 0.5, 0.75, 1.0)),
        ("5,", (0.05,)),
        ("100,0,50%,0", (0.0, 0.5, 1.0)),
    ],
)
def test_depths_of_the_command_line(text, depths):
    assert parse_depths(text) == depths
    assert len(parse_depths("101")) == 101
    assert even_depths(3) == (0.0, 0.5, 1.0)


@pytest.mark.parametrize("text", ["0", "102", "x", "-1", "1.5", ""])
def test_depths_that_are_none(text):
    with pytest.raises(CtxextError, match="depths"):
        Settings(depths=parse_depths(text))


def test_lengths_are_requested_or_known():
    assert lengths_of(Settings(lengths=(512, 256, 512)), (64,)) == (256, 512)
    assert lengths_of(Settings(), (512, None, 128, 512)) == (128, 512)


HEADER = {
    "settings": {"samples": 4, "lengths": [256]},
    "loading": {"dtype": "auto"},
    "models": [{"name": "one", "digest": "a", "recipe": None}, {"name": "two", "digest": "b", "recipe": None}],
    "versions": {"torch": "2.9"},
}


def changed(part, **changes):
    if part == "models":
        first, *others = HEADER["models"]
        return {**HEADER, "models": [{**first, **changes}, *others]}
    return {**HEADER, part: {**HEADER[part], **changes}}


@pytest.mark.parametrize(
    ("header", "difference"),
    [
        (changed("settings", samples=5), "samples 4, now 5"),
        (changed("settings", lengths=[256, 512]), "lengths 256, now 256,512"),
        (changed("settings", seed=1), "seed none, now 1"),
        (changed("loading", dtype="fp32"), "dtype auto, now fp32"),
        (changed("versions", torch="2.8"), "torch 2.9, now 2.8"),
        (changed("models", recipe={"steps": ["a"]}), 'model "one" recipe none, now a'),
        (changed("models", name="three"), "models one,two, now three,two"),
        ({**HEADER, "versions": {}}, "torch 2.9, now none"),
    ],
)
def test_only_the_same_run_is_resumed(header, difference, tmp_path):
    ResultsLog(tmp_path).begin(HEADER, resume=False, overwrite=False)
    ResultsLog(tmp_path).begin(json.loads(json.dumps(HEADER)), resume=True, overwrite=False)
    with pytest.raises(CtxextError) as refused:
        ResultsLog(tmp_path).begin(header, resume=True, overwrite=False)
    assert f"cannot be resumed with other settings: {difference}." in refused.value.message


def line(model, sample, **more):
    return {
        "model": model,
        "task": "kv",
        "length": 64,
        "depth": 0.5,
        "samples": [sample],
        "correct": [1],
        "seconds": 0.1,
        **more,
    }


def test_each_process_has_a_file_and_all_of_them_are_read(tmp_path):
    first, second = ResultsLog(tmp_path), ResultsLog(tmp_path, rank=1)
    first.begin(HEADER, resume=False, overwrite=False)
    first.append(line("one", 0))
    second.append(line("one", 1))
    second.append({"model": "two", "facts": {"dtype": "float32"}})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cells-1.jsonl", "cells.jsonl"]
    assert [record["samples"] for record in first.records_of("one")] == [[1], [0]]
    assert {key.sample for key in first.done("one")} == {0, 1}
    assert second.done("two") == set()
    with pytest.raises(CtxextError, match="already contains results"):
        first.begin(HEADER, resume=False, overwrite=False)
    (tmp_path / "cells.jsonl").unlink()
    with pytest.raises(CtxextError, match="already contains results"):
        first.begin(HEADER, resume=False, overwrite=False)
    first.begin(HEADER, resume=False, overwrite=True)
    assert first.records() == []
    assert [path.name for path in tmp_path.iterdir()] == ["cells.jsonl"]


WHOLE = {
    "kv": {},
    "perplexity": {"correct": ..., "depth": None, "width": 8, "buckets": [[1.5, 8]], "lengths": {"64": [9.5, 63]}},
    "longppl": {"correct": ..., "depth": None, "loss": [2.5], "key_tokens": [3], "of": [9], "evaluator": "it"},
}
"""Changes of a line that make one of another task; ... removes a key."""


def line_of(kind, changes=()):
    values = line("one", 0) | {"task": kind} | WHOLE[kind] | dict(changes)
    return {key: value for key, value in values.items() if value is not ...}


def is_read(tmp_path, text):
    log = ResultsLog(tmp_path)
    log.begin(HEADER, resume=False, overwrite=True)
    with (tmp_path / "cells.jsonl").open("a") as file:
        file.write(text + "\n")
    log.done("one")
    return (len(log.records()), log.num_skipped)


@pytest.mark.parametrize(
    ("task", "key", "values"),
    [
        ("kv", "task", ([], {}, None, 1, True)),
        ("kv", "model", ([], {}, None, 1)),
        ("kv", "length", ("64", 64.5, -1, True, None, [64], float("nan"))),
        ("kv", "depth", ("0.5", [0.5], -1, 2, float("nan"), ...)),
        ("kv", "samples", ("0", [], [[0]], [True], [0.5], [None], [-1], None, {})),
        ("kv", "seconds", ("1", None, [1], -1, float("inf"), float("nan"))),
        ("kv", "correct", (None, "1", [], [1, 1], ["1"], [float("nan")], [2], [None], ...)),
        ("kv", "texts", (None, [], ["0"], [0, 1])),
        ("perplexity", "buckets", (None, [1], [[1]], [["1", 8]], [[float("nan"), 8]], {})),
        ("perplexity", "lengths", (None, [], {"64": 1}, {"64": [1]}, {"64": [1, None]})),
        ("perplexity", "width", (None, 0, "8", [8])),
        ("longppl", "loss", (None, [], ["2"], [None], 2.5, [1, 2])),
        ("longppl", "key_tokens", (None, [], ["3"], [-1])),
    ],
)
def test_a_record_with_a_value_of_another_type_is_skipped(task, key, values, tmp_path):
    assert is_read(tmp_path, json.dumps(line_of(task))) == (1, 0)
    for value in values:
        assert is_read(tmp_path, json.dumps(line_of(task, {key: value}))) == (0, 1), (key, value)


@pytest.mark.parametrize(
    "text",
    [
        *('{"model": "one", "facts": []}', '{"model": "one", "facts": {"peak_memory": "1"}}', '{"model": []}'),
        *('{"model": "one", "harness": {"ruler": [1]}}', '{"header": []}', "[]", "1", '"task"', "null", "\ufeff{"),
    ],
)
def test_a_line_about_a_model_has_objects(text, tmp_path):
    assert is_read(tmp_path, '{"model": "one", "facts": {"peak_memory": 1}, "unknown": 1}') == (1, 0)
    assert is_read(tmp_path, text) == (0, 1)


def test_results_without_their_settings_are_not_resumed(tmp_path):
    log = ResultsLog(tmp_path)
    log.begin(HEADER, resume=False, overwrite=False)
    whole = (tmp_path / "cells.jsonl").read_bytes()
    (tmp_path / "cells.jsonl").write_bytes(b"\xef\xbb\xbf" + whole)
    log.begin(HEADER, resume=True, overwrite=False)
    for damaged in (whole[1:], whole[:-9] + b"\n", b"", whole.replace(b'"header"', b'"other"')):
        (tmp_path / "cells.jsonl").write_bytes(damaged)
        with pytest.raises(CtxextError, match=r"the first line of cells\.jsonl, with its settings, is missing"):
            log.begin(HEADER, resume=True, overwrite=False)


def test_what_a_kill_tore_is_dropped_and_nothing_else(tmp_path):
    log = ResultsLog(tmp_path)
    log.begin(HEADER, resume=False, overwrite=False)
    log.append(line("one", 0))
    whole = (tmp_path / "cells.jsonl").read_bytes()
    with (tmp_path / "cells.jsonl").open("ab") as file:
        file.write(b'{"model": "one", "task"')
    assert (len(log.records()), log.num_skipped) == (1, 0)
    log.append(line("one", 1))
    written = (tmp_path / "cells.jsonl").read_bytes()
    assert written.startswith(whole)
    assert [record["samples"] for record in log.records()] == [[0], [1]]
    memory = ResultsLog(None)
    memory.begin(HEADER, resume=False, overwrite=False)
    memory.append(line("one", 0))
    assert memory.records() == [line("one", 0)]
    assert memory.num_skipped == 0


CONFIG = {
    "model_type": "llama",
    **{"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 100},
}


def plan_of(name, lengths, tasks, samples, depths, documents=(), config=CONFIG):
    info = SimpleNamespace(name=name, checkpoint=SimpleNamespace(config=config))
    works = tuple(SimpleNamespace(keys=[SimpleNamespace(length=n) for n in counts]) for counts in documents)
    return ModelPlan(info, lengths, tasks, works, Settings(samples=samples, depths=depths), None)


def test_what_a_run_costs_and_how_long_it_takes():
    even = 64 * (2 * (4 + 2) * 16 + 3 * 100) / (4 * 16)

    def cost(length):
        return 1 + round(length * (1 + length / even) / 64)

    plans = [
        plan_of("a", (1000, 3000), ("kv", "needle"), 3, (0.0, 1.0), [[500], [700]]),
        plan_of("b", (1000,), ("kv",), 3, (0.0,)),
    ]
    shown, clock = [], [100.0]
    meter = Meter(plans, lambda *given: shown.append(given), 3, clock=lambda: clock[0])
    total = 12 * (cost(1000) + cost(3000)) + cost(500) + cost(700) + 3 * cost(1000)
    tokens = 12 * 4000 + 1200 + 3000
    assert shown == [(f"29 prompts and documents of {tokens:,} tokens", 0, total)]
    clock[0] = 200.0  # Loading takes a while, which says nothing of what is left.
    meter.begin()
    meter.skip("a", [500, 700], "a documents")
    reached = cost(500) + cost(700)
    assert shown[-1] == ("a documents", reached, total)
    spent = 0
    for number, (seconds, lengths) in enumerate(((10.0, [1000, 1000]), (30.0, [3000])), 1):
        clock[0] += seconds
        meter.advance("a", lengths, "a kv")
        spent += sum(map(cost, lengths))
        reached += sum(map(cost, lengths))
        left = (10.0 if number == 1 else 40.0) / spent * (total - reached)
        assert left > 120
        minutes = f"{round(left / 60)} min left"
        advice = ", half of it with --samples 1" if left >= 600 else ""
        assert shown[-1] == (f"a kv ({minutes}{advice})", reached, total)
    meter.skip("b", plans[1].measured_lengths, "b")
    assert shown[-1] == ("b", reached + 3 * cost(1000), total)


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (1, "1 s left"),
        (119, "119 s left"),
        (121, "2 min left"),
        (599, "10 min left"),
        (600, "10 min left, half"),
        (7100, "118 min left, half"),
        (7260, "2.0 h left, half"),
        (9000, "2.5 h left, half"),
    ],
)
def test_time_leftin_words(seconds, shown):
    labels, clock = [], [0.0]
    meter = Meter(
        [plan_of("a", (100,), ("kv",), 2, (0.5,))], lambda *given: labels.append(given[0]), 2, clock=lambda: clock[0]
    )
    clock[0] = float(seconds)
    meter.advance("a", [100], "kv")
    assert labels[-1].startswith(f"kv ({shown}")


@pytest.mark.parametrize(("processes", "batch", "size"), [(1, None, 4), (2, None, 3), (1, 2, 2), (4, 5, 2)])
def test_portions_cover_every_sample_once_and_every_process_has_some(processes, batch, size):
    settings = Settings(samples=5, depths=(0.0, 1.0), batch_size=batch)
    document = SimpleNamespace(keys=[SimpleNamespace(length=1000)])
    made = ModelPlan(SimpleNamespace(name="a"), (64, 128), (PassKey(),), (document,), settings, None)
    team = Team(0, processes)
    team.agree = lambda name, number: number
    *works, last = made.make_work(SimpleNamespace(questions_at_once=lambda length, num_depths: 4), team=team)
    assert last is document
    assert [work.length for work in works] == sorted(work.length for work in works)
    for length in (64, 128):
        samples = [work.samples for work in works if work.length == length]
        assert [n for numbers in samples for n in numbers] == [0, 1, 2, 3, 4]
        assert max(map(len, samples)) == size
    assert sorted(made.measured_lengths) == [64] * 10 + [128] * 10 + [1000]


def info(reach=1024, table=False, kind="causal", trained=512, folder=None, noted=None):
    fields = {
        "name": "m",
        "context_length": reach,
        "has_table": table,
        "pipeline": None,
        "kind": kind,
        "trained_length": trained,
        "checkpoint": SimpleNamespace(folder=folder, config={"ctxext": noted}),
        "source": None,
    }
    return dataclasses.make_dataclass("Info", fields)(**fields)


@pytest.mark.parametrize(
    ("asked", "lengths", "beyond", "advice"),
    [
        (info(), (256, 1024), False, None),
        (info(), (256, 1025), False, "--allow-beyond"),
        (info(), (256, 1025), True, None),
        (info(table=True), (1025,), True, "position table ends there"),
        (info(table=True), (1024,), False, None),
        (info(None), (9999,), False, None),
        (info(), (), False, "--lengths"),
    ],
)
def test_lengths_that_a_model_does_not_claim(asked, lengths, beyond, advice):
    if advice is None:
        check_context_length(asked, lengths, allow_beyond=beyond)
    else:
        with pytest.raises(CtxextError) as refused:
            check_context_length(asked, lengths, allow_beyond=beyond)
        assert advice in refused.value.hint


@pytest.fixture
def planned(monkeypatch):
    """Plan questions to two checkpoints without their files: the lengths of each, and those that vLLM is asked for."""
    infos = [info(reach=1024, trained=512), info(reach=2048, trained=256)]
    for name, entry in zip(("first", "second"), infos, strict=True):
        entry.name = name
    checked = {}
    monkeypatch.setattr(plan, "open_infos", lambda *given, **more: infos)
    monkeypatch.setattr(import_module("ctxext.models.model"), "load_tokenizer", lambda *given: None)
    monkeypatch.setattr("ctxext.data.encoding.Encoder", lambda *given, **more: SimpleNamespace(uses_chat=False))
    monkeypatch.setattr(import_module("ctxext.tasks.retrieval"), "check_fits", lambda *given: 0)
    monkeypatch.setattr(serving, "check_served", lambda entry, lengths: checked.update({entry.name: lengths}))

    def lengths(loading, **settings):
        checked.clear()
        plans = plan.plan_questions(["first", "second"], Settings(tasks=("passkey",), **settings), loading)
        return {entry.info.name: entry.lengths for entry in plans}, dict(checked)

    return lengths


def test_each_model_is_measured_at_its_lengths_or_at_all(planned):
    usual = {"first": (512, 1024), "second": (256, 2048)}
    assert planned(Loading()) == (usual, {})
    assert planned(Loading(engine="vllm")) == (usual, usual), "an engine is checked for the lengths of each model"
    everything = dict.fromkeys(usual, (256, 512, 1024, 2048))
    assert planned(Loading(), allow_beyond=True) == (everything, {})
    assert planned(Loading(engine="vllm"), allow_beyond=True) == (everything, everything)


def test_measuring_beyond_the_context_length_needs_an_option(planned):
    with pytest.raises(CtxextError, match='"first" supports 1024 tokens, but a prompt length is 2048'):
        planned(Loading(), lengths=(2048,))
    assert planned(Loading(), lengths=(2048,), allow_beyond=True)[0] == {"first": (2048,), "second": (2048,)}


def test_sources_are_read_in_place(tmp_path, monkeypatch):
    opened = []

    def opening(place, revision=None):
        opened.append((place, revision))
        if "gone" in place:
            raise CtxextError("gone")
        return place

    monkeypatch.setattr(plan, "open_checkpoint", opening)
    monkeypatch.setattr(plan, "info_of", lambda name, checkpoint: name)
    monkeypatch.setattr(plan, "is_source_of", lambda source, result: "other" not in source)
    noted = [
        {"source": "me/hub", "revision": "abc"},
        *({"source": name} for name in ("some/near", "demo", "gone", "some/other")),
        {},
    ]
    sources = [plan._open_source(info(folder=tmp_path / "made", noted=one), set()) for one in noted]
    assert sources == ["me/hub", "some/near", "demo", None, None, None]
    places = [str(tmp_path / name) for name in ("near", "gone", "other")]
    assert opened == [("me/hub", "abc"), (places[0], None), ("demo", None), (places[1], None), (places[2], None)]


@pytest.mark.parametrize(
    ("trained", "lengths", "expected"), [(64, (256,), 64), (None, (256, 128), 256), (None, (), 512)]
)
def test_documents_of_the_original_length_or_what_is_nearest_to_it(trained, lengths, expected, monkeypatch):
    """Of a source that does not say its length, those of the longest length that other models are asked at."""
    read_corpus = lambda data, encoder, **more: [list(range(more["length"]))]  # noqa: E731
    monkeypatch.setattr("ctxext.data.texts.read_corpus", read_corpus)
    settings = Settings(tasks=("short",), lengths=lengths)
    (work,) = plan._plan_documents(["short"], info(trained=trained), None, (), 512, settings)
    assert len(work.ids) == expected


def test_the_header_of_a_run_holds_no_secret():
    loading = Loading(device="cpu", token="hf_GivenGiven", revision="v1", chat_template=False)
    header = _make_header([], Settings(samples=3), loading)
    assert "hf_" not in json.dumps(header)
    assert header["settings"]["samples"] == 3
    options = header["loading"].keys()
    assert {"device", "dtype", "attention", "chat_template", "trust_remote_code", "revision"} <= options
    assert not {"engine", "token"} & options


def test_names_and_digests_of_checkpoints(tmp_path, monkeypatch):
    config = json.dumps({"model_type": "llama", "max_position_embeddings": 128, "architectures": ["LlamaForCausalLM"]})
    for name in ("a/x", "b/x", "y"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").write_text(config)
        (tmp_path / name / "tokenizer.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert [one.name for one in open_infos(["a/x", "b/x", "y"])] == ["a/x", "b/x", "y"]
    assert [one.name for one in open_infos([str(tmp_path / "y"), "a/x"])] == ["y", "x"]
    with pytest.raises(CtxextError, match="is listed twice"):
        open_infos(["y", "y"])
    (known,) = open_infos(["y"], original_length=64)
    assert known.checkpoint.original_length == 64

    def digest():
        return info_of("y", open_checkpoint("y")).digest

    first = digest()
    for name in ("generation_config.json", "ctxext.json", "notes.md"):
        (tmp_path / "y" / name).write_text("{}")
        assert digest() == first, name
    seen = {first}
    for name in ("chat_template.jinja", "modeling.py", "merges.txt", "model.bin"):
        (tmp_path / "y" / name).write_text("same")
        assert digest() not in seen, name
        seen.add(digest())
    (tmp_path / "y" / "model.bin").rename(tmp_path / "y" / "other.bin")
    assert digest() not in seen, "by another name"
    (tmp_path / "y" / "tokenizer.json").unlink()
    with pytest.raises(CtxextError, match="has no tokenizer"):
        digest()
    (tmp_path / "y" / "words.tiktoken").write_text("x")
    assert digest()


def losses_of(monkeypatch):
    """The loss of the token at position p is p, and every call is noted."""
    calls = []

    def token_losses(loaded, ids, *, last=None):
        calls.append((ids.tolist(), last))
        losses = ids[:, 1:].double()
        return losses if last is None else losses[:, -last:]

    monkeypatch.setattr(import_module("ctxext.models.token_losses"), "token_losses", token_losses)
    return calls


def work_of(ids, **options):
    """The work of the task perplexity on a document whose first token is a begin token."""
    encoder, options = SimpleNamespace(get_start_tokens=lambda: [0]), {"stride": None, **options}
    reading = SimpleNamespace(encoder=encoder, documents=lambda *_: [ids], longest=0, text="", **options)
    return Perplexity().documents_to_read(reading)[0]


@pytest.mark.parametrize("can_share", [True, False])
@pytest.mark.parametrize("longest", [100, 512, 513])
def test_loss_by_position_by_hand(can_share, longest, monkeypatch):
    """Token p is predicted with a loss of p: every sum is one of whole numbers."""
    calls = losses_of(monkeypatch)
    loaded = SimpleNamespace(device="cpu", can_share=can_share, kind="causal")
    work = work_of(list(range(2000)), lengths=(longest, 30))
    (key,) = work.keys
    (record,) = work.run(loaded, {key})
    width = 16 if longest <= 512 else 32
    assert record["width"] == width == bucket_width(longest)
    spans = [range(max(1, at), min(at + width, longest)) for at in range(0, longest, width)]
    assert record["buckets"] == [[sum(span), len(span)] for span in spans]
    assert record["lengths"] == {str(n): (sum(range(n)), n - 1) for n in (longest, 30)}
    assert (record["samples"], record["length"], record["depth"]) == ([0], longest, None)
    assert [len(ids[0]) for ids, _ in calls] == ([longest] if can_share else [longest, 30])
    assert [*work.run(loaded, set())] == []


@pytest.mark.parametrize("rows", [1, 3])
def test_a_sliding_window_by_hand(rows, monkeypatch):
    """A window of 8 tokens, the begin token among them, that moves on by 3: the mean loss of what is new in each."""
    calls = losses_of(monkeypatch)
    loaded = SimpleNamespace(device="cpu", can_share=True, kind="causal", rows_that_fit=lambda length: rows)
    work = work_of([0, *range(1, 19)], lengths=(8,), stride=3)
    sliding = next(work.run(loaded, set(work.keys)))["sliding"]["8"]
    windows = [(range(1, 8), 7), (range(4, 11), 3), (range(7, 14), 3), (range(10, 17), 3), (range(13, 19), 2)]
    means = [sum([*span][-new:]) / new for span, new in windows]
    assert sliding == (pytest.approx(sum(means)), 5)
    asked = [row for ids, last in calls if last is not None for row in ids]
    assert asked == [[0, *span] for span, _ in windows]
    assert max(len(ids) for ids, _ in calls) <= rows


def test_every_question_depends_on_seed_task_length_and_sample(tokenizer):
    from ctxext.data.encoding import Encoder

    encoder, task = Encoder(tokenizer, chat_template=False), PassKey(num_digits=9)

    def ids(settings, length, sample):
        return make_questions(task, encoder, length, [sample], settings)[0][0].ids[-12:]

    settings = Settings(samples=2, depths=(0.5,))
    other = dataclasses.replace(settings, seed=1)
    questions = [ids(settings, 300, 0), ids(settings, 300, 1), ids(settings, 301, 0), ids(other, 300, 0)]
    assert len(set(map(tuple, questions))) == 4
    assert ids(settings, 300, 0) == questions[0]
    assert (num_questions(task, settings), num_questions(TASKS["niah-multivalue"], settings)) == (2, 2)
    three = dataclasses.replace(settings, depths=(0.0, 0.5, 1.0))
    assert (num_questions(task, three), num_questions(TASKS["niah-multivalue"], three)) == (2, 6)


def rotary(tmp_path, **changes):
    config = {"model_type": "llama", "max_position_embeddings": 128, "hidden_size": 32, "num_attention_heads": 4}
    checkpoint = Checkpoint("m", tmp_path, {**config, "architectures": ["LlamaForCausalLM"], **changes})
    return SimpleNamespace(name="m", checkpoint=checkpoint, context_length=128, has_table=False)


def test_positions_passed_to_an_engine(tmp_path):
    one = rotary(tmp_path)
    assert serving._make_overrides(one, 128) == {}
    assert serving._make_overrides(one, 129) == {"hf_overrides": {"max_position_embeddings": 129}}
    serving.check_served(one, (64, 256))
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1e4}
    for other in (
        rotary(tmp_path, rope_parameters=yarn, rope_scaling=yarn),
        SimpleNamespace(**{**vars(one), "has_table": True}),
    ):
        with pytest.raises(CtxextError, match="supports only 128 tokens"):
            serving.check_served(other, (64, 129))
        serving.check_served(other, (64, 128))
    assert serving._make_overrides(SimpleNamespace(**{**vars(one), "context_length": None}), 999) == {}
    linear = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
    stretched = rotary(tmp_path, rope_parameters=linear, rope_scaling=linear)
    assert serving._make_overrides(stretched, 129) == {"hf_overrides": {"max_position_embeddings": 129}}
    text = {"max_position_embeddings": 128, "hidden_size": 32, "num_attention_heads": 4, "rope_theta": 1e4}
    nested = rotary(tmp_path, model_type="gemma3", text_config=text)
    assert serving._make_overrides(nested, 129) == {"hf_overrides": {"text_config": {"max_position_embeddings": 129}}}


@pytest.mark.parametrize(
    ("generation", "config", "ends"),
    [
        ({"eos_token_id": [1, 2]}, 3, (1, 2)),
        ({"eos_token_id": 0}, 3, (0,)),
        ({}, 3, (3,)),
        (None, 0, (0,)),
        (None, None, ()),
    ],
)
def test_the_end_tokens_of_an_engine(generation, config, ends, tmp_path):
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    content = {} if config is None else {"eos_token_id": config}
    assert serving._read_ends(Checkpoint("m", tmp_path, content)) == ends


def test_an_engine_receives_prompts_without_answers():
    asked = []

    def complete(ids, text, *, max_tokens, logprobs, **_):
        asked.append((ids, max_tokens, logprobs))
        return Completion("", (Token(ids[0], {ids[0]: -1.0}), Token(9, {9: -1.0})), len(ids))

    server = SimpleNamespace(
        complete=complete, takes_ids=True, is_chat=False, measure_read=lambda *_, **__: None, cuts=lambda *_: False
    )
    encoder = SimpleNamespace(tokenizer=SimpleNamespace(decode=str), get_start_tokens=lambda: [1])
    encoder.use_form = lambda _: encoder
    model = ServerModel("m", server, encoder, False, num_concurrent=2, engine=SimpleNamespace(has_text=False, name="e"))
    question = [Prompt([number, 2, 3, 4], number, ()) for number in (1, 3, 2)]
    written = [(depth, [answer.ids for answer in rows]) for depth, rows in model.write([question], [0, 2])]
    assert written == [(0, [[1, 9]]), (2, [[2, 9]])]
    assert sorted(asked) == [([1, 2, 3], 1, True), ([2, 2], 2, True)]
    assert not model.may_share(1000, 1000)
    assert model.questions_at_once(2**20, 2) == 4
    assert model.questions_at_once(2**22, 9) == 1


@pytest.mark.parametrize(("stride", "most"), [(None, 512), (64, 1024)])
def test_documents_are_as_long_as_what_is_read_of_them(stride, most, monkeypatch):
    """A window that slides needs text behind the longest length."""
    asked = []

    def read_corpus(data, encoder, **more):
        asked.append((data, more))
        return [[1], [2]]

    monkeypatch.setattr("ctxext.data.texts.read_corpus", read_corpus)
    encoder = SimpleNamespace(get_start_tokens=lambda: [0, 0])
    first, second = Perplexity().documents_to_read(
        DocumentPlan("causal", encoder, (128, 256), 512, 64, data=("text.txt",), samples=2, seed=3, stride=stride)
    )
    assert asked == [("text.txt", {"count": 2, "length": 512, "most": most, "seed": 3})]
    assert [(work.ids, work.sample, work.length) for work in (first, second)] == [([1], 0, 256), ([2], 1, 256)]


@pytest.mark.parametrize("count", [2, 8, len(prose.OBJECTS), len(prose.OBJECTS) + 1, 1000])
def test_names_of_things_never_double(count):
    for seed in range(20):
        names = prose.object_names(random.Random(seed), count)
        assert len(names) == len(set(names)) == count
        if count <= len(prose.OBJECTS):
            assert len({name.split()[-1] for name in names}) == count, "no noun comes twice"


@pytest.mark.parametrize(
    ("task", "name"),
    [
        (Needle(num_needles=20), r"number for (.+) is"),
        (Needle(num_needles=20, phrasing="opens"), r"that the (.+) is opened"),
        (Needle(num_needles=20, phrasing="code"), r"written on the (.+) is"),
        (Needle(num_needles=20, phrasing="number"), r"number of the (.+) is"),
        (Passages(num_passages=20), r"number for (.+) is"),
        (Association(num_people=16), r"^ (\w+) "),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_the_needles_of_a_text_are_about_different_things(task, name):
    for seed in range(5):
        needles = task.pieces(random.Random(seed)).needles
        names = [re.search(name, needle)[1] for needle in needles]
        assert len(set(names)) == len(names) >= 16
