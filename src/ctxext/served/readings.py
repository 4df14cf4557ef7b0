"""The ways in which an engine may read a checkpoint, each computed in transformers and compared with a server."""

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ctxext.checkpoint.head import Head
from ctxext.checkpoint.loading import choose_device, load_checkpoint
from ctxext.checkpoint.opening import Checkpoint
from ctxext.errors import CtxextError
from ctxext.models.prefix_cache import cache_of_windows, is_static_for, sharing_works
from ctxext.models.reading import read_states
from ctxext.recipes.code.staging import stage_checkpoint
from ctxext.recipes.encodings.rotary import attention_scaling
from ctxext.recipes.model_config import ModelConfig, model_config
from ctxext.recipes.recipe import plain_config
from ctxext.served.probes import TOKENS, Probe

if TYPE_CHECKING:
    import torch

CONVERTED = "the checkpoint as converted"
UNMODIFIED = "the unmodified model"
NO_THETA = "the schedule without rope_theta"
NO_TEMPERATURE = "the schedule without its attention temperature"
DEFAULT_TEMPERATURE = "the schedule with its default attention temperature"
LINEAR = "a linear schedule"

CUT = "the last tokens only:"
"""Beginning of the name of a reading of a cut prompt; its number of tokens follows."""

_USUAL_THETA = 10_000.0
"""The base that engines assume without rope_theta."""

_TEMPERATURES = ("attention_factor", "mscale", "mscale_all_dim")
"""Keys of the attention temperature, which engines ignore or replace by the default."""

_USUAL_CUT = 4096
"""Ollama's default context length; it cuts longer prompts silently."""


def readings_of(checkpoint: Checkpoint) -> dict[str, dict[str, Any]]:
    """Return the configurations of all readings that differ from each other, by name; the right one is first.

    Raises:
        CtxextError: The checkpoint has no rotary embeddings, or is not extended.
    """
    model = model_config(checkpoint.config)
    rotary, plain = model.rotary, plain_config(model)
    if not model.is_extended:
        raise CtxextError(
            f'"{checkpoint.name}" is not extended, so a server has no schedule to read wrongly.',
            hint="Give the converted checkpoint that the server should serve.",
        )

    def edit(**changes: Any) -> ModelConfig:
        return model.with_encoding(dataclasses.replace(rotary, **changes))

    numbers = {key: value for key, value in rotary.parameters.items() if key not in _TEMPERATURES}
    others = {UNMODIFIED: plain, NO_THETA: edit(theta=_USUAL_THETA)}
    if rotary.rope_type in ("yarn", "longrope"):
        others[NO_TEMPERATURE] = edit(parameters={**numbers, "attention_factor": 1.0})
        others[DEFAULT_TEMPERATURE] = edit(parameters=numbers)
    if rotary.rope_type != "default" and not model.code:
        factor = rotary.parameters.get("factor") or rotary.usable_length / rotary.trained_length
        others[LINEAR] = edit(parameters={"rope_type": "linear", "factor": factor})
    readings, known = {CONVERTED: model}, [_summarize(model)]
    for name, other in others.items():
        if (summary := _summarize(other)) not in known:
            readings[name] = other
            known.append(summary)
    return {name: dict(reading.config) for name, reading in readings.items()}


def _summarize(model: ModelConfig) -> tuple[Any, ...]:
    """Return all that the logits within the context length depend on: code, base, schedule and temperature."""
    rotary, code = model.rotary, model.code
    schedule = {key: value for key, value in rotary.parameters.items() if key not in _TEMPERATURES}
    scales_scores = bool(rotary.parameters.get("mscale_all_dim"))
    return code, rotary.theta, schedule, attention_scaling(rotary), scales_scores


def list_cuts(probe: Probe, trained: int) -> list[int]:
    """Return the lengths to which the server may have cut a prompt silently, in tokens."""
    if probe.read is not None:
        return [probe.read] if 0 < probe.read < len(probe.ids) else []
    # Some servers leave room for the answer.
    return [length for length in (trained, trained - TOKENS, _USUAL_CUT) if 0 < length < len(probe.ids)]


@contextmanager
def load_reading(checkpoint: Checkpoint, config: dict[str, Any], *, foreign: bool) -> Iterator[Head]:
    """Load the checkpoint's weights under another configuration, in float32."""
    reading = dataclasses.replace(checkpoint, config=config)
    with stage_checkpoint(reading, foreign=foreign and config == checkpoint.config) as stage:
        model = load_checkpoint(reading, stage.folder, trust=stage.trust, dtype="fp32", device=choose_device("auto"))
        yield Head(model)


def read_tokens(head: Head, ids: "torch.Tensor") -> "torch.Tensor":
    """Return the last hidden states of tokens (batch, length), read in pieces if a window makes that faster."""
    model, length = head.model, ids.shape[1]
    cache = cache_of_windows(model, length) if is_static_for(model.config.to_dict(), 0, length) else None
    return read_states(head, ids, cache if cache is not None and sharing_works(model) else None)


def measure_errors(head: Head, probe: Probe, *, last: int | None = None) -> list[list[float]]:
    """Return the server's log-probabilities minus those of a loaded reading, by generated token, in nats.

    Without log-probabilities, they are the differences of each generated token from the most probable one.

    Args:
        head: The loaded model.
        probe: The prompt and the server's continuation.
        last: The number of tokens that the model reads, at the end of the prompt; None for all.

    Raises:
        CtxextError: The model has no such tokens.
    """
    evidence, ids = probe.evidence, probe.ids[-(last or len(probe.ids)) :]
    assert evidence is not None
    size = head.model.get_input_embeddings().weight.shape[0]
    tokens = {*evidence.chosen, *(token for numbers in evidence.numbers for token in numbers)}
    if unknown := [token for token in tokens if not 0 <= token < size]:
        raise CtxextError(
            f"The server returns the token {unknown[0]}, but the checkpoint has only {size:,} tokens.",
            hint="Check that it serves this model.",
        )
    values = _log_probabilities(head, ids, evidence.chosen)
    if not evidence.numbers:
        return [[float(row[token] - row.max())] for row, token in zip(values, evidence.chosen, strict=True)]
    return [
        [number - float(row[token]) for token, number in numbers.items()]
        for row, numbers in zip(values, evidence.numbers, strict=True)
    ]


def _log_probabilities(head: Head, ids: Sequence[int], chosen: Sequence[int]) -> "torch.Tensor":
    """Return the log-probabilities, (generated tokens, vocabulary), after the prompt and each generated token."""
    import torch

    device = next(head.model.parameters()).device
    tokens = torch.tensor([[*ids, *chosen[:-1]]], device=device)
    with torch.inference_mode():
        hidden = read_tokens(head, tokens)[:, -len(chosen) :]
        return head(hidden, tokens[:, -len(chosen) :])[0].float().log_softmax(-1).cpu()
