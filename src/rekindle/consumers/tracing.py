"""Graphs of a model's computation: by torch.fx of the whole or of its parts, or by torch.export.

The neurons are followed through them in `walking.py`.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn

from rekindle.consumers.flows import Trace
from rekindle.consumers.walking import Walk, known_inside
from rekindle.consumers.wiring import LAYERS, as_layer, is_transposed_linear


class _Tracer(fx.Tracer):
    def __init__(self, opaque: frozenset[nn.Module]) -> None:
        super().__init__()
        self.opaque = opaque

    def is_leaf_module(self, module: nn.Module, qualified_name: str) -> bool:
        plain = any(type(module).forward is kind.forward for kind in LAYERS)
        return (
            plain
            or is_transposed_linear(module)
            or module in self.opaque
            or super().is_leaf_module(module, qualified_name)
        )


def trace(model: nn.Module) -> Trace:
    """Trace the model by torch.fx, or, where that fails, each of its parts that can be traced on its own."""
    found = Trace("torch.fx")
    with unmarked(model):
        _trace_part(model, "", found, "the model's output")
    return found


@contextmanager
def unmarked(model: nn.Module) -> Iterator[None]:
    """Tracing runs a model's own code on stand-ins for tensors: put back what it stored or counted meanwhile."""
    kept = []
    for module in model.modules():
        held = dict(module.__dict__)
        inside = {k: copy.copy(v) for k, v in held.items() if isinstance(v, (dict, list, set))}
        kept.append((module, held, inside, {k: b.clone() for k, b in module._buffers.items() if b is not None}))
    try:
        yield
    finally:
        for module, held, inside, buffers in kept:
            module.__dict__.clear()
            module.__dict__.update(held)
            for name, content in inside.items():
                _refill(held[name], content)
            with torch.no_grad():
                for name, value in buffers.items():
                    buffer = module._buffers[name]
                    assert buffer is not None
                    if not torch.equal(buffer, value):
                        buffer.copy_(value)


def _refill(container: Any, content: Any) -> None:
    container.clear()
    (container.extend if isinstance(container, list) else container.update)(content)


def _trace_part(module: nn.Module, path: str, found: Trace, end: str) -> None:
    """Trace a module; failing that, with its untraceable parts as closed boxes; failing that, the parts alone."""
    top = path == ""
    try:
        Walk(module, path, _graph(module, top), found, end).run()
        return
    except _Untraceable as error:
        reason = str(error)
    found.how = "torch.fx, part by part"
    parts = list(_parts(module, path))
    closed = {part: name for name, part in parts if not _can_trace(part)}
    if closed:
        try:
            Walk(module, path, _graph(module, top, frozenset(closed)), found, end).run()
        except _Untraceable:
            pass
        else:
            for part, name in closed.items():
                _trace_part(part, name, found, f"what leaves {name}")
            return
    for name, part in parts:
        if as_layer(name, part) is not None:
            found.unreached[name] = reason
        elif any(as_layer(n, m) for n, m in part.named_modules()):
            _trace_part(part, name, found, f"what leaves {name}")
    known_inside(module, path, found)


class _Untraceable(Exception):
    pass


def _graph(module: nn.Module, top: bool, closed: frozenset[nn.Module] = frozenset()) -> fx.Graph:
    """A model is called with its defaults; of a part it is not known which optional values its parent gives."""
    parameters = inspect.signature(module.forward).parameters.items()
    defaults = {name: p.default for name, p in parameters if p.default is not p.empty}
    last: Exception | None = None
    for concrete in [defaults] if top else [None, defaults]:
        try:
            return _Tracer(closed).trace(module, concrete_args=concrete)
        except Exception as error:
            last = last or error
    raise _Untraceable(f"torch.fx cannot trace {type(module).__name__} ({_first_line(last)})")


def _can_trace(module: nn.Module) -> bool:
    try:
        _graph(module, top=False)
    except _Untraceable:
        return False
    return True


def _parts(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """The children, and those of containers that are never called themselves."""
    for name, child in module.named_children():
        whole = f"{path}.{name}" if path else name
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from _parts(child, whole)
        else:
            yield whole, child


def _first_line(error: Exception | None) -> str:
    text = str(error).strip().splitlines()
    return text[0][:120] if text else type(error).__name__


def export(model: nn.Module, batch: Any) -> Trace:
    """Walk the graph that torch.export makes of the model on one batch."""
    found = Trace("torch.export")
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    if isinstance(batch, torch.Tensor):
        args = (batch,)
    elif isinstance(batch, (tuple, list)):
        args = (batch[0],)
    else:
        kwargs = dict(batch)
    if "use_cache" in inspect.signature(model.forward).parameters:
        kwargs["use_cache"] = False  # a cache of keys is no tensor, so it cannot be an exported output
    try:
        with unmarked(model):
            program = torch.export.export(model, args, kwargs, strict=False)
    except Exception as error:
        reason = f"torch.export fails too ({_first_line(error)})"
        found.unreached = {n: reason for n, m in model.named_modules() if as_layer(n, m) is not None}
        return found
    signature = program.graph_signature
    held = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    Walk(model, "", program.graph, found, "the model's output", held).run()
    return found
