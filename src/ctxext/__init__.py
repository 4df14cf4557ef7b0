"""ctxext: extend the context window of a language model.

>>> from ctxext.api import Recipe
>>> from ctxext.methods import Yarn
>>> Recipe(Yarn(factor=4)).summary()
'yarn ×4'

`ctxext.api` contains the functions, their options and the types of their results; `ctxext.methods` contains the methods
by class name.
"""

from typing import TYPE_CHECKING, Any

from ctxext.version import __version__ as __version__

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        from ctxext.api import __all__ as public

        message = f"module {__name__!r} has no attribute {name!r}"
        if name in public:
            message += f". Use `from ctxext.api import {name}`"
        raise AttributeError(message)
