"""A stand-in for the module `xllamacpp`: the part of its server that is used, over the demo in transformers."""

import enum
import functools
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ctxext.checkpoint.opening import open_checkpoint
from ctxext.gguf.header import read_header
from ctxext.verify.decoding_process import cache_argument, cache_of

ggml_type = enum.Enum("ggml_type", ["GGML_TYPE_F32", "GGML_TYPE_F16", "GGML_TYPE_BF16"])
llama_flash_attn_type = enum.Enum("llama_flash_attn_type", ["LLAMA_FLASH_ATTN_TYPE_DISABLED"])
__version__ = "1"
made = []
"""The servers that were started."""


@functools.cache
def demo():
    folder = open_checkpoint("demo").folder
    return AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


class CommonParams:
    def __init__(self):
        self.model, self.cpuparams, self.cpuparams_batch = SimpleNamespace(), SimpleNamespace(), SimpleNamespace()
        self.n_gpu_layers = -1


def get_device_info():
    return [{"type": "GGML_BACKEND_DEVICE_TYPE_CPU"}]


class Server:
    def __init__(self, parameters):
        self.parameters, self.asked = parameters, []
        self.header = read_header(Path(parameters.model.path))
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self.answer(None)

            def do_POST(self):
                self.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

            def answer(self, content):
                assert self.headers["Authorization"] == f"Bearer {parameters.api_keys[0]}"
                answer = server.answer(self.path, content)
                body = json.dumps(answer).encode()
                self.send_response(400 if "error" in answer else 200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *arguments):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.listening_address = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()
        made.append(self)

    def answer(self, path, content):
        tokenizer, model = demo()
        length = min(self.parameters.n_ctx, self.header.get("llama.context_length"))
        if path == "/props":
            names = {"bos_token": "<|begin|>", "eos_token": "<|end|>", "model_ftype": "all F32"}
            return {"build_info": "b1", **names, "default_generation_settings": {"n_ctx": length}}
        if path == "/v1/models":
            return {"data": [{"id": "model", "owned_by": "llamacpp"}]}
        if path == "/tokenize":
            return {"tokens": tokenizer(content["content"], add_special_tokens=content["add_special"])["input_ids"]}
        if path == "/detokenize":
            return {"content": tokenizer.decode(content["tokens"])}
        assert (path, content["samplers"], content["top_k"]) == ("/v1/completions", ["top_k"], 1)
        ids, new = content["prompt"], []
        self.asked.append(ids)
        if len(ids) > length:
            return {"error": {"message": f"request ({len(ids)} tokens) exceeds the available context size"}}
        with torch.no_grad():
            output = model(torch.tensor([ids]), logits_to_keep=1)
            while len(new) < content["max_tokens"] and tokenizer.eos_token_id not in new:
                new.append(int(output.logits[0, -1].argmax()))
                output = model(torch.tensor([new[-1:]]), **{cache_argument(model): cache_of(output)})
        is_ended = new[-1] == tokenizer.eos_token_id
        entries = [{"id": token, "logprob": logprob(), "top_logprobs": []} for token in new if token in whole()]
        choice = {"text": tokenizer.decode(new[:-1] if is_ended else new), "logprobs": {"content": entries}}
        usage = {"prompt_tokens": len(ids), "completion_tokens": len(new)}
        return {"choices": [{**choice, "finish_reason": "stop" if is_ended else "length"}], "usage": usage}


def whole():
    """The tokens that are no half of a character, for which the server gives scores."""
    return range(1 << 20)


def logprob():
    return -1.0
