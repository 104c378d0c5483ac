"""Changing weight matrices block by block, as FIRE does, so that controls differ from it in one thing only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rekindle.blocks import parametrized
from rekindle.blocks.finding import Block, Found, find
from rekindle.engine.isometry import polar
from rekindle.measures.matrices import scale_free_deviation
from rekindle.methods.parameters import clear_gradients
from rekindle.optimizers import StateReset
from rekindle.optimizers import resetting as optimizers
from rekindle.projection.receipt import BlockRecord, Meter, Receipt
from rekindle.projection.scales import Scale
from rekindle.projection.stores import Weight
from rekindle.projection.targets import Targets, choose

# New matrices (count, out, in) from the old ones; the name and block tell which they are.
Change = Callable[[str, Block, Tensor], Tensor]


@dataclass(frozen=True)
class Chosen:
    """One weight whose blocks are to be changed."""

    found: Found
    blocks: tuple[Block, ...]
    weight: Weight


def chosen_matrices(model: nn.Module, targets: Targets, **finding: Any) -> tuple[list[Chosen], dict[str, str]]:
    """The weights that `targets` mean, and why the other parameters are left alone.

    "layers" is "auto" and the output head, where there is one: what papers call every layer.
    """
    found = find(model, **finding)
    if isinstance(targets, str) and targets == "layers":
        targets = ("auto", "head") if any(f.role == "head" and f.blocks for f in found) else "auto"
    choices = choose(found, targets)
    picked = [Chosen(c.found, c.blocks, Weight.at(model, c.found.key)) for c in choices if c.reason is None]
    return picked, {c.found.name: c.reason for c in choices if c.reason is not None}


def plain_weights(model: nn.Module, targets: Targets) -> tuple[list[Chosen], dict[str, str]]:
    """The targeted weights that are parameters themselves; those computed from others are left alone."""
    picked, skipped = chosen_matrices(model, targets)
    computed = {c.found.name: "parametrised: its originals are not its weights" for c in picked if c.weight.computed}
    return [c for c in picked if not c.weight.computed], {**skipped, **computed}


def rewrite(
    method: str,
    model: nn.Module,
    change: Change,
    optimizer: Any = None,
    *,
    targets: Targets = "auto",
    policy: str = "fresh",
    settings: Mapping[str, Any] | None = None,
    measure: bool = True,
) -> Receipt:
    """Replace the targeted matrices by what `change` makes of them; all of it is computed before the first write."""
    meter = Meter()
    picked, skipped = chosen_matrices(model, targets)
    parameters = {n: p for each in picked for n, p in each.weight.parameters(each.found.name).items()}
    optimizers.check(optimizer, parameters, policy)
    new: list[tuple[Chosen, Block, Tensor, Tensor]] = []
    for each in picked:
        whole = each.weight.read()
        if not bool(torch.isfinite(whole).all()):
            raise ValueError(f"{each.found.name!r} holds NaN or Inf; nothing was changed")
        trial = whole.clone()
        for block in each.blocks:
            old = _real(block.read(whole))
            value = change(each.found.name, block, old)
            block.write(trial, value)
            new.append((each, block, old, value))
        refusal = parametrized.trial(each.weight.owner, each.weight.tensor, trial)
        if refusal is not None:
            raise ValueError(f"{each.found.name!r} is {refusal}; leave it out with targets=")
    records = []
    for each, block, old, value in new:
        records.append(_record(each.found.name, block, old, value, measure))
        each.weight.write(block, value)
    return Receipt(
        method,
        tuple(records),
        skipped,
        settings or {},
        optimizers.reset(optimizer, parameters, policy=policy) if optimizer is not None else StateReset("none"),
        gradients_cleared=clear_gradients(parameters.values()),
        seconds=meter.seconds,
        memory=meter.memory,
    )


def isometry_scale(scale: Scale, block: Block, matrices: Tensor) -> Tensor:
    """The scale that FIRE would give each of these matrices, (count, 1, 1)."""
    norm = torch.linalg.matrix_norm(matrices)
    nuclear = norm
    if scale.rule == "nearest":
        nuclear = (polar(matrices) * matrices).sum((-2, -1))
    return scale.values(block, norm=norm, nuclear=nuclear).to(matrices)[:, None, None]


def with_gradient(block: Block, weight: Tensor) -> Tensor:
    """The matrices (count, out, in) of a block as part of the autograd graph."""
    layout = block.layout
    window = weight.reshape(layout.split)
    for factor, start, length in layout.take:
        window = window.narrow(factor, start, length)
    return window.permute(*layout.count, *layout.out, *layout.in_).reshape(layout.sizes)


def _real(matrices: Tensor) -> Tensor:
    return matrices.detach().to(torch.promote_types(matrices.dtype, torch.float32), copy=True)


def _record(name: str, block: Block, old: Tensor, new: Tensor, measure: bool) -> BlockRecord:
    error, energy = (old - new).square().sum().item(), old.square().sum().item()
    return BlockRecord(
        name,
        block.role,
        block.part,
        block.count,
        block.out,
        block.in_,
        dfi_free_before=_sum(scale_free_deviation(old)) if measure else None,
        dfi_free_after=_sum(scale_free_deviation(new)) if measure else None,
        sfe=error,
        sfe_relative=error / energy if energy else None,
        norm_before=energy**0.5,
        norm_after=new.norm().item(),
    )


def _sum(values: Tensor) -> float | None:
    known = values[~values.isnan()]
    return float(known.sum()) if known.numel() else None
