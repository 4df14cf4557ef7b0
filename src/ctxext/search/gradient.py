"""Learned heads: ratio, ramp and temperature of every KV head of every layer by gradient, with frozen weights.

A few hundred parameters are trained on the loss of needle answers up to the target length, with a penalty on the
divergence from the source within its original context. The result is an ordinary static Ms-PoE recipe. Learned
schedules per head were proposed as AdaRoPE (ICML 2026); the ramp is YaRN's (arXiv 2309.00071, section 3.2).
"""

import inspect
import itertools
import math
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ctxext.data.encoding import Encoder
from ctxext.data.prompt import Prompt
from ctxext.data.texts import read_corpus
from ctxext.errors import CtxextError
from ctxext.evaluate.scoring.answers import run
from ctxext.evaluate.settings import Settings, even_depths
from ctxext.evaluate.tasks.needle import Needle
from ctxext.evaluate.tasks.retrieval import check_fits, make_questions
from ctxext.evaluate.workbench import Workbench
from ctxext.recipes.methods.mspoe import MsPoE, num_kv_heads
from ctxext.recipes.methods.yarn import Yarn
from ctxext.recipes.recipe import Recipe
from ctxext.search.measurement import measure
from ctxext.search.options import SearchOptions
from ctxext.search.study import MOST_FOR_CHECKS, WRITING, Ground, Standing, Trial, choose_best, find_points

_NEEDLES = 8
"""Number of answers in a sequence: a single one would give little training signal for its length."""
_RATE, _DIGITS = 0.03, 4
_FAST, _SLOW = 32.0, 1.0
_HELD, _BEYOND = 2.0, 30.0
"""Weights of the divergence from the source: of the divergence, and of its excess over half the permitted loss."""
_DOCUMENTS, _HELD_POSITIONS = 2, 512
"""Sequences per batch for the divergence from the source, and positions of each."""
_ALREADY = 77_000_000
"""Offset of the seed, so that training shares no question with the search or `ctxext eval`."""


class Learner:
    """Learned parameters during training."""

    def __init__(self, bench: Workbench, options: SearchOptions) -> None:
        self.bench, self.options = bench, options
        factor = options.target_length / bench.plain.rotary.trained_length
        heads = num_kv_heads(bench.plain)
        # Training starts from the schedule and temperature of YaRN, the same for every head.
        self.starts = {"ratios": factor, "ramps": 1.0, "temperatures": 1 + 0.1 * math.log(factor)}
        plain = MsPoE(schedule="by-parts", head_order="fixed", first_layer=0)
        layers = len(plain.settings(bench.plain)["layers"])
        self.logs = {name: torch.zeros(layers, heads, requires_grad=True) for name in self.starts}
        self.model = bench.apply(self.recipe()).model
        self.model.requires_grad_(False)
        # The parameters are passed to the portable code as tensors, so that training runs the code of the checkpoint.
        methods = {
            id(method): method
            for module in self.model.modules()
            for method in getattr(module, "ctxext_methods", ())
            if method.name == "mspoe"
        }
        if not methods:
            raise CtxextError(f'The heads of "{bench.source.name}" cannot be learned.', hint="Remove --gradient.")
        self.methods = list(methods.values())

    def get_parameters(self) -> dict[str, torch.Tensor]:
        """Return the parameters, (layers, heads) each; ratios are at least 1."""
        parameters = {name: self.starts[name] * log.exp() for name, log in self.logs.items()}
        return {**parameters, "ratios": parameters["ratios"].clamp(min=1.0)}

    def recipe(self) -> Recipe:
        """Return the current parameters as a recipe."""
        rows = {
            name: tuple(tuple(float(f"{number:.{_DIGITS}g}") for number in row) for row in values.tolist())
            for name, values in self.get_parameters().items()
        }
        parameters: Any = {**rows, "ramp_fast": _FAST, "ramp_slow": _SLOW, "reaches": self.options.target_length}
        return Recipe([MsPoE(schedule="by-parts", head_order="fixed", first_layer=0, **parameters)])

    def refresh(self) -> None:
        """Update the parameters in the model from those of the optimizer."""
        parameters = self.get_parameters()
        for method in self.methods:
            method.settings["heads"] = {name: list(values.unbind(0)) for name, values in parameters.items()}


def learn(bench: Workbench, options: SearchOptions, end: float, report: Callable[[float, float], None]) -> Recipe:
    """Train the parameters of the heads until the time is up; `end` is on the monotonic clock in seconds.

    `report` is called after each step with the loss of the answers and the divergence from the source, in nats.
    """
    learner = Learner(bench, options)
    optimizer = torch.optim.Adam(learner.logs.values(), lr=_RATE)
    trained, began = bench.plain.rotary.trained_length, time.monotonic()
    lengths = itertools.cycle(sorted(options.list_lengths(trained), reverse=True))
    questions = {
        length: _draw_sequences(bench.stock.encoder, options, length) for length in options.list_lengths(trained)
    }
    documents = _read_documents(bench.stock.encoder, options, trained)
    drawn = torch.Generator().manual_seed(options.seed)
    step = 0
    while step < (options.trials or math.inf) and time.monotonic() < end:
        gone = step / options.trials if options.trials else (time.monotonic() - began) / max(end - began, 1e-9)
        for group in optimizer.param_groups:
            group["lr"] = _RATE * min(1.0, (step + 1) / 5) * max(0.05, 1 - gone)
        learner.refresh()
        answers = _compute_answer_loss(learner.model, *next(questions[next(lengths)]))
        at = torch.randperm(trained - 1, generator=drawn)[:_HELD_POSITIONS]
        divergence, source_loss = _compute_divergence(learner.model, bench.stock.model, next(documents), at)
        allowed = options.keep_short * source_loss / 2
        optimizer.zero_grad()
        (answers + _HELD * divergence + _BEYOND * torch.relu(divergence - allowed)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        step += 1
        report(float(answers.detach()), float(divergence.detach()))
    return learner.recipe()


def _draw_sequences(
    encoder: Encoder, options: SearchOptions, length: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield texts followed by all their questions and answers: ids (1, length or more), and the mask of the answers."""
    task, settings = _make_task(encoder, options, length, _NEEDLES)
    for sample in itertools.count():
        (prompts,) = make_questions(task, encoder, length, [sample], settings)
        random.Random(f"{options.seed} {length} {sample}").shuffle(prompts)
        yield _join_prompts(prompts)


def _make_task(encoder: Encoder, options: SearchOptions, length: int, count: int) -> tuple[Needle, Settings]:
    """Make a task with as many needles as fit into a length, at least two, and its settings."""
    settings = Settings(tasks=("needle",), samples=1, depths=even_depths(count), seed=options.seed + _ALREADY)
    task = Needle(num_needles=count)
    try:
        check_fits(task, encoder, [length], settings)
    except CtxextError:
        if count <= 2:
            raise
        return _make_task(encoder, options, length, count // 2)
    return task, settings


def _join_prompts(prompts: list[Prompt]) -> tuple[torch.Tensor, torch.Tensor]:
    """Join prompts: their common prefix once, then the rest of each."""
    first = prompts[0].ids
    prefix = min(
        next((place for place, (a, b) in enumerate(zip(first, prompt.ids, strict=False)) if a != b), len(first))
        for prompt in prompts[1:]
    )
    ids, is_answer = list(first[:prefix]), [False] * prefix
    for prompt in prompts:
        tail = prompt.ids[prefix:]
        ids += tail
        is_answer += [False] * (len(tail) - prompt.num_answer) + [True] * prompt.num_answer
    return torch.tensor([ids]), torch.tensor([is_answer])


def _read_documents(encoder: Encoder, options: SearchOptions, length: int) -> Iterator[torch.Tensor]:
    """Yield documents of the original context length, (documents, length), endlessly."""
    seed = options.seed + _ALREADY
    documents = read_corpus(options.data, encoder, count=64, length=length, most=length, seed=seed)
    rows = torch.tensor(documents)
    while True:
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
        seed += 1
        for start in range(0, len(rows), _DOCUMENTS):
            yield rows[order[start : start + _DOCUMENTS]]


def _compute_answer_loss(model: Any, ids: torch.Tensor, is_answer: torch.Tensor) -> torch.Tensor:
    """Compute the mean loss of the answer tokens, with logits only from the first answer on."""
    ids, is_answer = ids.to(model.device), is_answer.to(model.device)
    first = int(is_answer[0].long().argmax())
    logits = run(model, ids, ids.shape[1] - first + 1)[:, :-1]
    chosen = is_answer[:, first:]
    return torch.nn.functional.cross_entropy(logits[chosen].float(), ids[:, first:][chosen])


def _compute_divergence(model: Any, source: Any, ids: torch.Tensor, at: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Compute the Kullback-Leibler divergence from the source in nats per token, and the source's loss.

    Both are computed only at the positions `at`, so that logits do not grow with the length.
    """
    ids, at = ids.to(model.device), at.to(model.device)
    with torch.no_grad():
        source_log_probabilities = _compute_logits(source, ids, at).log_softmax(-1)
    log_probabilities = _compute_logits(model, ids, at).log_softmax(-1)
    divergence = (source_log_probabilities.exp() * (source_log_probabilities - log_probabilities)).sum(-1).mean()
    return divergence, float(-source_log_probabilities.gather(-1, ids[:, at + 1, None]).mean())


def _compute_logits(model: Any, ids: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """Return the logits after the positions `at`, (documents, positions, vocabulary), in float32."""
    arguments = {"logits_to_keep": at} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    logits: torch.Tensor = model(input_ids=ids, use_cache=False, **arguments).logits
    return (logits if arguments else logits[:, at]).float()


def run_gradient_search(ground: Ground) -> Standing:
    """Return the points for the final evaluation: YaRN with published parameters, and the learned recipe."""
    bench, options = ground.bench, ground.options
    trials: list[Trial] = []

    def add(recipe: Recipe, published: str) -> None:
        began = time.monotonic()
        measurement = measure(bench.apply(recipe), ground.eval_set)
        trials.append(Trial(len(trials), published, recipe, measurement, "", time.monotonic() - began))

    add(bench.prepare(Recipe([Yarn(factor=options.target_length / bench.plain.rotary.trained_length)])), "yarn")
    reserve = 0.0
    if math.isfinite(ground.end):
        each = trials[0].seconds + 2 * ground.stock_seconds
        checks = (1 + 2 + options.checked / options.samples) * each + WRITING
        reserve = min(MOST_FOR_CHECKS * options.seconds, checks)
    steps = itertools.count(1)

    def report(answers: float, divergence: float) -> None:
        stage = f"training step {next(steps)}: answers {answers:.3f} nats, divergence from the source {divergence:.4f}"
        ground.watch(Standing(stage, ground.stock, end=ground.end))

    add(learn(bench, options, ground.end - reserve, report), "")
    points = find_points(trials, ground.stock)
    return Standing("learned", ground.stock, trials, points, choose_best(points, options.keep_short), ground.end)
