"""New statistics for BatchNorm layers after the weights before them changed.

Only the BatchNorm layers that were training are re-estimated; everything else runs in eval mode, so dropout draws
nothing and frozen layers stay frozen. Random states, modes and momenta are afterwards what they were before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from rekindle.blocks.names import unwrapped
from rekindle.engine.devices import callers_device
from rekindle.isolation import Kept, call, isolated
from rekindle.projection.receipt import Receipt
from rekindle.sharding.passes import passes
from rekindle.sharding.team import Team


def recalibrate(model: nn.Module, batches: Iterable[Any]) -> tuple[str, ...]:
    """Re-estimate the running statistics of the training BatchNorm layers of `model`; return their names.

    Each batch (a tensor, a tuple whose first item is the input, or a dict for `model(**batch)`) counts the same.
    A layer that no batch reaches keeps its statistics. If the forward raises, all statistics are put back.

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    >>> _ = nn.init.constant_(model[0].weight, 1.0), nn.init.zeros_(model[0].bias)
    >>> recalibrate(model, [torch.ones(4, 2), 3 * torch.ones(4, 2)])
    ('1',)
    >>> model[1].running_mean
    tensor([4., 4., 4.])
    """
    layers = training_layers(model)
    if not layers:
        return ()
    device = next((tensor.device for tensor in model.parameters()), torch.device("cpu"))
    kept = {name: [Kept(buffer) for buffer in layer.buffers(recurse=False)] for name, layer in layers.items()}
    reached: tuple[str, ...] = ()
    try:
        isolation = isolated(model, training=layers.values(), keep_buffers=False)
        with torch.no_grad(), isolation, _plain_mean(layers.values()):
            for layer in layers.values():
                layer.reset_running_stats()
            count = 0
            for batch in batches:
                call(model, batch, device)
                count += 1
            if not count:
                raise ValueError("recalibrate= holds no batch: pass batches that can be iterated again")
            reached = tuple(name for name, layer in layers.items() if layer.num_batches_tracked)
    finally:
        for name in layers:
            if name not in reached:
                for buffer in kept[name]:
                    buffer.put_back()
    return reached


def training_layers(model: nn.Module) -> dict[str, _BatchNorm]:
    """The BatchNorm layers that are in training mode and keep running statistics, by name.

    >>> list(training_layers(nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2).eval())))
    ['0']
    """
    return {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, _BatchNorm) and layer.training and layer.running_mean is not None
    }


def agree_statistics(team: Team, layers: Iterable[_BatchNorm]) -> None:
    """Give every process the statistics of all batches, with equal weight per rank; no-op for one process.

    >>> agree_statistics(Team.solo(), [nn.BatchNorm1d(2)])
    """
    if team.size == 1:
        return
    for layer in layers:
        mean, variance = layer.running_mean, layer.running_var
        if mean is None or variance is None:
            continue
        both = team.sum(torch.stack([mean.double(), variance.double() + mean.double().square()])) / team.size
        mean.copy_(both[0])
        variance.copy_(both[1] - both[0].square())


@contextlib.contextmanager
def _plain_mean(layers: Iterable[_BatchNorm]) -> Iterator[None]:
    chosen = list(layers)
    momenta = [layer.momentum for layer in chosen]
    try:
        for layer in chosen:
            layer.momentum = None  # the plain mean over batches
        yield
    finally:
        for layer, momentum in zip(chosen, momenta, strict=True):
            layer.momentum = momentum


def recalibrated(model: nn.Module, batches: Iterable[Any], receipt: Receipt, team: Team) -> Receipt:
    """Recalibrate after a method that has written its weights, and say so in its receipt."""
    # DDP would give every rank the buffers of the first before each forward pass: bypass the wrapper.
    inner = unwrapped(model) if team.size > 1 else model
    with callers_device(), passes(inner, team):
        names = recalibrate(inner, batches)
    agree_statistics(team, training_layers(inner).values())
    if not names:
        note = "recalibrate= found no BatchNorm layer in training mode"
        return replace(receipt, notes=(*receipt.notes, note))
    return replace(receipt, recalibrated=names)
