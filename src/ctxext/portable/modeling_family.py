"""A private copy of a family's modeling module in which the methods of a checkpoint stand.

This file travels inside checkpoints and knows no method: a stub beside it names the family and the methods, and
`family` copies the family's module and puts them in. config.json holds their numbers in `ctxext_code`: `rope`, the
model's own schedule, which the sentinel rope type hides, `hidden`, other values that are hidden from stock classes, and
`steps`, one entry per method. Attention classes and all
else stay the family's own, and the installed module, which other models use, stays untouched.
"""

import copy
import functools
import inspect
import sys

import torch
import transformers

from .method import Call, Frame, Given, Method, Part, Tables, Turn, chained
from .private_copy import MODERN, classes_of, find_renamed_weights, is_model, private_copy, replace, true_values

KEY = "ctxext_code"
SENTINEL = "ctxext_needs_trust_remote_code"  # The rope type in config.json: without this file no model knows it.
APPLY = ("apply_rotary_pos_emb", "apply_rotary_emb")  # What families call the function that rotates.


def parts_of(found):
    """Cos and sin, as most families have them, or as the parts of one complex tensor (Llama 4)."""
    return (found.real, found.imag) if torch.is_tensor(found) else found


def turned(query, key, cos, sin, unsqueeze_dim=1):
    """A family's rotation by complex numbers, as all others rotate: cos and sin have one column for each pair."""
    turn = torch.complex(cos.float(), sin.float()).unsqueeze(unsqueeze_dim)
    if not MODERN:  # There the family's own lies so in memory, which changes the last bit of a product.
        turn = turn.transpose(1, -1).contiguous().transpose(1, -1)
    pairs = (torch.view_as_complex(one.float().unflatten(-1, (-1, 2))) for one in (query, key))
    return tuple(
        torch.view_as_real(pair * turn).flatten(-2).type_as(one) for pair, one in zip(pairs, (query, key), strict=True)
    )


def frame_of(rotary, layer_type, like):
    """What the angles of a rotary embedding are made of, on the device of `like` and for tables of its type."""
    columns, prefix = rotary.ctxext_layouts[layer_type][0], f"{layer_type}_" if layer_type else ""
    inverse = getattr(rotary, f"{prefix}inv_freq").to(like.device).float()
    scaling = getattr(rotary, f"{prefix}attention_scaling", 1.0)
    return Frame(inverse, torch.tensor(columns, device=like.device), scaling, like.dtype)


def rotary_forward(original, rotary, *args, **kwargs):
    """Return the family's (cos, sin), with what the methods need in the place of cos."""
    found = original(rotary, *args, **kwargs)
    cos, sin = parts_of(found)
    given = dict(zip(("x", "position_ids"), args, strict=False)) | kwargs
    layer_type = next((value for value in (*args, *kwargs.values()) if isinstance(value, str)), None)
    if layer_type not in getattr(rotary, "ctxext_layouts", ()):
        return found
    positions, methods = given["position_ids"], rotary.ctxext_methods
    rows = positions[0] if positions.ndim == 3 else positions
    if positions.ndim == 3:  # With several position axes (multimodal models) every column has its own.
        positions = positions[torch.tensor(rotary.ctxext_layouts[layer_type][1], device=cos.device)].movedim(0, -1)
    frame = frame_of(rotary, layer_type, found if torch.is_tensor(found) else cos)

    def innermost(frame, turn):
        if turn.to is positions:
            return cos, sin
        moved = {name: turn.to if one is positions else one for name, one in kwargs.items()}
        return parts_of(original(rotary, *(turn.to if one is positions else one for one in args), **moved))

    table = functools.partial(chained(methods, "tables", innermost), frame)
    sets = chained(methods, "positions", lambda sets: sets)([(positions, positions)])
    made = []
    for query, key in sets:  # Mostly they share their positions; the keys' tables are then None.
        made.append((table(Turn(query, None)), None if key is query else table(Turn(key, None))))
    is_complex, call = torch.is_tensor(found), getattr(rotary, "ctxext_call", None)
    tables = Tables(found if is_complex else cos, made, rows, frame, {"given": getattr(rotary, "ctxext_given", None)})
    if call is None:
        return tables, None if is_complex else sin
    call.see_tables(tables)  # The rotary embedding of one attention.
    return (cos if call.is_plain else call), sin


def counted(mask, seen, length):
    """Positions of rows (b, l), counted from the first column that a mask of tokens (b, n) shows, or None if that is 0.

    What a family rotates by counts from the first column, so that padding between tokens counts as tokens do.
    """
    if not torch.compiler.is_compiling() and bool((mask[:, 0] != 0).all()):
        return None
    first = (mask != 0).long().argmax(-1, keepdim=True)
    return (torch.arange(length, device=mask.device) + seen - first).clamp(min=0)


def model_forward(names, original, model, *args, **kwargs):
    """Call the family's model, and let its layers know what only it is told: the mask of tokens and the cache.

    Models within a model (a text model within a multimodal one) may get another form of the mask.
    """
    given = dict(zip(names, args, strict=False)) | kwargs
    inputs = next((given[name] for name in ("input_ids", "inputs_embeds") if given.get(name) is not None), None)
    if inputs is None or not model.ctxext_rotaries:
        return original(model, *args, **kwargs)
    outer, cache = getattr(model.ctxext_rotaries[0], "ctxext_given", None), given.get("past_key_values")
    mask, length = given.get("attention_mask"), inputs.shape[1]
    if not (torch.is_tensor(mask) and mask.ndim == 2):
        mask = None if outer is None else outer.mask
    seen = cache.get_seq_length() if hasattr(cache, "get_seq_length") else 0
    seen = seen.clone() if torch.is_tensor(seen) else seen  # A static cache counts in place.
    rows = counted(mask, seen, length) if mask is not None and given.get("position_ids") is None else None
    for rotary in model.ctxext_rotaries:
        rotary.ctxext_given = Given(mask, seen, rows)
    try:
        return original(model, *args, **kwargs)
    finally:
        for rotary in model.ctxext_rotaries:
            rotary.ctxext_given = outer


def layer_forward(original, layer, *args, **kwargs):
    """Call the family's decoder layer with what its methods need in the place of the tables."""
    part = getattr(layer, "ctxext_part", None)
    found = [one for one in (*args, *kwargs.values()) if isinstance(one, tuple) and one and isinstance(one[0], Tables)]
    if part is None or not (found or part.rotary):
        return original(layer, *args, **kwargs)
    call = Call(part, found[0][0] if found else None, kwargs)

    def own(value):
        if isinstance(value, tuple) and value and isinstance(value[0], Tables):
            first = value[0].cos if call.is_plain else call
            return first if value[1] is None else (first, value[1])
        return value

    for one in (part.attention, part.rotary):
        if one is not None:
            one.ctxext_call = call
    result = original(layer, *(own(value) for value in args), **{name: own(value) for name, value in kwargs.items()})
    for one in (part.attention, part.rotary):
        if one is not None:
            one.ctxext_call = None
    return result


def apply(original, names, *args, **kwargs):
    """Rotate queries and keys as the family does, inside the methods of this checkpoint."""
    given = dict(zip(names, args, strict=False)) | kwargs
    where = names.index("cos") if "cos" in names else names.index("freqs_cis")
    call, axis = given[names[where]], given.get("unsqueeze_dim", 1 if "cos" in names else 2)
    if not isinstance(call, Call):
        return original(*args, **kwargs)
    tensors = [given[name] for name in names[:where]]  # Query and key, or one of them.
    sets = []
    for for_query, for_key in call.tables.sets:
        rotated = call.rotate(tensors, for_query, axis)
        sets.append(rotated if for_key is None else [rotated[0], call.rotate(tensors, for_key, axis)[1]])
    if len(tensors) == 1:
        return sets[0][0]
    return chained(call.methods, "merge", lambda queries, keys: (queries[0], keys[0]))(*zip(*sets, strict=True))


class Attentions:
    """The private module's view of transformers' attention functions: each inside the methods of this checkpoint."""

    def __init__(self, original):
        self.original = original

    def __getitem__(self, name):
        return attending(self.original[name])

    def get_interface(self, name, default):
        """The function of this name inside the methods; the default is the private module's own, and already is."""
        found = self.original.get_interface(name, default)
        return found if found is default else attending(found)


def attending(function):
    """An attention function inside the methods of the layer that calls it."""

    @functools.wraps(function)
    def attend(module, query, key, value, *mask, **kwargs):
        mask = mask[0] if mask else kwargs.pop("attention_mask", None)  # Some families name it.
        call = getattr(module, "ctxext_call", None)
        inner = functools.partial(function, module)
        if call is not None and not call.is_left_to_engine:
            for method in call.methods:
                if type(method).attend is not Method.attend and method.acts_on(call.layer):
                    inner = functools.partial(method.attend, inner, call)
        return inner(query, key, value, mask, **kwargs)

    return attend


def own_schedule(config):
    """Return the config with the model's own rope schedule, and the layer types it was hidden for ([None]: all)."""
    settings, live = getattr(config, KEY, None), None if MODERN else getattr(config, "rope_scaling", None)
    live = (getattr(config, "rope_parameters", None) if live is None else live) or {}
    entries = live if any(isinstance(entry, dict) for entry in live.values()) else {None: live}
    hidden = [k for k, entry in entries.items() if isinstance(entry, dict) and SENTINEL in entry.values()]
    if settings and None in entries and settings.get("shown"):  # Its rope type may not be hidden.
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
    """The keys in which transformers 4 reads the schedule, where transformers 5 saved the checkpoint without them."""
    schedules, live = getattr(config, "rope_parameters", None), getattr(config, "rope_scaling", None) or {}
    if MODERN or not isinstance(schedules, dict) or SENTINEL in live.values():
        return {}
    entries = [entry for entry in (schedules, *schedules.values()) if isinstance(entry, dict) and "rope_type" in entry]
    full = next((entry for entry in entries if entry["rope_type"] == SENTINEL), None)
    if full is None:
        return {}
    bases = {"rope_theta": full, "rope_local_base_freq": next((entry for entry in entries if entry is not full), {})}
    found = {key: entry["rope_theta"] for key, entry in bases.items() if hasattr(config, key) and "rope_theta" in entry}
    return {**found, "rope_scaling": dict(full)} if hasattr(config, "rope_scaling") else found


def asked(rotary):
    """The names of what a rotary embedding is asked by."""
    return inspect.signature(inspect.unwrap(rotary.forward)).parameters


def rotary_init(methods, original, rotary, config=None, *args, **kwargs):
    """Build the rotary embedding from the model's own schedule, and find which frequency each column rotates by."""
    module = sys.modules[original.__module__]
    takes_config = hasattr(config, "to_dict")
    own, layer_types = own_schedule(config if takes_config else getattr(module, "ctxext_config", None))
    first = own if takes_config else config  # In some families of transformers 4 it is a size.
    rope_type = getattr(own, KEY)["rope"].get("rope_type", "default") if layer_types else None

    functions = getattr(module, "ROPE_INIT_FUNCTIONS", {})
    if not MODERN and rope_type in functions:  # Some families look up one type, whatever is asked (Nemotron, Llama 4).
        module.ROPE_INIT_FUNCTIONS = dict.fromkeys(functions, functions[rope_type])
    original(rotary, first, *args, **kwargs)
    if not layer_types:
        return
    name, takes = f"{type(rotary).__name__} of transformers {transformers.__version__}", asked(type(rotary))
    if not (MODERN or rope_type == "default" or hasattr(rotary, "rope_type")):
        raise ValueError(f"{name} takes no schedule.")
    if "position_ids" not in takes or (any(layer_types) and "layer_type" not in takes):
        raise ValueError(f"{name} cannot be asked for positions and layers, which the methods need.")
    rotary.ctxext_methods, rotary.ctxext_layouts = methods(getattr(own, KEY)), {}
    with torch.device("cpu"):  # The model itself may be on the meta device, and this needs values.
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
            found = (sines[:, None] - (positions.view(-1, 1) * inverse).sin().flatten()).abs().argmin(-1)
            rotary.ctxext_layouts[name] = (found % len(inverse)).tolist(), (found // len(inverse)).tolist()


def model_init(methods, rotation, original, model, config, *args, **kwargs):
    """Build the family's model, then tell each decoder layer what it needs to know."""
    if not isinstance(config, model.config_class):  # A text model in a checkpoint with the whole model's configuration.
        config = config.get_text_config(decoder=True)
    settings = getattr(config.get_text_config(), KEY, None)
    module = sys.modules[original.__module__]
    if settings:
        module.ctxext_config = config.get_text_config()
    text = config.get_text_config()
    with true_values(text, settings), true_values(text, {"hidden": settings and schedule_of_4(text)}):
        original(model, config, *args, **kwargs)
    for layer in model.modules() if settings else ():
        # An attention is what applies rotary embeddings in its own forward; its parent is a decoder layer.
        codes = ((child, getattr(inspect.unwrap(child.forward), "__code__", None)) for child in layer.children())
        attention = next((c for c, code in codes if code and not {*APPLY}.isdisjoint(code.co_names)), None)
        if attention is not None:
            own = next((child for child in attention.children() if hasattr(child, "ctxext_layouts")), None)
            layer.ctxext_part = part = Part(methods(settings), attention, rotation, own)
            for method in part.methods:
                if part.layer is None or method.acts_on(part.layer):
                    method.equip(attention)
            replace(type(layer), "forward", layer_forward)
    for name in ("ctxext_layouts", "ctxext_part") if settings else ():
        if not any(hasattr(module, name) for module in model.modules()):
            raise ValueError(f"{type(model).__name__} does not have the parts that the methods replace.")
    # In a tuple, as they have their places in the model already.
    model.ctxext_rotaries = tuple(module for module in model.modules() if hasattr(module, "ctxext_layouts"))
    find_renamed_weights(model)


def family(stub, modeling, methods):
    """Return a private copy of the family's modeling module for the checkpoint module named `stub`.

    `methods` are the classes behind the steps, in any order; a step names its class.
    """
    module = private_copy(stub, modeling)
    applied = next(name for name in APPLY if hasattr(module, name))
    function = getattr(module, applied)
    names = list(inspect.signature(function).parameters)
    rotation = (function, names.index("cos") == 2) if "cos" in names else (turned, True)
    setattr(module, applied, functools.partial(apply, function, names))
    if any(method.attend is not Method.attend for method in methods):  # Others leave the attention to any engine.
        if not hasattr(module, "ALL_ATTENTION_FUNCTIONS"):
            raise ValueError(f"{modeling} of transformers {transformers.__version__} has an attention of its own.")
        module.ALL_ATTENTION_FUNCTIONS = Attentions(module.ALL_ATTENTION_FUNCTIONS)
        if hasattr(module, "eager_attention_forward"):
            module.eager_attention_forward = attending(module.eager_attention_forward)
    by_name = {method.name: method for method in methods}

    def made(settings):
        return [by_name[step["method"]](step) for step in settings["steps"]]

    for cls in classes_of(module):
        if cls.__name__.endswith("RotaryEmbedding"):
            replace(cls, "__init__", functools.partial(rotary_init, made))
            replace(cls, "forward", rotary_forward)
        elif is_model(cls):
            replace(cls, "__init__", functools.partial(model_init, made, rotation))
            names = list(inspect.signature(cls.forward).parameters)[1:]
            replace(cls, "forward", functools.partial(model_forward, names))
    return module
