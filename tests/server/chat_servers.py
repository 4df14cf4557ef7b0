"""How servers that are not installed here answer chat completions: one entry each, read from their source or documents.

A stand-in answers the question of a needle, and thinks first unless thoughts are switched off.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from openai_server import Served

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}<assistant>"
    "{% if not enable_thinking|default(true) %}<think></think>{% endif %}"
)
"""A template that thinks by default."""


@dataclass(frozen=True)
class ChatServer:
    """The chat completions of a server.

    Attributes:
        source: The files and the version from which this was read.
        name: Its name in ctxext.
        version: The version that it reports.
        model: Its entry in the list of models.
        identity: The path and the answer that report its version; empty if there are none.
        completions: How completions read a prompt: "ids", "text", "template" around a text, or "" for no such path.
        switch: The argument that switches thoughts: "chat_template_kwargs", "reasoning_effort", or "" for none.
        thoughts: The key of separate thoughts in a message; empty if they stay in the text.
        refusal: Status and JSON of the refusal of a prompt of `tokens` with an answer of `room` beyond `limit`.
        cuts: Number of tokens to which it can be set to cut a prompt, by the limit.
        has_logprobs: Whether its answers have log-probabilities.
        unknown: Status and JSON for an unknown path.
    """

    source: str
    name: str
    version: str
    model: Mapping[str, Any]
    identity: tuple[str, Mapping[str, Any]] | None
    completions: str
    switch: str
    thoughts: str
    refusal: tuple[int, Any]
    cuts: Mapping[int, int]
    has_logprobs: bool = True
    unknown: tuple[int, Any] = field(default=(404, {"error": "404 page not found"}))


SERVERS = {
    "Ollama": ChatServer(
        source="ollama/ollama 0.33.0-rc2: openai/openai.go, server/routes.go, llm/llama_server.go",
        name="Ollama",
        version="0.33.0",
        model={"id": "chatty:latest", "object": "model", "created": 1, "owned_by": "library"},
        identity=("/api/version", {"version": "0.33.0"}),
        completions="template",
        switch="reasoning_effort",
        thoughts="reasoning",
        refusal=(
            400,
            {
                "error": {
                    "message": "request ({tokens} tokens) exceeds the available context size ({limit} tokens), "
                    "try increasing it",
                    "type": "invalid_request_error",
                    "param": None,
                    "code": None,
                }
            },
        ),
        # The half of the context after `num_keep`, for models with a template of Ollama's own.
        cuts={700: 352},
    ),
    "LM Studio": ChatServer(
        source="lmstudio.ai/docs/developer/openai-compat; lmstudio-ai/lmstudio-bug-tracker 546 and 2057 (0.4.17), "
        "lmstudio-ai/lms 60",
        name="LM Studio",
        version="",
        model={"id": "chatty", "object": "model", "owned_by": "organization_owner"},
        identity=None,
        completions="text",
        switch="reasoning_effort",
        thoughts="reasoning_content",
        refusal=(
            400,
            {
                "error": "Trying to keep the first {tokens} tokens when context the overflows. However, the model is "
                "loaded with context length of only {limit} tokens, which is not enough. Try to load the model with a "
                "larger context length, or provide a shorter input. Error Data: n/a, Additional Data: n/a"
            },
        ),
        cuts={700: 444},
        has_logprobs=False,
        unknown=(200, {"error": "Unexpected endpoint or method. (GET /props)"}),
    ),
    "SGLang": ChatServer(
        source="sglang 0.5.23: srt/entrypoints/openai/protocol.py, serving_base.py, usage_processor.py, "
        "srt/entrypoints/http_server.py, srt/managers/tokenizer_manager.py",
        name="SGLang",
        version="0.5.23",
        model={"id": "chatty", "object": "model", "created": 1, "owned_by": "sglang", "root": "chatty", "parent": None},
        identity=("/server_info", {"version": "0.5.23", "internal_states": []}),
        completions="ids",
        switch="chat_template_kwargs",
        thoughts="reasoning_content",
        refusal=(
            400,
            {
                "object": "error",
                "message": "Requested token count exceeds the model's maximum context length of {limit} tokens. You "
                "requested a total of {total} tokens: {tokens} tokens from the input messages and {room} tokens for "
                "the completion. Please reduce the number of tokens in the input messages or the completion to fit "
                "within the limit.",
                "type": "BadRequestError",
                "param": None,
                "code": 400,
            },
        ),
        # --allow-auto-truncate
        cuts={700: 699},
        unknown=(404, {"detail": "Not Found"}),
    ),
    "TGI": ChatServer(
        source="huggingface/text-generation-inference 3.3.6-dev0: router/src/lib.rs, validation.rs, server.rs",
        name="TGI",
        version="3.3.6-dev0",
        model={"id": "chatty", "object": "model", "created": 0, "owned_by": "chatty"},
        identity=("/info", {"model_id": "chatty", "router": "text-generation-router", "version": "3.3.6-dev0"}),
        completions="text",
        switch="",
        thoughts="",
        refusal=(
            422,
            {
                "error": "Input validation error: `inputs` tokens + `max_new_tokens` must be <= {limit}. Given: "
                "{tokens} `inputs` tokens and {room} `max_new_tokens`",
                "error_type": "validation",
            },
        ),
        cuts={},
    ),
}


class StandIn(Served):
    """A server like one of these, which answers as this file describes.

    Args:
        server: The server.
        tokenizer: The tokenizer, with the template.
        knows: Whether the answer is right. If not, the thought is.
        length: Its context length; None for no limit.
        cuts: Whether it cuts longer prompts instead of refusing them.
        chat_only: Whether it has chat completions only, as behind some proxies.
    """

    def __init__(self, server: ChatServer, tokenizer: Any, *, knows: bool = True, **options: Any) -> None:
        super().__init__(None, tokenizer, override=self._answer_path, **options)
        self.server, self.knows = server, knows
        self.is_thinking: list[bool] = []

    def _answer_path(self, path: str) -> tuple[int, dict[str, str], bytes] | None:
        pages = {"/v1/models": {"object": "list", "data": [self.server.model]}}
        if self.server.identity is not None:
            pages |= [self.server.identity]
        if path.endswith("completions") and not (self.chat_only and "chat" not in path):
            return None
        status, content = (200, pages[path]) if path in pages else self.server.unknown
        return status, {"Content-Type": "application/json"}, json.dumps(content).encode()

    def complete(self, content: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        prompt, thinks = content.get("prompt"), self._thinks(content)
        if isinstance(prompt, list) and self.server.completions != "ids":
            return 422, {"error": "Failed to deserialize the JSON body: prompt: data did not match any variant"}
        messages = content.get("messages") or [{"role": "user", "content": prompt}]
        is_raw = "messages" not in content and self.server.completions != "template"
        text = (
            prompt if is_raw else self.tokenizer.apply_chat_template(messages, tokenize=False, enable_thinking=thinks)
        )
        ids = prompt if isinstance(prompt, list) else self.tokenizer(text, add_special_tokens=is_raw)["input_ids"]
        tokens, room = len(ids), content["max_tokens"]
        if self.length is not None and tokens + room > self.length:
            if not self.cuts:
                status, refusal = self.server.refusal
                values = {"tokens": tokens, "room": room, "limit": self.length, "total": tokens + room}
                words = json.dumps(refusal)
                for name, value in values.items():
                    words = words.replace(f"{{{name}}}", str(value))
                return status, json.loads(words)
            tokens = self.server.cuts[self.length]
        self.is_thinking.append(thinks)
        shown = messages[-1]["content"] if isinstance(messages[-1]["content"], str) else self.tokenizer.decode(ids)
        right, wrong = f"It is {find_number(shown)}.", "Perhaps it is 12345."
        thought, text = (wrong, right) if self.knows else (right, wrong)
        message = {"role": "assistant", "content": text}
        if thinks and self.server.thoughts:
            message[self.server.thoughts] = thought
        elif thinks:
            message["content"] = f"<think>{thought}</think>{text}"
        answer = {"message": message} if "messages" in content else {"text": message["content"]}
        usage = {"prompt_tokens": tokens, "completion_tokens": 9, "total_tokens": tokens + 9}
        return 200, {"choices": [{"index": 0, "finish_reason": "stop", **answer}], "usage": usage}

    def _thinks(self, content: dict[str, Any]) -> bool:
        """Return whether the request lets the server think."""
        if self.server.switch == "reasoning_effort":
            return content.get("reasoning_effort") != "none"
        if self.server.switch:
            return content.get(self.server.switch, {}).get("enable_thinking", True)
        return True


def find_number(text: str) -> str:
    """Return the number that the question of a needle asks for."""
    key = re.search(r"What is the special magic number for (.+?)\?", text)
    return re.search(rf"number for {key[1]} is: (\d+)", text)[1] if key else ""
