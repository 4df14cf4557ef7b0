"""All tasks by name, in the order of help and model cards."""

from collections.abc import Iterable

from ctxext.tasks.babilong import BABILONG
from ctxext.tasks.base import RetrievalTask, Task
from ctxext.tasks.documents import Documents
from ctxext.tasks.graphwalks import GraphWalks
from ctxext.tasks.kv import KeyValue
from ctxext.tasks.longbench2 import LongBench2
from ctxext.tasks.longppl import LongPerplexity
from ctxext.tasks.mrcr import MRCR, MRCR_FLAT
from ctxext.tasks.needle import Association, Needle, PassKey
from ctxext.tasks.nolima import NOLIMA
from ctxext.tasks.passages import TOPICS_IN_CHUNKS, Passages, Topics
from ctxext.tasks.perplexity import Perplexity, PseudoPerplexity, Short
from ctxext.tasks.ruler import RULER
from ctxext.tasks.ruler2 import RULER2

_RETRIEVAL: tuple[RetrievalTask, ...] = (
    *(PassKey(), Needle(), KeyValue(), Documents(), Association(), Passages()),
    *(Topics(), *TOPICS_IN_CHUNKS, GraphWalks(), *MRCR, *MRCR_FLAT, *RULER, *RULER2, *NOLIMA, *BABILONG),
    LongBench2(),
)
RETRIEVAL_TASKS: dict[str, RetrievalTask] = {task.name: task for task in _RETRIEVAL}
TASKS: dict[str, Task] = {
    **RETRIEVAL_TASKS,
    **{task.name: task for task in (Perplexity(), LongPerplexity(), PseudoPerplexity(), Short())},
}
GROUPS: dict[str, tuple[str, ...]] = {
    "mrcr": tuple(task.name for task in MRCR),
    "mrcr-flat": tuple(task.name for task in MRCR_FLAT),
    "ruler": tuple(task.name for task in RULER),
    "ruler2": tuple(task.name for task in RULER2),
    "babilong": tuple(task.name for task in BABILONG[:5]),
    "babilong-all": tuple(task.name for task in BABILONG),
}
"""Names of groups of tasks."""
DEFAULTS: dict[str, tuple[str, ...]] = {
    "causal": (Needle.name, Short.name),
    "masked": (Passages.name, Short.name),
    "encoder": (Passages.name, Topics.name),
}
"""The default tasks of each kind of model."""
NAMES = tuple(dict.fromkeys(next((group for group in GROUPS if task in GROUPS[group]), task) for task in TASKS))
"""Task names in help texts, with groups instead of their tasks."""

USERS = {
    option: name for name in reversed(NAMES) for task in GROUPS.get(name, (name,)) for option in TASKS[task].options
}
"""All task options, with the first task or group that uses each."""


def expand_groups(names: Iterable[str]) -> tuple[str, ...]:
    """Replace groups by their tasks."""
    return tuple(task for name in names for task in GROUPS.get(name, (name,)))
