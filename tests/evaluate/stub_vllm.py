"""A stand-in for vLLM: instead of the process of its server, a server in this process, over transformers."""

import json
import subprocess
import sys
import types
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from ctxext.engines import vllm as engine
from openai_server import Served, running

made: list[Any] = []
"""The processes that were started."""

NO_PROCESS = 2**30
"""The id of no process."""


@dataclass
class VllmServer(Served):
    """vLLM's server without a tokenizer."""

    longest: int = 0
    calls: list[Any] = field(default_factory=list)

    def complete(self, content):
        ids, stops = content["prompt"], content.get("stop_token_ids", [])
        assert len(ids) + content["max_tokens"] <= self.longest
        assert content["temperature"] == 0, "only greedy decoding is asked for"
        self.calls.append(content)
        status, answer = super().complete(content)
        (choice,) = answer["choices"]
        choice["text"] = ""
        if content.get("logprobs"):
            known = choice["logprobs"]
            tokens = [int(token.removeprefix("token_id:")) for token in known["tokens"]]
            end = next((place + 1 for place, token in enumerate(tokens) if token in stops), len(tokens))
            numbers = [[*map(logprob, known["token_logprobs"][:end])]]
            rows = [{token: logprob(number) for token, number in row.items()} for row in known["top_logprobs"][:end]]
            choice["logprobs"] = {"tokens": known["tokens"][:end], "token_logprobs": numbers[0], "top_logprobs": rows}
        if "prompt_logprobs" in content:
            with torch.inference_mode():
                scores = self.model(torch.tensor([ids])).logits[0, :-1].float().log_softmax(-1)
            read = scores.gather(-1, torch.tensor(ids[1:])[:, None]).flatten().tolist()
            rows = [{str(token): {"logprob": logprob(number)}} for token, number in zip(ids[1:], read, strict=True)]
            choice["prompt_logprobs"] = [None, *rows]
        return status, answer


class Process:
    """The part of `subprocess.Popen` that is used."""

    pid = NO_PROCESS

    def __init__(self, words, *, env, stdout, **_options):
        *_, mode, model = words[: len(engine._COMMAND) + 2]
        self.mode, self.key, self.ended, self.calls = mode, env["VLLM_API_KEY"], False, []
        self.options = dict(read_flag(word) for word in words[len(engine._COMMAND) + 2 :])
        made.append(self)
        self.code = fail(stdout)
        if self.code is not None:
            return
        config = AutoConfig.from_pretrained(model)
        for key, value in (self.options.get("hf_overrides") or {}).items():
            setattr(config, key, value)
            if key == "rope_parameters":  # The dialect of transformers 4.
                config.rope_theta, config.rope_scaling = value["rope_theta"], value
        loaded = AutoModelForCausalLM.from_pretrained(
            model,
            config=config,
            dtype=getattr(torch, self.options["dtype"]),
            trust_remote_code=self.options["trust_remote_code"],
        ).eval()
        tokenizer = AutoTokenizer.from_pretrained(Path(engine.__file__).parents[1] / "demo" / "checkpoint")
        served = VllmServer(loaded, tokenizer, longest=self.options["max_model_len"], calls=self.calls)
        self.stack = ExitStack()
        self.stack.enter_context(running(served, port=self.options["port"]))

    def poll(self):
        return self.code

    def terminate(self):
        self.ended, self.code = True, 0
        self.stack.close()

    def wait(self, timeout=None):
        return self.code


def read_flag(word):
    """Return the name and the value of an option."""
    name, has_value, value = word.removeprefix("--").partition("=")
    name = name.replace("-", "_")
    if not has_value:
        return name.removeprefix("no_"), not name.startswith("no_")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def logprob(number):
    """Return a log-probability as it is sent."""
    return number


def fail(log):
    """Return the exit code of a process that ends at once; None for one that serves."""
    return


def install(monkeypatch):
    """Replace the process of vLLM's server, without those of earlier tests."""
    made.clear()
    module = types.ModuleType("vllm")
    module.__spec__ = ModuleSpec("vllm", None)
    monkeypatch.setitem(sys.modules, "vllm", module)
    popen = subprocess.Popen

    def start(words, **options):
        return (Process if "VLLM_API_KEY" in (options.get("env") or {}) else popen)(words, **options)

    monkeypatch.setattr(subprocess, "Popen", start)
