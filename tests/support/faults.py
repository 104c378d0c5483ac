"""Errors at any line of the package while a call runs, and what then differs from before, found by comparing values."""

from __future__ import annotations

import ast
import copy
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

import rekindle
from rekindle.isolation import WATCHERS
from rekindle.projection import transaction
from rekindle.projection.method import MethodError
from rekindle.projection.receipt import Receipt

PACKAGE = str(Path(rekindle.__file__).parent)


class Fault(Exception):
    """The injected error."""


def lines(call: Callable[[], Any]) -> int:
    """How many lines of the package the call runs."""
    return _traced(call, None, Fault)[0]


def interrupted(call: Callable[[], Any], at: int, kind: type[BaseException] = Fault) -> BaseException | None:
    """What the call raises when `kind` is raised at its line number `at`; None if it ends before."""
    return _traced(call, at, kind)[1]


def _traced(call: Callable[[], Any], at: int | None, kind: type[BaseException]) -> tuple[int, BaseException | None]:
    count = 0
    entered: set[tuple[int, int]] = set()

    def line(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        place = frame.f_code.co_filename, frame.f_lineno
        # Leaving a `with` block is a line too, and an error there would skip the exit: Python does not raise there.
        left = (id(frame), frame.f_lineno) in entered
        if event == "line" and place[1] in _withs(place[0]):
            entered.add((id(frame), frame.f_lineno))
        if event == "line" and not left and place[1] not in _silent(place[0]):
            count += 1
            if count == at:
                raise kind(f"at {Path(frame.f_code.co_filename).name}:{frame.f_lineno}")
        return line

    def enter(frame: FrameType, event: str, _: Any) -> Any:
        name = frame.f_code.co_filename
        return line if name.startswith(PACKAGE) else None

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        call()
    except BaseException as error:
        sys.settrace(before)
        if at is None:
            raise
        return count, error
    finally:
        sys.settrace(before)
    return count, None


@cache
def _withs(file: str) -> frozenset[int]:
    return frozenset(
        line
        for node in _nodes(file)
        if isinstance(node, ast.With)
        for item in node.items
        for line in range(node.lineno, (item.context_expr.end_lineno or node.lineno) + 1)
    )


@cache
def _silent(file: str) -> frozenset[int]:
    """Lines on which nothing is called, so that nothing can be raised: `try:` and a bare `return`."""
    nodes = _nodes(file)
    return frozenset(n.lineno for n in nodes if isinstance(n, ast.Try) or (isinstance(n, ast.Return) and not n.value))


@cache
def _nodes(file: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(Path(file).read_text("utf-8"))))


class Before:
    """A copy of everything that a method may touch.

    mirrors: networks that follow the model. others: what else may change, by the name that a receipt gives it.
    """

    def __init__(
        self,
        model: nn.Module,
        *optimizers: torch.optim.Optimizer,
        mirrors: Sequence[nn.Module] = (),
        others: Callable[[], dict[str, Any]] = dict,
    ) -> None:
        self.model, self.optimizers, self.mirrors, self._others = model, optimizers, mirrors, others
        self._held = self._everything()
        self._around = self._surroundings()

    def differences(self) -> set[str]:
        """Names of parameters, buffers and slots whose value differs now."""
        now, old = self._everything(), self._held
        return {name for name in old.keys() | now.keys() if not _equal(old.get(name), now.get(name))}

    def _everything(self) -> dict[str, Any]:
        held = {**_tensors(self.model), **copy.deepcopy(self._others())}
        for number, mirror in enumerate(self.mirrors):
            held |= {f"mirror {number}: {name}": value for name, value in _tensors(mirror).items()}
        for optimizer in self.optimizers:
            held |= _slots(self.model, optimizer)
        return held

    def surroundings_differ(self, written: set[str]) -> list[str]:
        """What else differs: modes, gradients of parameters that were not written, random states, hooks, flags."""
        now = self._surroundings()
        wrong = [name for name, value in self._around.items() if not _equal(value, now.get(name))]
        return [name for name in wrong if name.removeprefix("gradient of ") not in written]

    def _surroundings(self) -> dict[str, Any]:
        held: dict[str, Any] = {"random": torch.get_rng_state(), "python": random.getstate()}
        # Of a call that has ended nothing may be taken for what is around a later one.
        held |= {"transaction": transaction._INNERMOST.get(), "watchers": len(WATCHERS.get())}
        held["global hooks"] = global_hooks()
        for name, module in self.model.named_modules():
            hooks = [module._forward_hooks, module._forward_pre_hooks, module._backward_hooks]
            held[f"mode of {name}"] = module.training
            held[f"hooks of {name}"] = [len(each) for each in hooks]
        for name, parameter in self.model.named_parameters():
            held[f"gradient of {name}"] = None if parameter.grad is None else parameter.grad.clone()
            held[f"trained {name}"] = parameter.requires_grad
        held["optimizer hooks"] = [len(each._optimizer_step_post_hooks) for each in self.optimizers]
        return held


def global_hooks() -> dict[str, int]:
    """How many hooks each of torch's tables for all modules holds, and the depth of its stack of dispatch modes."""
    tables = {name: len(held) for name, held in vars(nn.modules.module).items() if name.startswith("_global_") and held}
    return tables | {"modes": torch._C._len_torch_dispatch_stack()}


def judged(error: BaseException | None, before: Before, *, whole: bool) -> str | None:
    """What is wrong with how a call ended; None if all is well. `whole`: everything must be as it was."""
    if error is None:
        return None
    written = before.differences()
    if whole:
        if written:
            return f"not put back: {sorted(written)[:4]}"
    elif isinstance(error, MethodError):
        said = {name for name in error.receipt.differs if not name.endswith(": gradient")}
        if written - said:
            return f"not named: {sorted(written - said)[:4]}"
        equal = {name for name in said - written if not name.startswith("mirror ")}
        if equal:
            return f"named, and they do not differ: {sorted(equal)[:4]}"
        if not said and "everything was put back" not in str(error):
            return "a MethodError that names nothing"
    elif written:
        return f"{type(error).__name__} without a receipt, and {sorted(written)[:4]} differ"
    around = before.surroundings_differ(written if not whole else set())
    return f"left behind: {around[:4]}" if around else None


def positions(total: int, count: int, seed: int) -> Iterator[int]:
    """Line numbers to fail at: spread over the call, at random within each part."""
    chosen = random.Random(seed)
    count = min(count, total)
    for part in range(count):
        yield chosen.randint(part * total // count + 1, max(part * total // count + 1, (part + 1) * total // count))


def _tensors(model: nn.Module) -> dict[str, Any]:
    named = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    return {name: tensor.detach().clone() for name, tensor in named.items()}


def _slots(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    held = {}
    for owner, state in optimizer.state.items():
        for slot, value in state.items():
            held[f"{names.get(id(owner), 'parameter')}: {slot}"] = copy.deepcopy(value)
    for number, group in enumerate(optimizer.param_groups):
        held |= {f"group {number}: {key}": value for key, value in group.items() if key != "params"}
    return held


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())
    return type(a) is type(b) and bool(a == b)


__all__ = ["Before", "Fault", "Receipt", "interrupted", "judged", "lines", "positions"]
