"""The settings of an evaluation: tasks, lengths, depths, samples."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

from ctxext.data.prose import read_haystack
from ctxext.data.records import check_place
from ctxext.data.texts import kinds_of_text
from ctxext.errors import CtxextError, suggest
from ctxext.files.content import sha256_of
from ctxext.files.length import read_words as read_length_words
from ctxext.options import (
    Rule,
    check_options,
    count_option,
    flag_of,
    is_set,
    option,
    original_length_option,
    seed_option,
    with_documented_options,
)
from ctxext.tasks.base import RetrievalTask
from ctxext.tasks.documents import read_questions
from ctxext.tasks.forms import REASONING
from ctxext.tasks.longppl import name_evaluator
from ctxext.tasks.published import PublishedTask, digest_of
from ctxext.tasks.registry import DEFAULTS, GROUPS, NAMES, RETRIEVAL_TASKS, TASKS, USERS, expand_groups
from ctxext.tasks.ruler_files import read_essays, read_hotpot, read_squad, read_words

_TASKS, _RUN = "Task options", "Execution"
_FEWEST_NEEDLES = 4
"""The other needles are distractors; with fewer, a task is too easy."""
_FILES: Mapping[str, tuple[str, Callable[[Path], Any]]] = {
    "haystack": ("text", read_haystack),
    "documents": ("questions", read_questions),
    "essays": ("essays", read_essays),
    "squad": ("squad", read_squad),
    "hotpot": ("hotpot", read_hotpot),
    "words": ("words", read_words),
}
"""Options with files, each with the name of its content in `RetrievalTask.with_options` and the function to read it."""

_FOLDERS = ("ruler2", "nolima", "babilong", "longbench_v2")
"""Options with published material."""


def _near_tasks(task: str) -> str:
    """Return a hint for an unknown task: the tasks of its group, a similar name, or all names."""
    group = task.partition("-")[0]
    if group in GROUPS:
        return f"Tasks of {group}: {', '.join(GROUPS[group])}."
    return suggest(task.lower(), (*TASKS, *GROUPS), f"Tasks: {', '.join(NAMES)}.")


def _find_unused_option(settings: "Settings") -> tuple[str, str] | None:
    """Return the flag of an option that no task uses, and a task that does."""
    unused = (name for name in USERS if is_set(settings, name) and not settings.uses(name))
    return next(((flag_of(type(settings), name), USERS[name]) for name in unused), None)


def _find_idle_form(settings: "Settings") -> str | None:
    """Return the flag of an option for prompts and answers if no selected task has any."""
    is_used = not settings.tasks or any(
        "causal" in RETRIEVAL_TASKS[t].kinds for t in settings.tasks if t in RETRIEVAL_TASKS
    )
    names = () if is_used else ("prompt", "reason", "no_think")
    return next((flag_of(type(settings), name) for name in names if is_set(settings, name)), None)


def _find_missing_folder(settings: "Settings") -> Path | None:
    folder = None if settings.key_tokens is None else settings.key_tokens.parent
    return None if folder is None or folder.is_dir() else folder


def find_length_above_target(options: Any) -> int | None:
    """Return the longest prompt length of options with a target length, if it is above the target."""
    longest = max(options.lengths, default=0)
    return longest if longest > options.target_length else None


@with_documented_options
@dataclass(frozen=True)
class Settings:
    """The settings of an evaluation.

    In Python, `depths` are shares from 0 to 1, and `reason` may be True. The default `tasks` depend on the model.
    """

    default_tasks: ClassVar[Mapping[str, tuple[str, ...]]] = DEFAULTS

    tasks: tuple[str, ...] = option(
        (),
        help=f"{', '.join(NAMES)}; separate several with commas. Default: needle,short; with --engine or --server "
        "needle; for encoders passages,short, without a head passages,topics.",
        flags=("--task", "-t"),
        kind="names",
        repeats=True,
    )
    lengths: tuple[int, ...] = option(
        (),
        help="Prompt lengths, for example 4k,32k. Default: the original and the current context length.",
        kind="lengths",
    )
    depths: tuple[float, ...] = option(
        (0.0, 0.25, 0.5, 0.75, 1.0),
        help="Number of depths, or a list of percentages: 0,50,100.",
        kind="depths",
        shown="5",
    )
    samples: int = count_option(10, help="Number of questions per length and depth, and of documents.")
    seed: int = seed_option()
    allow_beyond: bool = option(False, help="Also evaluate beyond a model's context length.")
    original_length: int | None = original_length_option()
    num_needles: int | None = count_option(
        None,
        help="needle, kv, documents: facts hidden in each text; one pass over it covers that many depths. Default: one "
        "for each depth, at least 4.",
        panel=_TASKS,
        flags=("--needles",),
    )
    kv_ids: str = option(
        "uuid",
        help="kv: uuid, as in the paper, or number.",
        panel=_TASKS,
        choices=("uuid", "number"),
        hint="Use --kv-ids uuid or --kv-ids number.",
    )
    filler: str = option(
        "prose",
        help="needle: prose, or same: only sentences like the needle.",
        panel=_TASKS,
        choices=("prose", "same"),
        hint="Use --filler prose or --filler same.",
    )
    repeat_question: bool = option(False, help="Put the question before the text too.", panel=_TASKS)
    haystack: Path | None = option(None, help="needle: text file to hide needles in.", panel=_TASKS)
    documents: Path | None = option(None, help="documents: file with questions, as JSON lines.", panel=_TASKS)
    essays: Path | None = option(
        None, help="ruler: the prose of niah, as text or JSON, such as PaulGrahamEssays.json.", panel=_TASKS
    )
    squad: Path | None = option(None, help="ruler: questions of ruler-qa-1, such as dev-v2.0.json.", panel=_TASKS)
    hotpot: Path | None = option(
        None, help="ruler: questions of ruler-qa-2, such as hotpot_dev_distractor_v1.json.", panel=_TASKS
    )
    words: Path | None = option(
        None, help="ruler, ruler2: words of niah and ruler-cwe, as lines or JSON.", panel=_TASKS
    )
    ruler2: Path | None = option(None, help="ruler2: folder with MMLU and HotpotQA.", panel=_TASKS)
    nolima: Path | None = option(None, help="nolima: folder with the authors' data set.", panel=_TASKS)
    babilong: Path | None = option(
        None, help="babilong: folder with the authors' data set and prompts.py.", panel=_TASKS
    )
    longbench_v2: Path | None = option(None, help="longbench-v2: the authors' data.json, or its folder.", panel=_TASKS)
    chain_of_thought: bool = option(
        False, help="longbench-v2: first let the model write its reasoning, up to 1024 tokens.", panel=_TASKS
    )
    data: str | None = option(
        None,
        help="perplexity, longppl, pseudo-perplexity, short: text, JSON lines or parquet file, or data set id. "
        "Separate several with commas (prose.txt,code.jsonl); perplexity reports each one.",
        panel=_TASKS,
    )
    stride: int | None = option(
        None, help="perplexity: stride of an additional sliding window.", panel=_TASKS, min=1, parser_checks=True
    )
    evaluator: str | None = option(
        None,
        help="longppl: long-context model that picks the key tokens.",
        panel=_TASKS,
    )
    key_tokens: Path | None = option(
        None,
        help="longppl: file for the key tokens, written by a run with --evaluator; later runs only need this file.",
        panel=_TASKS,
    )
    harness: tuple[str, ...] = option(
        (),
        help="Tasks of lm-evaluation-harness, for example longbench.",
        panel=_TASKS,
        kind="names",
    )
    prompt: str | None = option(
        None,
        help="base: the prompt begins the answer; chat: a user message alone, through the chat template. Default: "
        "chat for a model with a template if the task's authors use it, else base.",
        panel=_RUN,
        choices=("base", "chat"),
        hint="Use --prompt base or --prompt chat.",
    )
    reason: int | None = option(
        None,
        help=f"Let the model reason before its answer, up to this number of tokens in total, by default {REASONING:,}. "
        "Only the answer is scored.",
        kind="length",
        implied=str(REASONING),
        min=1,
        panel=_RUN,
        metavar="[TOKENS]",
    )
    no_think: bool = option(
        False,
        help="Switch thinking off, if the chat template has a switch. Default in chat: as the template.",
        panel=_RUN,
    )
    generate: bool = option(False, help="Generate every answer: slower, with the same results.", panel=_RUN)
    batch_size: int | None = count_option(
        None, help="Prompts per batch. Default: as many as fit into memory.", panel=_RUN
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            lambda settings: next(((task, _near_tasks(task)) for task in settings.tasks if task not in TASKS), None),
            'Unknown task "{found[0]}".',
            "{found[1]}",
        ),
        Rule(_find_unused_option, "No selected task uses {found[0]}.", "Add --task {found[1]}, or omit {found[0]}."),
        Rule(
            lambda settings: "longppl" in settings.tasks and not settings.has_evaluator,
            'The task "longppl" needs an evaluator.',
            "Add a long-context model: --evaluator MODEL, or --key-tokens FILE of an earlier run.",
        ),
        Rule(
            lambda settings: settings.no_think and settings.reason,
            "--no-think cannot be combined with --reason.",
            "Omit one of them.",
        ),
        Rule(
            lambda settings: settings.prompt == "base" and settings.reason,
            "--reason cannot be combined with --prompt base, in which the prompt begins the answer.",
            "Omit one of them.",
        ),
        Rule(
            _find_idle_form,
            "{found} has no effect on the selected tasks, in which the model generates nothing.",
            "Add a retrieval task, for example --task needle.",
        ),
        Rule(_find_missing_folder, 'There is no folder "{found}".', "Use another --key-tokens."),
        Rule(lambda settings: not settings.depths, "--depths is empty.", "Add at least one depth with --depths."),
        Rule(
            lambda settings: any(not 0 <= depth <= 1 for depth in settings.depths),
            "A depth is not between 0 and 100 %.",
            "For example: --depths 0,50,100.",
        ),
        Rule(
            lambda settings: settings.filler == "same" and settings.haystack,
            "--filler same cannot be combined with --haystack.",
            "Omit one of them.",
        ),
    )

    def __post_init__(self) -> None:
        read_length_words(self)
        depths: Any = self.depths
        if isinstance(depths, str):
            object.__setattr__(self, "depths", parse_depths(depths))
        if self.key_tokens is not None:
            object.__setattr__(self, "key_tokens", Path(self.key_tokens))
        object.__setattr__(self, "tasks", expand_groups(self.tasks))
        if self.reason is True:
            object.__setattr__(self, "reason", REASONING)
        check_options(self)
        for place in kinds_of_text(self.data).values():
            if place is not None:
                check_place(place)
        for entry in self.retrieval_tasks(read=False):
            if isinstance(entry, PublishedTask):
                entry.find_folder()

    @property
    def has_evaluator(self) -> bool:
        """Whether key tokens can be chosen, or were chosen by an earlier run."""
        return bool(self.evaluator) or (self.key_tokens is not None and self.key_tokens.exists())

    def uses(self, option: str) -> bool:
        """Return whether a task uses an option, or could while the tasks are unknown; all use those of no task."""
        tasks = self.tasks or chain.from_iterable(self.default_tasks.values())
        return option not in USERS or any(option in TASKS[task].options for task in tasks)

    def retrieval_tasks(self, *, read: bool = True) -> list[RetrievalTask]:
        """Return the retrieval tasks with their options, by default after reading the files."""
        options = {
            **{
                "num_needles": self.num_needles or max(_FEWEST_NEEDLES, len(self.depths)),
                "ids": self.kv_ids,
                "filler": self.filler,
            },
            **{name: getattr(self, name) for name in (*_FOLDERS, "chain_of_thought", "seed")},
            **{field: load(path) for name, (field, load) in _FILES.items() if read and (path := getattr(self, name))},
        }
        tasks = [RETRIEVAL_TASKS[name] for name in dict.fromkeys(self.tasks) if name in RETRIEVAL_TASKS]
        return [task.with_options(options) for task in tasks]

    def to_dict(self) -> dict[str, Any]:
        """Return the settings for report.json, with files by name and digest, without folders."""
        content = dataclasses.asdict(self)
        for name in ("data", *_FILES):
            value = content[name]
            if value is not None and Path(value).is_file():
                digest = sha256_of(Path(value))
                content[name] = {"name": Path(value).name, "sha256": digest}
        if len(kinds := kinds_of_text(self.data)) > 1:
            files = {name: Path(str(place)) for name, place in kinds.items()}
            digests = {name: sha256_of(file) if file.is_file() else None for name, file in files.items()}
            content["data"] = {"name": ",".join(file.name for file in files.values()), "sha256": digests}
        for name in _FOLDERS:
            if (folder := content[name]) is not None:
                content[name] = {"name": Path(folder).resolve().name, "sha256": digest_of(Path(folder))}
        if self.key_tokens is not None:
            content["key_tokens"] = self.key_tokens.name
        if self.evaluator:
            content["evaluator"] = name_evaluator(self.evaluator)
        return {key: list(value) if isinstance(value, tuple) else value for key, value in content.items()}


def even_depths(count: int) -> tuple[float, ...]:
    """Return evenly spaced depths from the beginning to the end; a single depth is the middle."""
    return (0.5,) if count == 1 else tuple(number / (count - 1) for number in range(count))


def parse_depths(text: str) -> tuple[float, ...]:
    """Parse depths, from a number of evenly spaced ones (`5`) or percentages (`0,50,100`)."""
    hint = "Use --depths 5 for five depths, or --depths 0,50,100 for percentages."
    parts = [part.strip() for part in text.split(",") if part.strip()]
    try:
        if len(parts) == 1 and "," not in text:
            count = int(parts[0])
            if not 1 <= count <= 101:
                raise CtxextError(f'"{text}" is not a number of depths from 1 to 101.', hint=hint)
            return even_depths(count)
        depths = sorted({float(part.removesuffix("%")) / 100 for part in parts})
    except ValueError as error:
        raise CtxextError(f'"{text}" is not a list of depths.', hint=hint) from error
    return tuple(depths)


def lengths_of(settings: Settings, known: Sequence[int | None]) -> tuple[int, ...]:
    """Return the prompt lengths of the settings, by default the known lengths of a model."""
    return tuple(sorted(set(settings.lengths))) or tuple(sorted({length for length in known if length}))
