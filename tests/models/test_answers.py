"""What the scorer runs, piece by piece, and what it makes of it: counted, and against plain forwards."""

from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaForCausalLM

from ctxext.data.prompt import Prompt
from ctxext.errors import CtxextError
from ctxext.files.processes import forget_peak, peak_memory
from ctxext.models import answers, reading
from ctxext.models import model as evaluate_model
from ctxext.models.answers import answer_losses, are_exact, run, run_as_written, score_depths
from ctxext.models.model import LoadedModel
from ctxext.models.prefix_cache import new_cache
from hand_made import tiny_llama
from releases import IS_OLDER

LENGTH, ANSWER, WINDOW = 24, 2, 16
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "factor": 2.0,
    "rope_theta": 10000.0,
}


class Plain(LlamaForCausalLM):
    """Makes every logit; notes how many tokens it is given at once."""

    def forward(self, input_ids=None, attention_mask=None, past_key_values=None, use_cache=None, return_dict=None):
        self.runs = [*getattr(self, "runs", []), input_ids.shape[1]]
        return super().forward(input_ids, attention_mask, past_key_values=past_key_values, use_cache=use_cache)


class Kept(LlamaForCausalLM):
    """Notes how many logits it is asked for."""

    def forward(self, *given, logits_to_keep=0, **options):
        self.runs = [*getattr(self, "runs", []), logits_to_keep]
        return super().forward(*given, logits_to_keep=logits_to_keep, **options)


def noting(kind=Plain, **changes):
    model = tiny_llama(**changes)
    other = kind(model.config).eval()
    other.load_state_dict(model.state_dict())
    return other


def tokens(*shape, seed=0):
    return torch.randint(3, 640, shape, generator=torch.Generator().manual_seed(seed))


def prompts(common, *, length=LENGTH, num_prompts=2, sizes=(ANSWER,)):
    """Questions, one per size of answer, whose prompts are alike in their first tokens alone."""
    ids = tokens(len(sizes), num_prompts, length)
    ids[:, 1:, :common] = ids[:, :1, :common]
    if num_prompts > 1:
        ids[:, 1:, common] = (ids[:, :1, common] + torch.arange(1, num_prompts)) % 640
    return [[Prompt(row.tolist(), size, ()) for row in question] for question, size in zip(ids, sizes, strict=True)]


def loaded_with(model, *, can_share=False):
    return LoadedModel("tiny", model, None, can_share=can_share)


def long_from(length):
    return {"rope_scaling": {**LONG, "original_max_position_embeddings": length}}


@pytest.mark.parametrize(
    ("changes", "common", "options", "runs"),
    [
        # Prompts share what they have in common, where the model can.
        ({}, 10, {"can_share": True}, [10, 14, 14]),
        ({}, 10, {"can_share": False}, [24, 24]),
        ({}, 3, {"can_share": True}, [3, 21, 21]),
        ({}, 2, {"can_share": True}, [24, 24]),  # Less than an eighth is not worth a cache.
        # Where the schedule follows the length, one token comes first, to forget longer prompts. Within the original
        # length it does not follow.
        ({"rope_scaling": DYNAMIC, "max_position_embeddings": 24}, 10, {}, [1, 10, 14, 14]),
        ({"rope_scaling": DYNAMIC, "max_position_embeddings": 24}, None, {}, [1, 24]),
        # Beyond it each prompt runs as it is written, and the answer's last token is never read.
        ({"rope_scaling": DYNAMIC, "max_position_embeddings": 23}, 10, {}, [1, 22, 1, 1, 22, 1]),
        # LongRoPE is fixed where all is beyond the original length but what is each prompt's own.
        (long_from(10), 10, {}, [1, 10, 14, 14]),
        (long_from(11), 10, {}, [1, 22, 1, 1, 22, 1]),
        (long_from(21), None, {}, [1, 24]),
        (long_from(22), None, {}, [1, 22, 1]),
    ],
)
def test_what_is_run_for_the_prompts_of_a_haystack(changes, common, options, runs):
    """Tokens at once; one prompt alone where nothing is in common."""
    model = noting(**changes)
    questions = prompts(common or 0, num_prompts=1 if common is None else 2)
    asked, loaded = range(len(questions[0])), loaded_with(model, **options)
    loaded.may_share(LENGTH, LENGTH)  # A cache is tried once.
    model.runs = []
    answers = dict(score_depths(loaded, questions, asked))
    assert sorted(answers) == [*asked]
    assert model.runs == runs


def test_what_is_fixed_within_its_length_shares_a_cache_only_if_that_works(monkeypatch):
    monkeypatch.setattr("ctxext.models.model.sharing_works", lambda _: False)
    model = noting(rope_scaling=DYNAMIC)
    assert len(dict(score_depths(loaded_with(model), prompts(10), [0, 1]))) == 2
    assert model.runs == [1, 24, 1, 24]


def test_a_resumed_depth_gets_the_same_numbers_to_the_last_bit(monkeypatch):
    seen, loaded, questions = [], loaded_with(tiny_llama(), can_share=True), prompts(10, num_prompts=4)
    monkeypatch.setattr(answers, "are_exact", lambda loaded, logits, *_: seen.append(logits.clone()))

    def logits_at(wanted):
        seen.clear()
        return dict(zip([depth for depth, _ in score_depths(loaded, questions, wanted)], [*seen], strict=True))

    every, some = logits_at(range(4)), logits_at([1, 3])
    assert sorted(some) == [1, 3]
    assert all(torch.equal(some[depth], every[depth]) for depth in some)


@pytest.mark.parametrize(("kind", "asked"), [(Kept, [1, 3, 3]), (Plain, [10, 14, 14])])
def test_no_more_logits_are_made_than_an_answer_has_and_one(kind, asked):
    model = noting(kind)
    dict(score_depths(loaded_with(model, can_share=True), prompts(10), [0, 1]))
    assert model.runs == asked


@pytest.mark.parametrize("way", ["shared", "alone", "as written"])
@pytest.mark.parametrize("kind", [Plain, Kept])
@torch.inference_mode()
def test_losses_and_verdicts_are_those_of_plain_forwards(monkeypatch, kind, way):
    model, questions = noting(kind), prompts(10, sizes=(1, 2, 4, 4))
    for question in questions[:3]:
        for prompt in question:  # Three answers are what the model says, the fourth is not.
            for place in range(-prompt.num_answer, 0):
                prompt.ids[place] = int(model(torch.tensor([prompt.ids])).logits[0, place - 1].argmax())
    monkeypatch.setattr(answers, "is_static_for", lambda *_: way != "as written")
    by_depth = {depth: rest for depth, *rest in answer_losses(loaded_with(model, can_share=way == "shared"), questions)}
    assert sorted(by_depth) == [0, 1]
    for depth, (losses, correct) in by_depth.items():
        assert correct == [True, True, True, False]
        for question, loss in zip(questions, losses, strict=True):
            ids, size = torch.tensor([question[depth].ids]), question[depth].num_answer
            scores = model(ids).logits[0, -size - 1 : -1]
            wanted = torch.nn.functional.cross_entropy(scores, ids[0, -size:])
            assert loss == pytest.approx(float(wanted), abs=1e-4)


@pytest.mark.parametrize("kind", [Plain, Kept])
@pytest.mark.parametrize("changes", [{}, {"rope_scaling": DYNAMIC, "max_position_embeddings": WINDOW}])
@torch.inference_mode()
def test_an_answer_s_logits_are_those_of_writing_it_whatever_ran_before(kind, changes):
    model, ids, sizes = noting(kind, **changes), tokens(4, LENGTH), [3, 1, 4, 3]
    wanted = torch.zeros(4, 6, 640)
    for row, size in enumerate(sizes):
        model(ids[:, :1], use_cache=False)
        output = model(ids[row : row + 1, :-size], use_cache=True)
        for place in range(-size, 0):
            wanted[row, place - 1] = output.logits[0, -1]
            output = model(ids[row : row + 1, place, None], past_key_values=output.past_key_values, use_cache=True)
    model(tokens(1, 100), use_cache=False)
    model.runs = []
    logits = run_as_written(model, ids, sizes, 6)
    torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=1e-4)
    if kind is Kept and not changes:
        assert model.runs == [1, 1, 2, 1, 3]


@pytest.mark.parametrize(("length", "kept", "runs"), [(12, 2, [5, 5, 2]), (11, 2, [5, 6]), (12, 7, [5, 7])])
@torch.inference_mode()
def test_a_cache_is_begun_in_one_run_and_continued_in_pieces_from_the_beginning(monkeypatch, length, kept, runs):
    monkeypatch.setattr(reading, "_PIECE", {"cpu": 5})
    model, ids = noting(), tokens(2, 8 + length)
    whole = model(ids).logits
    cache, model.runs = new_cache(model), []
    torch.testing.assert_close(run(model, ids[:, :8], 1, cache), whole[:, 7:8], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(run(model, ids[:, 8:], kept, cache), whole[:, -kept:], atol=1e-4, rtol=1e-4)
    assert model.runs == [8, *runs]


def test_an_answer_counts_if_each_of_its_tokens_is_the_likeliest():
    logits = torch.zeros(3, 4, 5)
    for row, said in enumerate([[1, 2, 3, 0], [4, 2, 3, 0], [1, 2, 4, 0]]):
        logits[row, range(4), said] = 1.0
    logits[..., 0] = -torch.inf  # As some families mask words that do not exist.
    ids = torch.tensor([[0, 0, 1, 2, 3]] * 3)
    assert are_exact(loaded_with(None), logits, ids, [3, 2, 1]) == [True, True, False]
    assert are_exact(loaded_with(None), logits, ids, [3, 3, 3]) == [True, False, False]
    for bad in (torch.nan, torch.inf):
        logits[1, 1, 2] = bad
        with pytest.raises(CtxextError) as caught:
            are_exact(loaded_with(None), logits, ids, [3, 2, 1])
        assert str(caught.value).splitlines()[0] == '"tiny" returns NaN or infinite logits.'


class Writer:
    """Writes what it is told to, and keeps what it was asked."""

    device = torch.device("cpu")

    def __init__(self, logits, **settings):
        self.generation_config = SimpleNamespace(**{"bos_token_id": 0, **settings})
        self.config, self.logits = tiny_llama().config, logits

    def generate(self, ids, **asked):
        self.asked = asked | {"settings": self.generation_config}
        for logits in self.logits:
            assert asked["logits_processor"](ids, logits) is logits
        new = torch.tensor([[7, 8]] * len(ids))
        return torch.cat([ids, new], dim=1)


@pytest.mark.parametrize(
    ("end", "padding", "wanted"),
    [(9, None, 9), ([6, 9], None, 6), (None, None, 0), (9, 4, 4), (9, 0, 0), ([6, 9], 4, 4)],
)
def test_greedy_decoding_takes_none_of_the_checkpoint_s_settings_but_its_tokens(end, padding, wanted):
    logits = torch.zeros(2, 5)
    logits[:, 3] = -torch.inf
    writer = Writer([logits], eos_token_id=end, pad_token_id=padding, temperature=3.0)
    settings_before = writer.generation_config
    assert loaded_with(writer)._decode(tokens(2, 6), 2) == [[7, 8], [7, 8]]
    asked = writer.asked
    assert (asked["pad_token_id"], asked["max_new_tokens"], asked["do_sample"]) == (wanted, 2, False)
    assert asked["settings"].eos_token_id == end
    assert asked["settings"] is not settings_before
    assert writer.generation_config is settings_before
    logits[0, 1] = torch.nan
    with pytest.raises(CtxextError, match="NaN or infinite"):
        loaded_with(writer)._decode(tokens(2, 6), 2)


@pytest.mark.thorough
def test_logits_of_earlier_steps_are_freed():
    """32 steps of 4 rows with 151,936 words: one step's float32 logits take 2 MiB, those of all steps 74 MiB."""
    model = tiny_llama(
        vocab_size=151_936, hidden_size=8, intermediate_size=8, num_attention_heads=1, num_key_value_heads=1
    )
    loaded = loaded_with(model)
    loaded._decode(tokens(4, 6), 2)  # Buffers of the first call.
    if not forget_peak(loaded.device):
        pytest.skip("the peak memory cannot be reset here")
    before = peak_memory(loaded.device)
    assert [len(row) for row in loaded._decode(tokens(4, 6), 32)] == [32] * 4
    assert peak_memory(loaded.device) - before < 40 << 20


def test_a_step_that_is_not_finite_ends_the_writing(monkeypatch):
    """The later steps are not computed, and the checkpoint's settings are restored."""
    model = tiny_llama()
    settings, forward, runs = model.generation_config, model.forward, []

    def failing(*given, **options):
        output = forward(*given, **options)
        runs.append(len(runs))
        if len(runs) == 3:
            output.logits[1, -1, 5] = torch.nan
        return output

    monkeypatch.setattr(model, "forward", failing)
    with pytest.raises(CtxextError, match="NaN or infinite"):
        loaded_with(model)._decode(tokens(2, 6), 12)
    assert len(runs) == 3
    assert model.generation_config is settings


def test_generated_text_does_not_depend_on_earlier_prompts(monkeypatch):
    """The stock dynamic schedule keeps the frequencies of the longest prompt it has seen."""
    loaded = loaded_with(tiny_llama(max_position_embeddings=64, rope_scaling=DYNAMIC))
    long, middle = (torch.arange(3, 3 + size)[None] for size in (400, 100))

    def written():
        loaded.model(input_ids=long, use_cache=False)
        return loaded._decode(middle, 12)

    with torch.inference_mode():
        first = loaded._decode(middle, 12)
        assert written() == first
        monkeypatch.setattr(evaluate_model, "forget_longer_prompts", lambda model: None)
        remembers = loaded.model.model.rotary_emb.max_seq_len_cached > 100
        assert remembers or IS_OLDER
        assert (written() != first) == remembers, "and it would show"


@pytest.mark.parametrize("depths", [1, 2])
def test_generation_stops_as_soon_as_every_answer_of_a_batch_is_right(depths):
    model = noting()
    loaded = loaded_with(model, can_share=True)
    ids = tokens(2 * depths, 20).tolist()
    questions = [
        [Prompt(ids[row * depths + depth], 6, ("x",), (str(row),)) for depth in range(depths)] for row in range(2)
    ]

    def written(grade):
        rows = answers._write(loaded, questions, range(depths), grade=grade)
        return {depth: [answer.ids for answer in of_depth] for depth, of_depth in rows}

    whole = written(None)
    assert all(len(answer) == 6 for rows in whole.values() for answer in rows)
    early = written(lambda tokens, prompt: float(len(tokens) > int(prompt.required[0])))  # After one and two tokens.
    assert early == {depth: [answer[:2] for answer in rows] for depth, rows in whole.items()}
    never = written(lambda tokens, prompt: 0.5)
    assert never == whole
