"""A training run in the terms that all trainers share, and the arguments of transformers' Trainer for it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ctxext.checkpoint.families import read
from ctxext.converters.plan import default_name
from ctxext.data.records import TRAIN, files_of, is_plain_text, kind_of, read_records
from ctxext.errors import CtxextError
from ctxext.finetune.base import Base
from ctxext.finetune.chats import TOOLS, RecordReader
from ctxext.finetune.documents import Source, TrainingData
from ctxext.finetune.options import TrainingOptions
from ctxext.recipes.code.own_code import needs_code
from ctxext.recipes.encodings.learned import tensors_named

_BUILDERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
"""The builder of the datasets library by the suffix of a file."""
_HEADS = ("lm_head", "embed_out", "output")


@dataclass(frozen=True)
class RunData:
    """One source of the data.

    Attributes:
        path: A file, a folder, or the id of a data set.
        kind: The format of its records: text, chat, prompt-completion, sharegpt or alpaca.
        builder: The builder of the datasets library for a file; None for a folder or a data set.
        split: The split that is read; a file has only train.
        is_local: Whether it is a file or a folder.
        is_plain: Whether it is or contains a text file, which is one document.
        weight: Its share of the tokens, if the sources have weights.
        fields: The fields of its first record; empty for a data set, which is not read.
    """

    path: str
    kind: str
    builder: str | None
    split: str
    is_local: bool
    is_plain: bool = False
    weight: float | None = None
    fields: frozenset[str] = frozenset()

    @property
    def has_tools(self) -> bool:
        """Whether its conversations have tools."""
        return TOOLS in self.fields


@dataclass(frozen=True)
class Run:
    """A training run.

    Attributes:
        base: The checkpoint.
        model: The folder or Hub id that the trainer loads: the result of the conversion if there is one.
        out: The output folder.
        options: The options, resolved.
        data: The data and its options.
        sources: The sources of the data.
        whole: Names of modules that are trained without LoRA: position tables, norms, embeddings.
        others: Names of further options that are set, which are not those of the training.
    """

    base: Base
    model: str
    out: str
    options: TrainingOptions
    data: TrainingData
    sources: tuple[RunData, ...]
    whole: tuple[str, ...]
    others: tuple[str, ...] = ()

    @property
    def length(self) -> int:
        """Tokens per sequence."""
        assert self.options.length is not None, "the options are resolved"
        return self.options.length

    @property
    def kind(self) -> str:
        """The format of the records."""
        return self.sources[0].kind

    @property
    def revision(self) -> str | None:
        """The commit on the Hub; None for a folder."""
        return None if self.base.conversion else self.base.checkpoint.revision

    @property
    def has_code(self) -> bool:
        """Whether the checkpoint needs Python code, which it carries."""
        steps = self.base.conversion.steps if self.base.conversion else ()
        return needs_code(self.base.checkpoint.config) or any(step.needs_code() for step in steps)

    @property
    def rope_type(self) -> str:
        """The name of the schedule in transformers; default without one."""
        return str(getattr(self.base.model.encoding, "rope_type", "default"))

    @property
    def alpha(self) -> float:
        """Scaling of the LoRA matrices, an integer if it is whole: some trainers take no other."""
        alpha = self.options.alpha or 2.0 * self.options.rank
        return int(alpha) if alpha == int(alpha) else alpha

    @property
    def learns_answers(self) -> bool:
        """Whether only answers are learned."""
        return self.options.learn == "answers" and self.kind != "text"

    @property
    def has_checkpointing(self) -> bool:
        """Whether activations are recomputed."""
        return any(stage.checkpointing for stage in self.options.each_stage)

    @property
    def in_bf16(self) -> bool:
        """Whether matrices are multiplied in bfloat16: by default, as on every accelerator that these trainers need."""
        return self.options.dtype in ("auto", "bf16")


def make_run(base: Base, out: Path, options: TrainingOptions, data: TrainingData, others: tuple[str, ...] = ()) -> Run:
    """Collect a run; the first record of local data is read, no weights.

    Args:
        base: The checkpoint.
        out: The output folder.
        options: The options, resolved.
        data: The data.
        others: Names of further options that are set.
    """
    model = base.checkpoint.name
    if base.conversion is not None:
        model = default_name(Path(model).name, base.conversion, base.model.encoding)
    sources = tuple(_read_source(source, data) for source in data.sources())
    whole = () if options.full else _find_whole(base, options)
    return Run(base, model, str(out), options, data, sources, whole, others)


def _read_source(source: Source, data: TrainingData) -> RunData:
    path, splits = Path(source.data), (data.split,) if data.split else TRAIN
    if not source.is_local:
        if data.record_format == "auto":
            raise CtxextError(
                f'"{source.data}" is a data set on the Hub, which is not read for a configuration.',
                hint="Name the format of its records, for example --format chat.",
            )
        split = data.split or TRAIN[0]
        return RunData(source.data, data.record_format, None, split, is_local=False, weight=source.weight)
    place, record = next(iter(read_records(source.data, splits)), ("", {}))
    if not record:
        raise CtxextError(f'"{source.data}" contains no records.')
    return RunData(
        source.data,
        RecordReader(data.record_format, data.text_field).find_format(record, place),
        _BUILDERS.get(kind_of(path)) if path.is_file() else None,
        TRAIN[0] if path.is_file() else splits[0],
        is_local=True,
        is_plain=any(is_plain_text(str(file)) for file in ([path] if path.is_file() else files_of(path, splits))),
        weight=source.weight,
        fields=frozenset(record),
    )


def _find_whole(base: Base, options: TrainingOptions) -> tuple[str, ...]:
    """Return the names of modules that are trained without LoRA, by the headers of the weights."""
    if not (base.learned_tensors or options.train_norms or options.train_embeddings):
        return ()
    shapes = {name: entry["shape"] for name, entry in base.checkpoint.headers.items() if name.endswith(".weight")}
    if not shapes:
        raise CtxextError(
            f'"{base.checkpoint.name}" has no local safetensors files, so the names of its modules are unknown.',
            hint="Download it, or convert it to a folder first.",
        )
    found = [name for ending in base.learned_tensors for name in tensors_named(list(shapes), ending)]
    if options.train_norms:
        found += [name for name, shape in shapes.items() if len(shape) == 1]
    if options.train_embeddings:
        num_rows = read(base.model.config, base.model.family, "vocab_size")
        found += [name for name, shape in shapes.items() if len(shape) == 2 and shape[0] == num_rows]
    leaves = dict.fromkeys(name.removesuffix(".weight").rsplit(".", 1)[-1] for name in found)
    return tuple(leaf for leaf in leaves if leaf not in _HEADS)


def scheduler(run: Run) -> dict[str, Any]:
    """Return the name of the learning rate's schedule in transformers, with its arguments."""
    options = run.options
    if options.rate_floor:
        return {"name": "cosine_with_min_lr", "arguments": {"min_lr_rate": options.rate_floor}}
    return {"name": "constant_with_warmup" if options.schedule == "constant" else options.schedule, "arguments": None}


def training_arguments(run: Run) -> dict[str, Any]:
    """Return the arguments of transformers' TrainingArguments, for one device.

    All are written out, because trainers change the defaults.
    """
    options, schedule = run.options, scheduler(run)
    kwargs = schedule["arguments"]
    return {
        "output_dir": run.out,
        **({"num_train_epochs": options.epochs} if options.epochs else {"max_steps": options.num_steps}),
        "per_device_train_batch_size": options.micro_batch,
        "gradient_accumulation_steps": options.batch_size // options.micro_batch,
        "learning_rate": options.peak_rate,
        "lr_scheduler_type": schedule["name"],
        **({"lr_scheduler_kwargs": kwargs} if kwargs else {}),
        # A number below 1 is a share of the steps.
        "warmup_steps": options.each_stage[0].warmup if options.epochs else options.each_stage[0].warmup_steps,
        "optim": options.optimizer,
        "weight_decay": options.weight_decay,
        "adam_beta2": options.beta2,
        "gradient_checkpointing": run.has_checkpointing,
        "bf16": run.in_bf16,
        "fp16": options.dtype == "fp16",
        "seed": options.seed,
        "logging_steps": 1,
        "save_steps": options.save_every,
        "save_total_limit": 2,
        "report_to": options.report_to,
    }


def drop_none(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries that have a value."""
    return {key: value for key, value in content.items() if value is not None}
