"""What torch's operations do to neurons: keep each by itself, or not.

The walk in `walking.py` lets neurons pass only through what stands in these tables.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx, nn

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
