"""Where the next step of a plain loop begins: at a forward pass that is trained on, known by its place in the code.

A rollout or an evaluation may run with gradients too. What is known of a pass before it runs is the place in the code
that makes it, so the places whose outputs got a backward pass are learned in the first updates.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

Place = tuple[tuple[str, str, int], ...]  # file, function and line of each frame
_INSIDE = {__file__, nn.modules.module.__file__}  # hooks and calls, equal for every pass


class Passes:
    """Calls `begin` before a forward pass of training, while it waits for one.

    >>> layer, begun = nn.Linear(1, 1), []
    >>> passes = Passes(layer, lambda: begun.append(1))
    >>> def loop(steps):
    ...     for _ in range(steps):
    ...         layer(torch.ones(1)).sum().backward()
    ...         passes.called(0)
    >>> passes.listen()
    >>> loop(2)
    >>> passes.wait()
    >>> _ = layer(torch.ones(1))  # an evaluation
    >>> begun
    []
    >>> loop(1)
    >>> begun
    [1]
    """

    def __init__(self, model: nn.Module, begin: Callable[[], object]) -> None:
        self._model, self._begin = model, begin
        self._places: set[Place] = set()  # of training
        self._loop: tuple[str, str] | None = None  # the function that calls `remedy.step()`
        self._waiting: bool | None = None  # for a pass in this mode of the model
        self._outer: tuple[nn.Module, Place] | None = None  # the pass that runs
        self._removes: list[Callable[[], object]] = []

    def called(self, frames: int) -> None:
        """`remedy.step()` was called, so many frames above: the loop is there."""
        code = sys._getframe(frames + 1).f_code
        self._loop = code.co_filename, code.co_name
        self._places = {self._up_to_loop(place) for place in self._places}

    def listen(self) -> None:
        """See the passes from now on, and learn which are of training."""
        if self._removes:
            return
        compiled = hasattr(self._model, "_orig_mod")  # hooks inside of it would be compiled too
        for module in (self._model,) if compiled else self._model.modules():
            self._removes.append(module.register_forward_pre_hook(_Hook(self.enter), prepend=True).remove)
            self._removes.append(module.register_forward_hook(_Hook(self.leave), always_call=True).remove)
        for module in self._model.modules():
            if module._compiled_call_impl is not None:  # `module.compile()`: its hooks are not called
                self._removes.append(self._surround(module, module._compiled_call_impl))
        _watch_compiled()
        _LISTENERS.add(self)
        self._removes.append(lambda: _LISTENERS.discard(self))

    def wait(self) -> None:
        """The next pass of training in the mode that the model has now begins a step."""
        self.listen()
        self._waiting = self._model.training

    def stop(self) -> None:
        """Remove the hooks."""
        self._waiting = self._outer = None
        for remove in self._removes:
            remove()
        self._removes.clear()

    def enter(self, module: nn.Module, *_: object) -> None:
        """A module is called: a pass begins, or goes on inside of it."""
        if self._outer is not None or not torch.is_grad_enabled():
            return
        place = self._place()
        waiting = self._waiting is not None and module.training == self._waiting
        unknown = self._loop is None and not self._places  # the first pass of a run that was resumed
        if waiting and (unknown or place in self._places):
            self._waiting = None
            self._begin()
        self._outer = module, place

    def leave(self, module: nn.Module, args: object, output: object) -> None:
        """A module was called: a backward pass through what it gave makes the place of the pass one of training."""
        if self._outer is None or not torch.is_grad_enabled():  # without gradients it is a recording inside of the pass
            return
        outer, place = self._outer
        if module is outer:
            self._outer = None
        if place not in self._places:  # of inner modules too: a policy may return a sample, without gradients
            for tensor in pytree.tree_leaves(output):
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    learn = lambda _: self._places.add(self._up_to_loop(place))  # noqa: E731
                    tensor.register_hook(learn)  # type: ignore[no-untyped-call]

    def around(self, module: nn.Module, call: Callable[..., Any], *args: object, **more: object) -> object:
        """A call of compiled code, which calls no hooks."""
        self.enter(module)
        output = None
        try:
            output = call(*args, **more)
        finally:
            self.leave(module, args, output)
        return output

    def sees(self, module: nn.Module) -> bool:
        """Whether a module is a part of the model."""
        return any(module is part for part in self._model.modules())

    def _surround(self, module: nn.Module, compiled: Any) -> Callable[[], None]:
        def call(*args: object, **more: object) -> object:
            if torch.compiler.is_compiling():
                return compiled(*args, **more)
            return self.around(module, compiled, *args, **more)

        def remove() -> None:
            module._compiled_call_impl = compiled

        module._compiled_call_impl = call
        return remove

    def _place(self) -> Place:
        frame: Any = sys._getframe(2)
        lines = []
        while frame is not None:
            code = frame.f_code
            if code.co_filename not in _INSIDE:
                lines.append((code.co_filename, code.co_name, frame.f_lineno))
            frame = frame.f_back
        return self._up_to_loop(tuple(lines))

    def _up_to_loop(self, place: Place) -> Place:
        """Without the callers of the loop, which may be several."""
        loops = [number for number, (file, name, _) in enumerate(place) if (file, name) == self._loop]
        return place[: loops[0] + 1] if loops else place


class _Hook:
    """A hook of a module. A copy of the model, or a file of it, gets one that does nothing."""

    def __init__(self, function: Callable[..., None] | None = None) -> None:
        self._function = function

    def __call__(self, *args: object) -> None:
        if not torch.compiler.is_compiling() and self._function is not None:
            self._function(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Hook, ()


_LISTENERS: weakref.WeakSet[Passes] = weakref.WeakSet()


def _watch_compiled() -> None:
    """Let the calls of `torch.compile(model)` be seen, for a loop that attached `model` itself."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    kind: Any = None if dynamo is None else dynamo.OptimizedModule
    if kind is None or hasattr(kind.__call__, "rekindle"):
        return
    plain = kind.__call__

    def call(self: Any, *args: object, **more: object) -> object:
        for passes in list(_LISTENERS):
            if passes.sees(self._orig_mod):
                return passes.around(self._orig_mod, plain, self, *args, **more)
        return plain(self, *args, **more)

    call.rekindle = True  # type: ignore[attr-defined]
    kind.__call__ = call
