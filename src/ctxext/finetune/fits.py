"""Which options do not go with which models, each with why."""

from collections.abc import Callable

from ctxext.errors import CtxextError
from ctxext.finetune.base import Base
from ctxext.finetune.options import TrainingOptions

_Refusal = tuple[Callable[[Base], bool], Callable[[TrainingOptions], bool], str, str]


def _has_table(base: Base) -> bool:
    return bool(base.model.encoding.learned_tensors)


_REFUSED: tuple[_Refusal, ...] = (
    (
        lambda base: base.model.family.positions != "rotary",
        lambda options: options.keep_short,
        "--keep-short is for rotary models: the source of any other is not in the checkpoint.",
        "--short-share trains on short sequences.",
    ),
    (
        _has_table,
        lambda options: options.pack == "restart",
        "--pack restart would train the first rows of the table of positions alone.",
        "Join documents with --pack run-on.",
    ),
    (
        lambda base: base.is_masked,
        lambda options: options.attention == "shifted",
        "--attention shifted is for models that see nothing but what came before.",
        "Leave it out.",
    ),
    (
        lambda base: base.is_masked,
        lambda options: options.context_parallel > 1,
        "--context-parallel is for models that see nothing but what came before.",
        "Leave it out.",
    ),
)


def check_fits(base: Base, options: TrainingOptions) -> None:
    """Refuse options that the model has no use for.

    Raises:
        CtxextError: there is one.
    """
    for is_such, is_asked, message, hint in _REFUSED:
        if is_such(base) and is_asked(options):
            raise CtxextError(message, hint=hint)
