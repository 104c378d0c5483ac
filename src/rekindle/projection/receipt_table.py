"""A receipt as a table that fits a terminal, and sentences below it."""

from __future__ import annotations

import itertools
import shutil
import textwrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rekindle.projection.receipt import BlockRecord, Receipt

_HEADINGS = (
    "parameter",
    "role",
    "matrices",
    "scale",
    "DfI",
    "→",
    "SFE/‖W‖²",
    "‖W‖",
    "→",
    "residual",
    "steps",
    "changed",
)
_LEFT = (0, 1, 11)
# Which columns go first where the terminal is narrow: DfI and SFE are never shown without each other.
_EXPENDABLE = (10, 3, 7, 8, 9, 1, 2)
_NAME = 24  # a longer name gives up its middle before a column goes
_GAP = "  "
_FACTS = (
    ("sfe_relative", "relative SFE"),
    ("residual", "residual ≤"),
    ("residual_stored", "stored ≤"),
    ("completed", "directions completed"),
    ("fallback", "solved by float64 SVD"),
)


def render(receipt: Receipt, width: int | None, rows: int) -> str:
    """The text, `width` columns wide or as wide as the terminal; more than `rows` records are cut in the middle."""
    width = width or min(shutil.get_terminal_size((100, 24)).columns, 140)
    first, *said = _sentences(receipt)
    lines = textwrap.wrap(first, width, subsequent_indent=_GAP)
    if receipt.records:
        shared = _shared([record.name for record in receipt.records])
        heading = f"{_HEADINGS[0]} ({shared}…)" if shared else _HEADINGS[0]
        cells = [_cells(record, shared) for record in receipt.records]
        lines += _columns([[heading, *_HEADINGS[1:]], *cells], width, rows)
    for sentence in said:
        lines += textwrap.wrap(sentence, width, subsequent_indent=_GAP, break_on_hyphens=False)
    return "\n".join(lines)


def _sentences(receipt: Receipt) -> list[str]:
    totals = receipt.totals()
    parameters, matrices = totals["parameters"], totals["matrices"]
    cost = f"{receipt.seconds:.3g} s" + (f", {receipt.memory / 1e6:.0f} MB more" if receipt.memory else "")
    said = [
        f"{receipt.method}: {parameters} parameter{'s' * (parameters != 1)}, "
        f"{matrices} matri{'x' if matrices == 1 else 'ces'} changed in {cost}"
    ]
    facts = [f"{label} {_number(totals[key])}" for key, label in _FACTS if totals[key]]
    if totals["dfi_before"] is not None and totals["dfi_after"] is not None:
        facts.insert(0, f"DfI {_number(totals['dfi_before'])} → {_number(totals['dfi_after'])}")
    facts += [f"{amount} {key}" for key, amount in totals["counts"].items()]
    if facts:
        said.append("total: " + ", ".join(facts))
    if receipt.optimizer is not None:
        said.append("optimizer: " + str(receipt.optimizer))
    for amount, what in (
        (receipt.gradients_cleared, "stale gradients cleared"),
        (receipt.biases_zeroed, "biases zeroed"),
        (receipt.mirrors, "mirrors given the same weights"),
        (len(receipt.recalibrated), "BatchNorm layers recalibrated"),
    ):
        if amount:
            said.append(f"{amount} {what}")
    reasons: dict[str, int] = {}
    for reason in receipt.skipped.values():
        reasons[reason] = reasons.get(reason, 0) + 1
    said += [f"left alone: {amount} × {reason}" for reason, amount in reasons.items()]
    return said + [f"note: {note}" for note in receipt.notes]


def _shared(names: list[str]) -> str:
    """The dotted beginning that all names have: it tells nothing, and room is short."""
    if len(set(names)) < 2:
        return ""
    levels = zip(*(name.split(".")[:-1] for name in names), strict=False)
    return "".join(f"{level[0]}." for level in itertools.takewhile(lambda level: len(set(level)) == 1, levels))


def _cells(record: BlockRecord, shared: str) -> list[str]:
    name = record.name.removeprefix(shared) + (f"[{record.part}]" if record.part else "")
    shape = f"{record.count}×{record.out}×{record.in_}" if record.out else str(record.count)
    numbers = (
        record.scale,
        record.dfi_before,
        record.dfi_after,
        record.sfe_relative,
        record.norm_before,
        record.norm_after,
        record.residual,
        record.steps,
    )
    counts = " ".join(f"{key} {amount}" for key, amount in record.counts.items())
    return [name, record.role, shape, *map(_number, numbers), counts]


def _columns(rows: list[list[str]], width: int, most: int) -> list[str]:
    """Aligned lines under the first row: columns that nobody filled are left out, then those that tell least."""
    head, *body = rows
    kept = [c for c in range(len(head)) if c == 0 or any(row[c] for row in body)]
    widths = [max(len(row[c]) for row in rows) for c in range(len(head))]
    for column in _EXPENDABLE:
        if min(widths[0], _NAME) + sum(widths[c] + len(_GAP) for c in kept if c) > width and column in kept:
            kept.remove(column)
    widths[0] = max(8, min(widths[0], width - sum(widths[c] + len(_GAP) for c in kept if c)))
    half = most // 2
    shown: list[list[str] | None] = [*body] if len(body) <= most else [*body[:half], None, *body[half - most :]]
    lines = []
    for row in [head, *shown]:
        if row is None:
            lines.append(f"… {len(body) - most} more …")
            continue
        cells = [elide(row[0], widths[0]), *row[1:]]
        lines.append(
            _GAP.join(cells[c].ljust(widths[c]) if c in _LEFT else cells[c].rjust(widths[c]) for c in kept).rstrip()
        )
    return lines


def elide(name: str, width: int) -> str:
    """A name without its middle: dotted names differ at their end, and their start says where they are.

    >>> elide("transformer.h.0.attn.c_attn.weight", 20)
    'transf…c_attn.weight'
    """
    if len(name) <= width:
        return name
    front = (width - 1) // 3
    return f"{name[:front]}…{name[len(name) - (width - 1 - front) :]}"


def _number(value: float | int | None) -> str:
    if value is None:
        return ""
    if isinstance(value, int) or value == 0:
        return f"{value:g}"
    return f"{value:.1e}" if abs(value) >= 1e5 or abs(value) < 1e-3 else f"{value:.3g}"
