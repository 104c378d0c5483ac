"""The graph of a model's computation, by torch.fx or torch.export, and what its operations do to neurons.

A neuron passes only through the functions in these tables: those that keep neurons separate.
"""

from __future__ import annotations

import copy
import inspect
import operator
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn

from rekindle.blocks.names import LAYERS, is_transposed_linear
from rekindle.isolation import Recorded

NONLINEAR = frozenset(
    {
        *("relu", "relu6", "gelu", "silu", "mish", "tanh", "sigmoid", "leaky_relu", "elu", "celu", "selu", "softplus"),
        *("hardtanh", "hardswish", "hardsigmoid", "softsign", "logsigmoid", "tanhshrink", "hardshrink", "softshrink"),
        *("abs", "pow", "square", "sqrt", "rsqrt", "exp", "erf", "sin", "cos", "clamp", "clamp_min", "threshold"),
    }
)
TRANSPARENT = frozenset(
    {
        *("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_dropout", "identity", "clone"),
        *("contiguous", "to", "_to_copy", "float", "half", "bfloat16", "double", "type_as", "neg", "positive"),
        *("detach", "alias"),
    }
)
POOLS = frozenset(
    {
        *("max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d", "lp_pool2d"),
        *("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "_adaptive_avg_pool2d"),
        *("adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d", "max_pool2d_with_indices"),
        *("interpolate", "upsample_nearest2d"),
        "boolean_dispatch",  # the name that torch.nn.functional.max_pool2d has in an fx graph
    }
)
BINARY = {
    **dict.fromkeys(("add", "iadd", "radd", "sub", "isub", "rsub"), "add"),
    **dict.fromkeys(("mul", "imul", "rmul", "div", "truediv"), "mul"),
}
SHAPE_ONLY = frozenset({"size", "getattr", "dim", "device", "dtype", "shape", "numel", "sym_size", "sym_size_int"})
ACTIVATIONS = (
    nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh, nn.Sigmoid, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU,
    nn.Softplus, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.Softsign, nn.LogSigmoid, nn.Tanhshrink, nn.Threshold,
    nn.RReLU, nn.Hardshrink, nn.Softshrink,
)  # fmt: skip
DROPOUTS = (nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
POOL_MODULES = (
    nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, nn.AdaptiveAvgPool1d,
    nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d, nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d,
    nn.LPPool2d, nn.Upsample,
)  # fmt: skip
CHANNEL_NORMS = (
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.GroupNorm,
    nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d,
)  # fmt: skip
RECURRENT = (nn.RNNBase, nn.RNNCellBase)


def operation(node: fx.Node) -> str:
    """The plain name of what a node computes: `add` for `+`, `torch.add`, `Tensor.add_` and `aten.add.Tensor`."""
    target = node.target
    if isinstance(target, str):
        name = target
    elif isinstance(target, torch._ops.OpOverload):
        name = target.overloadpacket.__name__
    else:
        name = "getitem" if target is operator.getitem else getattr(target, "__name__", str(target))
    return name.rstrip("_") if not name.startswith("__") else name.strip("_")


def is_number(node: fx.Node) -> bool:
    """Whether the node's value is one number, such as a size."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return value.ndim == 0
    return operation(node) in SHAPE_ONLY if node.op in ("call_function", "call_method") else False


def shapes_of(node: fx.Node) -> tuple[list[Any], list[Any]] | None:
    """The shapes before and after a node, where the graph knows them (torch.export's does)."""
    before, after = node.all_input_nodes[0].meta.get("val"), node.meta.get("val")
    if isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor):
        return [*before.shape], [*after.shape]
    return None


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


@contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """Tracing runs a model's own code on stand-ins for tensors: restore what it stored or counted meanwhile."""
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
                    if not buffer.is_meta and not torch.equal(buffer, value):
                        buffer.copy_(value)


def _refill(container: Any, content: Any) -> None:
    container.clear()
    (container.extend if isinstance(container, list) else container.update)(content)


class Untraceable(Exception):
    """torch.fx cannot follow this module's forward; the message says why."""


def graph_of(module: nn.Module, top: bool, closed: frozenset[nn.Module] = frozenset()) -> fx.Graph:
    """A model is called with its defaults; of a part it is not known which optional values its parent gives."""
    parameters = inspect.signature(module.forward).parameters.items()
    defaults = {name: p.default for name, p in parameters if p.default is not p.empty}
    last: Exception | None = None
    for concrete in [defaults] if top else [None, defaults]:
        try:
            return _Tracer(closed).trace(module, concrete_args=concrete)
        except Exception as error:
            last = last or error
    raise Untraceable(f"torch.fx cannot trace {type(module).__name__} ({_first_line(last)})")


def can_trace(module: nn.Module) -> bool:
    """Whether torch.fx can follow this module by itself."""
    try:
        graph_of(module, top=False)
    except Untraceable:
        return False
    return True


def parts_of(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """The children, and those of containers that are never called themselves."""
    for name, child in module.named_children():
        whole = f"{path}.{name}" if path else name
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from parts_of(child, whole)
        else:
            yield whole, child


def _first_line(error: Exception | None) -> str:
    text = str(error).strip().splitlines()
    return text[0][:120] if text else type(error).__name__


def exported(model: nn.Module, batch: Any) -> tuple[fx.Graph, dict[str, str]]:
    """The graph that torch.export makes of the model on one batch, and which of its inputs are which weights."""
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    if isinstance(batch, Recorded):
        args, kwargs = batch.args, dict(batch.kwargs)
    elif isinstance(batch, torch.Tensor):
        args = (batch,)
    elif isinstance(batch, (tuple, list)):
        args = (batch[0],)
    else:
        kwargs = dict(batch)
    if "use_cache" in inspect.signature(model.forward).parameters:
        kwargs["use_cache"] = False  # a cache of keys is not a tensor, so it cannot be an exported output
    try:
        with restored(model):
            program = torch.export.export(model, args, kwargs, strict=False)
    except Exception as error:
        raise Untraceable(f"torch.export fails too ({_first_line(error)})") from error
    signature = program.graph_signature
    return program.graph, {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
