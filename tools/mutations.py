"""What a mutant is: one change in one file of the package, and what is not worth changing."""

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass

_SWAPS: dict[type, type] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Add,
    ast.Pow: ast.Mult,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
_CALLS = {"min": "max", "max": "min", "any": "all", "all": "any", "floor": "ceil", "ceil": "floor"}
_BOUNDS = frozenset({"ge", "gt", "le", "lt", "min_length", "max_length", "pattern"})
"""Limits of a schema. One that is far away is left out; to move it by one would change nothing for anybody."""

_FAR = 1000
_DECLARED = frozenset({"help", "search"})
_UNSEEN = frozenset({"repr", "use_cache", "use_reentrant", "preserve_rng_state", "include_url", "exist_ok"})
"""Keywords that change what is shown of an object, how much is kept in memory, or how errors are told."""

_LOOKS = frozenset(
    {
        *("alpha", "dpi", "figsize", "fontsize", "frameon", "has_legend", "linewidth", "markersize", "xytext"),
        *("highlight", "no_wrap", "padding", "show_default", "show_header", "soft_wrap", "wspace"),
    }
)
"""Keywords of pictures, tables and help: how something looks, and not what it says."""

_PROGRESS = frozenset({"progress", "advance", "disable_progress_bars"})


@dataclass(frozen=True)
class Mutant:
    """One change in one file of the package.

    Attributes:
        path: The file, relative to the package.
        line: Where it begins.
        function: The function it is in; empty where it is carried out on import.
        before: What stood there.
        after: What stands there now.
        text: The whole file, changed.
    """

    path: str
    line: int
    function: str
    before: str
    after: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.before!r} -> {self.after!r}"


def changes(node: ast.AST) -> Iterator[ast.AST]:
    """What may stand in a node's place."""
    new = copy.deepcopy(node)
    match new:
        case ast.Compare():
            for number, operator in enumerate(new.ops):
                if type(operator) in _SWAPS:
                    other = copy.deepcopy(new)
                    other.ops[number] = _SWAPS[type(operator)]()
                    yield other
        case ast.BinOp() | ast.BoolOp() if type(new.op) in _SWAPS and not _is_text(new):
            new.op = _SWAPS[type(new.op)]()
            yield new
        case ast.AugAssign() if type(new.op) in _SWAPS:
            new.op = _SWAPS[type(new.op)]()
            yield new
        case ast.UnaryOp(op=ast.Not() | ast.USub()):
            yield new.operand
        case ast.Constant(value=bool()):
            yield ast.Constant(not new.value)
        case ast.Constant(value=int() | float()):
            yield ast.Constant(new.value + 1)
        case ast.Call(func=ast.Name(id="Field"), keywords=keywords):
            for keyword in keywords:
                if keyword.arg in _BOUNDS:
                    yield ast.Call(new.func, new.args, [other for other in keywords if other is not keyword])
        case ast.Call(func=ast.Name(id=name)) if name in _CALLS:
            new.func = ast.Name(_CALLS[name])
            yield new
        case ast.Call(func=ast.Attribute(attr=name)) if name in _CALLS:
            new.func.attr = _CALLS[name]
            yield new
        case ast.IfExp():
            new.test = ast.UnaryOp(ast.Not(), new.test)
            yield new
        case ast.Raise() | ast.Expr(value=ast.Call()):
            yield ast.Pass()
        case ast.Continue():
            yield ast.Break()
        case ast.Break():
            yield ast.Continue()


def _is_text(node: ast.AST) -> bool:
    """Whether a sum is one of texts, which no other operator takes."""
    return any(
        isinstance(part, ast.JoinedStr) or (isinstance(part, ast.Constant) and isinstance(part.value, str))
        for part in (node, getattr(node, "left", node), getattr(node, "right", node))
    )


def _is_left(child: ast.AST, parent: ast.AST) -> bool:
    """Whether a node is not to be changed, nor what is in it."""
    match child:
        case ast.JoinedStr() | ast.arg() | ast.Assert():
            return True
        case ast.IfExp(body=body, orelse=other) if ast.JoinedStr in (type(body), type(other)):
            return True  # A choice between texts is a text.
        case ast.If(test=ast.Name(id="TYPE_CHECKING")) | ast.Raise(exc=ast.Name(id="NotImplementedError")):
            return True
        case ast.Call(func=ast.Name(id="CtxextError" | "TypeVar" | "cast")):
            return True
        case ast.Expr(value=ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name))) if name in _PROGRESS:
            return True
        case ast.keyword(arg=name) if name in _DECLARED | _UNSEEN | _LOOKS:
            return True
        case ast.keyword(arg="strict") if isinstance(parent, ast.Call) and ast.unparse(parent.func) == "zip":
            return True
        case ast.keyword(arg=name, value=ast.Constant(value=value)) if name in _BOUNDS:
            return not isinstance(value, int | float) or value >= _FAR
        case ast.keyword(arg=name, value=ast.BinOp()) if name in _BOUNDS:
            return True
    return child in getattr(parent, "decorator_list", ()) or child in (
        getattr(parent, "annotation", None),
        getattr(parent, "returns", None),
    )


def places(tree: ast.AST, inside: str = "", defined: str = "") -> Iterator[tuple[ast.AST, str, str]]:
    """Every node that runs, with the outermost function it is in and the definition or constant that it belongs to."""
    for child in ast.iter_child_nodes(tree):
        if _is_left(child, tree):
            continue
        function, name = inside, defined
        if isinstance(child, ast.FunctionDef):
            function, name = inside or child.name, (inside and defined) or child.name
        elif isinstance(tree, ast.Module) and isinstance(child, ast.Assign | ast.AnnAssign | ast.ClassDef):
            target = child.targets[0] if isinstance(child, ast.Assign) else getattr(child, "target", None)
            name = child.name if isinstance(child, ast.ClassDef) else ast.unparse(target)
        yield child, function, name
        if isinstance(child, ast.If):  # Its test is a place of its own: the whole statement is too long to show.
            test = ast.copy_location(ast.IfExp(child.test, ast.Constant(True), ast.Constant(False)), child.test)
            yield test, function, name
        yield from places(child, function, name)


def mutants_of(path: str, source: str, left: frozenset[str] = frozenset()) -> Iterator[Mutant]:
    """Every mutant of a file of the package.

    Args:
        path: The file, relative to the package.
        source: Its content.
        left: Functions and constants to leave alone, by name.
    """
    content, starts = source.encode(), [0]
    for line in content.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for node, function, name in places(ast.parse(source)):
        if not hasattr(node, "end_col_offset") or name in left:
            continue
        begin = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        before = content[begin:end].decode()
        for new in changes(node):
            after = ast.unparse(ast.fix_missing_locations(new))
            if isinstance(node, ast.expr):
                after = f"({after})"
            text = (content[:begin] + after.encode() + content[end:]).decode()
            yield Mutant(path, node.lineno, function, before, after, text)
