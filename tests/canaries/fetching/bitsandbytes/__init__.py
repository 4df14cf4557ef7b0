"""A bitsandbytes that fetches while it is imported, in each of the ways in which packages do."""

import contextlib
import os
import urllib.request
from pathlib import Path

from kernels import Whatever, get_kernel

__version__ = "0.50.2"

with Path(os.environ["CTXEXT_CANARIES"]).open("a") as file:
    file.write("imported\n")
with contextlib.suppress(Exception):
    get_kernel("kernels-community/quantization-bitsandbytes", version=1)
with contextlib.suppress(Exception):
    urllib.request.urlopen("http://them.invalid/kernel.so", timeout=1)
with contextlib.suppress(Exception):
    from huggingface_hub import hf_hub_download

    hf_hub_download("them/kernel", "kernel.so")


class nn:
    """Layers that no model has."""

    Linear4bit = Linear8bitLt = Params4bit = Int8Params = Embedding = StableEmbedding = type("Layer", (), {})


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return Whatever
