"""A private copy of a family's modeling module, for methods to change. The installed module stays unchanged.

This file is copied into checkpoints. It does not depend on the methods.
"""

import contextlib
import functools
import importlib.util
import inspect
import sys
import types

import torch
import transformers
from transformers import AutoModel, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

PREFIX = "Ctxext"  # Begins the names of the classes in the stub.
MODERN = int(transformers.__version__.split(".")[0]) >= 5
conversion_mapping = importlib.import_module("transformers.conversion_mapping") if MODERN else None


# The names of a forward's cache, by family and version. A cache itself is found by its method.
CACHES = ("cache", "past_key_values", "past_key_value", "layer_past", "cache_params")


def cache_in(arguments):
    """Return the cache among the arguments of a forward, or None. An engine's cache may lack a length.

    Raises:
        ValueError: an argument with the name of a cache is not a cache.
    """
    cache = next((value for value in arguments.values() if hasattr(value, "get_seq_length")), None)
    for name in CACHES if cache is None else ():
        if (cache := arguments.get(name)) is not None:
            if not hasattr(cache, "update"):
                raise ValueError(f"{name} is a {type(cache).__name__}: pass a cache of transformers.")
            return cache
    return cache


def tokens_in(cache):
    """Return the number of tokens in a cache, as int or tensor.

    A cache counts the tokens of its first layer, which stores none if it has no attention (MiniMax).
    """
    seen = cache.get_seq_length()
    if torch.is_tensor(seen) or seen:
        return seen
    lengths = [layer.get_seq_length() for layer in getattr(cache, "layers", ()) if hasattr(layer, "get_seq_length")]
    return next((length for length in lengths if torch.is_tensor(length) or length), 0)


def private_copy(stub, modeling):
    """Return a copy of the module `modeling` for the checkpoint module named `stub`.

    Its name is that of a submodule of the stub. So pickle imports the stub, which creates the copy, before it looks up
    classes.
    """
    spec = importlib.util.find_spec(modeling)
    module = importlib.util.module_from_spec(spec)
    module.__name__ = f"{stub}.{modeling.rpartition('.')[2]}"  # Relative imports go by its specification.
    sys.modules[module.__name__] = module
    exec(spec.loader.get_code(modeling), vars(module))

    def from_config(config, **kwargs):  # Models within a model are private too.
        cls = getattr(module, str(MODEL_MAPPING_NAMES.get(config.model_type)), None)
        return AutoModel.from_config(config, **kwargs) if cls is None else cls._from_config(config, **kwargs)

    module.AutoModel = types.SimpleNamespace(from_config=from_config)
    for cls in classes_of(module):
        generic = next((base for base in cls.__mro__ if "__init__" in vars(base)), cls)
        if (
            generic.__module__ == "transformers.modeling_layers"
        ):  # Heads that build their body by AutoModel would build the installed one.
            init, names = generic.__init__, {"AutoModel": module.AutoModel}
            signature = (init.__name__, init.__defaults__, init.__closure__)
            cls.__init__ = types.FunctionType(init.__code__, {**init.__globals__, **names}, *signature)
        if issubclass(cls, PreTrainedModel):
            cls.is_custom_code = classmethod(lambda cls: False)  # Its weights are stored as the family's are.
        if PreTrainedModel in cls.__bases__:
            cls.__init_subclass__ = keep_newest_class(cls)
    return module


def keep_newest_class(base):
    """Return a hook that stores each new class in its module, because pickle looks it up there.

    transformers 4 replaces the stub's class by a subclass of the same name that can generate.
    """

    def __init_subclass__(cls, **kwargs):
        super(base, cls).__init_subclass__(**kwargs)
        vars(sys.modules[cls.__module__])[cls.__name__] = cls

    return classmethod(__init_subclass__)


def classes_of(module):
    """Return the classes that a private module defines."""
    return [cls for cls in vars(module).values() if inspect.isclass(cls) and cls.__module__ == module.__name__]


def is_model(cls):
    """Return whether a class is a complete model and defines `__init__`."""
    return issubclass(cls, PreTrainedModel) and "__init__" in vars(cls) and not cls.__name__.endswith("PreTrainedModel")


@contextlib.contextmanager
def true_values(config, settings):
    """Restore the values that config.json hides from unmodified classes, for the duration of the context."""
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
    """Register renamed weights for our classes: transformers 5 looks up some of them by the class name."""
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


def arguments_of(cls):
    """Return the names of the arguments of a class's forward."""
    return list(inspect.signature(cls.forward).parameters)[1:]


def check_arguments(cls, *names):
    """Refuse a class of models if its forward lacks a cache or one of these arguments.

    Raises:
        ValueError: an argument is missing; the message names it.
    """
    parameters = inspect.signature(cls.forward).parameters
    missing = [name for name in names if name not in parameters]
    if not any(name in CACHES or "Cache" in str(parameter.annotation) for name, parameter in parameters.items()):
        missing.append("cache")
    if missing:
        of = f"{cls.__name__}.forward of transformers {transformers.__version__}"
        raise ValueError(f"{of} takes no {missing[0]}, which the methods of this checkpoint need.")
