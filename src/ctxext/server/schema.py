"""The form of a server's answers: the keys that are read, with their types and limits.

Other keys are ignored, and null means a missing key. Types are strict: `true` is no number, and "5" neither.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Required

from pydantic import Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

_Text = str | None
_Count = Annotated[int, Field(ge=0, lt=2**31)]
_Id = Annotated[int, Field(ge=0, lt=2**31)]
_Name = Annotated[str, Field(min_length=1, max_length=500)]
_LogProbability = Annotated[float, Field(le=0.5)]
"""In nats; NaN is refused, too. Rounding to 16 bits moves that of a certain token above 0."""


class _Alternative(TypedDict, total=False):
    id: _Id | None
    token: _Text
    logprob: _LogProbability | None


class _Entry(_Alternative, total=False):
    top_logprobs: list[_Alternative] | None


class _LogProbs(TypedDict, total=False):
    """Log-probabilities in the form of chat completions (`content`) or in that of completions."""

    content: list[_Entry] | None
    tokens: list[_Id | str] | None
    token_logprobs: list[_LogProbability | None] | None
    top_logprobs: list[dict[str, _LogProbability | None] | None] | None


class _Message(TypedDict, total=False):
    content: _Text
    reasoning_content: _Text
    reasoning: _Text


class _Choice(TypedDict, total=False):
    text: _Text
    message: _Message | None
    finish_reason: _Text
    logprobs: _LogProbs | None


class _PromptDetails(TypedDict, total=False):
    cached_tokens: _Count | None


class _Usage(TypedDict, total=False):
    prompt_tokens: _Count | None
    completion_tokens: _Count | None
    prompt_tokens_details: _PromptDetails | None
    input_tokens: _Count | None
    output_tokens: _Count | None
    cache_read_input_tokens: _Count | None
    cache_creation_input_tokens: _Count | None


class _Timings(TypedDict, total=False):
    prompt_n: _Count | None
    cache_n: _Count | None
    predicted_n: _Count | None


class _Completion(TypedDict, total=False):
    choices: Required[Annotated[list[_Choice], Field(min_length=1, max_length=64)]]
    usage: _Usage | None
    timings: _Timings | None
    prompt_eval_count: _Count | None
    eval_count: _Count | None


class _Model(TypedDict, total=False):
    id: _Name
    owned_by: _Text
    max_model_len: Annotated[int, Field(gt=0, lt=2**40)] | None


class _Models(TypedDict, total=False):
    data: Annotated[list[_Model], Field(max_length=100_000)] | None


class _Settings(TypedDict, total=False):
    n_ctx: Annotated[int, Field(gt=0, lt=2**40)] | None


class _Identity(TypedDict, total=False):
    version: _Text
    build_info: _Text
    default_generation_settings: _Settings | None
    max_total_tokens: Annotated[int, Field(gt=0, lt=2**40)] | None


COMPLETION, MODELS, IDENTITY = TypeAdapter(_Completion), TypeAdapter(_Models), TypeAdapter(_Identity)


def find_fault(content: Any, schema: TypeAdapter[Any]) -> tuple[str, Any, str] | None:
    """Return the first key with another value than its schema allows, the value, and the reason."""
    try:
        schema.validate_python(content, strict=True)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        # Between the keys, pydantic names the alternatives of a type.
        key, value = "", content
        for part in fault["loc"]:
            if isinstance(value, Mapping) and part in value:
                key, value = f"{key}.{part}" if key else str(part), value[part]
            elif isinstance(value, list) and isinstance(part, int) and part < len(value):
                key, value = f"{key}[{part}]", value[part]
        return key, value, f'It lacks "{fault["loc"][-1]}"' if fault["type"] == "missing" else fault["msg"]
    return None
