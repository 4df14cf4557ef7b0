"""Which configurations let prompts share a cache: those by which a token's keys hang on nothing behind it."""

from types import SimpleNamespace

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from ctxext.data.encoding import Encoder
from ctxext.models import answers, prefix_cache
from ctxext.models.answers import count_common, walk
from ctxext.models.model import Written
from ctxext.models.prefix_cache import (
    follows_length,
    is_static,
    is_static_for,
    sharing_works,
)
from ctxext.tasks.documents import Documents
from ctxext.tasks.registry import RETRIEVAL_TASKS
from hand_made import make_tokenizer, nested, tiny_llama

LONG = {"short_factor": [1.0, 1.0], "long_factor": [1.0, 2.0]}
PROMPT = {"ctxext_code": {"rope": {}, "steps": [{"method": "mspoe", "per_prompt": True}]}}


def rope(**schedule):
    return {"rope_parameters": schedule, "max_position_embeddings": 100}


@pytest.mark.parametrize(
    ("config", "follows"),
    [
        ({}, False),
        (rope(rope_type="default"), False),
        (rope(rope_type="yarn", factor=4.0), False),
        (rope(rope_type="dynamic", factor=4.0), True),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, True),
        (rope(rope_type="longrope", **LONG), True),
        (rope(rope_type="longrope", short_factor=[1.0, 2.0], long_factor=[1.0, 2.0]), False),
        ({"rope_scaling": {"type": "su", **LONG}}, True),
        ({"text_config": {"rope_parameters": {"full_attention": {"rope_type": "dynamic"}}}}, True),
        ({"layers": [{"rope_type": "dynamic"}]}, True),
    ],
)
def test_schedules_that_follow_the_length(config, follows):
    assert follows_length(config) == follows
    assert is_static(config) == (not follows)


@pytest.mark.parametrize(
    ("config", "chooses"),
    [
        ({}, False),
        (PROMPT, True),
        ({"text_config": PROMPT}, True),
        ({"ctxext_code": {"rope": {}, "steps": [{"method": "mspoe", "ranks": [[0]]}]}}, False),
    ],
)
def test_heads_that_are_ordered_by_the_prompt(config, chooses):
    assert is_static(config) == (not chooses)
    assert is_static_for(config, 0, 1) == (not chooses)


@pytest.mark.parametrize(
    ("config", "common", "length", "is_shared"),
    [
        (rope(rope_type="default"), 0, 10**6, True),
        # One and the same inside the original length, whichever key says that.
        (rope(rope_type="dynamic"), 0, 100, True),
        (rope(rope_type="dynamic"), 100, 101, False),
        (rope(rope_type="dynamic", original_max_position_embeddings=50), 0, 50, True),
        (rope(rope_type="dynamic", original_max_position_embeddings=50), 0, 51, False),
        ({**rope(rope_type="dynamic"), "original_max_position_embeddings": 50}, 0, 51, False),
        ({"rope_parameters": {"rope_type": "dynamic"}}, 0, 1, False),
        # LongRoPE's long list is one and the same from there on.
        (rope(rope_type="longrope", original_max_position_embeddings=50, **LONG), 0, 50, True),
        (rope(rope_type="longrope", original_max_position_embeddings=50, **LONG), 49, 51, False),
        (rope(rope_type="longrope", original_max_position_embeddings=50, **LONG), 50, 51, True),
        ({**rope(type="longrope", **LONG), "original_max_position_embeddings": 50}, 50, 51, True),
        ({**rope(type="longrope", **LONG), "original_max_position_embeddings": 50}, 49, 51, False),
        (rope(rope_type="longrope", original_max_position_embeddings=1, **LONG), 1, 2, True),
        # Where nothing says the original length, nothing is known.
        (rope(rope_type="longrope", **LONG), 100, 100, False),
        (rope(rope_type="longrope", **LONG), 0, 1, False),
    ],
)
def test_prompts_for_which_it_is_one_schedule(config, common, length, is_shared):
    assert is_static_for(config, common, length) == is_shared


class Odd(LlamaForCausalLM):
    """Does something else with a cache than other models do."""

    way = ""

    def forward(self, input_ids=None, past_key_values=None, **options):
        if past_key_values is not None and self.way == "refuses it":
            raise TypeError
        if past_key_values is not None and self.way == "keeps a token of its own":
            input_ids = torch.cat([input_ids[:, :1], input_ids], dim=1)
        if past_key_values is not None and self.way == "begins its positions again":
            options["position_ids"] = torch.arange(input_ids.shape[1])[None]
        output = super().forward(input_ids, past_key_values=past_key_values, **options)
        if past_key_values is not None and self.way == "gives another one back":
            output.past_key_values = DynamicCache(config=self.config)
        return output


def odd(way="", **changes):
    model = Odd(tiny_llama(**changes).config).eval()
    model.way = way
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "way", ["refuses it", "keeps a token of its own", "gives another one back", "begins its positions again"]
)
def test_a_cache_with_other_uses_is_not_shared(way, dtype):
    assert not sharing_works(odd(way).to(dtype))
    assert sharing_works(odd().to(dtype))


def deep_model():
    """Return a model in bf16, in which rounding moves its logits by more than a twentieth of their spread."""
    torch.manual_seed(0)
    model = Odd(LlamaConfig(**{**tiny_llama().config.to_dict(), "num_hidden_layers": 48})).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1 and "embed" not in name and "lm_head" not in name:
                weight *= 10
    return model.bfloat16()


def test_rounding_of_a_deep_model_in_16_bits_does_not_prevent_sharing(monkeypatch):
    model = deep_model()
    assert sharing_works(model)
    monkeypatch.setattr(prefix_cache, "_TIMES_ROUNDING", 0)
    assert not sharing_works(model), "the difference is more than a twentieth"
    monkeypatch.undo()
    model.way = "begins its positions again"
    assert not sharing_works(model)


@pytest.mark.parametrize("scale", [0.0, 1.0, 1e5])
def test_sharing_is_tried_whatever_the_size_of_the_logits(scale):
    model = odd()
    with torch.no_grad():
        model.lm_head.weight *= scale
    assert sharing_works(model)


@pytest.mark.parametrize(("share", "works"), [(0.02, True), (0.2, False)])
def test_logits_may_differ_by_a_twentieth_of_their_spread(share, works):
    """By what a model adds to one of them where it is not given the whole prompt."""
    model = odd()
    spread = model(torch.arange(24)[None] * 7).logits[:, 12:].std()
    added = share * spread * torch.nn.functional.one_hot(torch.tensor(3), 640)
    model.lm_head.register_forward_hook(lambda _, given, logits: logits + added * (given[0].shape[1] < 24))
    assert sharing_works(model) is works


def test_a_nested_configuration_may_contain_the_vocabulary():
    model = odd()
    model.config = nested(model.config)
    assert sharing_works(model)


class Cache(list):
    """Of the tokens that were read."""

    unit = 1

    def __init__(self):
        self.marks = set()

    def mark(self):
        self.marks.add(len(self))

    def go_back(self, length):
        del self[length:]
        self.marks = {mark for mark in self.marks if mark <= length}

    def has_window_within(self, length):
        return False


@pytest.mark.parametrize(
    ("prompts", "num_last", "pieces"),
    [
        # The first three tokens of all, then the first prompt's own; five of the others, and what is theirs.
        (["abcxxxvv", "abcdefvv", "abcdegvv"], 2, ["abc", "xxxvv+3", "de", "fvv+5", "gvv+5"]),
        # Whatever comes between them, prompts with more in common follow each other, in the order of their first.
        (["abcdv", "axcdv", "abcev"], 1, ["a", "bc", "dv+3", "ev+3", "xcdv+1"]),
        # What is each prompt's own is not shared though it is alike.
        (["aaaaaaaa"] * 3, 2, ["aaaaaa", *3 * ["aa+6"]]),
        # Less than an eighth is not worth a cache.
        (["abcdefghij", "axcdefghiv", "axcdefghiw"], 1, ["abcdefghij", "axcdefghi", "v+9", "w+9"]),
    ],
)
def test_pieces_that_are_read(monkeypatch, prompts, num_last, pieces):
    read = []

    def run(model, ids, num_kept, cache):
        read.append("".join(map(chr, ids[0])))
        cache.extend(ids[0].tolist())

    def finish(prompt, rest, cache):
        assert "".join(map(chr, [*(cache or []), *rest[0]])) == prompts[prompt]
        read.append("".join(map(chr, rest[0])) + (f"+{len(cache)}" if cache is not None else ""))
        if cache is not None:
            cache.extend(rest[0].tolist())
        return prompt

    monkeypatch.setattr(answers, "run", run)
    monkeypatch.setattr(answers, "new_cache", lambda model: Cache())
    ids = torch.tensor([[list(map(ord, prompt)) for prompt in prompts]])
    finished = [*walk(None, ids, num_last, set(range(len(prompts))), finish)]
    assert sorted(finished) == [(number, number) for number in range(len(prompts))]
    assert read == pieces


def test_a_batch_shares_what_all_of_its_rows_share():
    batch = torch.ones(2, 2, 8, dtype=torch.long)
    batch[1, 1, 4] = 5
    assert count_common(batch, 2) == [[6, 4], [4, 6]]


@pytest.mark.parametrize("task", [Documents(), RETRIEVAL_TASKS["niah-multivalue"]])
def test_special_tokens_are_no_part_of_what_is_written(task, monkeypatch):
    tokenizer = make_tokenizer()
    parts = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in (" 4", "2 ")]
    written = [*parts[0], tokenizer.eos_token_id, *parts[1]]
    prompt = SimpleNamespace(answers=["42"], required=["42"])
    monkeypatch.setattr(answers, "_write", lambda *_: iter([(0, [Written(written, is_cut=False)])]))
    loaded = SimpleNamespace(encoder=Encoder(tokenizer))
    assert [*answers.generate_graded(loaded, [[prompt]], [0], task.grade)] == [(0, [1], (), (), ())]
