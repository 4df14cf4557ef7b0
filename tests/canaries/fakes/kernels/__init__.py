"""A package called kernels that notes which kernel of the Hub was asked for, and has none."""

import os
from pathlib import Path

__version__ = "0.18.5"


def get_kernel(name, *_, **__):
    with Path(os.environ["CTXEXT_CANARIES"]).open("a") as file:
        file.write(f"kernel: {name}\n")
    raise ImportError("There are no kernels in this test.")


class AnyMember(type):
    """Gives a class every member that is asked for."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return 0


class Whatever(metaclass=AnyMember):
    """Stands in for the other names of the package, which transformers imports and uses while it is imported."""

    def __init__(self, *_, **__):
        pass

    def __call__(self, decorated=None, *_, **__):
        return decorated

    def __or__(self, _):
        return self


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return Whatever
