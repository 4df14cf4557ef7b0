"""Which data a fine-tune reads: files, data sets and records in memory, and how documents come of them."""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from ctxext.data.records import HELD_OUT, check_place
from ctxext.errors import CtxextError
from ctxext.files.content import sha256_of
from ctxext.finetune.documents import DocumentReader, Documents, Source, parse_source
from ctxext.finetune.formats import FORMATS, RecordReader
from ctxext.finetune.options import TrainingOptions
from ctxext.options import option, with_documented_options

DEMO, _DATA = "demo", "Data"


@with_documented_options
@dataclass(frozen=True)
class TrainingData:
    """The data of a fine-tune, and how its records are read.

    `words` are files, folders and ids of data sets, each with a weight or without: `books.jsonl:0.7`. `records` are
    records in memory, in place of `words`.
    """

    words: tuple[str, ...] = option(
        (),
        help="A file or folder of text, JSON, CSV or parquet, or the id of a data set; several with their weights, as "
        "--data books.jsonl:0.7 --data chats.jsonl:0.3. demo makes documents on the fly.",
        flags=("--data",),
        repeats=True,
    )
    record_format: str = option(
        "auto",
        help="What records are: auto, text, chat, prompt-completion, sharegpt or alpaca.",
        flags=("--format",),
        panel=_DATA,
    )
    text_field: str = option("text", help="The field that holds a text.", panel=_DATA, advanced=True)
    # None for the one that is held out.
    split: str | None = option(
        "train", help="The split of a folder or data set that is read.", panel=_DATA, advanced=True
    )
    skip_bad_rows: bool = option(
        False,
        help="Count records that cannot be learned from instead of stopping.",
        flags=("--skip-bad-rows",),
        panel=_DATA,
        advanced=True,
    )
    long_share: float | None = option(
        None,
        help="Share of the tokens that come from documents of at least half the length. Default: as they come.",
        panel=_DATA,
        advanced=True,
    )
    records: tuple[Mapping[str, Any], ...] = ()

    @property
    def is_demo(self) -> bool:
        """Whether documents are generated."""
        return self.words == (DEMO,) and not Path(DEMO).exists()

    def reader(self, options: TrainingOptions) -> DocumentReader:
        """How the documents are read, once the tokenizer is there; what cannot be mixed is refused."""
        if not self.words and not self.records:
            raise CtxextError("--data is missing.", hint="Name a file, or --data demo for made-up documents.")
        if self.words and self.records:
            raise CtxextError("Data are named or in memory, not both.", hint="Give words or records.")
        if self.record_format not in FORMATS:
            raise CtxextError(f'--format "{self.record_format}" is not known.', hint=f"Choose {', '.join(FORMATS)}.")
        if self.long_share is not None and not 0 < self.long_share <= 1:
            raise CtxextError(f'--long-share is a share from 0 to 1, not "{self.long_share}".')
        sources = self._sources()
        if any(source.data == DEMO and not source.is_local for source in sources):
            raise CtxextError(
                f"--data {DEMO} has no records to mix with other data.", hint="Train on one, then on the other."
            )
        if self.is_demo and options.epochs:
            raise CtxextError("--data demo has no end, so --epochs means nothing.", hint="Give --steps.")
        remote = next((source.data for source in sources if not source.is_local), None)
        if remote is not None and options.epochs:
            raise CtxextError("--epochs needs files: what is streamed is not read to its end.", hint="Give --steps.")
        if self.is_demo:
            from ctxext.finetune.demo_documents import long_documents

            return lambda tokenizer, wanted: long_documents(tokenizer, wanted, options.seed, options.learn)
        if len({source.weight is None for source in sources}) > 1:
            raise CtxextError(
                "Some of --data have a weight and others none.", hint="Give each one, as --data a.jsonl:0.7."
            )
        if remote and self.long_share is not None:
            raise CtxextError(f'--long-share needs files, and "{remote}" is streamed.', hint="Download it first.")
        if remote and len(sources) > 1 and sources[0].weight is None:
            raise CtxextError(f'"{remote}" is streamed, so its size is not known.', hint="Give each --data a weight.")
        for source in sources if not self.records else ():
            check_place(source.data)
        return lambda tokenizer, wanted: Documents(
            sources,
            tokenizer,
            options.learn,
            RecordReader(self.record_format, self.text_field, self.skip_bad_rows),
            (self.split,) if self.split else HELD_OUT,
            options.seed,
            max(wanted) // 2,
            self.long_share,
            wanted,
        )

    def described(self) -> dict[str, Any]:
        """The data as reports name it: a file by its last part and its digest."""
        if self.is_demo:
            return {"name": DEMO}
        names, digests = [], []
        for source in self._sources():
            if source.records is not None:
                content = json.dumps(source.records, sort_keys=True, default=str).encode()
                names, digests = [source.data], [hashlib.sha256(content).hexdigest()]
                break
            path = Path(source.data)
            name = path.resolve().name if source.is_local else source.data
            names.append(name if source.weight is None else f"{name}:{source.weight:g}")
            files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
            digests += [sha256_of(file) for file in files]
        digest = digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()
        others = {"format": self.record_format, "text_field": self.text_field, "split": self.split}
        usual = {"format": "auto", "text_field": "text", "split": "train"}
        changed = {key: value for key, value in others.items() if value != usual[key]}
        long = {} if self.long_share is None else {"long_share": self.long_share}
        return {"name": ", ".join(names), **({"sha256": digest} if digests else {}), **changed, **long}

    def _sources(self) -> list[Source]:
        if self.records:
            return [Source(f"{len(self.records)} record{'s' * (len(self.records) > 1)}", records=self.records)]
        return [] if self.is_demo else [parse_source(word) for word in self.words]


Data = str | Path | TrainingData | Iterable[str | Path | Mapping[str, Any]]
"""A file, a folder, the id of a data set, or `demo`; or several paths; or texts and records in memory."""


def training_data(data: Data, **others: Any) -> TrainingData:
    """What the data of a call names. In a list a string is a text, and a Path a file."""
    if isinstance(data, TrainingData):
        return data
    if isinstance(data, str | Path):
        return TrainingData((str(data),), **others)
    entries = list(data)
    if entries and all(isinstance(entry, Path) for entry in entries):
        return TrainingData(tuple(map(str, entries)), **others)
    if not entries or not all(isinstance(entry, str | Mapping) for entry in entries):
        raise CtxextError("A list of data holds texts and records (dicts), or Paths alone.")
    name = next((entry for entry in entries if isinstance(entry, str) and os.path.exists(entry)), None)  # noqa: PTH110
    if name is not None:
        raise CtxextError(
            f'"{name}" is a text in a list, and the name of a file.', hint=f'For the file write [Path("{name}")].'
        )
    records = ({"text": entry} if isinstance(entry, str) else cast("Mapping[str, Any]", entry) for entry in entries)
    return TrainingData(records=tuple(records), **others)
