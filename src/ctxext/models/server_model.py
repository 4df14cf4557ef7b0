"""A model on a server, which generates the answers, with prompts of the checkpoint's tokenizer."""

import functools
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ctxext.data.encoding import BASE_FORM, Encoder, PromptForm, tokenize
from ctxext.data.prompt import Prompt
from ctxext.data.thoughts import switch_thoughts
from ctxext.engines.llama_cpp import LlamaCpp
from ctxext.engines.vllm import Vllm
from ctxext.errors import CtxextError
from ctxext.models.checkpoint_info import CheckpointInfo
from ctxext.models.model import LoadedModel, Loading, Written, load_tokenizer
from ctxext.server.answers import Completion
from ctxext.server.client import Server, ServerError, find_limit

_CALLS_AT_ONCE = 4
"""Requests per thread between two saved results."""

_LEAST_ESTIMATED = 0.85
"""Share of an estimated number of tokens that a server must have read; estimates are mostly within 0.05."""

_LENGTH_HINT = "Raise its context length, or use shorter --lengths."
_MOST_ADDED = 2
"""Most tokens that a server without a template adds to a text: begin tokens."""


@dataclass(frozen=True)
class ServerModel(LoadedModel):
    """A model on a server, which only generates answers.

    Attributes:
        num_concurrent: Number of concurrent requests.
        engine: The engine that was started for it; None for a server that was running.
        remark: A caution about this checkpoint in this engine; empty for none.
        wraps: Whether the server puts the prompts of completions into a chat template.
    """

    model: Server
    num_concurrent: int = 1
    engine: Vllm | LlamaCpp | None = None
    remark: str = ""
    wraps: bool = False

    def facts(self) -> dict[str, str]:
        """Return the settings of the model for the report; for a running server, dtype and device are unknown."""
        if self.engine is None:
            remark = "" if self.model.is_greedy else "it refuses temperature 0, so its answers are sampled"
            facts = {
                "engine": self.model.label,
                "served_model": self.model.model,
                **self.encoder.facts(),
                "prompts": "messages" if self.model.is_chat else "token ids" if self.model.takes_ids else "text",
            }
        else:
            remark = self.remark
            facts = {
                "dtype": self.engine.dtype,
                "device": self.engine.device,
                "attention": self.engine.attention,
                **self.encoder.facts(),
                "engine": f"{self.engine.name} {self.engine.version}",
            }
        return {**facts, "mind": remark} if remark else facts

    def questions_at_once(self, length: int, num_depths: int) -> int:
        """Return the number of questions per call, limited so that a killed run loses little."""
        return max(1, _CALLS_AT_ONCE * self.num_concurrent // num_depths)

    def may_share(self, common: int, length: int) -> bool:
        """Return False: the server manages its prompt cache."""
        return False

    def write(
        self, questions: Sequence[Sequence[Prompt]], depths: Sequence[int], form: PromptForm = BASE_FORM
    ) -> Iterator[tuple[int, list[Written]]]:
        """Generate all answers, with several requests at once, and prompts of a common prefix next to each other.

        Raises:
            CtxextError: The server takes messages only, but the prompts begin the answer.
        """
        if self.model.is_chat and not form.is_chat:
            reason = "puts every prompt into a chat template" if self.wraps else "has chat completions only"
            raise CtxextError(
                f"{self.model.label} {reason}, but these prompts begin the answer.",
                hint="Add --prompt chat, or use a server with a /completions endpoint that continues text.",
            )
        prompts = [question[depth] for question in questions for depth in depths]
        with ThreadPoolExecutor(self.num_concurrent) as threads:
            try:
                written = list(threads.map(functools.partial(self._answer, form=form), prompts))
            except BaseException:
                self.close()  # Otherwise the threads would wait for their answers.
                raise
        for place, depth in enumerate(depths):
            yield depth, written[place :: len(depths)]

    def close(self) -> None:
        """Stop the engine that was started."""
        if self.engine is not None:
            self.engine.close()

    def _answer(self, prompt: Prompt, form: PromptForm) -> Written:
        """Return the generated answer: in chat its text, else tokens, those of the correct answer if equal."""
        encoder, size = self.encoder.use_form(form), prompt.num_answer
        tokenizer, is_estimated = encoder.tokenizer, form.estimate is not None
        ids, expected = prompt.ids[:-size], prompt.ids[-size:]
        start = encoder.get_start_tokens()
        bare = ids[len(start) :] if ids[: len(start)] == start else ids  # The server adds the begin tokens to text.
        text = tokenizer.decode(bare)
        try:
            answer = self.model.complete(
                ids,
                text,
                max_tokens=size,
                logprobs=self.engine is not None,
                messages=prompt.messages,
                variables=switch_thoughts(form.thinks),
                keeps_special=form.is_chat and self.encoder.needs_special_tokens,
            )
        except ServerError as error:
            if find_limit(error, len(ids)) is None:
                raise
            raise CtxextError(error.message, hint=_LENGTH_HINT) from error
        if answer.is_empty:
            raise CtxextError(
                f"The server generated no token after a prompt of {len(ids):,} tokens.",
                hint="Raise its context length, and check its log.",
            )
        sent = len(ids) if self.model.takes_ids else len(tokenize(tokenizer, text))
        least = int(_LEAST_ESTIMATED * sent) if is_estimated else sent
        read = self.model.measure_read(answer, ids, text, least, max_tokens=size)
        if self.model.cuts(read, least):
            about = "about " if is_estimated else ""
            raise CtxextError(
                f"The server read only {read:,} of {about}{sent:,} tokens of a prompt.",
                hint="Raise its context length.",
            )
        if self.engine is not None:
            _check_finite(answer, self.engine.name)
            if not self.engine.has_text:
                new = [token.key for token in answer.tokens if isinstance(token.key, int)]
                return Written(new, answer.is_cut)
        if form.is_chat:
            answered = encoder.clean_answer(answer.text, is_separate=answer.has_thoughts)
            thinks = answer.has_thoughts or encoder.has_thoughts(answer.text, is_separate=answer.has_thoughts)
            return Written([], answer.is_cut, answered, read if is_estimated else None, thinks)
        # Some servers remove the space before the answer.
        if answer.text.strip() == tokenizer.decode(expected).strip():
            return Written(expected, is_cut=False)
        return Written(self.encoder.encode_piece(answer.text)[:size], answer.is_cut)


def _check_finite(answer: Completion, name: str) -> None:
    """Raise if a generated token has no finite log-probability."""
    if not all(math.isfinite(token.alternatives.get(token.key, math.nan)) for token in answer.tokens):
        raise CtxextError(f"{name} returned log-probabilities that are not finite.", hint="Try --dtype fp32.")


def connect_model(info: CheckpointInfo, loading: Loading, lengths: Sequence[int]) -> ServerModel:
    """Connect to a server, with the tokenizer of the checkpoint that it serves.

    Args:
        info: The checkpoint.
        loading: The server, and options for the tokenizer.
        lengths: Prompt lengths in tokens, answers included.

    Raises:
        CtxextError: The server cannot be reached, or supports fewer tokens.
    """
    assert loading.server is not None
    server = loading.server.connection
    if server.length is not None and max(lengths) > server.length:
        raise CtxextError(
            f"The server supports {server.length:,} tokens, but a prompt length is {max(lengths):,}.",
            hint=_LENGTH_HINT,
        )
    encoder = Encoder(load_tokenizer(info, loading), chat_template=loading.chat_template)
    wraps = choose_form(server, encoder)
    return ServerModel(info.name, server, encoder, False, num_concurrent=loading.server.num_concurrent, wraps=wraps)


def choose_form(server: Server, encoder: Encoder, *, logprobs: bool = False) -> bool:
    """Choose the form of requests by a first one, before several threads send requests.

    Return whether the server puts the prompts of completions into a chat template, as Ollama does. Then the form is
    that of chat completions, which use the template once.
    """
    ids = encoder.encode_document("One")

    def complete() -> Completion:
        return server.complete(
            ids,
            "One",
            max_tokens=1,
            logprobs=logprobs,
            variables=switch_thoughts(False),
            keeps_special=encoder.needs_special_tokens,
        )

    answer = complete()
    if server.is_chat or (answer.prompt_tokens or 0) <= len(ids) + _MOST_ADDED:
        return False
    server.use_completions(chat=True)
    complete()
    return True
