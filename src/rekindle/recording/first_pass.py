"""The first training pass of a model, recorded when it comes: for who has no batch before training starts.

At the first forward pass with gradients the model runs once more on the same arguments, in isolation, before the pass
itself goes on: one step is slower, nothing else. A model that is never called itself (a LightningModule, an agent with
`get_value`) is recorded by those of its networks that are, one after the other, in one graph.

>>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
>>> waiting = FirstPass(net, lambda graph: print([operation.name for operation in graph.operations]))
>>> _ = net(torch.zeros(1, 2))
['t', 'addmm', 'relu']
>>> _ = net(torch.zeros(1, 2))
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from rekindle.isolation import Recorded
from rekindle.recording.graph import Graph, ModuleCall
from rekindle.recording.recorder import Recorder, RecordingError, record

Listener = Callable[[Graph], object]


class FirstPass:
    """Waits for the first pass with gradients and gives its recording to `listen`; `remove()` stops waiting.

    called: the compiled module around the model, where there is one: hooks inside would be compiled too.
    """

    def __init__(self, model: nn.Module, listen: Listener, called: nn.Module | None = None) -> None:
        self._model, self._listen = model, listen
        self._handles: dict[int, RemovableHandle] = {}
        self._recorder = Recorder(model)
        self._outer = called if called is not None and hasattr(called, "_orig_mod") else None
        for module in model.modules() if self._outer is None else (self._outer,):
            hook = _FirstPassHook(self)
            self._handles[id(module)] = module.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)

    def remove(self) -> None:
        """Stop waiting."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()

    def come(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A module is called that is inside no other one of those still waited for."""
        part = self._model if module is self._outer else module
        for inner in (module, *part.modules()):
            handle = self._handles.pop(id(inner), None)
            if handle is not None:
                handle.remove()
        training = [each for each in self._model.modules() if each.training]
        calls = len(self._recorder.graph.calls)
        try:
            graph = record(self._model, Recorded(args, kwargs, part), training=training, recorder=self._recorder)
        except RecordingError:  # the pass itself says what is wrong
            return
        if part is not self._model:  # what it returns may be what the next network reads
            handle = module.register_forward_hook(lambda _, __, result: self._left(handle, graph.calls[calls], result))
        self._listen(graph)

    def _left(self, handle: RemovableHandle | None, call: ModuleCall, result: object) -> None:
        assert handle is not None
        handle.remove()
        self._recorder.link(call, result)


class _FirstPassHook:
    """A hook of `FirstPass`. A copy of the model, or a file of it, gets one that does nothing."""

    def __init__(self, waiting: FirstPass | None = None) -> None:
        self._waiting = waiting

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._waiting is not None and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self._waiting.come(module, args, kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _FirstPassHook, ()
