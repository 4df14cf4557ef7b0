"""A tiny lengthened checkpoint with a table of positions, and a short training of it."""

import dataclasses

from safetensors.torch import load_file

from ctxext.api import Recipe, TrainingOptions, convert, finetune
from ctxext.finetune.documents import Document
from ctxext.recipes.methods.table import Table
from tiny_base import Tokens, documents
from tiny_encodings import VOCABULARY, save, save_tokenizer

CAUSAL = ("gpt2", "gpt_bigcode", "gpt_neo", "opt", "biogpt")
ENCODERS = ("albert", "bert", "camembert", "distilbert", "electra", "longformer", "roberta", "xlm-roberta")
OPTIONS = TrainingOptions(length=24, steps=4, batch_size=2, rank=4, learning_rate=5e-2, save_every=2)


def make_base(folder, model_type, step=None):
    source = save_tokenizer(save(model_type, folder / "source"))
    convert(str(source), folder / "base", Recipe([step or Table(factor=2)]), check=False)
    return folder / "base"


def change(**options):
    usual = {"rank": TrainingOptions.rank} if options.get("full") else {}
    return dataclasses.replace(OPTIONS, **usual, **options)


def texts():
    return [Document([token % (VOCABULARY - 5) + 5 for token in ids]) for ids in documents(length=60)]


def tune(base, out, options=OPTIONS, **others):
    return finetune(base, out, Tokens([document.ids for document in texts()]), options, **others)


def weights(folder):
    return load_file(folder / "model.safetensors")
