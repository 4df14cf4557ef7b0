"""Every option of the commands that load models, and what lies beside models: tokenizers, templates, adapters, data."""

import bz2
import gzip
import json
import lzma
import os
import shutil
from pathlib import Path

import pytest
import torch
import typer
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from ctxext.cli.app import app
from hostile import ODD, TEXTS, a_folder, fuzzing, mutated
from test_fuzz_commands import ASKED, ROW, TRAINED, check, lines, made, server  # noqa: F401  Fixtures.
from test_fuzz_places import NUMBERS

pytestmark = pytest.mark.slow
fuzz = fuzzing(3)
COMMANDS = typer.main.get_command(app).commands
SEARCHED = ("--target-length", "640", "--trials", "1", "--samples", "1", "--checked", "2", "--keep-short", "1", "-q")
HEAVY = {
    "eval": ["tiny", *ASKED, "--out", "out"],
    "finetune": ["base", "out", "--data", "numbers.jsonl", *TRAINED],
    "search": ["tiny", "out.yaml", *SEARCHED, "--methods", "pi"],
    "merge": ["base", "adapter", "out"],
    "demo": ["out", "--samples", "0", "-q"],
}
MAY_GO_ON = {"--minutes", "--samples", "--checked", "--trials", "--steps", "--epochs"}
"""Who asks for much waits long: of these only what is refused is drawn."""
CALLED = {"--out", "--study", "--storage", "--report-to"}
"""Options that say where something is written."""
OPTIONS = {
    name: [
        (max(option.opts, key=len), bool(getattr(option, "is_flag", False)))
        for option in COMMANDS[name].params
        if option.opts[0].startswith("-") and not {"--help", *CALLED} & set(option.opts)
    ]
    for name in HEAVY
}
REFUSED = ("0", "-1", "x", "", "nan", "inf", "9" * 30, "1e308", "½", "\x1b[31m")
WORDS = (
    "",
    ",",
    ",,",
    "[/x]",
    "\x1b[31m",
    "a\nb",
    "a" * 5000,
    "none",
    "auto",
    "\udcff",
    "%s{}",
    "[]",
    '{"x": 1}',
    ":1",
)
WORDS += ("x:nan", "all", "yarn,", "passkey,passkey", "http://[", "1,2", "32k,1e9")
PLACES = ("folder", "pipe.jsonl", "loop", "zero.txt", "empty.jsonl", "hole.txt", "hole.jsonl", "bytes.csv", "missing/x")
PLACES += ("zipped.jsonl.gz", "x" * 300, ".", "/dev/null", "tiny/config.json")


def lay(place: Path, made: Path) -> None:  # noqa: F811
    """What the command lines name, and files that are something else."""
    for name in ("tiny", "base"):
        shutil.copytree(made / name, place / name)
    shutil.copytree(made / "tuned" / "adapter", place / "adapter")
    shutil.copy(made / "numbers.jsonl", place)
    (place / "folder").mkdir()
    os.mkfifo(place / "pipe.jsonl")
    (place / "loop").symlink_to("loop")
    (place / "zero.txt").symlink_to("/dev/zero")
    (place / "empty.jsonl").touch()
    (place / "bytes.csv").write_bytes(bytes(range(256)))
    (place / "zipped.jsonl.gz").write_bytes(gzip.compress(b'{"text": "w2"}')[:-9])
    for name in ("hole.txt", "hole.jsonl"):
        with (place / name).open("wb") as file:
            file.truncate(1 << 40)


@fuzz
@given(st.data(), st.sampled_from(sorted(HEAVY)))
def test_options_of_commands_that_load_models(server, made, data, command):  # noqa: F811
    with a_folder() as place:
        lay(place, made)
        words = []
        for option, is_flag in data.draw(st.lists(st.sampled_from(OPTIONS[command]), min_size=1, max_size=3)):
            values = st.one_of(st.sampled_from(WORDS), st.sampled_from(PLACES), NUMBERS.filter(lambda n: "/" not in n))
            value = data.draw(st.sampled_from(REFUSED) if option in MAY_GO_ON else values).replace("\x00", "_")
            words.append(option if is_flag else f"{option}={value}")
        check(server, place, command, *HEAVY[command], *words, may_write=("out", ".out"))


SPECIAL = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}, "additional_special_tokens": ["<x>"]}
TEMPLATES = ("", "{{", "{{ 1/0 }}", "{{ messages[9]['x']['y'] }}", "{{ raise_exception('no\nno') }}", "constant")
TEMPLATES += ("{% for i in range(10**9) %}x{% endfor %}", "{{ ''.__class__.__mro__[1].__subclasses__() }}")
TEMPLATES += ("{% include 'x' %}", "\x1b[31m", "{{ messages }}", "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}")
CLASSES = ("LlamaTokenizer", "GPT2Tokenizer", "BertTokenizer", "T5Tokenizer", "ByT5Tokenizer", "../x", "", "X")


def change_tokenizer(folder: Path, data: st.DataObject) -> None:
    """Mutate one of a tokenizer's files, or put those of another in their place."""
    whole, config = folder / "tokenizer.json", folder / "tokenizer_config.json"
    content, settings = json.loads(whole.read_text()), json.loads(config.read_text())
    kind = data.draw(
        st.sampled_from(["whole", "vocabulary", "config", "special", "added", "template", "class", "text"])
    )
    if kind == "whole":
        # The vocabulary is most of the file; what lies around it is drawn.
        around = data.draw(mutated({**content, "model": {**content["model"], "vocab": 0, "merges": 0}}))
        model = around.get("model") if isinstance(around, dict) else None
        if isinstance(model, dict):
            model |= {key: content["model"][key] for key in ("vocab", "merges") if model.get(key) == 0}
        whole.write_text(json.dumps(around))
    elif kind == "vocabulary":
        chosen = data.draw(st.sampled_from(sorted(content["model"]["vocab"])))
        content["model"]["vocab"][chosen] = data.draw(st.one_of(ODD, st.sampled_from([640, 10**6, 2**32 - 1])))
        whole.write_text(json.dumps(content))
    elif kind == "config":
        config.write_text(json.dumps(data.draw(mutated({**settings, **SPECIAL, "chat_template": "x"}))))
    elif kind in ("special", "added"):
        name = "special_tokens_map.json" if kind == "special" else "added_tokens.json"
        (folder / name).write_text(json.dumps(data.draw(mutated(SPECIAL if kind == "special" else {"<x>": 640}))))
    elif kind == "template":
        settings["chat_template"] = data.draw(st.one_of(st.sampled_from(TEMPLATES), ODD))
        config.write_text(json.dumps(settings))
    elif kind == "class":
        config.write_text(json.dumps({**settings, "tokenizer_class": data.draw(st.sampled_from(CLASSES))}))
        whole.unlink()
        name = data.draw(st.sampled_from(["vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model"]))
        (folder / name).write_bytes(data.draw(st.binary(max_size=60)))
    else:
        text = data.draw(st.sampled_from(TEXTS)).encode("utf-8", "surrogatepass")
        data.draw(st.sampled_from([whole, config, folder / "special_tokens_map.json"])).write_bytes(text)


@fuzz
@given(st.data(), st.sampled_from(["eval", "finetune", "search", "convert"]))
def test_tokenizers(server, made, data, command):  # noqa: F811
    with a_folder() as place:
        shutil.copytree(made / "tiny", place / "in")
        change_tokenizer(place / "in", data)
        if command == "finetune":
            for name in ("config.json", "ctxext.json", "model.safetensors"):
                shutil.copy(made / "base" / name, place / "in" / name)
        words = {
            "eval": ["in", *ASKED, "--out", "out"],
            "finetune": ["in", "out", "--data", made / "numbers.jsonl", *TRAINED],
            "search": ["in", "out.yaml", *SEARCHED, "--methods", "pi"],
            "convert": ["in", "out", "-m", "yarn", "--factor", "4"],
        }[command]
        check(server, place, command, *words, may_write=("out", ".out"))


TYPES = (torch.float64, torch.bfloat16, torch.int8, torch.int64, torch.bool, torch.float8_e4m3fn, torch.complex64)
SHAPES = ((), (0,), (1,), (2, 32), (32, 2), (0, 32), (2, 0), (2, 32, 1), (4, 32))
ENDS = (".lora_magnitude_vector", ".base_layer.weight", ".weight", ".lora_embedding_A", ".lora_A.default.weight", "")


@fuzz
@given(st.data())
def test_adapters_of_other_tensors(server, made, data):  # noqa: F811
    with a_folder() as place:
        shutil.copytree(made / "tuned" / "adapter", place / "adapter")
        path = place / "adapter" / "adapter_model.safetensors"
        tensors = load_file(path)
        for name in data.draw(st.lists(st.sampled_from(sorted(tensors)), min_size=1, max_size=3, unique=True)):
            kind = data.draw(st.sampled_from(["type", "shape", "name", "missing", "more"]))
            if kind == "type":
                tensors[name] = tensors[name].to(data.draw(st.sampled_from(TYPES)))
            elif kind == "shape":
                tensors[name] = torch.zeros(data.draw(st.sampled_from(SHAPES)))
            elif kind == "more":
                shape, dtype = data.draw(st.sampled_from([*SHAPES, (32,)])), data.draw(st.sampled_from(TYPES))
                other = name.partition(".lora_")[0] + data.draw(st.sampled_from(ENDS))
                tensors[other] = torch.zeros(shape, dtype=dtype)
            else:
                tensor = tensors.pop(name)
                if kind == "name":
                    tensors[data.draw(st.sampled_from(["x", "", "\x1b[31m", name.replace("_A", "_C")]))] = tensor
        save_file(tensors, path)
        check(server, place, "merge", made / "base", "adapter", "out", may_write=("out",))


PACKED = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress, "zst": bytes}
QUESTION = {"question": "Where?", "answers": ["here"], "ctxs": [{"title": "t", "text": "here", "isgold": True}] * 2}


@fuzz
@given(st.data(), st.sampled_from(["finetune", "perplexity", "documents", "needle", "search", "calibration"]))
def test_data_in_archives_and_folders(server, made, data, use):  # noqa: F811
    with a_folder() as place:
        rows = data.draw(mutated([QUESTION if use == "documents" else ROW] * 2))
        content = lines(rows if isinstance(rows, list) else [rows])
        name = data.draw(st.sampled_from(["d.jsonl", "d.json", "d.csv", "d.tsv", "d.txt", "d.parquet", "d"]))
        if data.draw(st.booleans()):
            suffix = data.draw(st.sampled_from(sorted(PACKED)))
            name, content = f"{name}.{suffix}", PACKED[suffix](content)
            cut = data.draw(st.integers(0, len(content)))
            content = content[:cut] + data.draw(st.binary(max_size=9)) + content[cut + 5 :]
        if is_folder := data.draw(st.booleans()):
            (place / "data").mkdir()
            os.mkfifo(place / "data" / "pipe.jsonl")
        (place / ("data" if is_folder else ".") / name).write_bytes(content)
        given = "data" if is_folder else name
        asked = ["--lengths", "250", "--samples", "1", "--depths", "1", "-q", "--out", "out"]
        words = {
            "finetune": ["finetune", made / "base", "out", "--data", given, *TRAINED],
            "perplexity": ["eval", made / "tiny", "-t", "perplexity", "--data", given, *asked],
            "documents": ["eval", made / "tiny", "-t", "documents", "--documents", given, *asked],
            "needle": ["eval", made / "tiny", "-t", "needle", "--haystack", given, *asked],
            "search": ["search", made / "tiny", "out.yaml", *SEARCHED, "--methods", "pi", "--data", given],
            "calibration": ["convert", made / "tiny", "out", "-m", "mspoe", "--head-order", "calibrated"],
        }[use]
        words += ["--calibration-text", given, "--no-verify"] if use == "calibration" else []
        check(server, place, *words, may_write=("out", ".out"))


def test_every_option_of_these_commands_is_tried():
    assert sum(map(len, OPTIONS.values())) > 90
