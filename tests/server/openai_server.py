"""A server on loopback with an OpenAI-compatible API, of a model of transformers; it can fail in the usual ways."""

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch


@dataclass
class Served:
    """What a server answers with.

    Attributes:
        model: The model.
        tokenizer: Its tokenizer.
        length: Longest prompt in tokens, with its answer; None for no limit.
        cuts: Whether it cuts longer prompts silently instead of refusing them.
        takes_ids: Whether a prompt may be token ids.
        has_logprobs: Whether it returns log-probabilities.
        counts: Whether it reports the number of prompt tokens.
        template: A text before each prompt, and one after it.
        chat_only: Whether it has chat completions only.
        noise: Standard deviation in nats of noise on its log-probabilities.
        seed: The seed of the noise.
        is_sampled: Whether it ignores the temperature: every answer differs.
        reply: Returns the message and the finish reason of a chat completion, instead of the model.
        override: Answers a request instead of the model: path and handler, to status, headers and body; None passes.
        listed_length: The length in its list of models.
        requests: The paths, headers and bodies received.
        most_at_once: The largest number of requests that were answered at the same time.
    """

    model: Any
    tokenizer: Any
    length: int | None = None
    cuts: bool = False
    takes_ids: bool = True
    has_logprobs: bool = True
    counts: bool = True
    template: tuple[str, str] = ("", "")
    chat_only: bool = False
    noise: float = 0.0
    seed: int = 0
    is_sampled: bool = False
    reply: Callable[[dict[str, Any]], tuple[dict[str, Any], str]] | None = None
    override: Callable[[str], tuple[int, dict[str, str], bytes] | None] | None = None
    listed_length: int | None = None
    requests: list[tuple[str, dict[str, str], Any]] = field(default_factory=list)
    most_at_once: int = 0
    running: int = 0

    def complete(self, content: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Return the status and the JSON of a completion."""
        prompt = content.get("prompt")
        if "messages" in content:
            prompt = self.tokenizer.apply_chat_template(content["messages"], add_generation_prompt=True, tokenize=False)
        if isinstance(prompt, list) and not self.takes_ids:
            return 422, {"error": {"message": "prompt must be a string"}}
        if isinstance(prompt, list):
            ids = list(prompt)
        else:
            special = "messages" not in content
            ids = self.tokenizer(self.template[0] + prompt + self.template[1], add_special_tokens=special)["input_ids"]
        if self.length is not None and len(ids) + content["max_tokens"] > self.length:
            if not self.cuts:
                return 400, {"error": {"message": f"maximum context length is {self.length} tokens, got {len(ids)}"}}
            ids = ids[-(self.length - content["max_tokens"]) :]
        given, top = len(ids), 5
        if self.reply is not None:
            message, reason = self.reply(content)
            choice = {"index": 0, "finish_reason": reason, "message": {"role": "assistant", **message}}
            return 200, {"choices": [choice], **({"usage": {"prompt_tokens": given}} if self.counts else {})}
        entries, generator = [], torch.Generator().manual_seed(given + self.seed)
        cache = None
        for _ in range(content["max_tokens"]):
            with torch.inference_mode():
                read = torch.tensor([ids if cache is None else ids[-1:]])
                output = self.model(read, past_key_values=cache, use_cache=True, logits_to_keep=1)
            scores, cache = output.logits[0, -1].float().log_softmax(-1), output.past_key_values
            scores += self.noise * torch.randn(scores.shape, generator=generator)
            best = scores.topk(top)
            entries.append(list(zip(best.indices.tolist(), best.values.tolist(), strict=True)))
            if self.is_sampled:
                entries[-1].insert(0, entries[-1].pop(len(self.requests) % top))
            ids.append(entries[-1][0][0])
        new = ids[given:]
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length"}
        text = self.tokenizer.decode(new)
        choice |= {"message": {"role": "assistant", "content": text}} if "messages" in content else {"text": text}
        if self.has_logprobs and content.get("logprobs") and "messages" in content:
            name = "token_id:{}".format if content.get("return_tokens_as_token_ids") else self.tokenizer.decode
            rows = [[{"token": name(token), "logprob": score} for token, score in row] for row in entries]
            choice["logprobs"] = {"content": [{**row[0], "top_logprobs": row} for row in rows]}
        elif self.has_logprobs and content.get("logprobs"):
            choice["logprobs"] = {
                "tokens": [f"token_id:{row[0][0]}" for row in entries],
                "token_logprobs": [row[0][1] for row in entries],
                "top_logprobs": [{f"token_id:{token}": score for token, score in row} for row in entries],
            }
        return 200, {"choices": [choice], **({"usage": {"prompt_tokens": given}} if self.counts else {})}


class _Handler(BaseHTTPRequestHandler):
    def log_message(self, *_args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._answer(None)

    def do_POST(self) -> None:
        self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def _answer(self, content: Any) -> None:
        served: Served = self.server.served  # type: ignore[attr-defined]
        served.requests.append((self.path, dict(self.headers), content))
        own = served.override(self.path) if served.override else None
        if own is not None:
            status, headers, body = own
        else:
            headers = {"Content-Type": "application/json"}
            if self.path == "/v1/models":
                status, answer = (
                    200,
                    {"data": [{"id": "served", "owned_by": "vllm", "max_model_len": served.listed_length}]},
                )
            elif self.path == "/version":
                status, answer = 200, {"version": "0.0"}
            elif self.path == "/v1/chat/completions" or (self.path == "/v1/completions" and not served.chat_only):
                served.running += 1
                served.most_at_once = max(served.most_at_once, served.running)
                status, answer = served.complete(content)
                served.running -= 1
            else:
                status, answer = 404, {"error": {"message": "Not Found"}}
            body = json.dumps(answer).encode()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            if "Transfer-Encoding" not in headers:
                self.send_header("Content-Length", headers.get("X-Length", str(len(body))))
            self.end_headers()
            self.wfile.write(body)


@contextlib.contextmanager
def running(served: Served, port: int = 0) -> Iterator[str]:
    """Run a server, and return the base of its API."""
    server = ThreadingHTTPServer(("127.0.0.1", port), _Handler)
    server.served = served  # type: ignore[attr-defined]
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        server.server_close()
