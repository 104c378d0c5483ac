"""Muon as the comparison: an optimizer whose every step is orthogonalized, instead of the weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from rekindle.engine.cpu import bfloat16_fault
from rekindle.methods.selection import chosen_weights
from rekindle.projection.targets import Targets


def muon(
    model: nn.Module,
    lr: float = 1e-2,
    *,
    adam_lr: float = 1e-3,
    targets: Targets = "auto",
    weight_decay: float = 0.0,
    adam: dict[str, Any] | None = None,
    **options: Any,
) -> list[Optimizer]:
    """`torch.optim.Muon` (Jordan et al., 2024) for the 2-D weights among the targets, AdamW for everything else.

    Muon takes 2-D parameters only, so convolutions go to AdamW. lr = 1e-2 as in FIRE's comparison. Both are to be
    stepped together. Muon multiplies in bfloat16: where that would end the process (`rekindle doctor`), it is refused.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> [type(optimizer).__name__ for optimizer in muon(model)]
    ['Muon', 'AdamW']

    Args:
        model: whose parameters are divided among Muon and Adam.
        lr: Muon's learning rate.
        adam_lr: that of the other parameters.
        targets: which matrices Muon trains.
        weight_decay: of both.
        adam: the optimizer of the other parameters.
        options: further ones of `torch.optim.Muon`.
    """
    picked, _ = chosen_weights(model, targets)
    weights = [p for c in picked for p in c.parameters().values() if p.ndim == 2]
    if not weights:
        raise ValueError(f"targets={targets!r} hold no 2-D weight, which is all that torch.optim.Muon takes")
    fault = bfloat16_fault() if any(p.device.type == "cpu" for p in weights) else None
    if fault is not None:
        raise ValueError(f"Muon multiplies in bfloat16: {fault}")
    mine = {id(p) for p in weights}
    rest = [p for p in model.parameters() if p.requires_grad and id(p) not in mine]
    made: list[Optimizer] = [torch.optim.Muon(weights, lr=lr, weight_decay=weight_decay, **options)]
    return [*made, AdamW(rest, lr=adam_lr, weight_decay=weight_decay, **(adam or {}))] if rest else made
