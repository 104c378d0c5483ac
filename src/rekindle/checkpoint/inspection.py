"""inspect_file(): the health of stored weights, a few tensors at a time.

The rules are those of `rekindle.health`; what needs data (dormancy, feature rank, gradients) stays unmeasured and is
reported so. Besides the numbers, each block's spectrum is kept, thinned out, for the page.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rekindle.blocks.finding import Block
from rekindle.blocks.state_dicts import find_in_state
from rekindle.checkpoint.hub import place_on_hub
from rekindle.checkpoint.opening import Checkpoint, match_plan, open_checkpoint
from rekindle.checkpoint.parts import CheckpointError
from rekindle.diagnosis.activity import Unmeasured
from rekindle.diagnosis.examination import Health, HealthBuilder, Thresholds
from rekindle.measures.matrices import Mode
from rekindle.projection.planning import Plan
from rekindle.spelling import advice

Advance = Callable[[float], None]
# Enough for a curve that looks smooth; a page of 500 layers stays near one megabyte.
POINTS = 48
# Rows of an embedding are looked up, a depthwise kernel has 1-wide matrices: their spectra say nothing.
_PASSED_OVER = ("embedding", "depthwise")


@dataclass(frozen=True)
class StoredTensor:
    """A stored tensor with the matrices that it holds, or the reason why it is not measured."""

    name: str
    key: str
    shape: tuple[int, ...]
    blocks: tuple[Block, ...]
    reason: str | None
    assumed: bool = False  # its layout is a guess, which is reported

    @property
    def numbers(self) -> int:
        """How many numbers a measurement has to read: the unit of progress."""
        return torch.Size(self.shape).numel() if self.reason is None else 0


@dataclass(frozen=True)
class FileHealth:
    """The health of a file, the thinned spectra of its blocks, what the file is, and what is to be known about it."""

    health: Health
    spectra: Mapping[str, Mapping[str, Any]]
    source: Mapping[str, Any]
    remarks: tuple[str, ...] = ()


def inspect_file(
    path: str | Path,
    *,
    config: object = None,
    plan: Plan | None = None,
    mode: Mode = "full",
    thresholds: Thresholds | None = None,
    progress: Callable[[float, float], object] | None = None,
) -> FileHealth:
    """Measure the weights of a checkpoint, one tensor in memory at a time; nothing is changed.

    Args:
        path: what `open_checkpoint` takes.
        config: a config or a model on the meta device that says how tensors are used, where none is beside the file.
        plan: a plan of the live model, which says it better.
        mode: "cheap" finds no eigenvalues and no spectra.
        thresholds: of the verdict.
        progress: called with how many numbers were measured, of how many.

    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile(suffix=".pt") as file:
    ...     torch.save({"a.weight": torch.eye(3)}, file.name)
    ...     found = inspect_file(file.name)
    >>> str(found.health.verdict), found.spectra["a.weight"]["mean"]
    ('unknown', [1.0, 1.0, 1.0])
    """
    with open_checkpoint(path) as checkpoint:
        layers, remarks = measurable(checkpoint, config, plan)
        total = sum(layer.numbers for layer in layers)
        done = 0.0

        def advance(more: float) -> None:
            nonlocal done
            done += more
            if progress is not None:
                progress(done, total)

        found = examine(checkpoint, layers, mode=mode, advance=advance, thresholds=thresholds)
        return replace(found, remarks=remarks)


def measurable(
    checkpoint: Checkpoint, config: object = None, plan: Plan | None = None
) -> tuple[list[StoredTensor], tuple[str, ...]]:
    """The tensors of a file, and remarks; a file without any certain matrix is an error that says what to pass."""
    layers, remark = layers_of(checkpoint, config, plan)
    told = advice("layout tells", "config= or a plan saved from the live model tells")
    if not any(layer.reason is None for layer in layers):
        reasons = sorted({layer.reason for layer in layers if layer.reason and len(layer.shape) > 1})
        why = f": {'; '.join(reasons[:3])}" if reasons else ""
        raise CheckpointError(
            f"{checkpoint.path} holds {len(layers)} tensors and no matrix that can be measured{why}. "
            f"{told} how tensors are used"
        )
    unsure = sum(layer.reason is not None and "state dict alone" in layer.reason for layer in layers)
    assumed = sum(layer.assumed for layer in layers)
    remarks = [remark] if remark else []
    if assumed:
        remarks.append(f"{assumed} convolution{'s' * (assumed != 1)} read with groups=1: {told} otherwise")
    if unsure:
        remarks.append(f"{unsure} tensor{'s' * (unsure != 1)} skipped; {told} how they are used")
    return layers, tuple(remarks)


def described(checkpoint: Checkpoint) -> dict[str, Any]:
    """What was read: path, format, tensors, numbers, bytes and dtypes."""
    tensors, path = checkpoint.meta_tensors(), Path(checkpoint.path)
    return {
        "path": str(place_on_hub(path) or path),
        "name": os.path.basename(os.path.abspath(path)),  # as the user gave it, a link included
        "format": checkpoint.format,
        "tensors": len(checkpoint.names),
        "numbers": sum(tensor.numel() for tensor in tensors.values()),
        "bytes": checkpoint.size,
        "dtypes": sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()}),
    }


def layers_of(
    checkpoint: Checkpoint, config: object = None, plan: Plan | None = None
) -> tuple[list[StoredTensor], str]:
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
        reason = reason if f.blocks or reason else "no matrix"
        layers.append(StoredTensor(f.name, f.key, f.shape, f.blocks, reason, reason is None and "assumed" in f.marks))
    return layers, note


def _planned(tensors: Mapping[str, Tensor], plan: Plan) -> list[StoredTensor]:
    entries = {entry.key: entry for entry in plan.entries}
    layers = []
    for key, tensor in tensors.items():
        shape, entry = tuple(tensor.shape), entries.get(key)
        if entry is None:
            layers.append(StoredTensor(key, key, shape, (), "not in the plan"))
        elif entry.shape != shape:
            layers.append(StoredTensor(key, key, shape, (), f"has shape {shape}, the plan says {entry.shape}"))
        else:
            passed = entry.role in _PASSED_OVER or not entry.blocks
            layers.append(StoredTensor(key, key, shape, entry.blocks, (entry.reason or entry.role) if passed else None))
    return layers


def examine(
    checkpoint: Checkpoint,
    layers: Iterable[StoredTensor],
    *,
    mode: Mode = "full",
    advance: Advance = lambda done: None,
    thresholds: Thresholds | None = None,
) -> FileHealth:
    """Measure the layers; `advance` is called with how many numbers have been done.

    >>> import tempfile
    >>> from rekindle.checkpoint import open_checkpoint
    >>> with tempfile.NamedTemporaryFile(suffix=".pt") as file:
    ...     torch.save({"a.weight": torch.eye(3)}, file.name)
    ...     stored = open_checkpoint(file.name)
    ...     found = examine(stored, layers_of(stored)[0])
    >>> str(found.health.verdict), found.spectra["a.weight"]["mean"]
    ('unknown', [1.0, 1.0, 1.0])
    """
    limits = thresholds or Thresholds()
    start = time.perf_counter()
    reading = HealthBuilder(mode=mode, tau=limits.tau)
    chosen = []
    for layer in layers:
        if layer.reason is None:
            chosen.append(layer)
        elif len(layer.shape) > 1:
            reading.unmeasured.append(Unmeasured(layer.name, "weight", layer.reason))
    spectra: dict[str, Mapping[str, Any]] = {}
    weights = ((layer, checkpoint.read(layer.key)) for layer in chosen)
    for layer, (_, found) in zip(chosen, reading.measured(weights, sum(each.numbers for each in chosen)), strict=True):
        spectra |= {name: thinned(each.spectrum) for name, each in found.items() if each.spectrum is not None}
        advance(layer.numbers)
    reading.unmeasured.append(Unmeasured("", "activity and gradients", "a file holds weights only, no data"))
    return FileHealth(reading.result(time.perf_counter() - start, limits), spectra, described(checkpoint))


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
