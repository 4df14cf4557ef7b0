"""vLLM in this process, by its offline API: a start takes seconds, where that of its server takes a minute on a CPU."""

import math
import os

import vllm

from ctxext.engines.vllm import ARGUMENTS


class Engine:
    """vLLM with one checkpoint, with the arguments that `ctxext.engines.vllm.Vllm` starts its server with."""

    def __init__(self, folder, *, length, dtype, trust=False, arguments=None):
        os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        options = {
            "model": str(folder),
            "dtype": dtype,
            "max_model_len": length,
            "trust_remote_code": trust,
            **ARGUMENTS,
        }
        self.version = vllm.__version__
        self._llm = vllm.LLM(**{**options, **(arguments or {})})

    def write(self, prompts, rooms):
        """Continue each prompt greedily by a number of tokens, and return them."""
        parameters = [make_parameters(max_tokens=room, logprobs=0) for room in rooms]
        written = []
        for result in self._llm.generate(as_prompts(prompts), parameters, use_tqdm=False):
            output = result.outputs[0]
            ids = list(output.token_ids)
            scores = [table[token].logprob for table, token in zip(output.logprobs, ids, strict=True)]
            if not all(map(math.isfinite, scores)):
                raise ValueError("vLLM returned log-probabilities that are not finite.")
            written.append(ids)
        return written

    def log_probabilities(self, prompts):
        """Return the log-probability of every token except the first."""
        parameters = make_parameters(max_tokens=1, prompt_logprobs=0)
        outputs = self._llm.generate(as_prompts(prompts), parameters, use_tqdm=False)
        return [
            [table[token].logprob for table, token in zip(result.prompt_logprobs[1:], ids[1:], strict=True)]
            for result, ids in zip(outputs, prompts, strict=True)
        ]

    def close(self):
        """Stop the engine and free its memory."""
        self._llm.llm_engine.engine_core.shutdown()
        del self._llm


def make_parameters(**options):
    return vllm.SamplingParams(temperature=0.0, detokenize=False, **options)


def as_prompts(prompts):
    return [{"prompt_token_ids": list(ids)} for ids in prompts]
