"""Every task by its name, in the order of help and model cards."""

from ctxext.evaluate.tasks.association import Association
from ctxext.evaluate.tasks.base import RetrievalTask, Task
from ctxext.evaluate.tasks.documents import Documents
from ctxext.evaluate.tasks.kv import KeyValue
from ctxext.evaluate.tasks.needle import Needle
from ctxext.evaluate.tasks.needle_lists import NeedleLines, NeedleQuestions, NeedleValues
from ctxext.evaluate.tasks.passages import Passages
from ctxext.evaluate.tasks.passkey import PassKey
from ctxext.evaluate.tasks.perplexity import Perplexity
from ctxext.evaluate.tasks.pseudo_perplexity import PseudoPerplexity
from ctxext.evaluate.tasks.short import Short
from ctxext.evaluate.tasks.variables import Variables
from ctxext.evaluate.tasks.word_counts import CodedWords, CommonWords

_RETRIEVAL = (
    *(PassKey, Needle, KeyValue, Documents),
    *(NeedleLines, NeedleValues, NeedleQuestions, Variables, CommonWords, CodedWords, Association, Passages),
)
RETRIEVAL_TASKS: dict[str, type[RetrievalTask]] = {task.name: task for task in _RETRIEVAL}
TASKS: dict[str, type[Task]] = {
    **RETRIEVAL_TASKS,
    **{task.name: task for task in (Perplexity, PseudoPerplexity, Short)},
}
DEFAULTS: dict[str, tuple[str, ...]] = {
    "causal": (Needle.name, Short.name),
    "masked": (Passages.name, Short.name),
    "encoder": (Passages.name,),
}
"""The default tasks of each kind of model."""
