"""The size of the tokens of a server with an unknown tokenizer, from its counts of a task's text."""

from collections.abc import Sequence

from ctxext.data.encoding import Encoder
from ctxext.data.estimated_tokens import EstimatedTokenizer, fit_size
from ctxext.data.prompt import Message
from ctxext.data.thoughts import switch_thoughts
from ctxext.errors import CtxextError
from ctxext.server.client import Server, ServerError
from ctxext.server.negotiation import NO_PATH
from ctxext.tasks.base import RetrievalTask
from ctxext.tasks.retrieval import check_fits, make_questions
from ctxext.tasks.settings import Settings

_SHORT = 2048
"""Length of the prompt to count, unless the task needs more: counting it takes little time."""

_MOST_CHARACTERS = 16.0
"""Largest number of characters of a token that is possible; known tokenizers have three to five in texts."""

_HINT = "Give the checkpoint that it serves, for its tokenizer: ctxext eval MODEL --server URL."


def estimate_tokens(
    server: Server, task: RetrievalTask, encoder: Encoder, lengths: Sequence[int], settings: Settings
) -> EstimatedTokenizer:
    """Return a stand-in for the tokenizer of a server with which a short prompt of a task has the tokens counted there.

    Args:
        server: The server.
        task: The task, in the form of its prompts.
        encoder: An encoder with any stand-in.
        lengths: Prompt lengths; a prompt of up to 2048 tokens is counted, or one of the shortest length.
        settings: Samples, depths and seed.

    Raises:
        CtxextError: The server has no chat completions, counts no tokens, or counts too few.
    """
    length = min(_SHORT, max(lengths))
    try:
        check_fits(task, encoder, [length], settings)
    except CtxextError:
        length = min(lengths)
        check_fits(task, encoder, [length], settings)
    prompt = make_questions(task, encoder, length, range(1), settings)[0][0]
    bare, least = EstimatedTokenizer(), [{"role": "user", "content": "One"}]
    rendered = bare.apply_chat_template(least, tokenize=False)
    overhead = max(_count(server, task, least) - len(bare(rendered)["input_ids"]), 0)
    count = _count(server, task, prompt.messages)
    size = fit_size(bare.apply_chat_template(prompt.messages, tokenize=False), count - overhead)
    if size > _MOST_CHARACTERS:
        raise CtxextError(
            f"The server at {server.host} counts only {count:,} tokens of a prompt of about {length:,}: it may not "
            "count what is in its cache.",
            hint=f"Clear its cache, for example by a restart. Or: {_HINT}",
        )
    return EstimatedTokenizer(size, overhead)


def _count(server: Server, task: RetrievalTask, messages: Sequence[Message]) -> int:
    """Return the number of tokens of a conversation that a server counts."""
    text = "\n\n".join(message["content"] for message in messages)
    try:
        answer = server.complete(
            (), text, max_tokens=1, logprobs=False, messages=messages, variables=switch_thoughts(task.form.thinks)
        )
    except ServerError as error:
        if error.status not in NO_PATH:
            raise
        raise CtxextError(f"The server at {server.host} has no chat completions.", hint=_HINT) from error
    if not answer.prompt_tokens:
        raise CtxextError(f"The server at {server.host} does not report how many tokens a prompt has.", hint=_HINT)
    return answer.prompt_tokens
