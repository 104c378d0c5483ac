"""Which layers are fused: their output is cut into parts, as the source of the classes around them shows.

A Linear whose output goes through `chunk`, `split`, `unbind`, slices or a gated linear unit holds more than one matrix,
unless the parts are concatenated again (a partial rotary embedding). It is refused by `finding`, unless its class is
known (`families`) or a recording shows the parts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from rekindle.blocks.layers import as_layer, has_matrices, layers_in
from rekindle.blocks.source import uses_of
from rekindle.blocks.values import INPUT, Split, Uses, at, key_of


@dataclass(frozen=True)
class CutOutput:
    """How the output of one layer is cut, and by whose forward."""

    split: Split
    owner: str
    function: str = ""  # that may cut it

    def __str__(self) -> str:
        if self.function:
            return f"{self.owner} gives its output to {self.function}, which may cut it: give example=batch"
        return f"fused: {self.owner} cuts its output into parts ({self.split.how})"


def cut_layers(model: nn.Module) -> dict[int, CutOutput]:
    """`id(layer)` of every Linear or convolution whose output is cut into parts, and by what.

    >>> net = nn.Sequential(nn.Linear(2, 8), nn.GLU(), nn.Linear(4, 1))
    >>> [str(cut) for cut in cut_layers(net).values()]
    ['fused: GLU cuts its output into parts (glu)']
    """
    found: dict[int, CutOutput] = {}
    for module in model.modules():
        if isinstance(module, nn.Sequential):
            children = list(module.children())
            for i, child in enumerate(children):
                split = input_split(child)
                if split is not None:
                    for layer in _last_layers(children[:i]):
                        found.setdefault(id(layer), CutOutput(split, type(child).__name__))
            continue
        if not module._modules and (is_torchs(module) or as_layer("", module) is None):
            continue
        uses = uses_of(module)
        if uses is None:
            continue
        kind = type(module).__name__
        if uses.own is not None and isinstance(module, nn.Linear):
            found[id(module)] = CutOutput(uses.own, kind)
        for path, split in uses.splits.items():
            for child in at(module, path):
                # Of a part whose own output is not clear its last layer may be cut; slices may be of tokens.
                last = [] if split.how == "slices" else list(layers_in(child))[-1:]
                for layer in output_layers(child, key_of(path)) or last:
                    found.setdefault(id(layer), CutOutput(split, kind))
        handed = [(source, reader, "") for source, reader in uses.passes]
        for source, reader, argument in (*handed, *uses.handed):
            for child in at(module, reader)[:1] if source != INPUT else ():
                split = input_split(child, argument)
                for made in at(module, source) if split is not None else ():
                    for layer in output_layers(made):
                        found.setdefault(id(layer), CutOutput(split, type(child).__name__))  # type: ignore[arg-type]
        for path, function in uses.unsettled.items():
            for child in at(module, path) if path != INPUT else ():
                for layer in output_layers(child):
                    found.setdefault(id(layer), CutOutput(Split(function), kind, function))
    return found


def input_split(module: nn.Module, argument: str = "") -> Split | None:
    """How a module cuts what it is given, or this argument of several (its name or place); None if it does not.

    >>> input_split(nn.GLU()).how
    'glu'
    """
    if isinstance(module, nn.GLU):
        return Split("glu", 2 if module.dim == -1 else None)
    if isinstance(module, nn.Sequential):
        return next((input_split(child) for child in list(module.children())[:1]), None)
    if not module._modules and (is_torchs(module) or has_matrices(module)):
        return None
    uses = uses_of(module)
    if uses is None or not argument:
        return None if uses is None else uses.splits_input
    if argument.isdigit():
        argument = uses.arguments[int(argument)] if int(argument) < len(uses.arguments) else ""
    return uses.cut_arguments.get(argument)


def is_torchs(module: nn.Module) -> bool:
    """Whether this is one of torch's own layers, whose code is known without reading it.

    >>> is_torchs(nn.GLU())
    True
    """
    return type(module).__module__.startswith("torch.nn.")


def output_layers(module: nn.Module, key: str = "") -> list[nn.Module]:
    """The layers whose output is, element by element, the output of this module, or the one of this key.

    >>> net = nn.Sequential(nn.Linear(1, 2), nn.Linear(2, 3), nn.ReLU())
    >>> output_layers(net) == [net[1]]
    True
    """
    if as_layer("", module) is not None:
        return [module]
    if isinstance(module, nn.Sequential):
        return _last_layers(list(module.children()))
    if isinstance(module, torch.jit.ScriptModule):
        return []
    inner = module._modules.get("base_layer")  # what an adapter adapts
    if inner is not None:
        return output_layers(inner)
    uses = uses_of(module)
    if uses is None:
        return []
    if key and len(uses.outputs) > 1:
        label = uses.shown.get(key, "")
        return [layer for child in at(module, label) if label for layer in output_layers(child, key_of(label))]
    return [
        layer
        for path in sorted(uses.returns)
        for child in _at_the_end(module, path, uses)
        for layer in output_layers(child)
    ]


def _at_the_end(module: nn.Module, path: str, uses: Uses) -> list[nn.Module]:
    """The modules that a path means; of a chain in which each reads the one before, the last."""
    return at(module, path)[-1 if (path, path) in uses.feeds else 0 :]


def _last_layers(children: list[nn.Module]) -> list[nn.Module]:
    last = next((child for child in reversed(children) if has_matrices(child)), None)
    return [] if last is None else output_layers(last)
