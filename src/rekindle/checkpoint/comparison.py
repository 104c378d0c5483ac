"""compare_files(): what changed between two checkpoints of one model, a few tensors at a time.

With A and B the same matrix in two files:
- drift ‖B − A‖_F/‖A‖_F; SFE ‖B − A‖²_F; both beside the DfI of each, because a change alone is neither good nor bad;
- angles between the spans of the r largest singular directions, on the output and on the input side, r = k/8 but at
  most 64. They are undefined, and left out, where the r-th and the next singular value are (nearly) equal, as in an
  isometry;
- frame tr(Q_Aᵀ Q_B)/k of the polar factors: 1 if only the spectrum changed, which is what FIRE does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rekindle.blocks.finding import Block
from rekindle.checkpoint.inspection import FileHealth, StoredTensor, examine, measurable
from rekindle.checkpoint.opening import Checkpoint, open_checkpoint
from rekindle.checkpoint.parts import CheckpointError
from rekindle.diagnosis.examination import Health
from rekindle.engine.isometry import polar
from rekindle.measures.matrices import Mode, frobenius_norm, gram, squared_frobenius_error
from rekindle.projection.planning import Plan

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


@dataclass(frozen=True)
class FileComparison:
    """What changed between two files A and B: block by block, in what there is, and in health (B against A)."""

    changes: tuple[BlockChange, ...]
    signs: MoreSigns
    first: FileHealth
    second: FileHealth
    differences: Mapping[str, list[str]]

    @property
    def health(self) -> Health:
        """The health of B with A as its reference."""
        return self.second.health.against(self.first.health)


def compare_files(
    first: str | Path,
    second: str | Path,
    *,
    config: object = None,
    plan: Plan | None = None,
    mode: Mode = "full",
    progress: Callable[[float, float], object] | None = None,
) -> FileComparison:
    """Measure two checkpoints of one model and what changed between them; cheap mode leaves out the angles.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for name, scale in (("a", 1.0), ("b", 2.0)):
    ...         torch.save({"w.weight": scale * torch.eye(3)}, f"{folder}/{name}.pt")
    ...     found = compare_files(f"{folder}/a.pt", f"{folder}/b.pt")
    >>> found.changes[0].drift, found.signs.which
    (1.0, 'neither')
    """
    with open_checkpoint(first) as a, open_checkpoint(second) as b:
        (layers, remarks), (others, _) = (measurable(checkpoint, config, plan) for checkpoint in (a, b))
        total = 2 * sum(layer.numbers for layer in layers) + sum(layer.numbers for layer in others)
        done = 0.0

        def advance(more: float) -> None:
            nonlocal done
            done += more
            if progress is not None:
                progress(done, total)

        healths = [
            examine(checkpoint, each, mode=mode, advance=advance) for checkpoint, each in ((a, layers), (b, others))
        ]
        moved = changes(a, b, layers, angles=mode == "full", advance=advance)
        different = differences(a.meta_tensors(), b.meta_tensors())
    if not moved:
        raise CheckpointError(f"{first} and {second} share no matrix of the same name and shape: not the same model")
    signs = more_signs(*(found.health for found in healths))
    return FileComparison(tuple(moved), signs, replace(healths[0], remarks=remarks), healths[1], different)


def differences(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """Which tensors only one file has, and which differ in shape or dtype."""
    both = [name for name in first if name in second]
    return {
        "only_A": [name for name in first if name not in second],
        "only_B": [name for name in second if name not in first],
        "shape": [name for name in both if first[name].shape != second[name].shape],
        "dtype": [name for name in both if first[name].dtype != second[name].dtype],
    }


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
