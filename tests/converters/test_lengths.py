"""Files beside the weights as nobody should write them: edited where they must be, kept otherwise, refused by name."""

import functools
import json
import random

import pytest

from ctxext.api import Recipe, convert, open_checkpoint, verify
from ctxext.converters.lengths import with_number
from ctxext.converters.plan import make_plan
from ctxext.errors import CtxextError
from ctxext.methods import Yarn
from ctxext.recipes.registry import method_named
from small_llama import make_llama, read_json

SelfExtend = method_named("self-extend")
VOCABULARY = {"vocab": dict.fromkeys(map(str, range(5000)), 0)}
LENGTH, LONGER = 64, 256
AGAIN = "trunc\\u0061tion"


@pytest.fixture
def llama(tmp_path):
    return make_llama(tmp_path / "llama", max_position_embeddings=LENGTH)


def converted(source, tmp_path, method=Yarn):
    return convert(str(source), tmp_path / "out", Recipe([method(factor=4)]), check=False)


def failed(out):
    return {finding.check for finding in verify(str(out), load=False) if finding.status == "failed"}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('{"truncation": {"max_length": 64}}', '{"truncation": {"max_length": 256}}'),
        ('{"x": {"truncation": {"max_length": 64}},\n "truncation" : {"a": {}, "max_length" :64 } }', None),
        ('{"a": [{"max_length": 64}], "truncation": {"strategy": {"b": {}}, "max_length": 64}}', None),
        ('\ufeff {"truncation": {"max_length": 64}, "padding": {"strategy": {"Fixed": 64}}}', None),
        (f'{{"y": "\\"truncation\\": {{\\"max_length\\": 64}}", "{AGAIN}": {{"max_length": 64}}}}', None),
        (
            json.dumps({"model": {"vocab": dict.fromkeys(map(str, range(5000)), 0)}, "truncation": {"max_length": 64}}),
            None,
        ),
    ],
)
def test_only_truncation_is_edited_in_place(before, after, llama, tmp_path):
    (llama / "tokenizer.json").write_text(before)
    converted(llama, tmp_path)
    text = (tmp_path / "out" / "tokenizer.json").read_text()
    wanted = json.loads(before.removeprefix("\ufeff"))
    wanted["truncation"]["max_length"] = LONGER
    assert json.loads(text) == wanted
    assert text == after or after is None
    assert len(text) == len(before.removeprefix("\ufeff")) + 1


@pytest.mark.parametrize(
    "text",
    [
        '{"truncation": {"max_length": 63}}',
        '{"truncation": null}',
        '{"x": {"truncation": {"max_length": 64}}}',
        '{"truncation": {"x": {"max_length": 64}}}',
        '{"truncation": [64]}',
        "[64]",
    ],
)
def test_what_is_not_the_old_length_stays_byte_for_byte(text, llama, tmp_path):
    (llama / "tokenizer.json").write_text(text)
    converted(llama, tmp_path)
    assert (tmp_path / "out" / "tokenizer.json").read_text() == text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"x": "\xe9"}', "is not valid UTF-8: invalid byte at position 7"),
        (b'{"truncation": {"max_length": 64}, "truncation": null}', 'has the key "truncation" twice'),
        (b'{"truncation"', "is not valid JSON"),
        (b'{"truncation": {"max_length": 64]', "is not valid JSON"),
        (b'{"x": ' + b"[" * 100_000, "is not valid JSON"),
    ],
)
def test_a_tokenizer_that_cannot_be_read_is_named(content, message, llama, tmp_path):
    (llama / "tokenizer.json").write_bytes(content)
    with pytest.raises(CtxextError, match=message) as caught:
        converted(llama, tmp_path)
    assert "tokenizer.json" in caught.value.message
    assert not (tmp_path / "out").exists()


def test_an_escaped_key_and_another_of_its_name_deeper(llama, tmp_path):
    name = "model_max_l\\u0065ngth"
    (llama / "tokenizer_config.json").write_text(f'{{"x": {{"model_max_length": 3}}, "{name}": {LENGTH}}}')
    converted(llama, tmp_path)
    text = (tmp_path / "out" / "tokenizer_config.json").read_text()
    assert text == f'{{"x": {{"model_max_length": 3}}, "{name}": {LONGER}}}'


def test_a_byte_order_mark_is_read_over_and_left_out(llama, tmp_path):
    (llama / "tokenizer_config.json").write_text('\ufeff{"model_max_length": 64}')
    converted(llama, tmp_path)
    assert (tmp_path / "out" / "tokenizer_config.json").read_text() == '{"model_max_length": 256}'


@pytest.mark.parametrize("more", [{"x": float("nan")}, {"x": [float("nan"), {"": None}]}, {"": 1}, {"": {"": []}}])
@pytest.mark.parametrize("method", [Yarn, SelfExtend])
def test_a_configuration_with_nan_and_empty_keys_passes_verify(more, method, llama, tmp_path):
    (llama / "config.json").write_text(json.dumps({**read_json(llama / "config.json"), **more}))
    converted(llama, tmp_path, method)
    assert failed(tmp_path / "out") == set()


NAMES = ("modeling_ctxext.py", "method.py", "relation.py", "ctxext.json")


def test_files_named_like_ours_are_the_sources(llama, tmp_path):
    for name in NAMES:
        (llama / name).write_text("{}" if name.endswith(".json") else "x = 1\n")
    converted(llama, tmp_path)
    assert (tmp_path / "out" / "method.py").read_text() == "x = 1\n"
    assert "yarn" in (tmp_path / "out" / "ctxext.json").read_text()
    assert failed(tmp_path / "out") == set()
    (tmp_path / "out" / "relation_maps.py").write_text("x = 2\n")
    assert failed(tmp_path / "out") == {"files", "code"}


@pytest.mark.parametrize("name", NAMES[:2])
def test_code_takes_no_files_place(name, llama, tmp_path):
    (llama / name).write_text("x = 1\n")
    with pytest.raises(CtxextError, match=f'already has a file "{name}"'):
        converted(llama, tmp_path, SelfExtend)
    assert not (tmp_path / "out").exists()


def test_a_length_missing_in_config_json_is_reported(run, llama, tmp_path):
    message = "contains no context length: 2048 tokens is the default of its class"
    config = read_json(llama / "config.json")
    assert message not in run("convert", llama, tmp_path / "out", "-m", "yarn", "--factor", "2").stderr
    assert json.loads(run("inspect", llama, "--json").stdout)["default_length"] is None
    del config["max_position_embeddings"]
    (llama / "config.json").write_text(json.dumps(config))
    (llama / "tokenizer_config.json").unlink(missing_ok=True)
    assert message in run("convert", llama, tmp_path / "out2", "-m", "yarn", "--factor", "2").stderr
    assert message in (tmp_path / "out2" / "README.md").read_text()
    said = " ".join(run("inspect", llama).stdout.split())
    assert "not in config.json: the default of its configuration class" in said
    assert json.loads(run("inspect", llama, "--json").stdout)["default_length"] == 2048


@pytest.mark.parametrize("seed", range(20))
def test_one_number_is_replaced_and_every_other_character_stays(seed):
    """Of any object, at any of its places, whatever stands before and behind it."""
    rng = random.Random(seed)

    def value(depth):
        kinds = (rng.randrange(1000, 9999), 'a: {1}, "', None, [1, {"a": 2}], {"b": 3}, -1.5e3)
        if depth and rng.random() < 0.6:
            return {key: value(depth - 1) for key in rng.sample(("a", "b", "é", "", "a.b", "max_length"), 3)}
        return rng.choice(kinds)

    def places(content, keys=()):
        for key, inner in content.items():
            if isinstance(inner, dict):
                yield from places(inner, (*keys, key))
            elif type(inner) is int:
                yield (*keys, key), inner

    content = {"first": 1234, **{key: value(2) for key in "xyz"}, "last": 5678}
    text = json.dumps(content, indent=rng.choice((None, 1)), ensure_ascii=rng.random() < 0.5)
    for keys, before in places(content):
        changed = with_number(text, "x", keys, 77, old=before)
        expected = json.loads(text)
        inner = functools.reduce(dict.__getitem__, keys[:-1], expected)
        inner[keys[-1]] = 77
        assert json.loads(changed) == expected
        assert len(changed) == len(text) - len(str(before)) + 2
        assert with_number(text, "x", keys, 77, old=before + 1) is None
        assert with_number(text, "x", (*keys, "deeper"), 77) is None


@pytest.mark.parametrize("keys", [("a",), ("b", "a")])
def test_a_duplicate_key_on_the_path_is_refused(keys):
    inner = '"a": 1, "c": [{"a": 3}], "a": 2'
    with pytest.raises(CtxextError, match=r'"x" has the key "a" twice'):
        with_number(f"{{{inner}}}" if len(keys) == 1 else f'{{"b": {{{inner}}}}}', "x", keys, 7)
    with pytest.raises(CtxextError, match=r'"x" has the key "b" twice'):
        with_number('{"b": {"a": 1}, "b": {}}', "x", ("b", "a"), 7)
    assert with_number('{"c": 1, "c": 2, "a": 3}', "x", ("a",), 7) == '{"c": 1, "c": 2, "a": 7}'


@pytest.mark.parametrize("inside", [False, True])
def test_a_kernel_required_by_the_config_is_named(inside, llama):
    config = json.loads((llama / "config.json").read_text())
    asked = {"_attn_implementation": "someone/kernel", "_experts_implementation": "grouped_mm"}
    (config.setdefault("inner", {}) if inside else config).update(asked)
    (llama / "config.json").write_text(json.dumps(config))
    plan = make_plan(open_checkpoint(str(llama)), Recipe([Yarn(factor=4)]))
    (caution,) = (caution for caution in plan.cautions if "kernel" in caution)
    assert "refers to someone/kernel on the Hub" in caution
    assert "grouped_mm" not in caution
