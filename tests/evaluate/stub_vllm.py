"""A stand-in for the module `vllm`: the part of its offline API that is used, over transformers."""

import types
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

made: list[Any] = []
"""The models that were loaded."""


@dataclass
class SamplingParams:
    max_tokens: int
    temperature: float = 1.0
    stop_token_ids: list[int] = field(default_factory=list)
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True


class LLM:
    def __init__(self, model, *, dtype, max_model_len, trust_remote_code, hf_overrides=None, **options):
        self.options = {"max_model_len": max_model_len, "hf_overrides": hf_overrides, "dtype": dtype, **options}
        self.calls: list[Any] = []
        self.ended = False
        config = AutoConfig.from_pretrained(model)
        for key, value in (hf_overrides or {}).items():
            setattr(config, key, value)
            if key == "rope_parameters":  # The dialect of transformers 4.
                config.rope_theta, config.rope_scaling = value["rope_theta"], value
        self.model = AutoModelForCausalLM.from_pretrained(
            model, config=config, dtype=getattr(torch, dtype), trust_remote_code=trust_remote_code
        ).eval()
        self.llm_engine = types.SimpleNamespace(engine_core=types.SimpleNamespace(shutdown=self.end))
        made.append(self)

    def end(self):
        self.ended = True

    @torch.no_grad()
    def generate(self, prompts, params, use_tqdm=True):
        params = params if isinstance(params, list) else [params] * len(prompts)
        self.calls.append([prompt["prompt_token_ids"] for prompt in prompts])
        return [self.answer(prompt["prompt_token_ids"], wanted) for prompt, wanted in zip(prompts, params, strict=True)]

    def answer(self, ids, wanted):
        assert len(ids) + wanted.max_tokens <= self.options["max_model_len"]
        assert wanted.temperature == 0.0, "only greedy decoding is asked for"
        output = self.model(torch.tensor([ids]), use_cache=True)
        read = None
        if wanted.prompt_logprobs is not None:
            scores = output.logits[0, :-1].float().log_softmax(-1)
            known = scores.gather(-1, torch.tensor(ids[1:])[:, None]).flatten().tolist()
            read = [None, *({token: logprob(score)} for token, score in zip(ids[1:], known, strict=True))]
        written, tables = [], []
        for _ in range(wanted.max_tokens):
            token = int(output.logits[0, -1].argmax())
            written.append(token)
            tables.append({token: logprob(output.logits[0, -1].float().log_softmax(-1)[token])})
            if token in wanted.stop_token_ids:
                break
            output = self.model(torch.tensor([[token]]), past_key_values=output.past_key_values, use_cache=True)
        one = types.SimpleNamespace(token_ids=tuple(written), logprobs=tables)
        return types.SimpleNamespace(outputs=[one], prompt_logprobs=read)


def logprob(number):
    return types.SimpleNamespace(logprob=float(number))


def module():
    """The module itself, without models of earlier tests."""
    made.clear()
    vllm = types.ModuleType("vllm")
    vllm.__spec__ = ModuleSpec("vllm", None)
    vllm.LLM, vllm.SamplingParams = LLM, SamplingParams
    return vllm
