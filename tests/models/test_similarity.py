"""Losses of masked tokens and likeness of texts, on models of a few numbers and against plain forwards."""

from types import SimpleNamespace

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM, BertModel

from ctxext.errors import CtxextError
from ctxext.models import similarity
from ctxext.models import token_losses as masked
from ctxext.models.model import LoadedModel, Pooler
from hand_made import tiny_llama

MASK, SPECIAL = 4, [0, 1, 4]
TEXT = [0, *torch.randint(5, 60, (19,), generator=torch.Generator().manual_seed(0)).tolist(), 1]


def bert(kind=BertForMaskedLM):
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=60,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=48,
        max_position_embeddings=64,
        initializer_range=0.3,
    )
    return kind(config).eval()


def loaded_with(model, *, kind="masked", mask=MASK):
    tokenizer = SimpleNamespace(mask_token_id=mask, all_special_ids=SPECIAL)
    return LoadedModel("bert", model, SimpleNamespace(tokenizer=tokenizer), can_share=False, kind=kind)


@pytest.mark.parametrize("rows", [1, 3, 32])
def test_every_eighth_token_is_masked_at_once(monkeypatch, rows):
    monkeypatch.setattr(LoadedModel, "rows_that_fit", lambda model, length: rows)
    model, wanted = bert(), torch.zeros(len(TEXT))
    places = torch.arange(1, 20)
    for number in range(8):
        chosen = places[number::8]
        seen = torch.tensor(TEXT)
        seen[chosen] = MASK
        with torch.no_grad():
            scores = model(seen[None]).logits[0].log_softmax(-1)
        wanted[chosen] = -scores[chosen, torch.tensor(TEXT)[chosen]]
    losses, is_guessed = masked.masked_losses(loaded_with(model), TEXT)
    assert is_guessed.tolist() == [False, *19 * [True], False]
    assert (losses.dtype, losses[0], losses[-1]) == (torch.float64, 0, 0)
    torch.testing.assert_close(losses.float(), wanted, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(masked.losses_of(loaded_with(model), TEXT), losses[1:-1])


@pytest.mark.parametrize(("text", "passes"), [([0, 7, 8, 9, 1], 3), ([0, 1], 1), (TEXT, 8)])
def test_no_more_passes_than_there_are_tokens_to_guess(monkeypatch, text, passes):
    seen, real = [], masked._measure_losses
    monkeypatch.setattr(masked, "_measure_losses", lambda *given: seen.append(given[1]) or real(*given))
    losses, is_guessed = masked.masked_losses(loaded_with(bert()), text)
    assert torch.cat(seen).shape == (passes, len(text))
    assert (losses > 0).tolist() == is_guessed.tolist()


def test_what_has_no_mask_or_no_numbers_is_refused():
    with pytest.raises(CtxextError) as caught:
        masked.masked_losses(loaded_with(bert(), mask=None), TEXT)
    assert str(caught.value) == 'The tokenizer of "bert" has no mask token.'
    model = bert()
    with torch.no_grad():
        model.bert.embeddings.word_embeddings.weight[TEXT[5]] = torch.nan
    for score in (masked.losses_of, lambda loaded, ids: similarity.pool_texts(loaded, [ids])):
        with pytest.raises(CtxextError, match='"bert" returns NaN or infinite logits'):
            score(loaded_with(model), TEXT)


def test_a_causal_model_predicts_each_token_from_the_previous_ones():
    loaded = loaded_with(tiny_llama(), kind="causal")
    assert torch.equal(masked.losses_of(loaded, TEXT), masked.token_losses(loaded, torch.tensor([TEXT]))[0])


@pytest.mark.parametrize("rows", [1, 2, 32])
def test_a_text_is_the_mean_of_its_states_with_length_one(monkeypatch, rows):
    monkeypatch.setattr(LoadedModel, "rows_that_fit", lambda model, length: rows)
    model = bert(BertModel)
    texts = torch.randint(5, 60, (3, 9), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        means = model(texts).last_hidden_state.double().mean(1)
    states = similarity.pool_texts(loaded_with(model), texts.tolist())
    torch.testing.assert_close(states, means / means.square().sum(1, keepdim=True).sqrt(), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    ("likeness", "is_right"),
    [
        ([0.9, 0.1, 0.5], True),
        ([0.5, 0.1, 0.9], False),
        ([0.5, 0.9, 0.1], False),
        ([0.5, 0.5, 0.1], False),
        ([1e-6, 0.0, 0.0], False),
        ([2e-6, 0.0, 0.0], True),
    ],
)
def test_the_right_passage_is_the_most_similar_one_by_more_than_rounding(monkeypatch, likeness, is_right):
    """Texts of one token, number 1 the query, and each as similar to it as is said."""
    states = {(1,): [1.0, 0.0], **{(2 + place,): [share, 1.0] for place, share in enumerate(likeness)}}
    monkeypatch.setattr(
        similarity, "pool_texts", lambda _, texts: torch.tensor([states[tuple(t)] for t in texts], dtype=torch.float64)
    )
    bare = SimpleNamespace(pooler=Pooler(), encoder=SimpleNamespace(get_start_tokens=list, get_end_tokens=list))
    assert similarity.are_most_similar(bare, [([1], [[2], [3], [4]])] * 2) == [is_right] * 2
