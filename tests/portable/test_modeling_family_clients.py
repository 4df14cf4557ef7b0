"""Clients of transformers beyond plain generation: all must write what plain cached generation writes.

Eight tokens, greedily, after a prompt past the original context length.
"""

import functools
import shutil
import uuid

import pytest
import torch
from transformers import GenerationConfig
from transformers.utils import logging

from ctxext.methods import MsPoE
from ctxext.recipes.registry import method_named
from portable_checkpoints import llama, load, tokens, write

NEW = 8
LENGTH = 150
PER_ROW = ("self-extend", "bifocal", "dca", "rerope", "adaptive", "sinks", "window")
CALIBRATED = MsPoE(schedule="by-parts", ratio_min=1, ratio_max=2, first_layer=0, head_order="fixed")
STEPS = {"calibrated": CALIBRATED, "prompt": MsPoE(schedule="linear", first_layer=0, head_order="prompt")}
STEPS |= {name: method_named(name)(target_length=512) for name in PER_ROW}

CLIENTS = {
    "prefill_chunk_size": {"prefill_chunk_size": 64},
    "assistant_model": {"assistant_model": True},
    "prompt_lookup_num_tokens": {"prompt_lookup_num_tokens": 4},
    "use_cache=False": {"use_cache": False},
}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return llama(tmp_path_factory.mktemp("clients") / "source", max_position_embeddings=64, eos_token_id=63)


@pytest.fixture(scope="module")
def models(source, tmp_path_factory):
    place = tmp_path_factory.mktemp("clients")

    @functools.cache
    def get(name):
        folder = shutil.copytree(source, place / f"served_{uuid.uuid4().hex[:8]}")
        return load(write(folder, STEPS[name]), dtype=torch.float64)

    return get


def written(model, ids, *, assistant_model=False, **options):
    """What greedy decoding writes; the end token is never chosen, so that all are as long."""
    helper = {"assistant_model": model} if assistant_model else {}
    config = GenerationConfig(
        max_new_tokens=NEW, do_sample=False, pad_token_id=0, eos_token_id=63, suppress_tokens=[63], **options
    )
    out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config, **helper)
    return out[:, ids.shape[1] :]


@functools.cache
def plainly_written(model):
    return written(model, tokens(LENGTH))


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("name", ["calibrated", *PER_ROW])
def test_every_client_writes_the_same(models, name, client):
    model = models(name)
    equal = written(model, tokens(LENGTH), **CLIENTS[client]) == plainly_written(model)
    assert equal.shape == (1, NEW)
    assert equal.sum() == NEW


@pytest.mark.parametrize("name", ["calibrated", *PER_ROW])
@torch.no_grad()
def test_right_padding_without_a_mask_moves_nothing(models, name):
    """As lm-evaluation-harness asks for log-likelihoods: rows of a batch padded at their end, and no mask."""
    model, long, short = models(name), tokens(LENGTH), tokens(LENGTH - 40, seed=1)
    padded = torch.cat([short, torch.zeros(1, 40, dtype=torch.long)], 1)
    together = model(torch.cat([long, padded])).logits
    torch.testing.assert_close(together[1:, : LENGTH - 40], model(short).logits, rtol=0, atol=1e-8)
    torch.testing.assert_close(together[:1], model(long).logits, rtol=0, atol=1e-8)


@pytest.mark.thorough
def test_continuous_batching(models):
    rows = [tokens(length)[0].tolist() for length in (40, 90, LENGTH)]
    model = models("calibrated")
    config = GenerationConfig(max_new_tokens=NEW, do_sample=False, pad_token_id=0, eos_token_id=-1)
    outputs = model.generate_batch(inputs=rows, generation_config=config)
    for row, output in zip(rows, outputs.values(), strict=True):
        plain = model.generate(
            torch.tensor([row]), attention_mask=torch.ones(1, len(row), dtype=torch.long), generation_config=config
        )
        assert list(output.generated_tokens) == plain[0, len(row) :].tolist()


@pytest.mark.parametrize("name", ["prompt", *PER_ROW])
def test_continuous_batching_is_refused_if_wrong(models, name):
    """It keeps the name of the backend and hands its paged cache to every layer (a whole engine takes all memory)."""
    ids = tokens(40)
    with pytest.raises(ValueError, match="needs whole sequences"):
        models(name)(ids, read_index=[torch.arange(40)], write_index=[torch.arange(40)], use_cache=False)


def warnings_of(monkeypatch):
    """What Ms-PoE has warned of, as it comes, without the limit of one each."""
    said = []

    def keep(self, text, *rest):
        if "Ms-PoE" in text:
            said.append(text)

    monkeypatch.setattr(type(logging.get_logger("transformers.ctxext")), "warning_once", keep)
    return said


@pytest.mark.parametrize(
    ("client", "warning"),
    [
        ("prefill_chunk_size", "a cache continues with several tokens"),
        ("prompt_lookup_num_tokens", "a cache continues with several tokens"),
        ("use_cache=False", "a text grows without a cache"),
    ],
)
@pytest.mark.thorough
def test_prompt_order_warns_of_clients_that_do_not_suit_it(models, monkeypatch, client, warning):
    said = warnings_of(monkeypatch)
    model, ids = models("prompt"), tokens(100)
    plain = written(model, ids)
    assert not said, "plain generation is what it is made for"
    others = written(model, ids, **CLIENTS[client])
    assert any(warning in text and "--head-order calibrated" in text for text in said)
    if client != "prompt_lookup_num_tokens":
        assert not torch.equal(others, plain), "nothing to warn of"


@torch.no_grad()
def test_prompt_order_warns_of_a_batch_without_a_mask(models, monkeypatch):
    said = warnings_of(monkeypatch)
    model, ids = models("prompt"), tokens(100, rows=2)
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    model(ids, attention_mask=mask)
    model(ids[:1])
    assert not said
    model(ids)
    assert [text for text in said if "a batch has no mask" in text]
