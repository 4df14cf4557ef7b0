"""What can go wrong on the Hub, each told in one line; a token never appears in any of them."""

import contextlib
import re
from collections.abc import Iterator, Mapping

from ctxext.errors import CtxextError
from ctxext.tokens import LOG_IN, redacted

# By HTTP status: what happened, and what to do.
_TOLD: Mapping[int, tuple[str, str]] = {
    400: ("The Hub does not accept this: {said}", ""),
    401: ("The Hub does not accept the token.", LOG_IN),
    402: ("The Hub asks for a payment before it stores this.", "https://huggingface.co/settings/billing"),
    403: ('"{name}" is not yours to write to, or the token may only read.', LOG_IN),
    404: ('The Hub knows no "{name}" that this token may see.', LOG_IN),
    409: ('"{name}" is being changed by someone else right now.', "Run the same command again."),
    413: ("The Hub says that this is too large: {said}", ""),
    429: ("The Hub asks to slow down.", "Wait a few minutes, then run the same command again."),
}
_AGAIN = "Run the same command again: what has arrived is not sent twice."
_LATER = "Later, run the same command again: what has arrived is not sent twice."


@contextlib.contextmanager
def told_in_one_line(name: str) -> Iterator[None]:
    """Turn the Hub client's exceptions into one line each.

    Args:
        name: The repository.

    Raises:
        CtxextError: whatever the client reports.
    """
    from huggingface_hub import errors

    # The client's transport errors descend from the base of its HTTP errors, in both of its generations.
    transport: type[Exception] = getattr(errors, "HTTPError")  # noqa: B009
    try:
        yield
    except errors.HFValidationError as error:
        raise illegal_name(name) from error
    except errors.OfflineModeIsEnabled as error:
        raise CtxextError(
            "The Hub is switched off: HF_HUB_OFFLINE is set.", hint="Unset it, then run the same command again."
        ) from error
    except errors.HfHubHTTPError as error:
        raise _of_status(error, name) from error
    except (transport, OSError) as error:
        raise CtxextError(f"The Hub cannot be reached: {_reason(error)}.", hint=_AGAIN) from error
    except RuntimeError as error:
        # The client wraps what stops the upload of one file.
        if not isinstance(error.__cause__, transport | OSError):
            raise
        if isinstance(error.__cause__, errors.HfHubHTTPError):
            raise _of_status(error.__cause__, name) from error
        what = str(error).rstrip(".")
        raise CtxextError(
            f"{what}: the connection broke off, several times.", hint=f"Later: {_AGAIN.lower()}"
        ) from error
    except ValueError as error:
        if "README.md" not in str(error):
            raise
        raise CtxextError(f"The Hub does not accept the model card: {_clean(str(error))}") from error


def is_passing(error: CtxextError) -> bool:
    """Whether the same command may succeed if it is simply run again."""
    return error.hint == _AGAIN


def illegal_name(name: str) -> CtxextError:
    """The refusal of a name that the Hub does not allow."""
    return CtxextError(
        f'"{name}" is not a name that the Hub allows.',
        hint="Write user/name with letters, digits, -, _ and dots, at most 96 characters in all.",
    )


def _of_status(error: Exception, name: str) -> CtxextError:
    response = getattr(error, "response", None)
    status = getattr(response, "status_code", 0) or 0
    said = _clean(getattr(error, "server_message", None) or str(error))
    # A repository that does not exist and a token that is wrong look alike, save for the status.
    if status == 401 and "nvalid" not in said and "username or password" not in said and "expired" not in said:
        return CtxextError(f'The Hub knows no "{name}" that this token may see.', hint=LOG_IN)
    if status >= 500:
        return CtxextError(f"The Hub has trouble of its own (status {status}).", hint=_AGAIN)
    message, hint = _TOLD.get(status, ("The Hub refused (status {status}): {said}", ""))
    return CtxextError(message.format(name=name, said=said, status=status), hint=hint)


def _reason(error: Exception) -> str:
    text = _clean(str(error)).rstrip(".")
    # One generation of the client wraps the system's own words in several layers.
    known = re.search(r"(Connection refused|Name or service not known|timed out|Network is unreachable)", text)
    return known[1] if known else text[:120] or type(error).__name__


def _clean(text: str) -> str:
    """A message on one line and without anything that looks like a token."""
    return redacted(" ".join(text.split()))
