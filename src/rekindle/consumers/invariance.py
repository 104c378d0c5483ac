"""Which layers have a normalisation right behind them, so that the scale of their weight does not change the function.

Behind a BatchNorm W and 10·W compute the same. What differs is training: a gradient step turns the direction of W by
about lr/‖W‖² (the effective learning rate), so that a larger norm learns more slowly. A remedy that changes the norm of
such a weight changes its learning rate and nothing else.
"""

from __future__ import annotations

from torch import fx, nn

from rekindle.blocks.names import as_layer
from rekindle.consumers.graph import (
    CHANNEL_NORMS,
    DROPOUTS,
    POOL_MODULES,
    POOLS,
    SHAPE_ONLY,
    TRANSPARENT,
    Untraceable,
    graph_of,
    operation,
    restored,
)

# A bias in front of these is subtracted again; in front of others it would have to be scaled along with the weight.
_CENTRING = tuple(kind for kind in CHANNEL_NORMS if kind is not nn.GroupNorm)
_RECTIFIERS = (nn.ReLU, nn.LeakyReLU, nn.RReLU, nn.PReLU)
_RESHAPES = frozenset({"view", "reshape", "transpose", "permute", "flatten", "unflatten", "movedim", "squeeze"})
_PASSING = (*DROPOUTS, *(kind for kind in POOL_MODULES if kind is not nn.LPPool2d), nn.Flatten)
_PASSES = (TRANSPARENT | POOLS | _RESHAPES) - {"lp_pool2d"}


def norms_behind(model: nn.Module) -> dict[str, str]:
    """The layers whose output goes into a normalisation and nowhere else, each with the name of the normalisation.

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
        except Untraceable:
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
    with restored(owner):
        return graph_of(owner, top=top, closed=frozenset(owner.children()))


def per_output(layer: nn.Module, norm: nn.Module) -> bool:
    """Whether the normalisation treats each output of the layer by itself, so that its bias and its norm are free.

    A BatchNorm behind a Linear normalises the second axis, which is the layer's output where there are two axes. Where
    the sizes differ there are more; where they are the same by chance, that is not seen.

    >>> per_output(nn.Linear(6, 4), nn.BatchNorm1d(4)), per_output(nn.Linear(6, 4), nn.BatchNorm1d(3))
    (True, False)
    """
    size = getattr(layer, "out_features", None) or getattr(layer, "out_channels", None)
    kinds = (nn.BatchNorm1d, nn.SyncBatchNorm) if isinstance(layer, nn.Linear) else _CENTRING
    return isinstance(norm, kinds) and getattr(norm, "num_features", None) == size


def is_norm(module: nn.Module) -> bool:
    """Whether it divides by a measured size: torch's own norms, or a class named like one that holds vectors only.

    >>> is_norm(nn.BatchNorm2d(3)), is_norm(nn.ReLU())
    (True, False)
    """
    if isinstance(module, (*CHANNEL_NORMS, nn.LayerNorm, nn.RMSNorm)):
        return True
    called = type(module).__name__
    return "Norm" in called and "Frozen" not in called and all(p.ndim <= 1 for p in module.parameters())


def _norm_behind(node: fx.Node, children: dict[str, nn.Module], bias: bool, bent: bool = False) -> str:
    """The normalisation that all users of the node's value lead to, or None; `bent`: a rectifier is on the path."""
    found = ""
    for user in node.users:
        child = children.get(str(user.target)) if user.op == "call_module" else None
        if child is not None and is_norm(child):
            norm = str(user.target) if not bias or (isinstance(child, _CENTRING) and not bent) else ""
        elif user.op in ("call_function", "call_method") and operation(user) in SHAPE_ONLY:
            continue
        elif isinstance(child, _RECTIFIERS) or (child is None and operation(user) in ("relu", "leaky_relu")):
            norm = _norm_behind(user, children, bias, bent=True)
        elif isinstance(child, _PASSING) or (child is None and user.op != "output" and operation(user) in _PASSES):
            norm = _norm_behind(user, children, bias, bent)
        else:
            norm = ""
        if not norm:
            return ""
        found = found or norm
    return found
