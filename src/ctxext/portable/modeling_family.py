"""A private copy of a family's modeling module that calls the methods of a checkpoint.

This file is copied into checkpoints. The checkpoint's `modeling_ctxext.py` names the family and the methods; `family`
copies the family's module and adds the methods. Their settings are in config.json, in `ctxext_code`:

- `rope`: the model's schedule, which the sentinel rope type hides from classes that lack the methods
- `hidden`: other values hidden from such classes
- `steps`: one entry per method

Attention classes and the rest of the model are the family's. The installed module, which other models use, is not
changed.
"""

import copy
import functools
import inspect
import sys

import torch
import transformers

from .method import (
    CURRENT,
    UNCLEAR,
    Call,
    Frame,
    Given,
    Method,
    Part,
    Row,
    Tables,
    Turn,
    chain_hooks,
    layer_of,
    refuse_mask,
    text_positions,
)
from .private_copy import (
    MODERN,
    arguments_of,
    cache_in,
    check_arguments,
    classes_of,
    find_renamed_weights,
    is_model,
    private_copy,
    replace,
    tokens_in,
    true_values,
)

KEY = "ctxext_code"
SENTINEL = "ctxext: load this checkpoint with trust_remote_code=True"  # The rope type in config.json.
APPLY = ("apply_rotary_pos_emb", "apply_rotary_emb")  # The function that rotates, by family.


def parts_of(tables):
    """Return cos and sin from a rotary embedding's output, which is a pair or one complex tensor (Llama 4)."""
    return (tables.real, tables.imag) if torch.is_tensor(tables) else tables


def rotate_complex(query, key, cos, sin, unsqueeze_dim=1):
    """Rotate by complex numbers, with the usual arguments of a family: cos and sin have one column for each pair."""
    turn = torch.complex(cos.float(), sin.float()).unsqueeze(unsqueeze_dim)
    if not MODERN:  # The memory layout of the family's tensor, which affects the last bit of a product.
        turn = turn.transpose(1, -1).contiguous().transpose(1, -1)
    return tuple(
        torch.view_as_real(torch.view_as_complex(x.float().unflatten(-1, (-1, 2))) * turn).flatten(-2).type_as(x)
        for x in (query, key)
    )


def frame_of(rotary, layer_type, like):
    """Return the Frame of a rotary embedding, on the device of `like` and for tables of its dtype."""
    columns, prefix = rotary.ctxext_layouts[layer_type][0], f"{layer_type}_" if layer_type else ""
    inverse = getattr(rotary, f"{prefix}inv_freq").to(like.device).float()
    scaling = getattr(rotary, f"{prefix}attention_scaling", 1.0)
    if torch.compiler.is_compiling():
        return Frame(inverse, torch.tensor(columns, device=like.device), scaling, like.dtype)
    kept = vars(rotary).setdefault("ctxext_columns", {})  # The same tensor at every step.
    if (layer_type, like.device) not in kept:
        with torch.inference_mode(False):  # Gradients may be needed later.
            kept[layer_type, like.device] = torch.tensor(columns, device=like.device)
    return Frame(inverse, kept[layer_type, like.device], scaling, like.dtype)


def use_text_positions(rotary, args, kwargs):
    """Return the `Given` and arguments of a rotary embedding, with positions within texts if a method needs them."""
    known = getattr(CURRENT, "given", None)
    method = next((method for method in getattr(rotary, "ctxext_methods", ()) if method.counts_in_texts), None)
    if method is None or known is None or known.rows is None:
        return known, args, kwargs
    if known.rows is UNCLEAR:
        refuse_mask(method.name)
    positions = kwargs["position_ids"] if "position_ids" in kwargs else args[1]
    rows = known.rows.to(positions.device).expand(*positions.shape[:-2], *[-1] * 2)
    known = known._replace(rows=None)
    if "position_ids" in kwargs:
        return known, args, {**kwargs, "position_ids": rows}
    return known, (args[0], rows, *args[2:]), kwargs


def rotary_forward(original, rotary, *args, **kwargs):
    """Return the family's (cos, sin), with `Tables` instead of cos."""
    known, args, kwargs = use_text_positions(rotary, args, kwargs)
    original_tables = original(rotary, *args, **kwargs)
    cos, sin = parts_of(original_tables)
    given = dict(zip(("x", "position_ids"), args, strict=False)) | kwargs
    layer_type = next((value for value in (*args, *kwargs.values()) if isinstance(value, str)), None)
    if layer_type not in getattr(rotary, "ctxext_layouts", ()):
        return original_tables
    positions, methods = given["position_ids"], rotary.ctxext_methods
    rows = positions[0] if positions.ndim == 3 else positions
    if positions.ndim == 3:  # Several position axes (multimodal models): one per column.
        positions = positions[torch.tensor(rotary.ctxext_layouts[layer_type][1], device=cos.device)].movedim(0, -1)
    frame = frame_of(rotary, layer_type, original_tables if torch.is_tensor(original_tables) else cos)

    def innermost(frame, turn):
        if turn.to is positions:
            return cos, sin
        moved = {name: turn.to if value is positions else value for name, value in kwargs.items()}
        return parts_of(original(rotary, *(turn.to if value is positions else value for value in args), **moved))

    table = functools.partial(chain_hooks(methods, "tables", innermost), frame)
    sets = chain_hooks(methods, "positions", lambda sets: sets)([(positions, positions)])
    by_set = []
    for query, key in sets:  # If they share their positions, the keys' tables are None.
        by_set.append((table(Turn(query, None)), None if key is query else table(Turn(key, None))))
    is_complex, call = torch.is_tensor(original_tables), getattr(CURRENT, "call", None)
    memory = {"given": known}
    tables = Tables(original_tables if is_complex else cos, by_set, rows, frame, memory)
    if call is None or call.rotary is not rotary:
        return tables, None if is_complex else sin
    call.see_tables(tables)  # The rotary embedding of one attention.
    return (cos if call.is_plain else call), sin


def count_positions(mask, seen, length):
    """Return positions (b, l), counted from the first column that a mask of tokens (b, n) shows.

    They are None if that is column 0 in every row. Families count columns, so padding between tokens counts as tokens.
    """
    if not torch.compiler.is_compiling() and bool((mask[:, 0] != 0).all()):
        return None
    first = (mask != 0).long().argmax(-1, keepdim=True)
    return (torch.arange(length, device=mask.device) + seen - first).clamp(min=0)


def full_mask(mask):
    """Return the caller's mask of pairs (b, h, l, n) for layers with full attention, or None."""
    mask = mask.get("full_attention") if isinstance(mask, dict) else mask
    return mask if torch.is_tensor(mask) and mask.ndim == 4 else None


def model_forward(names, original, model, *args, **kwargs):
    """Call the family's model, and store the mask of tokens and the number of cached tokens for its layers.

    A model within a model (a text model within a multimodal one) may receive another form of the mask.
    """
    given = dict(zip(names, args, strict=False)) | kwargs
    inputs = next((given[name] for name in ("input_ids", "inputs_embeds") if given.get(name) is not None), None)
    if inputs is None or not model.ctxext_names:
        return original(model, *args, **kwargs)
    if torch.jit.is_tracing():
        names = " and ".join(model.ctxext_names)
        raise ValueError(f"torch.jit.trace cannot record {names}, which depends on positions: use torch.export.")
    outer, cache = getattr(CURRENT, "given", None), cache_in(given)
    mask, length = given.get("attention_mask"), inputs.shape[1]
    if not (torch.is_tensor(mask) and mask.ndim == 2):
        mask = None if outer is None else outer.mask
    # Continuous batching concatenates texts; methods that need their lengths refuse it.
    seen = 0 if cache is None or "read_index" in given else tokens_in(cache)
    seen = seen.clone() if torch.is_tensor(seen) else seen  # A static cache counts in place.
    rows, pairs = None, full_mask(given.get("attention_mask"))
    if given.get("position_ids") is None:
        if mask is not None:
            rows = count_positions(mask, seen, length)
        elif outer is not None:  # The outer model created the mask or has already read it.
            rows = outer.rows
        elif pairs is not None:
            rows = text_positions(pairs, seen, length)
    elif outer is not None and given["position_ids"].ndim == 2:
        rows = outer.rows  # The outer model numbers the columns if its caller passes no positions (Gemma 4).
    CURRENT.given = Given(mask, seen, rows)
    try:
        return original(model, *args, **kwargs)
    finally:
        CURRENT.given = outer


def holds_tables(value):
    """Return whether an argument of a decoder layer is (Tables, sin)."""
    return isinstance(value, tuple) and bool(value) and isinstance(value[0], Tables)


def layer_forward(names, original, layer, *args, **kwargs):
    """Call the family's decoder layer with a `Call`, or the `Row` that an earlier layer kept, instead of the tables."""
    part = getattr(layer, "ctxext_part", None)
    if part is None:
        return original(layer, *args, **kwargs)
    given = dict(zip(names, args, strict=False)) | kwargs
    held = [name for name, value in given.items() if holds_tables(value)]
    tables, number = given[held[0]] if held else None, layer_of(part, given)
    if tables is None and part.rotary is None:
        for method in part.attends(number):
            raise ValueError(f"{method.name}: layer {number} was called without its rotary tables.")
        return original(layer, *args, **kwargs)
    rows = tables[0].memory.get("rows") if tables else None
    call = None if rows else Call(part, getattr(layer, part.name), tables and tables[0], given)
    for name in held:
        value = given[name]
        first = rows.get(number, value[0].cos) if rows else value[0].cos if call.is_plain else call
        value = first if value[1] is None else (first, value[1])
        if name in kwargs:
            kwargs[name] = value
        else:
            place = names.index(name)
            args = (*args[:place], value, *args[place + 1 :])
    outer, CURRENT.call = getattr(CURRENT, "call", None), call
    try:
        return original(layer, *args, **kwargs)
    finally:
        CURRENT.call = outer


def apply(original, names, where, *args, **kwargs):
    """Rotate queries and keys as the family does, by the methods of this checkpoint; `where` is the index of cos."""
    call = args[where] if where < len(args) else kwargs[names[where]]
    if not isinstance(call, Call | Row):
        return original(*args, **kwargs)
    tensors = [*args[:where], *(kwargs[name] for name in names[len(args) : where])]  # Query and key, or only one.
    if isinstance(call, Row):
        rotated = call.rotate(tensors)
        return rotated[0] if len(tensors) == 1 else rotated
    given = dict(zip(names, args, strict=False)) | kwargs
    axis = given.get("unsqueeze_dim", 1 if names[where] == "cos" else 2)
    sets = []
    for for_query, for_key in call.tables.sets:
        rotated = call.rotate(tensors, for_query, axis)
        sets.append(rotated if for_key is None else [rotated[0], call.rotate(tensors, for_key, axis)[1]])
    if len(tensors) == 1:
        return sets[0][0]
    return chain_hooks(call.methods, "merge", lambda queries, keys: (queries[0], keys[0]))(*zip(*sets, strict=True))


class Attentions:
    """Attention functions of transformers for the private module: each wrapped by the methods of this checkpoint."""

    def __init__(self, original):
        self.original = original

    def __getitem__(self, name):
        return wrap_attention(self.original[name])

    def get_interface(self, name, default):
        """Return the function of this name, wrapped by the methods. The default, the private module's, is wrapped."""
        function = self.original.get_interface(name, default)
        return function if function is default else wrap_attention(function)


def wrap_attention(function):
    """Wrap an attention function by the methods of the layer that calls it."""

    @functools.wraps(function)
    def attend(module, query, key, value, *mask, **kwargs):
        mask = mask[0] if mask else kwargs.pop("attention_mask", None)  # Some families name it.
        inner, part = functools.partial(function, module), getattr(module, "ctxext_attends", None)
        if part is None or part.is_left_to_engine:  # The attention of an image model, or vLLM's.
            return inner(query, key, value, mask, **kwargs)
        call = getattr(CURRENT, "call", None)
        if call is None or call.part is not part:
            for method in part.methods if part.layer is None else part.attends(part.layer):
                raise ValueError(f"{method.name}: attention was called from outside its decoder layer.")
            return inner(query, key, value, mask, **kwargs)
        for method in part.attends(call.layer):
            inner = functools.partial(method.attend, inner, call)
        return inner(query, key, value, mask, **kwargs)

    return attend


def original_schedule(config):
    """Return the config with the original schedule, and the layer types from which it was hidden ([None]: all)."""
    settings, live = getattr(config, KEY, None), None if MODERN else getattr(config, "rope_scaling", None)
    live = (getattr(config, "rope_parameters", None) if live is None else live) or {}
    entries = live if any(isinstance(entry, dict) for entry in live.values()) else {None: live}
    hidden = [k for k, entry in entries.items() if isinstance(entry, dict) and SENTINEL in entry.values()]
    if settings and None in entries and settings.get("shown"):  # Its rope type is not hidden.
        hidden = [None]
    if settings is None or not hidden:
        return config, []
    rope = {**settings["rope"], **settings.get("held", {})}
    config, entries = copy.copy(config), {**entries, **{k: {**entries[k], **rope} for k in hidden}}
    if MODERN:
        config.rope_parameters = entries.get(None, entries)
    elif None in hidden:
        config.rope_scaling = entries[None]
        for name in {"rope_theta", "partial_rotary_factor"} & entries[None].keys():
            setattr(config, name, entries[None][name])
    return config, hidden


def schedule_of_4(config):
    """Return the schedule's keys for transformers 4, if transformers 5 saved the checkpoint without them."""
    schedules, live = getattr(config, "rope_parameters", None), getattr(config, "rope_scaling", None) or {}
    if MODERN or not isinstance(schedules, dict) or SENTINEL in live.values():
        return {}
    entries = [entry for entry in (schedules, *schedules.values()) if isinstance(entry, dict) and "rope_type" in entry]
    full = next((entry for entry in entries if entry["rope_type"] == SENTINEL), None)
    if full is None:
        return {}
    bases = {"rope_theta": full, "rope_local_base_freq": next((entry for entry in entries if entry is not full), {})}
    keys = {key: entry["rope_theta"] for key, entry in bases.items() if hasattr(config, key) and "rope_theta" in entry}
    return {**keys, "rope_scaling": dict(full)} if hasattr(config, "rope_scaling") else keys


def parameters_of(rotary):
    """Return the parameters of a rotary embedding's forward."""
    return inspect.signature(inspect.unwrap(rotary.forward)).parameters


def rotary_init(methods, original, rotary, config=None, *args, **kwargs):
    """Build the rotary embedding from the original schedule, and find which frequency each column rotates by."""
    module = sys.modules[original.__module__]
    takes_config = hasattr(config, "to_dict")
    text, layer_types = original_schedule(config if takes_config else getattr(module, "ctxext_config", None))
    first = text if takes_config else config  # In some families of transformers 4 the first argument is a size.
    rope_type = getattr(text, KEY)["rope"].get("rope_type", "default") if layer_types else None

    functions = getattr(module, "ROPE_INIT_FUNCTIONS", {})
    if not MODERN and rope_type in functions:  # Some families always look up one type (Nemotron, Llama 4).
        module.ROPE_INIT_FUNCTIONS = dict.fromkeys(functions, functions[rope_type])
    original(rotary, first, *args, **kwargs)
    if not layer_types:
        return
    name, takes = f"{type(rotary).__name__} of transformers {transformers.__version__}", parameters_of(type(rotary))
    if not (MODERN or rope_type == "default" or hasattr(rotary, "rope_type")):
        raise ValueError(f"{name} does not support a schedule.")
    if "position_ids" not in takes or (any(layer_types) and "layer_type" not in takes):
        missing = "position_ids" if "position_ids" not in takes else "layer_type"
        raise ValueError(f"{name} does not accept {missing}, which the methods of this checkpoint need.")
    rotary.ctxext_methods, rotary.ctxext_layouts = methods(getattr(text, KEY)), {}
    with torch.device("cpu"):  # The model may be on the meta device, and values are needed.
        original(probe := type(rotary).__new__(type(rotary)), first, *args, **kwargs)
        if not MODERN and rope_type in functions:
            module.ROPE_INIT_FUNCTIONS = functions
            rotary.rope_type = probe.rope_type = rope_type
        positions = torch.tensor([1.0, 0.7, 0.4])[: 3 if hasattr(probe, "mrope_section") else 1, None, None]
        for name in layer_types:
            prefix = f"{name}_" if name else ""
            given = (torch.zeros(1), positions if len(positions) == 3 else positions[0], *filter(None, [name]))
            _, sin = parts_of(probe(*given))
            inverse = getattr(probe, f"{prefix}inv_freq").float()
            sines = sin.flatten() / getattr(probe, f"{prefix}attention_scaling", 1.0)
            nearest = (sines[:, None] - (positions.view(-1, 1) * inverse).sin().flatten()).abs().argmin(-1)
            rotary.ctxext_layouts[name] = (nearest % len(inverse)).tolist(), (nearest // len(inverse)).tolist()


def model_init(module, methods, original, model, config, *args, **kwargs):
    """Build the family's model, then give each decoder layer its `Part`."""
    of_family = next(cls for cls in type(model).__mro__ if vars(module).get(cls.__name__) is cls)
    if not isinstance(config, of_family.config_class):  # A text model in a checkpoint with the whole's configuration.
        config = config.get_text_config(decoder=True)
    settings = getattr(config.get_text_config(), KEY, None)
    if settings:
        module.ctxext_config = config.get_text_config()
    text = config.get_text_config()
    with true_values(text, settings), true_values(text, {"hidden": settings and schedule_of_4(text)}):
        original(model, config, *args, **kwargs)
    shared = methods(settings) if settings else []  # By all layers, which then share plans by their maps.
    layers = []
    for layer in model.modules() if settings else ():
        # An attention applies rotary embeddings in its forward; its parent is a decoder layer.
        codes = ((n, getattr(inspect.unwrap(c.forward), "__code__", None)) for n, c in layer.named_children())
        name = next((n for n, code in codes if code and not {*APPLY}.isdisjoint(code.co_names)), None)
        if name is not None:
            give_part(layer, name, shared, module.ctxext_rotation)
            layers.append(layer)
    has_tables = any(hasattr(child, "ctxext_layouts") for child in model.modules())
    model.ctxext_names = tuple(method.name for method in shared if has_tables)
    if settings:
        check_parts(model, layers, has_tables)
    find_renamed_weights(model)


def prepare(layer_class):
    """Let the decoder layers of a class call the methods."""
    replace(layer_class, "forward", functools.partial(layer_forward, arguments_of(layer_class)))


def give_part(layer, name, methods, rotation):
    """Give a decoder layer its `Part`; `name` is that of its attention."""
    attention = getattr(layer, name)
    rotary = next((n for n, child in attention.named_children() if hasattr(child, "ctxext_layouts")), None)
    layer.ctxext_part = part = Part(methods, name, attention, rotation, rotary, type(layer))
    if any(type(method).attend is not Method.attend for method in methods):
        attention.ctxext_attends = part
    for method in methods:
        if part.layer is None or method.acts_on(part.layer):
            method.equip(attention)
    prepare(type(layer))
    names = arguments_of(type(layer))
    if "attention_mask" not in names or (part.layer is None and "layer_idx" not in names):
        missing = "attention_mask" if "attention_mask" not in names else "layer_idx"
        raise ValueError(f"{type(layer).__name__} of transformers {transformers.__version__} has no {missing}.")


def runs_at(layer):
    """Return the names of the arguments of a layer and of its attention. Some specify the depth of the layer."""
    return {*arguments_of(type(layer)), *arguments_of(type(getattr(layer, layer.ctxext_part.name)))}


def check_parts(model, layers, has_tables):
    """Refuse a model without the parts that the methods replace, or without an argument of its forward that they read.

    Raises:
        ValueError: something is missing; the message names it.
    """
    check_arguments(type(model), "attention_mask", "position_ids", "inputs_embeds")
    missing = [] if has_tables else ["rotary embedding"]
    if not layers:
        missing.append("decoder layer with rotary attention")
    elif not any({"layer_idx", "cycle_offset"} & runs_at(layer) for layer in layers):
        numbers = {layer.ctxext_part.layer for layer in layers}
        acting = {number for m in layers[0].ctxext_part.methods for number in m.settings.get("layers", ())}
        missing += [f"layer {number}" for number in sorted(acting - numbers)]
    if missing:
        of = f"{type(model).__name__} of transformers {transformers.__version__}"
        raise ValueError(f"{of} has no {missing[0]}, which the methods of this checkpoint need.")


def family(stub, modeling, methods):
    """Return a private copy of the family's modeling module for the checkpoint module named `stub`.

    `methods` are the classes of the steps, in any order; the `method` of a step is the `name` of its class.
    """
    module = private_copy(stub, modeling)
    applied = next((name for name in APPLY if hasattr(module, name)), None)
    function = getattr(module, applied) if applied else None
    names = list(inspect.signature(function).parameters) if applied else ()
    if inspect.isfunction(
        function
    ):  # Pickle finds it by its name: in some releases attentions have it as an attribute.
        function.__qualname__ = f"original_{applied}"
        setattr(module, function.__qualname__, function)
    if {"cos", "freqs_cis"}.isdisjoint(names):
        raise ValueError(f"{modeling} of transformers {transformers.__version__} has no known rotation of queries.")
    module.ctxext_rotation = (function, names.index("cos") == 2) if "cos" in names else (rotate_complex, True)
    module.ctxext_prepare = prepare
    where = names.index("cos" if "cos" in names else "freqs_cis")
    setattr(module, applied, functools.partial(apply, function, names, where))
    if any(
        method.attend is not Method.attend for method in methods
    ):  # Other methods do not depend on the attention function.
        if not hasattr(module, "ALL_ATTENTION_FUNCTIONS"):
            raise ValueError(
                f"{modeling} of transformers {transformers.__version__} does not use the attention interface."
            )
        module.ALL_ATTENTION_FUNCTIONS = Attentions(module.ALL_ATTENTION_FUNCTIONS)
        if hasattr(module, "eager_attention_forward"):
            module.eager_attention_forward = wrap_attention(module.eager_attention_forward)
    by_name = {method.name: method for method in methods}

    def build(settings):
        return [by_name[step["method"]](step) for step in settings["steps"]]

    for cls in classes_of(module):
        if cls.__name__.endswith("RotaryEmbedding") and "Vision" not in cls.__name__:
            replace(cls, "__init__", functools.partial(rotary_init, build))
            replace(cls, "forward", rotary_forward)
        elif is_model(cls):
            replace(cls, "__init__", functools.partial(model_init, module, build))
            replace(cls, "forward", functools.partial(model_forward, arguments_of(cls)))
    return module
