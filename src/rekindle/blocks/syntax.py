"""What single nodes of a syntax tree say: a number, a name with unknown parts, the arguments of a call."""

from __future__ import annotations

import ast
import re


def argument_names(node: ast.Call) -> list[str]:
    """The arguments of a call, by position or name."""
    return [*map(str, range(len(node.args))), *(k.arg or "**" for k in node.keywords)]


def is_outputs(node: ast.expr) -> bool:
    """Whether an expression is what a model calls its outputs, a tuple, or a slice of it."""
    while isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice):
        node = node.value
    return isinstance(node, ast.Name) and node.id.endswith("outputs")


def leaves_out(node: ast.expr) -> bool:
    """Whether an index is a slice that leaves something out, or a list or tensor of places."""
    if isinstance(node, ast.Slice):
        return any(end is not None for end in (node.lower, node.upper, node.step))
    return not isinstance(node, ast.Constant) and integer(node) is None


def is_window(index: ast.expr) -> bool:
    """Whether an index is a slice that moves: `i * n : (i + 1) * n`.

    >>> [is_window(ast.parse(text, mode="eval").body.slice) for text in ("y[:, i : i + 8]", "y[:, :n]")]
    [True, False]
    """
    parts = index.elts if isinstance(index, ast.Tuple) else [index]
    lows = [p.lower for p in parts if isinstance(p, ast.Slice) and p.lower is not None and p.upper is not None]
    return any(isinstance(node, ast.Name) for low in lows for node in ast.walk(low))


def glob_of(node: ast.expr) -> str:
    """The name that an expression spells, with `*` for what is not known before it runs.

    >>> texts = ("f'head_{i}'", "'conv%d' % i", "'fc' + str(n)", "name")
    >>> [glob_of(ast.parse(text, mode="eval").body) for text in texts]
    ['head_*', 'conv*', 'fc*', '*']
    """
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(glob_of(part) for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return glob_of(node.left) + glob_of(node.right)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
        return re.sub(r"%[ds]", "*", glob_of(node.left))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "format":
        return re.sub(r"\{[^}]*\}", "*", glob_of(node.func.value))
    return "*"


def integer(node: ast.expr) -> int | None:
    """The integer that an expression is, None if it is not an integer or not known before it runs."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = integer(node.operand)
        return None if value is None else -value
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, int) else None
