"""Compare a checkpoint in vLLM with itself in transformers, by log-probabilities at every length."""

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ctxext.checkpoint.head import Head
from ctxext.checkpoint.opening import Checkpoint, open_checkpoint
from ctxext.converters.engine_support import serving_of, vllm_arguments
from ctxext.engines.arguments import check_arguments
from ctxext.engines.vllm import Vllm
from ctxext.recipes.code.own_code import runs_only_own_code
from ctxext.recipes.code.staging import stage_checkpoint
from ctxext.recipes.model_config import model_config
from ctxext.served.readings import load_reading, read_tokens

TOLERANCE = 1e-3
"""Largest difference of a log-probability between equal runs in float32, in nats."""


@dataclass(frozen=True)
class EngineComparison:
    """The comparison of one prompt.

    Attributes:
        served: The name of the checkpoint in the engine.
        place: Its length: "inside" the original context length, "beyond" it, or "to the last position".
        tokens: The number of tokens.
        difference: The largest difference of a log-probability, in nats.
        mean: The mean difference, in nats.
        position: The position of the largest difference.
    """

    served: str
    place: str
    tokens: int
    difference: float
    mean: float
    position: int

    @property
    def is_alike(self) -> bool:
        """Whether the difference is within the tolerance."""
        return self.difference <= TOLERANCE  # False for NaN.


def compare_in_engine(
    checkpoint: Checkpoint,
    served: Mapping[str, tuple[Path, Mapping[str, Any]]],
    *,
    trust_remote_code: bool = False,
    arguments: Mapping[str, Any] | None = None,
) -> list[EngineComparison]:
    """Compare log-probabilities of some prompts in vLLM and transformers, both in float32.

    The second half of each prompt repeats the first, so that distant tokens matter. The longest prompt has the maximum
    length, to detect tables that are too short.

    Args:
        checkpoint: The checkpoint that transformers loads.
        served: The checkpoints for the engine, by name: a folder, and arguments of `vllm.LLM`.
        trust_remote_code: Run the checkpoint's modeling code even if this version did not write it.
        arguments: Arguments of `vllm.LLM` for all checkpoints; `max_model_len` limits the longest prompt.
    """
    arguments = dict(arguments or {})
    check_arguments("vllm", arguments, trust_remote_code=trust_remote_code)
    model, foreign = model_config(checkpoint.config), trust_remote_code and not runs_only_own_code(checkpoint)
    rotary, needed = model.rotary, vllm_arguments(next(row for row in serving_of(model) if row.engine == "vLLM"))
    reach = min(rotary.context_length, arguments.pop("max_model_len", rotary.context_length))
    lengths = _lengths(min(rotary.trained_length, reach), reach)
    prompts = [_prompt(length, checkpoint.config) for length in lengths.values()]
    by_name: dict[str, list[list[float]]] = {}
    for name, (folder, engine_options) in served.items():
        with stage_checkpoint(open_checkpoint(str(folder)), foreign=foreign) as stage:
            options = {**needed, **engine_options, **arguments}
            engine = Vllm(
                stage.folder, length=reach, dtype="float32", trust=stage.trust, may_fetch=foreign, arguments=options
            )
        with closing(engine):
            by_name[name] = [engine.score(prompt) for prompt in prompts]
    expected = _read_expected(checkpoint, prompts, foreign=foreign)
    return [
        _compare_prompt(name, place, *pair)
        for name, log_probabilities in by_name.items()
        for place, *pair in zip(lengths, log_probabilities, expected, strict=True)
    ]


def _lengths(trained: int, reach: int) -> dict[str, int]:
    past = {"beyond": (trained + reach) // 2} if reach > trained else {}
    # An engine generates one token after the prompt, which counts for its length.
    return {"inside": trained // 2, **past, "to the last position": reach - 1}


def _prompt(length: int, config: Mapping[str, Any]) -> list[int]:
    import torch

    vocabulary = int(config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size") or 1000)
    generator = torch.Generator().manual_seed(0)
    first = torch.randint(vocabulary // 8, vocabulary, ((length + 1) // 2,), generator=generator).tolist()
    return (first + first)[:length]


def _read_expected(checkpoint: Checkpoint, prompts: Sequence[Sequence[int]], *, foreign: bool) -> list[list[float]]:
    with load_reading(checkpoint, checkpoint.config, foreign=foreign) as head:
        return [_read(head, prompt) for prompt in prompts]


def _read(head: Head, prompt: Sequence[int]) -> list[float]:
    """Return the log-probability of every token but the first."""
    import torch

    with torch.inference_mode():
        ids = torch.tensor([prompt], device=head.model.device)
        losses: list[float] = head.measure_losses(read_tokens(head, ids)[:, :-1], ids[:, :-1], ids[0, 1:]).tolist()
    return [-loss for loss in losses]


def _compare_prompt(name: str, place: str, served: Sequence[float], expected: Sequence[float]) -> EngineComparison:
    off = [abs(actual - number) for actual, number in zip(served, expected, strict=True)]
    at = max(range(len(off)), key=lambda number: float("inf") if off[number] != off[number] else off[number])
    return EngineComparison(name, place, len(off) + 1, off[at], sum(off) / len(off), at)
