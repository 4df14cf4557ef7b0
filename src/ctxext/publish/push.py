"""Upload a checkpoint to the Hub with huggingface_hub; safe to run again."""

import contextlib
import glob
import logging
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ctxext.checkpoint.opening import LOG_IN, hub_token
from ctxext.errors import CtxextError
from ctxext.files.content import Progress
from ctxext.files.retrying import call_with_retries, count_pause
from ctxext.notebook import table
from ctxext.options import accepts_options
from ctxext.publish.upload_plan import PushOptions, UploadPlan, adapter_in, pack, pack_adapter, seal
from ctxext.redaction import shorten

if TYPE_CHECKING:
    from huggingface_hub import HfApi

# Message and hint by HTTP status.
_MESSAGES: Mapping[int, tuple[str, str]] = {
    400: ("The Hub rejected the request: {reason}", ""),
    401: ("The Hub rejected the token.", LOG_IN),
    402: ("The Hub requires a payment for this upload.", "https://huggingface.co/settings/billing"),
    403: ('No write access to "{name}".', LOG_IN),
    404: ('"{name}" does not exist on the Hub, or the token has no access to it.', LOG_IN),
    409: ('"{name}" is being changed by another client.', "Run the same command again."),
    413: ("The upload is too large: {reason}", ""),
    429: ("Too many requests to the Hub.", "Wait a few minutes, then run the same command again."),
}
_AGAIN = "Run the same command again; uploaded files are not sent twice."
_MAX_RETRIES = 2
_DEFAULT_BRANCH = "main"
_OF_THE_HUB = (".gitattributes",)
_Result = TypeVar("_Result")
_LONGEST = 1000
"""Maximum number of characters of a message of the Hub."""
_MESSAGE = "Upload a checkpoint created by ctxext"


@contextlib.contextmanager
def hub_errors_in_one_line(name: str) -> Iterator[None]:
    """Convert exceptions of the Hub's client to one-line errors about a repository."""
    from huggingface_hub import errors

    # The client's transport errors derive from the base class of its HTTP errors, in both major versions.
    transport: type[Exception] = getattr(errors, "HTTPError")  # noqa: B009
    try:
        yield
    except errors.HFValidationError as error:
        raise _illegal_name(name) from error
    except errors.OfflineModeIsEnabled as error:
        raise CtxextError(
            "Offline mode: HF_HUB_OFFLINE is set.", hint="Unset it, then run the same command again."
        ) from error
    except errors.HfHubHTTPError as error:
        raise _of_status(error, name) from error
    except (transport, OSError) as error:
        text = _clean(str(error)).rstrip(".")
        # One major version of the client wraps the system's message in several layers.
        known = re.search(r"(Connection refused|Name or service not known|timed out|Network is unreachable)", text)
        reason = known[1] if known else shorten(text, 120) or type(error).__name__
        raise CtxextError(f"The Hub cannot be reached: {reason}.", hint=_AGAIN) from error
    except RuntimeError as error:
        # The client wraps errors in the upload of one file.
        if not isinstance(error.__cause__, transport | OSError):
            raise
        if isinstance(error.__cause__, errors.HfHubHTTPError):
            raise _of_status(error.__cause__, name) from error.__cause__
        message = str(error).rstrip(".")
        raise CtxextError(f"{message}: the connection failed several times.", hint=_AGAIN) from error
    except ValueError as error:
        if "README.md" not in str(error):
            raise
        raise CtxextError(f"The Hub rejected the model card: {_clean(str(error))}") from error


def _illegal_name(name: str) -> CtxextError:
    return CtxextError(
        f'"{name}" is not a valid Hub id.',
        hint="Use user/name with letters, digits, -, _ and dots, at most 96 characters in total.",
    )


def _of_status(error: Exception, name: str) -> CtxextError:
    response = getattr(error, "response", None)
    status = getattr(response, "status_code", 0) or 0
    reason = _clean(getattr(error, "server_message", None) or str(error))
    # A missing repository also returns status 401; only the message distinguishes it from an invalid token.
    if status == 401 and "nvalid" not in reason and "username or password" not in reason and "expired" not in reason:
        status = 404
    if status >= 500:
        return CtxextError(f"The Hub has an internal error (status {status}).", hint=_AGAIN)
    message, hint = _MESSAGES.get(status, ("The Hub rejected the request (status {status}): {reason}", ""))
    return CtxextError(message.format(name=name, reason=reason, status=status), hint=hint)


def _clean(text: str) -> str:
    """Return a message on one line, with secrets redacted."""
    return shorten(text, _LONGEST)


@dataclass(frozen=True)
class Push:
    """The result of a push.

    Attributes:
        url: URL of the commit or pull request.
        commit: SHA of the commit.
        is_new: Whether anything was uploaded.
        sizes: Size in bytes of each file, by name.
        others: Other files in the repository.
    """

    url: str
    commit: str
    is_new: bool
    sizes: dict[str, int]
    others: tuple[str, ...]

    def __repr__(self) -> str:
        return f"Push({self.url!r}: {len(self.sizes)} files, {sum(self.sizes.values())} bytes)"

    def _repr_html_(self) -> str:
        return table({"url": self.url, "commit": self.commit, "files": len(self.sizes), "new": self.is_new})


def prepare(
    folder: Path,
    repository: str,
    options: PushOptions,
    progress: Progress | None = None,
) -> UploadPlan:
    """Verify the checkpoint and plan the upload without writing files or sending requests."""
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    with hub_errors_in_one_line(repository):
        validate_repo_id(repository)
    if repository.count("/") != 1:
        raise _illegal_name(repository)
    if options.create_pr and options.revision not in (None, _DEFAULT_BRANCH):
        raise CtxextError("--create-pr cannot be combined with --revision.", hint="Remove one of them.")
    is_adapter = options.adapter or (not (folder / "config.json").is_file() and adapter_in(folder) is not None)
    if is_adapter and options.report:
        raise CtxextError("An adapter cannot be combined with --report.", hint="Remove --report.")
    if is_adapter:
        return pack_adapter(folder, repository, options.base)
    return pack(folder, repository, options, progress)


@accepts_options(PushOptions)
def plan_push(folder: str | Path, repository: str, options: PushOptions) -> UploadPlan:
    """Plan a push without writing files or sending requests: files, sizes and the model card.

    The checkpoint is verified as `push` verifies it.

    Args:
        folder: The checkpoint.
        repository: The Hub id, user/name.
        options: Options of the push. Each field is also a keyword argument of this function.

    Raises:
        CtxextError: The name is not allowed, options contradict each other, or the folder fails verification.
    """
    return prepare(Path(folder), repository, options)


@accepts_options(PushOptions)
def push(folder: str | Path, repository: str, options: PushOptions, *, token: str | None = None) -> Push:
    """Record the digests of a finished checkpoint's weights, then upload it.

    Args:
        folder: The checkpoint.
        repository: The Hub id, user/name.
        options: Options of the push. Each field is also a keyword argument of this function, such as private=True.
        token: A Hub token with write access. By default the environment and the token of hf auth login are used.

    Raises:
        CtxextError: The checkpoint, the name or the token is rejected, or the Hub cannot be reached.
    """
    return send(prepare(Path(folder), repository, options), repository, options, token=token)


def send(
    plan: UploadPlan,
    repository: str,
    options: PushOptions,
    *,
    token: str | None = None,
    progress: Progress | None = None,
    notify: Callable[[str], None] | None = None,
) -> Push:
    """Write the planned files into the folder and upload it; see `push` for the arguments."""
    from huggingface_hub import HfApi

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    usable = hub_token(token)
    if not usable:
        raise CtxextError("No Hub token found.", hint=LOG_IN)
    api = HfApi(token=usable, library_name="ctxext")
    if plan.base:
        with hub_errors_in_one_line(plan.base):
            api.model_info(plan.base)
    # Fail on immediate rejections by the Hub before large files are read.
    _call_with_retries(lambda: _open(api, repository, options), notify)
    if not plan.is_adapter:
        seal(plan, progress)
        return _call_with_retries(lambda: _upload(api, plan.folder, repository, options), notify)
    with tempfile.TemporaryDirectory() as place:  # A recorded checkpoint must not change.
        for name, content in plan.contents.items():
            (Path(place) / name).write_bytes(content if isinstance(content, bytes) else content.read_bytes())
        return _call_with_retries(lambda: _upload(api, Path(place), repository, options), notify)


def _call_with_retries(action: Callable[[], _Result], notify: Callable[[str], None] | None) -> _Result:
    """Call a function and retry if the connection breaks; uploaded files are not sent twice."""

    def find_pause(error: CtxextError, attempt: int) -> float | None:
        if error.hint != _AGAIN:  # The same command would fail again.
            return None
        if notify is not None:
            notify(f"{error.message} Retrying ({attempt + 1} of {_MAX_RETRIES}).")
        headers = getattr(getattr(error.__cause__, "response", None), "headers", {})
        return count_pause(headers.get("retry-after"), attempt + 1)

    return call_with_retries(action, _MAX_RETRIES, find_pause)


def _open(api: "HfApi", repository: str, options: PushOptions) -> None:
    with hub_errors_in_one_line(repository):
        api.create_repo(repository, private=options.private or None, exist_ok=True)
        if options.private and not api.model_info(repository).private:
            raise CtxextError(
                f'"{repository}" exists and is public.', hint="Make it private in its settings, or remove --private."
            )
        if options.revision not in (None, _DEFAULT_BRANCH):
            api.create_branch(repository, branch=str(options.revision), exist_ok=True)


def _upload(api: "HfApi", folder: Path, repository: str, options: PushOptions) -> Push:
    """Upload missing files that are not hidden, and check that all have arrived."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    names = {path.relative_to(folder).as_posix(): path.stat().st_size for path in paths}
    sizes = {name: size for name, size in names.items() if not re.search(r"(^|/)(\.|__pycache__/)", name)}
    title, revision, create_pr = options.message or _MESSAGE, options.revision, options.create_pr
    with hub_errors_in_one_line(repository):
        if create_pr:
            # Reuse this user's open pull request with this title; others may use the same default title.
            revision, user = None, api.whoami()["name"]
            pulls = api.get_repo_discussions(repository, discussion_type="pull_request", discussion_status="open")
            number = next((pull.num for pull in pulls if pull.author == user and pull.title == title), None)
            if number is not None:
                revision, create_pr = f"refs/pr/{number}", False
        head = api.model_info(repository, revision=revision).sha
        done: Any = api.upload_folder(
            repo_id=repository,
            folder_path=folder,
            commit_message=title,
            revision=revision,
            create_pr=create_pr,
            allow_patterns=[glob.escape(name) for name in sizes],
        )
        there = set(api.list_repo_files(repository, revision=done.pr_revision or revision))
    missing = [name for name in sizes if name not in there]
    if missing:
        raise CtxextError(
            f'"{missing[0]}" is missing on the Hub after the upload.',
            hint="A .gitignore in the repository may exclude it.",
        )
    others = tuple(sorted(there - sizes.keys() - set(_OF_THE_HUB)))
    return Push(str(done.pr_url or done.commit_url), str(done.oid), done.oid != head, sizes, others)
