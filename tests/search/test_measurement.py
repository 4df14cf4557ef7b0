"""Losses of answers and documents, early stopping, and the choice of the best recipe."""

import dataclasses

import pytest

from ctxext.api import Recipe
from ctxext.data.encoding import Encoder
from ctxext.errors import CtxextError
from ctxext.methods import LongRope
from ctxext.models.answers import answer_losses
from ctxext.models.model import LoadedModel, wrap_model
from ctxext.search import measurement
from ctxext.search.measurement import make_eval_sets, measure, read_measurement
from ctxext.search.options import SearchOptions
from hand_made import make_tokenizer, tiny_llama

OPTIONS = SearchOptions(target_length=640, samples=3, num_depths=3, checked=4)


@pytest.fixture(scope="module")
def loaded():
    return wrap_model("tiny", tiny_llama(), make_tokenizer())


@pytest.fixture(scope="module")
def eval_sets(loaded):
    return make_eval_sets(loaded.encoder, OPTIONS, 320)


@pytest.mark.thorough
def test_documents_first_then_the_shortest_prompts(loaded, eval_sets):
    whole = measure(loaded, eval_sets[0])
    assert whole.is_whole
    assert [len(losses) for losses in whole.answers.values()] == [9, 9]
    seen = []
    part = measure(loaded, eval_sets[0], lambda now: seen.append(sorted(now.answers)) or len(seen) == 2)
    assert seen == [[], [320]]
    assert part.short == whole.short
    assert part.answers == {320: whole.answers[320]}
    assert not part.is_whole
    assert read_measurement(dataclasses.asdict(part)) == part


@pytest.mark.thorough
def test_rounds_show_early_what_is_hopeless(loaded, eval_sets, monkeypatch):
    whole = measure(loaded, eval_sets[0])
    monkeypatch.setattr(measurement, "_ROUND", 1)
    bounds = []
    again = measure(loaded, eval_sets[0], lambda now: bounds.append(now.least_loss) and False)
    for length, losses in whole.answers.items():
        assert again.answers[length] == pytest.approx(losses, abs=1e-5), "in the order of the prompts"
    assert len(bounds) == 2 * 3
    assert bounds == sorted(bounds)
    assert bounds[-1] < whole.loss


@pytest.mark.thorough
def test_prompts_share_what_lies_beyond_a_switch_of_schedules(applier, monkeypatch):
    loaded = applier.apply(Recipe([LongRope(factor=4, long_factor=(1.0, 2.0, 3.0, 4.0))]))
    assert applier.stock.can_share
    assert not loaded.can_share
    options = SearchOptions(target_length=1280, samples=2, num_depths=3)
    eval_set = make_eval_sets(applier.stock.encoder, options, 320)[0]
    shared = {length: list(answer_losses(loaded, questions)) for length, questions in eval_set.questions.items()}
    monkeypatch.setattr(LoadedModel, "may_share", lambda *_: False)
    for length, questions in eval_set.questions.items():
        losses_alone = sorted(answer_losses(loaded, questions))
        wanted = [pytest.approx(two, abs=1e-4) for _, two, _ in sorted(shared[length])]
        assert [losses for _, losses, _ in losses_alone] == wanted


def test_eval_sets_share_no_prompt_and_no_document(eval_sets):
    prompts = [
        {tuple(prompt.ids) for by_length in eval_set.questions.values() for one in by_length for prompt in one}
        for eval_set in eval_sets
    ]
    documents = [{tuple(row) for row in eval_set.documents.tolist()} for eval_set in eval_sets]
    for sets in (prompts, documents):
        assert sum(map(len, sets)) == len(set().union(*sets))
    assert [len(by_length) for by_length in prompts] == [2 * 9, 2 * 18, 2 * 12]


def test_exams_from_the_users_text(tmp_path):
    encoder = Encoder(make_tokenizer())
    path = tmp_path / "own.txt"
    path.write_text(" ".join(f"Sentence number {number} stands alone here." for number in range(1500)))
    eval_sets = make_eval_sets(encoder, SearchOptions(target_length=640, data=str(path), samples=2, checked=2), 320)
    texts = [encoder.tokenizer.decode(eval_set.questions[640][0][0].ids) for eval_set in eval_sets]
    assert all("stands alone here." in text for text in texts)
    documents = [{tuple(row) for row in eval_set.documents.tolist()} for eval_set in eval_sets]
    assert sum(map(len, documents)) == len(set().union(*documents))
    path.write_text("Too little text. For three eval sets.")
    with pytest.raises(CtxextError, match=r"contains no document"):
        make_eval_sets(encoder, SearchOptions(target_length=640, data=str(path)), 320)
