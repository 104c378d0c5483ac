"""Which weights, parameters, and parts of fused parameters the `targets` of a method mean.

All of it rests on `rekindle.projection.targets.choose`, so that a request means the same to every method as to FIRE.
Methods that work on matrices take `chosen_weights`; those that change numbers one by one take `chosen_parameters`,
where a part of a fused weight comes as its parameter with a mask.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from rekindle.blocks import names
from rekindle.blocks.finding import Block, Conv, find
from rekindle.projection.stores import LiveWeight
from rekindle.projection.targets import Targets, choose, terms

NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase)
_GENERAL = ("auto", "layers", "all", "everything", "trainable")


@dataclass(frozen=True)
class Share:
    """A parameter, or (with a mask) the entries of it that are to be changed.

    >>> share = Share("weight", Parameter(torch.zeros(2)), torch.tensor([True, False]))
    >>> share.of(torch.ones(2)), share.merged(torch.ones(2))
    (tensor([1.]), tensor([1., 0.]))
    """

    name: str
    parameter: Parameter
    mask: Tensor | None = None

    def of(self, values: Tensor) -> Tensor:
        """The chosen ones of these values: all as they are, or some as a vector."""
        return values if self.mask is None else values[self.mask]

    def merged(self, new: Tensor, old: Tensor | None = None) -> Tensor:
        """`new` where chosen, `old` (by default the parameter's value) elsewhere."""
        old = self.parameter.detach() if old is None else old
        return new if self.mask is None else torch.where(self.mask, new, old)


def chosen_weights(model: nn.Module, targets: Targets, conv: Conv = "taps") -> tuple[list[LiveWeight], dict[str, str]]:
    """The weights that `targets` mean, and why the other parameters and parts are skipped.

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> [weight.name for weight in chosen_weights(model, "layers")[0]]
    ['0.weight', '2.weight']
    """
    picked, skipped = [], {}
    everything = find(model, conv=conv)
    for before, found in zip(everything, choose(everything, targets), strict=True):
        if found.refusal is not None:
            skipped[found.name] = found.refusal
            continue
        picked.append(LiveWeight.at(model, found))
        left = (b for b in before.blocks if b not in found.blocks)
        skipped |= {f"{found.name}[{b.part}]": f"not among the targets ({b.role})" for b in left}
    return picked, skipped


def plain_weights(model: nn.Module, targets: Targets) -> tuple[list[LiveWeight], dict[str, str]]:
    """The targeted weights that are parameters themselves; those computed from others are skipped."""
    picked, skipped = chosen_weights(model, targets)
    computed = {c.name: "parametrized: its originals are not its weights" for c in picked if c.computed}
    return [c for c in picked if not c.computed], {**skipped, **computed}


def chosen_parameters(model: nn.Module, targets: Targets) -> tuple[dict[str, Share], dict[str, str]]:
    """The parameters that `targets` mean, by clean name, each once, and why the others are skipped.

    "everything" is every parameter, "trainable" those that are trained; anything else is chosen among the weight
    matrices as in `rekindle.plan`.

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3), nn.Linear(3, 1))
    >>> len(chosen_parameters(model, "everything")[0]), list(chosen_parameters(model, "auto")[0])
    (6, ['0.weight'])
    """
    named = dict(names.named_parameters(model))
    if isinstance(targets, str) and targets in ("everything", "trainable"):
        found = {n: Share(n, p) for n, p in named.items() if targets == "everything" or p.requires_grad}
        if not found:
            raise ValueError(f"targets={targets!r}: the model has no such parameter")
        return found, {n: "frozen" for n in named if n not in found}
    picked, skipped = chosen_weights(model, targets)
    called = {id(parameter): name for name, parameter in named.items()}
    chosen: dict[str, Share] = {}
    for each in picked:
        held = each.parameters().values()
        if each.computed and not each.whole:
            raise ValueError(f"{each.name!r} is parametrized: single parts of it cannot be chosen here")
        mask = None if each.whole else mask_of(each)
        chosen |= {called[id(p)]: Share(called[id(p)], p, mask) for p in held}
    return chosen, skipped


def trainable(shares: dict[str, Share]) -> dict[str, Share]:
    """Those that training can move; none is an error."""
    found = {name: share for name, share in shares.items() if share.parameter.requires_grad}
    if not found:
        raise ValueError("every targeted parameter is frozen: there is nothing to regularize")
    return found


def chosen_biases(model: nn.Module, weights: Iterable[LiveWeight]) -> dict[str, Share]:
    """The trainable biases that are added to the outputs of these weights, with a mask where that is a part."""
    called = {id(parameter): name for name, parameter in names.named_parameters(model)}
    found: dict[str, Share] = {}
    for each in weights:
        bias = each.bias()
        if bias is None or not bias.requires_grad or id(bias) not in called:
            continue
        name = called[id(bias)]
        mask = torch.zeros(bias.shape, dtype=torch.bool, device=bias.device)
        mask[slice(None) if each.whole and not _shared(each) else each.outputs()] = True
        earlier = found[name].mask if name in found else None
        if earlier is not None:
            mask |= earlier
        found[name] = Share(name, bias, mask)
    return {n: replace(s, mask=None) if s.mask is not None and bool(s.mask.all()) else s for n, s in found.items()}


def norm_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The normalization layers by clean name, known by class or by a class name that ends in Norm."""
    return {
        name: module
        for name, module in names.named_modules(model)
        if isinstance(module, NORMS) or (type(module).__name__.endswith("Norm") and hasattr(module, "weight"))
    }


def chosen_norms(model: nn.Module, targets: Targets) -> dict[str, nn.Module]:
    """The normalization layers that `targets` mean: all for a general word such as "layers", else those it names.

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3))
    >>> list(chosen_norms(model, "layers")), list(chosen_norms(model, "0")), list(chosen_norms(model, ("0", "1")))
    (['1'], [], ['1'])
    """
    asked = [term for term in terms(targets) if isinstance(term, str)]
    return {
        name: module
        for name, module in norm_layers(model).items()
        if any(term in _GENERAL or fnmatchcase(name, term) or f"{name}.".startswith(f"{term}.") for term in asked)
    }


def mask_of(chosen: LiveWeight) -> Tensor:
    """Which entries of a weight its chosen blocks hold."""
    value = chosen.read()
    mask = torch.zeros(value.shape, dtype=torch.bool, device=value.device)
    for block in chosen.blocks:
        block.write(mask, torch.ones(block.count, block.out, block.in_, dtype=torch.bool, device=value.device))
    return mask


def matrices_of(chosen: LiveWeight) -> Iterable[tuple[Block, Tensor]]:
    """Each chosen block of a weight with its matrices (count, out, in) as part of the autograd graph."""
    value = getattr(chosen.owner, chosen.tensor)
    return ((block, with_gradient(block, value)) for block in chosen.blocks)


def with_gradient(block: Block, weight: Tensor) -> Tensor:
    """The matrices (count, out, in) of a block as part of the autograd graph."""
    layout = block.layout
    window = weight.reshape(layout.split)
    for factor, start, length in layout.take:
        window = window.narrow(factor, start, length)
    return window.permute(*layout.count, *layout.out, *layout.in_).reshape(layout.sizes)


def _shared(chosen: LiveWeight) -> bool:
    # MultiheadAttention with keys of another width: three weights, one bias.
    return chosen.tensor in ("q_proj_weight", "k_proj_weight", "v_proj_weight")
