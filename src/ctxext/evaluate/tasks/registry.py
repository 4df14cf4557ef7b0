"""Every task by its name, in the order in which help and cards tell them."""

from ctxext.evaluate.tasks.base import RetrievalTask, Task
from ctxext.evaluate.tasks.documents import Documents
from ctxext.evaluate.tasks.kv import KeyValue
from ctxext.evaluate.tasks.needle import Needle
from ctxext.evaluate.tasks.passkey import PassKey
from ctxext.evaluate.tasks.perplexity import Perplexity
from ctxext.evaluate.tasks.short import Short

RETRIEVAL_TASKS: dict[str, type[RetrievalTask]] = {task.name: task for task in (PassKey, Needle, KeyValue, Documents)}
TASKS: dict[str, type[Task]] = {**RETRIEVAL_TASKS, Perplexity.name: Perplexity, Short.name: Short}
