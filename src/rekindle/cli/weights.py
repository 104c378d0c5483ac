"""Stored weights measured: the health of one checkpoint, and what changed between two, a few tensors at a time.

The rules are those of `rekindle.health`; what needs data (dormancy, feature rank, gradients) stays unmeasured and is
reported so. Besides the numbers, each block's spectrum is kept, thinned out, for the page.

With A and B the same matrix in two files:
- drift ‖B − A‖_F/‖A‖_F; SFE ‖B − A‖²_F; both beside the DfI of each, because a change alone is neither good nor bad;
- angles between the spans of the r largest singular directions, on the output and on the input side, r = k/8 but at
  most 64. They are undefined, and left out, where the r-th and the next singular value are (nearly) equal, as in an
  isometry;
- frame tr(Q_Aᵀ Q_B)/k of the polar factors: 1 if only the spectrum changed, which is what FIRE does.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from rekindle.blocks.finding import Block
from rekindle.blocks.state_dicts import find_in_state
from rekindle.checkpoint import Checkpoint
from rekindle.checkpoint.opening import match_plan
from rekindle.diagnosis.activity import Unmeasured
from rekindle.diagnosis.examination import Health, HealthBuilder, Thresholds
from rekindle.engine.isometry import polar
from rekindle.measures.matrices import Mode, frobenius_norm, gram, squared_frobenius_error
from rekindle.projection.planning import Plan

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
    """The health of a file, and the thinned spectra of its blocks."""

    health: Health
    spectra: Mapping[str, Mapping[str, Any]]


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
    return FileHealth(reading.result(time.perf_counter() - start, limits), spectra)


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


# Two files

_LARGEST_SPAN = 64
# A relative gap below this leaves the span of the leading directions to rounding.
_GAP = 1e-3
# By how much one of two numbers must differ to count as worse.
_MARGIN = 1.05
_MOST = 0.6


@dataclass(frozen=True)
class BlockChange:
    """How one block changed; None is undefined (a zero matrix, a span without a gap)."""

    name: str
    role: str
    shape: str
    drift: float | None
    sfe: float
    sfe_relative: float | None
    frame: float | None = None
    span: int | None = None
    angle_out: float | None = None
    angle_in: float | None = None
    overlap_out: float | None = None
    overlap_in: float | None = None

    @property
    def same(self) -> bool:
        """Not a single number differs."""
        return self.sfe == 0


@dataclass(frozen=True)
class MoreSigns:
    """Which of two files shows more signs of lost plasticity, and by which counts."""

    which: str
    text: str
    counts: Mapping[str, Mapping[str, int]]


def changes(
    first: Checkpoint,
    second: Checkpoint,
    layers: Iterable[StoredTensor],
    *,
    angles: bool = True,
    advance: Callable[[float], None] = lambda done: None,
) -> list[BlockChange]:
    """One `BlockChange` for every block that both files hold in the same shape."""
    there = second.meta_tensors()
    found = []
    for layer in layers:
        if layer.reason is None and layer.key in there and tuple(there[layer.key].shape) == layer.shape:
            before, after = first.read(layer.key), second.read(layer.key)
            for block in layer.blocks:
                name = f"{layer.name}[{block.part}]" if block.part else layer.name
                found.append(change(name, block, block.read(before), block.read(after), angles=angles))
        advance(layer.numbers)
    return found


def change(name: str, block: Block, before: Tensor, after: Tensor, *, angles: bool = True) -> BlockChange:
    """The numbers of one block from its matrices (count, out, in) in the two files.

    >>> from rekindle.blocks.layouts import matrices
    >>> block = matrices("out in")((2, 2))[0]
    >>> moved = change("a", block, torch.eye(2)[None], 2 * torch.eye(2)[None])
    >>> round(moved.drift, 9), moved.frame, moved.angle_out
    (1.0, 1.0, None)
    """
    before, after = before.double(), after.double()
    shape = f"{block.out}×{block.in_}" if block.count == 1 else f"{block.count}·{block.out}×{block.in_}"
    sfe = float(squared_frobenius_error(before, after).sum())
    energy = float(frobenius_norm(before).square().sum())
    finite = math.isfinite(sfe)
    relative = sfe / energy if energy and finite else None
    plain = BlockChange(name, block.role, shape, None if relative is None else math.sqrt(relative), sfe, relative)
    if not finite or not energy or not angles:
        return plain
    facts: dict[str, Any] = {**asdict(plain), "frame": 1.0}
    if sfe:
        k = block.smaller
        inner = (polar(before, tol=0.0) * polar(after, tol=0.0)).sum((1, 2)) / k
        facts["frame"] = round(float(inner.mean()), 12)
    facts |= _angles(before, after)
    return BlockChange(**facts)


def _angles(before: Tensor, after: Tensor) -> dict[str, float | int | None]:
    """Of the matrices whose leading spans are defined in both files: the mean of largest angle and overlap."""
    k = min(before.shape[1:])
    span = max(1, min(k // 8, _LARGEST_SPAN))
    if k < 2:
        return {}
    spans = [_leading(each, span) for each in (before, after)]
    defined = spans[0][2] & spans[1][2]
    if not bool(defined.any()):
        return {"span": span}
    facts: dict[str, float | int | None] = {"span": span}
    for side, first, second in zip(("out", "in"), spans[0][:2], spans[1][:2], strict=True):
        cosines = torch.linalg.svdvals(first[defined].mT @ second[defined]).clamp(max=1)
        # The cosine of a small angle is lost in rounding: the sine comes from the part outside the first span.
        rest = second[defined] - first[defined] @ (first[defined].mT @ second[defined])
        sines = torch.linalg.matrix_norm(rest, ord=2).clamp(max=1)
        largest = torch.atan2(sines, cosines[:, -1]).rad2deg()
        facts[f"angle_{side}"] = float(largest.mean())
        facts[f"overlap_{side}"] = float(cosines.square().mean())
    return facts


def _leading(matrices: Tensor, span: int) -> tuple[Tensor, Tensor, Tensor]:
    """Orthonormal bases of the leading directions (output side, input side), and where they are defined."""
    # Eigenvectors of the smaller Gram matrix: several times faster than an SVD, and exact for the leading ones.
    wide = matrices.shape[1] <= matrices.shape[2]
    values, vectors = torch.linalg.eigh(gram(matrices))
    sigma = values.flip(-1).clamp_min(0).sqrt()
    tiny = torch.finfo(sigma.dtype).tiny
    shorter = vectors.flip(-1)[:, :, :span]
    longer = ((matrices.mT if wide else matrices) @ shorter) / sigma[:, None, :span].clamp_min(tiny)
    gap = (sigma[:, span - 1] - sigma[:, span]) / sigma[:, 0].clamp_min(tiny)
    out, in_ = (shorter, longer) if wide else (longer, shorter)
    return out, in_, gap > _GAP


def more_signs(first: Health, second: Health) -> MoreSigns:
    """Which file shows more signs: lower effective rank, higher scale-free DfI, more zero rows, more similar neurons.

    A verdict that is worse decides; else the file that is worse by 5 % in most layers, in rank and in DfI both.

    >>> from rekindle.diagnosis.examination import health
    >>> now = health(torch.nn.Linear(4, 4))
    >>> more_signs(now, now).which
    'neither'
    """
    measures = (
        ("effective_rank" if second.mode == "full" else "participation_rank", -1, "lower effective rank"),
        ("dfi_scale_free", 1, "higher scale-free DfI"),
        ("dead_rows", 1, "more zero rows"),
        ("similar_pairs", 1, "more similar neurons"),
    )
    counts: dict[str, dict[str, int]] = {}
    for name, sign, words in measures:
        pairs = [
            (first.weights[layer][name], second.weights[layer][name])
            for layer in first.weights
            if name in first.weights[layer] and name in second.weights.get(layer, {})
        ]
        worse = [sum(_worse(mine, other, sign) for mine, other in pairs), sum(_worse(b, a, sign) for a, b in pairs)]
        counts[words] = {"A": worse[0], "B": worse[1], "of": len(pairs)}
    if first.verdict.level != second.verdict.level:
        which = "A" if first.verdict.level > second.verdict.level else "B"
        reason = f"its verdict is {second.verdict if which == 'B' else first.verdict}"
        return MoreSigns(which, f"{which} shows more signs of lost plasticity: {reason}", counts)
    for which in ("A", "B"):
        leading = [counts[words] for _, _, words in measures[:2]]
        if all(row["of"] and row[which] > _MOST * row["of"] for row in leading):
            facts = ", ".join(f"{words} in {row[which]} of {row['of']}" for words, row in counts.items() if row[which])
            return MoreSigns(which, f"{which} shows more signs of lost plasticity: {facts} layers", counts)
    return MoreSigns("neither", "neither shows clearly more signs of lost plasticity", counts)


def _worse(mine: float, other: float, sign: int) -> bool:
    high, low = (mine, other) if sign > 0 else (other, mine)
    return high > low * _MARGIN and high - low > 1e-9
