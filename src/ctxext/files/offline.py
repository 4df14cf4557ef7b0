"""No downloads while other packages are imported: some fetch on import, such as bitsandbytes a native kernel."""

import importlib
import importlib.util
import ipaddress
import socket
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

_KERNEL_LOADERS = ("get_kernel", "load_kernel", "get_local_kernel", "get_locked_kernel")
"""Functions of the package `kernels` that download a kernel, or load one that was downloaded earlier."""

_LOCK = threading.Lock()
_CONTEXTS = list[object]()
"""All open contexts; those of two threads may overlap."""
_CHANGES = ExitStack()
"""Undoes the changes of the first context, when the last one ends."""


class _OfflineFlag:
    """True until all contexts have ended.

    Some packages, such as `datasets`, copy the flag during their import, and a copied True would remain.
    """

    def __bool__(self) -> bool:
        return bool(_CONTEXTS)


@contextmanager
def forbid_network(*, kernels: bool = False) -> Iterator[None]:
    """Forbid downloads, and native kernels of the Hub, by whichever library, in the whole process.

    Every import of a package that may fetch anything is in this context (`tests/test_architecture.py`).

    Args:
        kernels: Whether the user selected a kernel, which may be downloaded.
    """
    if kernels:
        yield
        return
    context = object()
    with _LOCK:
        if not _CONTEXTS:
            _CHANGES.enter_context(replace_attributes(_list_changes()))
        _CONTEXTS.append(context)
    try:
        yield
    finally:
        with _LOCK:
            _CONTEXTS.remove(context)
            if not _CONTEXTS:
                _CHANGES.close()


def _list_changes() -> list[tuple[Any, str, Any]]:
    """Return the attributes that forbid downloads, with their values."""
    import huggingface_hub.constants

    look_up = socket.getaddrinfo

    def look_up_locally(host: Any, *args: Any, **options: Any) -> Any:
        if not _is_local(host):
            raise socket.gaierror(socket.EAI_FAIL, f'"{host}" is not contacted.')
        return look_up(host, *args, **options)

    changes: list[tuple[Any, str, Any]] = [(socket, "getaddrinfo", look_up_locally)]
    if not huggingface_hub.constants.HF_HUB_OFFLINE:
        changes.append((huggingface_hub.constants, "HF_HUB_OFFLINE", _OfflineFlag()))
    if importlib.util.find_spec("kernels") is not None:
        package = importlib.import_module("kernels")
        changes += [(package, name, refuse_download) for name in _KERNEL_LOADERS]
    return changes


def refuse_download(name: Any, *_: Any, **__: Any) -> Any:
    """Raise in place of a download."""
    raise ImportError(f'"{getattr(name, "full_url", name)}" is not downloaded.')


@contextmanager
def replace_attributes(changes: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Replace attributes, those that exist, until the context ends."""
    with ExitStack() as stack:
        for place, name, value in changes:
            if hasattr(place, name):
                stack.callback(setattr, place, name, getattr(place, name))
                setattr(place, name, value)
        yield


def _is_local(host: Any) -> bool:
    """Return whether a name is this machine's; processes of one run and servers of engines connect to it."""
    name = host.decode("ascii", "replace") if isinstance(host, bytes) else host
    if name in (None, "", "localhost", socket.gethostname()):
        return True
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified
