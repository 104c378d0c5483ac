"""The optimizers of a run and their learning rate: the same for every arm unless the arm is an optimizer itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from rekindle.lab.arms import Arm
from rekindle.lab.settings import Setting
from rekindle.methods import muon

_ADAMS = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}


def make_optimizers(model: nn.Module, setting: Setting, arm: Arm) -> list[Optimizer]:
    """New optimizers for everything in the model that is trained.

    Options of the setting hold for an arm's optimizer too if both are Adams. AdamW decays nothing unless it is told
    to, so that changing Adam for AdamW changes nothing else.

    >>> setting = Setting("tiny", "random-labels", "mlp", optimizer_options={"betas": (0.9, 0.95)})
    >>> made = make_optimizers(nn.Linear(2, 1), setting, Arm("half", lr=0.5))
    >>> made[0].param_groups[0]["lr"], made[0].param_groups[0]["betas"]
    (0.0005, (0.9, 0.95))
    """
    kind = arm.optimizer or setting.optimizer
    related = kind == setting.optimizer or {kind, setting.optimizer} <= set(_ADAMS)
    options: dict[str, Any] = {**(setting.optimizer_options if related else {}), **arm.optimizer_options}
    factor = 1.0 if arm.lr is None else arm.lr
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if kind in _ADAMS:
        if "betas" in options:
            options["betas"] = tuple(options["betas"])  # JSON has lists only
        options = {"weight_decay": 0.0, "fused": True, "lr": setting.lr, **options}
        made: list[Optimizer] = [_ADAMS[kind](trained, **{**options, "lr": factor * options["lr"]})]
    elif kind == "sgd":
        options = {"lr": setting.lr, **options}
        made = [torch.optim.SGD(trained, **{**options, "lr": factor * options["lr"]})]
    else:
        options = {"lr": 1e-2, "adam_lr": setting.lr, **options}
        made = muon(model, **{**options, "lr": factor * options["lr"], "adam_lr": factor * options["adam_lr"]})
    for optimizer in made:
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]
    return made


def rate(setting: Setting, steps: int) -> Callable[[int], float] | None:
    """By what the learning rate is multiplied at each step of a task; None where it never changes.

    Warm-up rises linearly over the first `warmup` of the steps and reaches the full rate with its last step; cosine
    then falls to a tenth.

    >>> factor = rate(Setting("tiny", "random-labels", "mlp", warmup=0.5), 8)
    >>> [factor(step) for step in range(6)]
    [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    """
    rising = round(setting.warmup * steps)
    if setting.schedule == "constant" and not rising:
        return None

    def factor(step: int) -> float:
        if step < rising:
            return (step + 1) / rising
        if setting.schedule == "constant":
            return 1.0
        passed = (step - rising) / max(1, steps - 1 - rising)
        return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, passed)))

    return factor


def set_rate(optimizers: Sequence[Optimizer], factor: float) -> None:
    """Give every group its own learning rate times the factor."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = factor * group["initial_lr"]
