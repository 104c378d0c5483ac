"""A plan as a table that fits a terminal: one line a parameter, every skip explained."""

from __future__ import annotations

import math
import shutil
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rekindle.projection.planning import Entry, Plan

_HEADINGS = ("parameter", "role", "shape", "matrices", "scale", "DfI now", "action")
_GAP = "  "
# The narrowest that a name and the text of a reason may become.
_NAME, _TEXT = 20, 28


def render(plan: Plan, width: int | None = None) -> str:
    """The table, `width` columns wide or as wide as the terminal."""
    width = width or shutil.get_terminal_size((120, 24)).columns
    chosen = plan.selected
    numbers = sum(block.count * block.out * block.in_ for entry in chosen for block in entry.blocks)
    total = sum(math.prod(entry.shape) for entry in plan.entries)
    matrices = sum(entry.count for entry in chosen)
    foot = (
        f"{len(chosen)} of {len(plan.entries)} parameters to project: {matrices} matrices, {numbers:,} of {total:,} "
        f"numbers; scale {plan.scale}, targets {plan.targets}"
    )
    return "\n".join([*_lines([_HEADINGS, *map(_row, plan.entries)], width), *textwrap.wrap(foot, width)])


def _row(e: Entry) -> tuple[str, ...]:
    """Seven cells, or four for what is left alone: the reason takes the place of the numbers."""
    shape = "×".join(map(str, e.shape)) or "-"
    if e.reason is not None:
        return e.name, e.role, shape, f"left: {e.reason}"
    role = "+".join(dict.fromkeys(block.role for block in e.blocks))
    sizes: dict[str, int] = {}
    for block in e.blocks:
        size = f"{block.out}×{block.in_}"
        sizes[size] = sizes.get(size, 0) + block.count
    matrices = ", ".join(f"{count} × {size}" for size, count in sizes.items())
    scales = ", ".join(dict.fromkeys("by matrix" if s is None else f"{s:.3g}" for s in e.scales))
    action = "project"
    if e.left:
        action += f" {', '.join(block.part or block.role for block in e.blocks)}; {', '.join(e.left)} left"
    if any(e.small):
        action += f"; {sum(e.small)} zero matrices stay"
    if e.parametrized:
        action += " through its parametrisation"
    return e.name, role, shape, matrices, scales, "-" if e.dfi_now is None else f"{e.dfi_now:.3g}", action


def _lines(rows: Sequence[Sequence[str]], width: int) -> list[str]:
    full = [row for row in rows if len(row) == len(_HEADINGS)]
    widths = [max(len(row[i]) for row in (rows if i < 3 else full)) for i in range(len(_HEADINGS) - 1)]
    # Names give way to the numbers only; a long reason goes on below itself.
    longest = sum(widths) + len(_GAP) * len(widths) + max(len(row[-1]) for row in full)
    widths[0] = max(min(_NAME, widths[0]), widths[0] - max(0, longest - width))
    lines = []
    for row in rows:
        cells = [elide(row[0], widths[0]), *row[1:-1]]
        head = _GAP.join(cell.ljust(size) for cell, size in zip(cells, widths, strict=False))
        first, *more = textwrap.wrap(row[-1], max(_TEXT, width - len(head) - len(_GAP)), break_on_hyphens=False)
        lines.append(f"{head}{_GAP}{first}")
        lines += [" " * len(head) + _GAP + text for text in more]
    return lines


def elide(name: str, width: int) -> str:
    """Without its middle: dotted names differ at their end, and their start says where they are."""
    if len(name) <= width:
        return name
    front = (width - 1) // 4
    return f"{name[:front]}…{name[len(name) - (width - 1 - front) :]}"
