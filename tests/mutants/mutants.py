"""The mutants of a module's source: each is the source with one small fault.

What is never mutated: annotations, decorators, texts, `__all__`, `assert`, lines with `# pragma: no cover`, code under
`if TYPE_CHECKING`, and calls that only tell a person something (`log.info`, `print`).
"""

from __future__ import annotations

import ast
import copy
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.Continue: ast.Break,
    ast.Break: ast.Continue,
}
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}
TOLD = {"debug", "info", "warning", "exception", "error", "print", "log"}


@dataclass(frozen=True)
class Mutant:
    """`change` takes the place of the node number `place` of `ast.walk`; `what` says it."""

    line: int
    what: str
    place: int
    change: ast.AST
    last_line: int
    text: str  # of the line
    nth: int = 1  # of those of the same line with the same `what`

    def __str__(self) -> str:
        return f"line {self.line}: {self.what}"

    def of(self, source: str) -> str:
        """The module's source with the fault."""
        tree = ast.parse(source)
        old = next(node for i, node in enumerate(ast.walk(tree)) if i == self.place)
        return ast.unparse(ast.fix_missing_locations(_Exchange(old, self.change).visit(tree)))


class _Exchange(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self._old, self._new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        return self._new if node is self._old else self.generic_visit(node)


def mutants_of(source: str) -> list[Mutant]:
    """All mutants of a module's source, in the order of its lines."""
    tree, lines = ast.parse(source), source.splitlines()
    places = {node: i for i, node in enumerate(ast.walk(tree))}
    found = [
        Mutant(line, what, places[node], change, getattr(node, "end_lineno", line), lines[line - 1].strip())
        for node in _open_nodes(tree)
        if "pragma: no cover" not in lines[(line := getattr(node, "lineno", 1)) - 1]
        for what, change in _changes(node)
    ]
    seen = Counter[tuple[int, str]]()
    numbered = []
    for one in sorted(found, key=lambda one: one.line):
        seen[one.line, one.what] += 1
        numbered.append(replace(one, nth=seen[one.line, one.what]))
    return numbered


Change = ast.AST  # the node that takes a node's place


def _changes(node: ast.AST) -> Iterator[tuple[str, Change]]:  # noqa: C901 - a table
    match node:
        case ast.Compare(ops=ops):
            for i, op in enumerate(ops):
                if new := SWAPS.get(type(op)):
                    yield _told(node, _with(node, ops=[*ops[:i], new(), *ops[i + 1 :]]))
        case ast.BoolOp(op=op) | ast.BinOp(op=op) | ast.AugAssign(op=op):
            if new := SWAPS.get(type(op)):
                yield _told(node, _with(node, op=new()))
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield _told(node, operand)
        case ast.Constant(value=bool(value)):
            yield _told(node, ast.Constant(not value))
        case ast.Constant(value=int(value) | float(value)):
            yield _told(node, ast.Constant(value + 1))
        case ast.Call():
            yield from _changed_calls(node)
        case ast.Raise() | ast.Continue() | ast.Break() | ast.Expr(value=ast.Call()):
            yield f"without `{_short(node)}`", ast.Pass()
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
            yield f"`{_short(node)}` returns None", ast.Return(ast.Constant(None))


def _changed_calls(node: ast.Call) -> Iterator[tuple[str, Change]]:
    if isinstance(node.func, ast.Name) and (name := NAMES.get(node.func.id)):
        yield _told(node, _with(node, func=ast.Name(name, ast.Load())))
        return
    plain = not any(isinstance(arg, ast.Starred) for arg in node.args)
    if plain and len(node.args) == 2 and ast.dump(node.args[0]) != ast.dump(node.args[1]):
        yield _told(node, _with(node, args=node.args[::-1]))


def _with(node: ast.AST, **fields: object) -> ast.AST:
    new = copy.copy(node)
    for name, value in fields.items():
        setattr(new, name, value)
    return new


def _told(old: ast.AST, new: ast.AST) -> tuple[str, Change]:
    return f"`{_short(old)}` -> `{_short(new)}`", new


def _short(node: ast.AST) -> str:
    text = " ".join(ast.unparse(ast.fix_missing_locations(copy.deepcopy(node))).split())
    return text if len(text) <= 80 else text[:77] + "..."


def _open_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes in which a fault changes what the module does."""
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not _is_closed(child):
                yield child
                yield from _open_nodes(child)


def _is_closed(node: ast.AST) -> bool:
    if isinstance(node, (ast.Assert, ast.Import, ast.ImportFrom, ast.JoinedStr)):
        return True
    if isinstance(node, ast.If):
        return "TYPE_CHECKING" in ast.unparse(node.test)
    if isinstance(node, ast.Assign):
        return any(isinstance(target, ast.Name) and target.id == "__all__" for target in node.targets)
    if isinstance(node, ast.Expr):
        call = node.value
        if isinstance(call, ast.Constant):
            return True
        if isinstance(call, ast.Call):
            func = call.func
            return (func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "")) in TOLD
    return False
