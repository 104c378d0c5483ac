"""Whether a function that a class calls may cut what it is given: read off its byte code, which is always there."""

from __future__ import annotations

import ast
import builtins
import dis
import functools
import inspect
import sys
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

from torch import Tensor, nn

# What makes parts of a tensor, or axes that can be unpacked.
_CUTTING = frozenset(
    {
        *(
            "chunk",
            "split",
            "unbind",
            "tensor_split",
            "split_with_sizes",
            "hsplit",
            "dsplit",
            "vsplit",
            "glu",
            "narrow",
        ),
        *("unsafe_chunk", "unsafe_split", "index_select", "gather", "view", "reshape", "unflatten"),
        *("rearrange", "unfold", "as_strided", "take_along_dim"),
    }
)
_SLICES = frozenset({"BUILD_SLICE", "BINARY_SLICE"})
_DEEP = 3  # functions that call functions


def may_cut(module: nn.Module, function: ast.expr) -> bool:
    """Whether what this expression means inside the module's class is a function that may cut its arguments.

    torch's own functions are known; one that cannot be found may do anything.

    >>> may_cut(nn.Linear(1, 1), ast.parse("torch.relu", mode="eval").body)
    False
    """
    if isinstance(function, ast.Call):  # made and called at once: nn.ReLU()(x)
        return may_cut(module, function.func)
    called = _meaning(module, function)
    if called is None:  # a method of a value; another name that is not known may mean anything
        if isinstance(function, ast.Attribute):
            if isinstance(function.value, ast.Name) and function.value.id == "self" and hasattr(module, function.attr):
                return False  # None: a part that is switched off is not called
            if hasattr(Tensor, function.attr):
                return function.attr in _CUTTING
            # `forward` of a module in a list or dict of modules is a call like any other.
            return not (function.attr == "forward" or hasattr(list, function.attr) or hasattr(dict, function.attr))
        return not (isinstance(function, ast.Name) and hasattr(builtins, function.id))
    return any(_cuts(code, _DEEP, space) for code, space in _codes(called))


def names_used(called: object, deep: int = _DEEP) -> set[str]:
    """The names that a function, or every method of a class, and what these call use; none of torch's own code.

    An operator that takes powers is called `pow`.

    >>> names_used(lambda x: x.relu())
    {'relu'}
    """
    found: set[str] = set()
    waiting = [(code, space, deep) for code, space in _codes(called)]
    seen: set[CodeType] = set()
    while waiting:
        code, space, level = waiting.pop()
        if code in seen:
            continue
        seen.add(code)
        found |= set(code.co_names) | ({"pow"} if _raises(code) else set())
        waiting += [(inner, space, level) for inner in code.co_consts if isinstance(inner, CodeType)]
        if level:
            named = (space[name] for name in code.co_names if name in space)
            waiting += [(inner, around, level - 1) for called in named for inner, around in _codes(called)]
    return found


def _meaning(module: nn.Module, function: ast.expr) -> object:
    if isinstance(function, ast.Attribute):
        if isinstance(function.value, ast.Name) and function.value.id == "self":
            return getattr(module, function.attr, None)
        holder = _meaning(module, function.value)
        return None if holder is None else getattr(holder, function.attr, None)
    if not isinstance(function, ast.Name):
        return None
    for cls in type(module).__mro__:  # a module that was made by exec is in no list of modules
        own = next((held.__globals__ for held in vars(cls).values() if isinstance(held, FunctionType)), {})
        for space in (own, vars(sys.modules.get(cls.__module__, builtins))):
            if function.id in space:
                return space[function.id]
    return getattr(sys.modules["torch"], function.id, None) if function.id == "torch" else sys.modules.get(function.id)


def _codes(called: object) -> Iterator[tuple[CodeType, dict[str, Any]]]:
    """The byte code of a function, of a partial one's function, of every method of a class; none of torch's own."""
    while isinstance(called, functools.partial):
        called = called.func
    called = inspect.unwrap(called) if callable(called) else called
    if isinstance(called, type):
        held = list(vars(called).values())
    else:
        held = [getattr(called, "__func__", called)]
    for function in held:
        if isinstance(function, FunctionType) and not (function.__module__ or "").startswith("torch."):
            yield function.__code__, function.__globals__


def _cuts(code: CodeType, deep: int, space: dict[str, Any]) -> bool:
    if not _CUTTING.isdisjoint(code.co_names) or _slices(code):
        return True
    if any(_cuts(inner, deep, space) for inner in code.co_consts if isinstance(inner, CodeType)):
        return True
    named = [space[name] for name in code.co_names if name in space] if deep else []
    return any(_cuts(inner, deep - 1, around) for called in named for inner, around in _codes(called))


@functools.lru_cache(maxsize=4096)
def _slices(code: CodeType) -> bool:
    return any(instruction.opname in _SLICES for instruction in dis.get_instructions(code))


@functools.lru_cache(maxsize=4096)
def _raises(code: CodeType) -> bool:
    return any(i.argrepr in ("**", "**=") for i in dis.get_instructions(code))
