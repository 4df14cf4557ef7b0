"""Prompts read in pieces and on a shared cache, by models with windows, chunks and states, against whole prompts."""

import math
from types import SimpleNamespace

import pytest
import torch

from ctxext.checkpoint.head import Head
from ctxext.data.prompt import Prompt
from ctxext.models import answers, reading, token_losses
from ctxext.models import model as model_module
from ctxext.models.model import LoadedModel
from ctxext.models.prefix_cache import new_cache, sharing_works
from ctxext.served.readings import read_tokens
from hand_made import tiny_llama
from tiny_models import build

# Windows and chunks of 16 tokens, and states. LENGTH is several windows.
WINDOWS = ["gemma2", "gemma3_text", "gemma3n_text", "gemma4_text", "gpt_oss", "llama4_text", "cohere2", "olmo3"]
WINDOWS += ["ministral3", "mistral", "phi3", "mimo_v2_flash"]
STATES = ["qwen3_next", "qwen3_5_text", "falcon_h1", "zamba2", "lfm2", "granitemoehybrid", "olmo_hybrid"]
LENGTH, ANSWER, BRANCHES = 60, 3, (9, 26, 41)
LONG = 5
"""Factor of these for models with states, whose pieces begin at multiples of 64 tokens."""
TOLERANCE, OF_ZAMBA = 1e-5, 3e-5
"""Of the largest logit. Zamba 2 as built here differs from itself in float64 by 2e-3, whole or in pieces."""


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(reading, "_PIECE", {"cpu": 7})


def loaded_of(family):
    return LoadedModel(family, (model := build(family).eval()), None, can_share=sharing_works(model))


def questions_of(model, factor=1):
    """Two questions of four prompts that differ from some place on, each with an answer."""
    vocabulary, size = model.config.get_text_config(decoder=True).vocab_size, (2, 1, factor * LENGTH)
    ids = torch.randint(3, vocabulary, size, generator=torch.Generator().manual_seed(1)).repeat(1, 4, 1)
    for number, place in enumerate((factor * branch for branch in BRANCHES), 1):
        ids[:, number, place:] = (ids[:, number, place:] - 3 + number) % (vocabulary - 3) + 3
    return [[Prompt(row.tolist(), ANSWER, ()) for row in question] for question in ids]


def last_logits(loaded, questions, depths):
    return {depth: logits for depth, _, logits in answers._run_all(loaded, questions, set(depths))}


@pytest.mark.parametrize("family", [*WINDOWS, *STATES])
def test_prompts_share_a_cache_in_bf16_too(family):
    assert sharing_works(build(family).eval().bfloat16())


@pytest.mark.parametrize("family", [*WINDOWS, *STATES])
@torch.inference_mode()
def test_prompts_on_a_shared_cache_equal_whole_prompts(family, monkeypatch):
    monkeypatch.setattr(reading, "_PIECE", {"cpu": 64 if family in STATES else 7})
    loaded = loaded_of(family)
    assert loaded.can_share
    questions = questions_of(loaded.model, LONG if family in STATES else 1)
    shared = last_logits(loaded, questions, range(4))
    allowed = OF_ZAMBA if family == "zamba2" else TOLERANCE
    for depth, logits in shared.items():
        ids = torch.tensor([question[depth].ids for question in questions])
        whole = loaded.model(input_ids=ids, use_cache=False).logits[:, -ANSWER - 1 :]
        assert (logits - whole).abs().max() <= allowed * whole.abs().max()
    # A run that is resumed reads other prompts before, and gets the same bits.
    for left in ([1, 3], [2], [0, 3]):
        for depth, logits in last_logits(loaded, questions, left).items():
            assert torch.equal(logits, shared[depth])


@pytest.mark.parametrize("family", WINDOWS)
@torch.inference_mode()
def test_losses_and_generated_tokens_of_pieces_equal_those_of_whole_prompts(family, monkeypatch):
    loaded = loaded_of(family)
    questions = [question[:1] for question in questions_of(loaded.model)]
    ids = torch.tensor([question[0].ids for question in questions])
    loaded.model.generation_config.eos_token_id = None
    assert loaded.cache_for(LENGTH) is not None
    in_pieces = (
        token_losses.token_losses(loaded, ids),
        [*loaded.write(questions, [0])],
        last_logits(loaded, questions, [0]),
    )
    monkeypatch.setattr(LoadedModel, "cache_for", lambda *_: None)
    whole = token_losses.token_losses(loaded, ids), [*loaded.write(questions, [0])], last_logits(loaded, questions, [0])
    torch.testing.assert_close(in_pieces[0], whole[0], atol=1e-5, rtol=1e-5)
    assert in_pieces[1] == whole[1]
    torch.testing.assert_close(in_pieces[2][0], whole[2][0], atol=1e-5, rtol=1e-5)
    assert not torch.equal(in_pieces[0], whole[0]) or not torch.equal(in_pieces[2][0], whole[2][0])


def test_only_a_window_shorter_than_the_prompt_is_read_in_pieces():
    loaded = loaded_of("gemma3_text")
    assert loaded.cache_for(16) is None
    assert loaded.cache_for(17) is not None
    plain = LoadedModel("llama", tiny_llama(), None, can_share=True)
    assert plain.cache_for(10**6) is None
    assert LoadedModel("gemma3", loaded.model, None, can_share=False).cache_for(17) is None


class Forgetful(torch.nn.Module):
    """A model whose state begins again with each piece, as some kernels do, but whose attention continues."""

    def __init__(self, model):
        super().__init__()
        self.inner, self.config, self.device, self.dtype = model, model.config, model.device, model.dtype

    def forward(self, input_ids, past_key_values=None, **options):
        for layer in getattr(past_key_values, "layers", ()):
            for states in (getattr(layer, "conv_states", {}), getattr(layer, "recurrent_states", {})):
                for state in filter(torch.is_tensor, states.values()):
                    state.zero_()
        return self.inner(input_ids=input_ids, past_key_values=past_key_values, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["falcon_h1", "qwen3_next"])
def test_a_state_that_begins_again_is_seen(family, dtype):
    model = build(family).eval().to(dtype)
    assert sharing_works(model)
    assert not sharing_works(Forgetful(model))


def test_a_mark_is_gone_back_to_more_than_once():
    model = build("falcon_h1").eval()
    ids = torch.randint(3, 100, (1, LENGTH), generator=torch.Generator().manual_seed(0))
    cache = new_cache(model)
    with torch.inference_mode():
        reading.run(model, ids[:, :20], 1, cache)
        cache.mark()
        first = reading.run(model, ids[:, 20:], 1, cache)
        for _ in range(2):
            cache.go_back(20)
            reading.run(model, ids[:, 30:50], 1, cache)
            cache.mark()
            cache.go_back(20)
            assert cache.marks == {20}
            assert torch.equal(reading.run(model, ids[:, 20:], 1, cache), first)


def test_states_begin_again_where_the_chunks_of_the_model_begin():
    for family, unit in {"gemma3_text": 1, "qwen3_next": 64, "zamba2": 256, "falcon_h1": 64}.items():
        assert new_cache(build(family)).unit == unit


@torch.inference_mode()
def test_readings_of_a_served_checkpoint_are_in_pieces_too(monkeypatch):
    head = Head(build("gemma3_text"))
    ids = questions_of(head.model)[0][0].ids
    sizes, read = [], head.read
    monkeypatch.setattr(head, "read", lambda piece, **given: sizes.append(piece.shape[1]) or read(piece, **given))
    whole = read(torch.tensor([ids]))
    torch.testing.assert_close(read_tokens(head, torch.tensor([ids])), whole, atol=1e-5, rtol=1e-5)
    assert sizes == [7] * 8 + [4]
    sizes.clear()
    read_tokens(head, torch.tensor([ids[:16]]))
    assert sizes == [16]


def test_generated_rows_end_at_their_first_end_token():
    """Not with the padding up to the end of a longer row."""
    model = build("llama")
    loaded = LoadedModel("llama", model, None, can_share=False)
    questions = [[Prompt([*range(start, start + 20), *[0] * 12], 12, ())] for start in (3, 30, 60)]
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = None
    ((_, rows),) = loaded.write(questions, [0])
    assert all(row.is_cut for row in rows)
    model.generation_config.eos_token_id = end = rows[0].ids[5]
    model.generation_config.pad_token_id = 7
    ((_, ended),) = loaded.write(questions, [0])
    assert [row.ids for row in ended] == [
        row.ids[: row.ids.index(end) + 1] if end in row.ids else row.ids for row in rows
    ]
    assert [row.is_cut for row in ended] == [end not in row.ids for row in rows]
    assert len({len(row.ids) for row in ended}) > 1


@pytest.mark.parametrize(
    ("per_token", "num_tokens", "lengths"),
    [
        (0.005, math.inf, (1, 64, 128, 256, 512)),
        (0.1, math.inf, (1, 64)),
        (0.0, math.inf, (1, 64, 128, 256, 512, 1000)),
        (0.005, 20_000, (1, 64, 128, 256)),
    ],
    ids=("usual", "slow", "fast", "little work"),
)
def test_the_speed_is_measured_within_seconds(monkeypatch, per_token, num_tokens, lengths):
    clock = SimpleNamespace(now=0.0)
    loaded = LoadedModel("tiny", SimpleNamespace(device="cpu"), SimpleNamespace(), can_share=False)

    def read(self, ids):
        clock.now += per_token * ids.shape[1]
        return torch.zeros(1)

    monkeypatch.setattr(LoadedModel, "_read_once", read)
    several = SimpleNamespace(monotonic=lambda: clock.now, process_time=lambda: torch.get_num_threads() * clock.now)
    monkeypatch.setattr(model_module, "time", several)
    read_texts = loaded.first_pace(1000, num_tokens)
    assert [length for length, _ in read_texts] == [*lengths]
    assert [seconds for _, seconds in read_texts] == pytest.approx([per_token * size for size in lengths])


def test_threads_that_wait_for_each_other_are_not_measured(monkeypatch):
    """Short texts take 5 s with two threads, which work a tenth of it, and 2 ms a token with one thread."""
    clock, threads = SimpleNamespace(now=0.0, work=0.0), [2]
    loaded = LoadedModel("tiny", SimpleNamespace(device="cpu"), SimpleNamespace(), can_share=False)

    def read(self, ids):
        seconds = 5.0 if threads[-1] == 2 else 0.002 * ids.shape[1]
        clock.now += seconds
        clock.work += seconds / 10 if threads[-1] == 2 else seconds
        return torch.zeros(1)

    monkeypatch.setattr(LoadedModel, "_read_once", read)
    times = SimpleNamespace(monotonic=lambda: clock.now, process_time=lambda: clock.work)
    monkeypatch.setattr(model_module, "time", times)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads[-1])
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    read_texts = loaded.first_pace(2048)
    assert threads == [2, 1, 2]
    assert read_texts == [(length, pytest.approx(0.001 * length)) for length in (1, 64, 128, 256, 512, 1024)]
