"""A tiny extended checkpoint with a tokenizer of numbered words, and data for it."""

import dataclasses
import functools
import json
import random
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import loaded_models
from ctxext.api import Recipe, TrainingData, TrainingOptions, convert, finetune
from ctxext.finetune.documents import Document
from ctxext.methods import Yarn
from ctxext.report import pictures
from loaded_models import load as load

VOCABULARY, TRAINED, FACTOR = 64, 32, 4
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": TRAINED,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def save_llama(folder: Path, **changes) -> Path:
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**{**SIZES, **changes})).save_pretrained(folder)
    words = {"<s>": 0, "</s>": 1} | {f"w{number}": number for number in range(2, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", model_max_length=TRAINED
    )
    fast.save_pretrained(folder)
    return folder


def make_base(folder: Path, *steps, **changes) -> Path:
    """A converted checkpoint; Yarn by default."""
    source = save_llama(folder / "source", **changes)
    convert(str(source), folder / "base", Recipe(steps or [Yarn(factor=FACTOR)]), check=False)
    return folder / "base"


def documents(count: int = 24, length: int = 130, seed: int = 0) -> list[list[int]]:
    """Random token ids with a pattern to learn: each is told twice."""
    rng = random.Random(seed)
    texts = []
    for _ in range(count):
        half = [rng.randrange(2, VOCABULARY) for _ in range(length // 2)]
        texts.append([*half, *half])
    return texts


def write_records(path: Path, records) -> Path:
    """A file of records; what is no record is the text of one."""
    lines = (json.dumps({"text": record} if isinstance(record, str) else record) for record in records)
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def write_jsonl(path: Path, **sizes) -> Path:
    return write_records(path, (" ".join(f"w{token}" for token in ids) for ids in documents(**sizes)))


QUICK = TrainingOptions(
    **{"length": 64, "steps": 6, "batch_size": 2, "rank": 4, "learning_rate": 5e-3, "save_every": 6},
    dtype="fp32",  # The same on processors with bf16.
)
PARALLEL = dataclasses.replace(QUICK, batch_size=4, pack="run-on", steps=5)


def arguments_of(folder: Path, num_processes: int = 1, **choices):
    """Make the Trainer's arguments of a training with some options."""
    from ctxext.finetune.arguments import make_training_arguments
    from ctxext.finetune.models import choose_precision

    options = TrainingOptions(**choices).resolve(window=1024, trained_length=128)
    precision = choose_precision(options.device, options.dtype, full=options.full)
    return make_training_arguments(options, precision, folder, num_processes)


def change(**options) -> TrainingOptions:
    """The short training with other options; of all weights without the rank, which is an adapter's."""
    usual = {"rank": TrainingOptions.rank} if options.get("full") else {}
    return dataclasses.replace(QUICK, **usual, **options)


def tune(base: Path, out: Path, options: TrainingOptions = QUICK, *, is_drawn: bool = False, **others):
    """Train; the curve of losses is drawn where asked, as that takes longer than a short training."""
    with mock.patch.multiple(pictures, **(DRAWN if is_drawn else NOT_DRAWN)):
        return finetune(base, out, others.pop("data", None) or Tokens(documents()), options, **others)


@dataclasses.dataclass(frozen=True)
class Tokens(TrainingData):
    """Documents as token ids, in place of what a tokenizer makes of a text."""

    words: object = ()
    name: str = "random"

    def reader(self, options):
        return lambda *_: map(Document, self.words)

    def describe(self):
        return {"name": self.name}


def documents_of(tokenizer, *words, num_needed=None, seed=0, learn="answers", **more):
    """The documents of files, as a training reads them that wants all of them."""
    data, options = TrainingData(tuple(map(str, words)), **more), TrainingOptions(seed=seed, learn=learn)
    return data.reader(options)(tokenizer, num_needed or {16: 1 << 40})


DRAWN = {"draw_training": pictures.draw_training, "as_png": pictures.as_png}
NOT_DRAWN = {"draw_training": lambda losses, lengths: None, "as_png": lambda figure, *, dpi=160: b"not drawn"}


class Stopped(Exception):
    """Stands for a kill."""


def stop_after(step: int):
    """What a training reports its progress to, to be stopped after a step."""

    def progress(_, done, *__):
        if done == step:
            raise Stopped

    return progress


def logits(model, seed: int = 1, length: int = 48) -> torch.Tensor:
    ids = torch.randint(2, VOCABULARY, (2, length), generator=torch.Generator().manual_seed(seed))
    return loaded_models.logits(model, ids)


class Largest(TorchDispatchMode):
    """The most elements that a tensor has which an operation takes or makes."""

    def __init__(self):
        super().__init__()
        self.size = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        some = [*args, *(kwargs or {}).values(), *(result if isinstance(result, (tuple, list)) else [result])]
        tensors = [one for one in some if torch.is_tensor(one)]
        self.size = max([self.size, *(one.numel() for one in tensors)])
        return result


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    return make_base(tmp_path_factory.mktemp("finetune"))


@pytest.fixture(scope="session", autouse=True)
def short_trainings():
    """No curve of losses (`tune` draws it where asked), no collecting of garbage, and peft's card is compiled once."""
    import jinja2

    with pytest.MonkeyPatch.context() as patch:
        for name, function in NOT_DRAWN.items():
            patch.setattr(pictures, name, function)
        patch.setattr("accelerate.utils.memory.gc", SimpleNamespace(collect=lambda: 0))
        patch.setattr(jinja2, "Template", functools.cache(jinja2.Template))
        yield
