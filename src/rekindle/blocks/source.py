"""What a class's own source does with the outputs of its submodules, read without running it.

`uses_of(module)` reads the methods of the module's class (the syntax tree, once per class) and follows each
submodule's output through them: is it cut into parts, does another submodule read it, is it added to what it was
computed from, does it become scores, does it leave the class? torch.fx stops at shapes that are computed, and a
method without a caller (`get_value`, `get_action`) is in no trace at all; the source shows both.

Paths are attribute names below the module; `*` stands for the elements of a ModuleList or Sequential.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import re
from collections.abc import Hashable, Iterator, Sequence
from functools import lru_cache

from torch import nn
from torch.nn.parameter import is_lazy

from rekindle.blocks.statements import Reader, TooLong
from rekindle.blocks.values import Uses


def uses_of(module: nn.Module) -> Uses | None:
    """What the class of this module does with its submodules' outputs; None if its source cannot be read.

    >>> uses_of(nn.Linear(1, 1)) is None  # torch's own classes are known without reading
    True
    """
    content = _content(module)
    if content not in _CACHE:
        if len(_CACHE) >= _LARGEST_CACHE:
            _CACHE.clear()
        _CACHE[content] = _read(module)
    return _CACHE[content]


def unread_above(modules: Sequence[nn.Module]) -> str | None:
    """The first of these classes whose `forward` cannot be read, None if all can; torch's own are known.

    >>> unread_above([nn.Sequential(nn.Linear(1, 1))])
    """
    for module in modules[:-1]:
        kind = type(module)
        package = kind.__module__.partition(".")[0]
        if package == "torch":
            continue
        if kind.forward is nn.Module.forward:  # called by parts, in methods of other names or from outside
            if any(node is None for _, node in _definitions(kind)):
                return kind.__name__
            continue
        if any(vars(cls).get("forward") is kind.forward for cls in kind.__mro__ if cls.__module__.startswith("torch.")):
            continue  # a subclass of Sequential with nothing of its own
        if uses_of(module) is None:
            return kind.__name__
    return None


def changes_weight(layer: nn.Module) -> bool:
    """Whether the `forward` of this subclass of Linear or a convolution does not simply use `self.weight`.

    >>> exec("class Twice(nn.Linear):\\n    def forward(self, x): return x @ (2 * self.weight).T")
    >>> changes_weight(Twice(1, 1))  # the source of what was typed in cannot be read
    True
    """
    definitions = _methods(type(layer)).get("forward")
    if not definitions:
        return True
    definition = definitions[0]
    plain, uses = 0, 0
    for node in ast.walk(definition):
        uses += isinstance(node, ast.Attribute) and node.attr == "weight" and ast.unparse(node.value) == "self"
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            given = [*node.args[1:2], *(k.value for k in node.keywords if k.arg == "weight")]
            plain += bool(_WEIGHTED.search(name)) and any(map(_is_weight, given))
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
            plain += ast.unparse(node.right) in ("self.weight.T", "self.weight.t()", "self.weight.mT")
    inherits = any(ast.unparse(n.func) == "super().forward" for n in ast.walk(definition) if isinstance(n, ast.Call))
    return not (uses == plain and (plain or inherits))


def _is_weight(node: ast.expr) -> bool:
    """`self.weight`, also in another dtype."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("to", "type_as"):
        node = node.func.value
    return ast.unparse(node) == "self.weight"


_WEIGHTED = re.compile(r"linear|conv")
_CACHE: dict[Hashable, Uses | None] = {}
_LARGEST_CACHE = 4096  # classes made in a loop must not fill the memory


def _content(module: nn.Module) -> Hashable:
    """All that a reader asks of a module: classes, names and axes of what is inside, at every depth.

    Two instances of one class may differ in it: `nn.Sequential(nn.Linear(8, 3)) if deep else nn.Sequential()`.
    """
    parameters = tuple(
        (name, parameter is not None and (is_lazy(parameter) or parameter.dim() > 1))
        for name, parameter in module._parameters.items()
    )
    children = tuple((name, None if child is None else _content(child)) for name, child in module._modules.items())
    return type(module), parameters, children


def _read(module: nn.Module) -> Uses | None:
    kind = type(module)
    if kind.__module__.startswith("torch.nn.") or kind.__module__.startswith("torch.ao."):
        return None
    methods = _methods(kind)
    if not methods:
        return None
    reader = Reader(module, methods)
    try:
        reader.run()
    except (RecursionError, TooLong):
        return None
    return reader.finish()


def _methods(kind: type) -> dict[str, list[ast.FunctionDef]]:
    """Every method of a class with its definitions, nearest first, torch's own left out."""
    found: dict[str, list[ast.FunctionDef]] = {}
    for name, node in _definitions(kind):
        if node is not None:
            found.setdefault(name, []).append(node)
    return found


def _definitions(kind: type) -> Iterator[tuple[str, ast.FunctionDef | None]]:
    """(name, definition) of the methods, None where it cannot be read."""
    for cls in kind.__mro__:
        # The base classes of transformers hold thousands of lines about loading and generation.
        package, _, rest = cls.__module__.partition(".")
        if package in ("torch", "builtins") or (package == "transformers" and not rest.startswith("models.")):
            continue
        for name, value in vars(cls).items():
            function = inspect.unwrap(value.__func__ if isinstance(value, staticmethod | classmethod) else value)
            code = getattr(function, "__code__", None)
            if code is None or name == "__init__":
                continue
            if not (name.startswith("__") and code.co_filename == "<string>"):  # such as a dataclass makes
                yield name, _functions(code.co_filename).get((code.co_name, code.co_firstlineno))


@lru_cache(maxsize=256)
def _functions(filename: str) -> dict[tuple[str, int], ast.FunctionDef]:
    try:
        tree = ast.parse("".join(linecache.getlines(filename)))
    except (SyntaxError, ValueError):
        return {}
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            found[node.name, first] = node
    return found
