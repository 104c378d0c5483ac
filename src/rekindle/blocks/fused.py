"""Layers whose output their owner cuts into parts: several matrices in one weight, whatever the class is called.

Read off the source of the owner's class (`rekindle.consumers.source`): a Linear whose output goes through `chunk`,
`split`, `unbind`, slices or a gated linear unit holds more than one matrix, unless the parts are concatenated again
(a partial rotary embedding). Only a plain `chunk` of the last axis tells the layout; anything else is refused by
`finding`, unless the class is known (`families`).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from rekindle.consumers.graph import as_layer
from rekindle.consumers.source import uses_of
from rekindle.consumers.values import INPUT, Split, at, has_matrices


@dataclass(frozen=True)
class Cut:
    """How the output of one layer is cut, and by whose forward."""

    split: Split
    owner: str

    def __str__(self) -> str:
        return f"fused: {self.owner} cuts its output into parts ({self.split.how})"


def cut_layers(model: nn.Module) -> dict[int, Cut]:
    """`id(layer)` of every Linear or convolution whose output is cut into parts, and by what.

    >>> net = nn.Sequential(nn.Linear(2, 8), nn.GLU(), nn.Linear(4, 1))
    >>> [str(cut) for cut in cut_layers(net).values()]
    ['fused: GLU cuts its output into parts (glu)']
    """
    found: dict[int, Cut] = {}
    for module in model.modules():
        if isinstance(module, nn.Sequential):
            children = list(module.children())
            for i, child in enumerate(children):
                split = input_split(child)
                if split is not None:
                    for layer in _last_layers(children[:i]):
                        found.setdefault(id(layer), Cut(split, type(child).__name__))
            continue
        if not module._modules and (_is_torch(module) or as_layer("", module) is None):
            continue
        uses = uses_of(module)
        if uses is None:
            continue
        kind = type(module).__name__
        if uses.own is not None and isinstance(module, nn.Linear):
            found[id(module)] = Cut(uses.own, kind)
        for path, split in uses.splits.items():
            for child in at(module, path):
                for layer in output_layers(child):
                    found.setdefault(id(layer), Cut(split, kind))
        for source, reader in uses.passes:
            if source == INPUT:
                continue
            for child in at(module, reader)[:1]:
                split = input_split(child)
                if split is not None:
                    for made in at(module, source):
                        for layer in output_layers(made):
                            found.setdefault(id(layer), Cut(split, type(child).__name__))
    return found


def input_split(module: nn.Module) -> Split | None:
    """How a module cuts what it is given, None if it does not.

    >>> input_split(nn.GLU()).how
    'glu'
    """
    if isinstance(module, nn.GLU):
        return Split("glu", 2 if module.dim == -1 else None)
    if isinstance(module, nn.Sequential):
        return next((input_split(child) for child in list(module.children())[:1]), None)
    if not module._modules and (_is_torch(module) or has_matrices(module)):
        return None
    uses = uses_of(module)
    return None if uses is None else uses.splits_input


def output_layers(module: nn.Module) -> list[nn.Module]:
    """The layers whose output is, element by element, the output of this module.

    >>> net = nn.Sequential(nn.Linear(1, 2), nn.Linear(2, 3), nn.ReLU())
    >>> output_layers(net) == [net[1]]
    True
    """
    if as_layer("", module) is not None:
        return [module]
    if isinstance(module, nn.Sequential):
        return _last_layers(list(module.children()))
    inner = module._modules.get("base_layer")  # what an adapter adapts
    if inner is not None:
        return output_layers(inner)
    uses = uses_of(module)
    if uses is None:
        return []
    return [layer for path in sorted(uses.returns) for child in at(module, path) for layer in output_layers(child)]


def _last_layers(children: list[nn.Module]) -> list[nn.Module]:
    last = next((child for child in reversed(children) if has_matrices(child)), None)
    return [] if last is None else output_layers(last)


def _is_torch(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn.")
