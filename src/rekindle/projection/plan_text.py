"""A plan as text and as rows of a table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rekindle import tables
from rekindle.projection.entries import PlanEntry

_HEADINGS = ("parameter", "role", "shape", "matrices", "scale", "DfI now", "evidence", "action")


def table(entries: Sequence[PlanEntry], made_by: str, width: int | None) -> str:
    """One line per parameter, and a sum; made_by: the scale and targets in words."""
    width = width or tables.terminal_width(120)
    chosen = [entry for entry in entries if entry.refusal is None]
    numbers = sum(block.count * block.out * block.in_ for entry in chosen for block in entry.blocks)
    total = sum(math.prod(entry.shape) for entry in entries)
    foot = (
        f"{len(chosen)} of {len(entries)} parameters to project: {sum(e.count for e in chosen)} matrices, "
        f"{numbers:,} of {total:,} numbers; {made_by}"
    )
    free = sum(bool(entry.norm) for entry in chosen)
    if free:
        foot += (
            f". {free} of the {len(chosen)} have a normalization right behind them, which takes their scale out: "
            "for them the scale sets only how fast they learn, lr/‖W‖²"
        )
    against = [f"{e.name} ({e.overruled})" for e in entries if e.overruled]
    if against:
        foot += f". The recorded pass overruled what class, source or name say: {', '.join(against)}"
    lines = tables.table(_HEADINGS, list(map(_cells, entries)), width, left=range(len(_HEADINGS)), drop=(1,))
    return "\n".join([*lines, *tables.wrapped(foot, width, "")])


def rows(entries: Sequence[PlanEntry]) -> list[dict[str, Any]]:
    """One row per block, or one per parameter that is skipped."""
    made: list[dict[str, Any]] = []
    for e in entries:
        base = {"name": e.name, "role": e.role, "shape": e.shape, "dtype": e.dtype, "reason": e.refusal}
        base |= {"norm": e.norm, "evidence": e.evidence, "overruled": e.overruled}
        if e.refusal is not None:
            made.append(base)
        for i, block in enumerate(e.blocks if e.refusal is None else ()):
            made.append(
                {
                    **base,
                    "role": block.role,
                    "part": block.part,
                    "count": block.count,
                    "out": block.out,
                    "in": block.in_,
                    "taps": block.taps,
                    "scale": e.scales[i],
                    "dfi": e.dfi[i],
                    "dfi_scale_free": e.dfi_free[i],
                }
            )
    return made


def _cells(entry: PlanEntry) -> list[str]:
    """Its row of the table: eight cells, or four if it is skipped: the reason takes the place of the numbers."""
    shape = "×".join(map(str, entry.shape)) or "-"
    if entry.refusal is not None:
        return [entry.name, entry.role, shape, f"skipped: {entry.refusal}"]
    role = "+".join(dict.fromkeys(block.role for block in entry.blocks))
    sizes: dict[str, int] = {}
    for block in entry.blocks:
        size = f"{block.out}×{block.in_}"
        sizes[size] = sizes.get(size, 0) + block.count
    matrices = ", ".join(f"{count} × {size}" for size, count in sizes.items())
    scales = ", ".join(dict.fromkeys("by matrix" if s is None else f"{s:.3g}" for s in entry.scales))
    action = "project"
    if entry.left:
        action += f" {', '.join(block.part or block.role for block in entry.blocks)}; skip {', '.join(entry.left)}"
    if any(entry.small):
        action += f"; {sum(entry.small)} zero matrices stay"
    if entry.parametrized:
        action += " through its parametrization"
    dfi = "-" if entry.dfi_now is None else f"{'≈' if entry.estimated else ''}{entry.dfi_now:.3g}"
    return [entry.name, role, shape, matrices, scales, dfi, entry.evidence or "-", action]
