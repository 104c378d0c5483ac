"""The health of a stored checkpoint: every matrix measured from its weights alone, a few tensors in memory at a time.

The rules are those of `rekindle.health`; what needs data (dormancy, feature rank, gradients) stays unmeasured and
is said to be. Besides the numbers it keeps each block's spectrum, thinned out, for the page.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rekindle.blocks.finding import Block
from rekindle.blocks.state_dicts import find_in_state
from rekindle.checkpoint import Checkpoint
from rekindle.checkpoint.planmatch import match_plan
from rekindle.diagnosis.activity import Unmeasured
from rekindle.diagnosis.examination import Health, Reading, Stored, Thresholds
from rekindle.measures.matrices import Mode
from rekindle.projection.planning import Plan

Advance = Callable[[float], None]
# Enough for a curve that looks smooth; a page of 500 layers stays near one megabyte.
POINTS = 48
# Rows of an embedding are looked up, a depthwise kernel has 1-wide matrices: their spectra say nothing.
_PASSED_OVER = ("embedding", "depthwise")


@dataclass(frozen=True)
class Layer:
    """A stored tensor with the matrices that it holds, or the reason why it is not measured."""

    name: str
    key: str
    shape: tuple[int, ...]
    blocks: tuple[Block, ...]
    reason: str | None

    @property
    def numbers(self) -> int:
        """How many numbers a measurement has to read: the unit of progress."""
        return torch.Size(self.shape).numel() if self.reason is None else 0


@dataclass(frozen=True)
class Examination:
    """The health of a file, and the thinned spectra of its blocks."""

    health: Health
    spectra: Mapping[str, Mapping[str, Any]]


def layers_of(checkpoint: Checkpoint, config: Any = None, plan: Plan | None = None) -> tuple[list[Layer], str]:
    """Every stored tensor with its blocks: as the plan says where one is given, else by config, names and shapes.

    The second value is a note where the config beside the file could not be used.

    >>> import tempfile
    >>> from rekindle.checkpoint import open_checkpoint
    >>> with tempfile.NamedTemporaryFile(suffix=".pt") as file:
    ...     torch.save({"a.weight": torch.zeros(4, 6), "a.bias": torch.zeros(4)}, file.name)
    ...     [(layer.name, layer.reason) for layer in layers_of(open_checkpoint(file.name))[0]]
    [('a.weight', None), ('a.bias', 'vector')]
    """
    tensors = checkpoint.meta_tensors()
    if plan is not None:
        return _planned(tensors, match_plan(plan, checkpoint)), ""
    note = ""
    own = checkpoint.own_config() if config is None else config
    try:
        found = find_in_state(tensors, own)
    except Exception as error:  # whatever transformers makes of a config that it does not know
        if config is not None or own is None:
            raise
        note = f"config.json was not used ({' '.join(str(error).split())[:300]})"
        found = find_in_state(tensors)
    layers = []
    for f in found:
        reason = f.refusal or next((f.marks[mark] for mark in _PASSED_OVER if mark in f.marks), None)
        layers.append(Layer(f.name, f.key, f.shape, f.blocks, reason if f.blocks or reason else "no matrix"))
    return layers, note


def _planned(tensors: Mapping[str, Tensor], plan: Plan) -> list[Layer]:
    entries = {entry.key: entry for entry in plan.entries}
    layers = []
    for key, tensor in tensors.items():
        shape, entry = tuple(tensor.shape), entries.get(key)
        if entry is None:
            layers.append(Layer(key, key, shape, (), "not in the plan"))
        elif entry.shape != shape:
            layers.append(Layer(key, key, shape, (), f"has shape {shape}, the plan says {entry.shape}"))
        else:
            passed = entry.role in _PASSED_OVER or not entry.blocks
            layers.append(Layer(key, key, shape, entry.blocks, (entry.reason or entry.role) if passed else None))
    return layers


def examine(
    checkpoint: Checkpoint,
    layers: Iterable[Layer],
    *,
    mode: Mode = "full",
    advance: Advance = lambda done: None,
    thresholds: Thresholds | None = None,
) -> Examination:
    """Measure the layers; `advance` is told how many numbers have been done.

    >>> import tempfile
    >>> from rekindle.checkpoint import open_checkpoint
    >>> with tempfile.NamedTemporaryFile(suffix=".pt") as file:
    ...     torch.save({"a.weight": torch.eye(3)}, file.name)
    ...     stored = open_checkpoint(file.name)
    ...     found = examine(stored, layers_of(stored)[0])
    >>> str(found.health.verdict), found.spectra["a.weight"]["mean"]
    ('healthy', [1.0, 1.0, 1.0])
    """
    limits = thresholds or Thresholds()
    start = time.perf_counter()
    reading = Reading(mode=mode, tau=limits.tau)
    chosen = []
    for layer in layers:
        if layer.reason is None:
            chosen.append(layer)
        elif len(layer.shape) > 1:
            reading.unmeasured.append(Unmeasured(layer.name, "weight", layer.reason))
    spectra: dict[str, Mapping[str, Any]] = {}
    weights = (Stored(layer.name, layer.blocks, checkpoint.read(layer.key)) for layer in chosen)
    for layer, (_, found) in zip(chosen, reading.measured(weights, sum(each.numbers for each in chosen)), strict=True):
        spectra |= {name: thinned(each.spectrum) for name, each in found.items() if each.spectrum is not None}
        advance(layer.numbers)
    reading.unmeasured.append(Unmeasured("", "activity and gradients", "a file holds weights only, no data"))
    return Examination(reading.result(time.perf_counter() - start, limits), spectra)


def thinned(spectrum: Tensor, points: int = POINTS) -> dict[str, Any]:
    """At most `points` singular values of matrices (count, k): mean over the matrices, and their range if several.

    >>> thinned(torch.tensor([[3.0, 1.0], [5.0, 1.0]]))
    {'k': 2, 'count': 2, 'mean': [4.0, 1.0], 'low': [3.0, 1.0], 'high': [5.0, 1.0]}
    """
    flat = spectrum.reshape(-1, spectrum.shape[-1]).double()
    count, k = flat.shape
    at = torch.linspace(0, k - 1, min(points, k)).round().long()
    kept = flat[:, at]
    curve: dict[str, Any] = {"k": k, "count": count, "mean": _short(kept.mean(0))}
    if count > 1:
        curve |= {"low": _short(kept.amin(0)), "high": _short(kept.amax(0))}
    return curve


def _short(values: Tensor) -> list[float]:
    return [float(f"{value:.4g}") for value in values.tolist()]
