"""The form of a task's prompts for a model: with the beginning of the answer, or as in chat."""

from typing import TYPE_CHECKING

from ctxext.data.encoding import BASE_FORM, Encoder, PromptForm
from ctxext.errors import CtxextError

if TYPE_CHECKING:
    from ctxext.tasks.base import RetrievalTask

REASONING = 4096
"""Maximum number of tokens of thoughts and answer, as on NVIDIA's page about RULER since 2026."""

_ANSWER = 256
"""Maximum number of tokens of an answer in chat: without the beginning of the answer, it is at least a sentence."""


def choose_form(
    task: "RetrievalTask",
    name: str,
    encoder: Encoder,
    *,
    prompt: str | None = None,
    reason: int | None = None,
    no_think: bool = False,
) -> PromptForm:
    """Return the form of a task's prompts for a model.

    Args:
        task: The task.
        name: The name of the model.
        encoder: Its tokenizer.
        prompt: "base", "chat", or None for the form that the authors use.
        reason: Maximum number of tokens of thoughts and answer; None without a request for thoughts.
        no_think: Whether thoughts are switched off.

    Raises:
        CtxextError: The options require a chat template, but there is none.
    """
    if "causal" not in task.kinds:
        return BASE_FORM
    reasons = reason is not None
    if not encoder.uses_chat:
        if prompt == "chat" or (reasons and not task.reasons_in_text):
            flag = "--prompt chat" if prompt == "chat" else "--reason"
            raise CtxextError(
                f'{flag} needs a chat template, but "{name}" has none, or it is switched off.', hint=f"Omit {flag}."
            )
        return PromptForm(room=reason or 0, reasons=reasons)
    if not (task.has_one_form or prompt == "chat" or (prompt is None and (task.is_chat or reasons))):
        return BASE_FORM
    thinks = True if reasons else False if no_think else None
    may_think = thinks is None and encoder.thoughts.are_default
    room = reason or (REASONING if may_think else 0 if task.has_one_form else _ANSWER)
    return PromptForm(is_chat=True, thinks=thinks, room=room, reasons=reasons)
