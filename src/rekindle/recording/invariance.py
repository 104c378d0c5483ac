"""Which layers have a normalization right behind them, so that the scale of their weight does not change the function.

Behind a BatchNorm W and 10·W compute the same. What differs is training: a gradient step turns the direction of W by
about lr/‖W‖² (the effective learning rate), so that a larger norm learns more slowly. A remedy that changes the norm of
such a weight changes its learning rate and nothing else.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection

from torch import fx, nn

from rekindle.blocks.layers import as_layer
from rekindle.blocks.normalization import CHANNEL_NORMS, is_norm
from rekindle.isolation import attributes_kept, isolated

_DROPOUTS = (nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_POOLS = (
    nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, nn.AdaptiveAvgPool1d,
    nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d, nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d,
    nn.Upsample,
)  # fmt: skip
# A bias in front of these is subtracted again; in front of others it would have to be scaled along with the weight.
_CENTERING = tuple(kind for kind in CHANNEL_NORMS if kind is not nn.GroupNorm)
_RECTIFIERS = (nn.ReLU, nn.LeakyReLU, nn.RReLU, nn.PReLU)
_PASSING = (*_DROPOUTS, *_POOLS, nn.Flatten)
_PASSES = frozenset(
    {
        *("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_dropout", "identity", "clone"),
        *("contiguous", "to", "float", "half", "bfloat16", "double", "type_as", "neg", "positive", "detach"),
        *("max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d", "interpolate"),
        *("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "adaptive_max_pool1d"),
        *("adaptive_max_pool2d", "adaptive_max_pool3d", "view", "reshape", "transpose", "permute", "flatten"),
        *("unflatten", "movedim", "squeeze"),
        "boolean_dispatch",  # the name that torch.nn.functional.max_pool2d has in an fx graph
    }
)
_SHAPE_ONLY = frozenset({"size", "getattr", "dim", "device", "dtype", "shape", "numel"})


class _Tracer(fx.Tracer):
    def __init__(self, closed: Collection[nn.Module]) -> None:
        super().__init__()
        self._closed = closed

    def is_leaf_module(self, module: nn.Module, qualified_name: str) -> bool:
        return module in self._closed or super().is_leaf_module(module, qualified_name)


class _Untraceable(Exception):
    """torch.fx cannot follow this module's forward."""


def norms_behind(model: nn.Module) -> dict[str, str]:
    """The layers whose output goes into a normalization and nowhere else, each with the name of the normalization.

    Found by tracing every module that holds both; a layer that is not named here may still be one.

    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU())
    >>> norms_behind(net)
    {'0': '1'}
    """
    found: dict[str, str] = {}
    closed: set[type] = set()  # classes that torch.fx cannot follow: a large model has the same one in every block
    for path, owner in model.named_modules():
        children = dict(owner.named_children())
        layers = {name: child for name, child in children.items() if as_layer(name, child) is not None}
        if not layers or type(owner) in closed or not any(map(is_norm, children.values())):
            continue
        try:
            graph = _chain(owner) if type(owner).forward is nn.Sequential.forward else _traced(owner, top=not path)
        except _Untraceable:
            closed.add(type(owner))
            continue
        calls = {str(node.target): node for node in graph.nodes if node.op == "call_module"}
        times = [str(node.target) for node in graph.nodes if node.op == "call_module"]
        for name, layer in layers.items():
            if times.count(name) != 1:
                continue
            norm = _norm_behind(calls[name], children, layer.bias is not None)
            if norm and (layer.bias is None or per_output(layer, children[norm])):
                found[f"{path}.{name}" if path else name] = f"{path}.{norm}" if path else norm
    return found


def _chain(owner: nn.Module) -> fx.Graph:
    """The graph of a Sequential, which needs no trace: that would take a tenth of the time of `health`."""
    graph, first = fx.Graph(), dict[int, str]()
    value = graph.placeholder("input")
    for name, child in owner._modules.items():
        value = graph.call_module(first.setdefault(id(child), name), (value,))
    graph.output(value)
    return graph


def _traced(owner: nn.Module, top: bool) -> fx.Graph:
    """A model is called with its defaults; of a part it is not known which optional values its parent gives."""
    parameters = inspect.signature(owner.forward).parameters.items()
    defaults = {name: p.default for name, p in parameters if p.default is not p.empty}
    with isolated(owner), attributes_kept(owner):
        for concrete in [defaults] if top else [None, defaults]:
            try:
                return _Tracer(list(owner.children())).trace(owner, concrete_args=concrete)
            except Exception:
                continue
    raise _Untraceable


def _operation(node: fx.Node) -> str:
    """The plain name of what a node computes: `add` for `+`, `torch.add` and `Tensor.add_`."""
    target = node.target
    name = target if isinstance(target, str) else getattr(target, "__name__", str(target))
    return name.rstrip("_") if not name.startswith("__") else name.strip("_")


def per_output(layer: nn.Module, norm: nn.Module) -> bool:
    """Whether the normalization treats each output of the layer by itself, so that its bias and its norm are free.

    A BatchNorm behind a Linear normalizes the second axis, which is the layer's output where there are two axes. Where
    the sizes differ there are more; where they are the same by chance, that is not seen.

    >>> per_output(nn.Linear(6, 4), nn.BatchNorm1d(4)), per_output(nn.Linear(6, 4), nn.BatchNorm1d(3))
    (True, False)
    """
    size = getattr(layer, "out_features", None) or getattr(layer, "out_channels", None)
    kinds = (nn.BatchNorm1d, nn.SyncBatchNorm) if isinstance(layer, nn.Linear) else _CENTERING
    return isinstance(norm, kinds) and getattr(norm, "num_features", None) == size


def _norm_behind(node: fx.Node, children: dict[str, nn.Module], bias: bool, bent: bool = False) -> str:
    """The normalization that all users of the node's value lead to, or None; `bent`: a rectifier is on the path."""
    found = ""
    for user in node.users:
        child = children.get(str(user.target)) if user.op == "call_module" else None
        if child is not None and is_norm(child):
            norm = str(user.target) if not bias or (isinstance(child, _CENTERING) and not bent) else ""
        elif user.op in ("call_function", "call_method") and _operation(user) in _SHAPE_ONLY:
            continue
        elif isinstance(child, _RECTIFIERS) or (child is None and _operation(user) in ("relu", "leaky_relu")):
            norm = _norm_behind(user, children, bias, bent=True)
        elif isinstance(child, _PASSING) or (child is None and user.op != "output" and _operation(user) in _PASSES):
            norm = _norm_behind(user, children, bias, bent)
        else:
            norm = ""
        if not norm:
            return ""
        found = found or norm
    return found
