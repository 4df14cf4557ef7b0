"""The data of `ctxext finetune`: from words on the command line to documents."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ctxext.errors import CtxextError
from ctxext.system.files import sha256_of

if TYPE_CHECKING:
    from ctxext.finetune.documents import DocumentReader
    from ctxext.finetune.options import TrainingOptions

DEMO = "demo"


@dataclass(frozen=True)
class DataChoice:
    """What the options say of the data.

    Attributes:
        words: What `--data` names, weights included.
        record_format: What records are.
        text_field: The field of a text.
        split: The split of a folder or data set; None for the one that is held out.
        skip_bad_rows: Whether bad records are counted instead of refused.
        long_share: Share of the tokens from long documents.
    """

    words: tuple[str, ...]
    record_format: str = "auto"
    text_field: str = "text"
    split: str | None = "train"
    skip_bad_rows: bool = False
    long_share: float | None = None

    @property
    def is_demo(self) -> bool:
        """Whether documents are generated."""
        return self.words == (DEMO,) and not Path(DEMO).exists()

    def reader(self, options: "TrainingOptions") -> "DocumentReader":
        """How the documents are read, once the tokenizer is there.

        Raises:
            CtxextError: an option is wrong, or a file is not there.
        """
        from ctxext.data.records import HELD_OUT, check_place
        from ctxext.demo.long_documents import long_documents
        from ctxext.finetune.documents import Documents, check_sources
        from ctxext.finetune.formats import FORMATS, RecordReader
        from ctxext.finetune.mixture import parse_source

        if not self.words:
            raise CtxextError("--data is missing.", hint="Name a file, or --data demo for made-up documents.")
        if self.record_format not in FORMATS:
            raise CtxextError(f'--format "{self.record_format}" is not known.', hint=f"Choose {', '.join(FORMATS)}.")
        if self.long_share is not None and not 0 < self.long_share <= 1:
            raise CtxextError(f'--long-share is a share from 0 to 1, not "{self.long_share}".')
        sources = [] if self.is_demo else [parse_source(word) for word in self.words]
        if any(source.data == DEMO and not source.is_local for source in sources):
            raise CtxextError(
                f"--data {DEMO} has no records to mix with other data.", hint="Train on one, then on the other."
            )
        if self.is_demo and options.epochs:
            raise CtxextError("--data demo has no end, so --epochs means nothing.", hint="Give --steps.")
        if any(not source.is_local for source in sources) and options.epochs:
            raise CtxextError("--epochs needs files: what is streamed is not read to its end.", hint="Give --steps.")
        if self.is_demo:
            return lambda tokenizer, wanted: long_documents(tokenizer, wanted, options.seed, options.learn)
        check_sources(sources, self.long_share)
        for source in sources:
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
        from ctxext.finetune.mixture import parse_source

        if self.is_demo:
            return {"name": DEMO}
        names, digests = [], []
        for source in map(parse_source, self.words):
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
