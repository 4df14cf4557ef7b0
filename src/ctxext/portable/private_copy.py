"""A private copy of a family's modeling module, which methods may change: the installed one, which others use, stays.

This file travels inside checkpoints and knows no method.
"""

import contextlib
import functools
import importlib.util
import inspect
import sys
import types

import transformers
from transformers import AutoModel, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

PREFIX = "Ctxext"  # Of the classes in the stub.
MODERN = int(transformers.__version__.split(".")[0]) >= 5
conversion_mapping = importlib.import_module("transformers.conversion_mapping") if MODERN else None


def private_copy(stub, modeling):
    """Return a copy of the module `modeling` for the checkpoint module named `stub`."""
    name = f"{modeling}_for_{stub.replace('.', '_')}"
    spec = importlib.util.spec_from_file_location(name, importlib.util.find_spec(modeling).origin)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def from_config(config, **kwargs):  # Models within a model are private too.
        cls = getattr(module, str(MODEL_MAPPING_NAMES.get(config.model_type)), None)
        return AutoModel.from_config(config, **kwargs) if cls is None else cls._from_config(config, **kwargs)

    module.AutoModel = types.SimpleNamespace(from_config=from_config)
    for cls in classes_of(module):
        generic = next((base for base in cls.__mro__ if "__init__" in vars(base)), cls)
        if (
            generic.__module__ == "transformers.modeling_layers"
        ):  # Heads that build their body with AutoModel: with ours.
            init, names = generic.__init__, {"AutoModel": module.AutoModel}
            signature = (init.__name__, init.__defaults__, init.__closure__)
            cls.__init__ = types.FunctionType(init.__code__, {**init.__globals__, **names}, *signature)
        if issubclass(cls, PreTrainedModel):
            cls.is_custom_code = classmethod(lambda cls: False)  # Its weights are stored as the family's are.
    return module


def classes_of(module):
    """The classes that a private module defines."""
    return [cls for cls in vars(module).values() if inspect.isclass(cls) and cls.__module__ == module.__name__]


def is_model(cls):
    """Whether a class is a whole model that defines `__init__`."""
    return issubclass(cls, PreTrainedModel) and "__init__" in vars(cls) and not cls.__name__.endswith("PreTrainedModel")


@contextlib.contextmanager
def true_values(config, settings):
    """Give a configuration the values that config.json hides from stock classes; they are hidden again afterwards."""
    replaced = []
    for place, value in ((settings or {}).get("hidden") or {}).items():
        *path, name = place.split(".")
        holder = config
        for part in path:
            holder = holder[part] if isinstance(holder, dict) else getattr(holder, part)
        replaced.append((holder, name, holder[name] if isinstance(holder, dict) else getattr(holder, name)))
        put(holder, name, value)
    try:
        yield
    finally:
        for holder, name, value in reversed(replaced):
            put(holder, name, value)


def put(holder, name, value):
    """Set one value of a configuration, or of a dict within one."""
    if isinstance(holder, dict):
        holder[name] = value
    else:
        setattr(holder, name, value)


def find_renamed_weights(model):
    """Let transformers 5, which looks up some renamed weights by the class name, find those of our classes."""
    name = type(model).__name__
    if MODERN and (renamed := conversion_mapping.get_checkpoint_conversion_mapping(name.removeprefix(PREFIX))):
        conversion_mapping.register_checkpoint_conversion_mapping(name, renamed, overwrite=True)


def replace(cls, name, new):
    """Replace a method of a private class by `new(original, ...)`, once."""
    original = getattr(cls, name)
    if not hasattr(original, "ctxext"):
        method = functools.wraps(original)(lambda *args, **kwargs: new(original, *args, **kwargs))
        method.ctxext = True
        setattr(cls, name, method)
