"""A receipt as text: its table, and the sentences around it."""

from __future__ import annotations

from typing import Any

from rekindle import tables

_HEADINGS = [
    *("parameter", "role", "matrices", "scale", "DfI", "→", "SFE/‖W‖²", "‖W‖", "→"),
    *("residual", "steps", "changed"),
]
_LEFT = (0, 1, 11)
# Which columns go first where the terminal is narrow: DfI and SFE are never shown without each other.
_EXPENDABLE = (10, 3, 7, 8, 9, 1, 2)
_FACTS = (
    ("sfe_relative", "relative SFE"),
    ("residual", "residual ≤"),
    ("residual_stored", "stored ≤"),
    ("completed", "directions completed"),
    ("fallback", "solved by float64 SVD"),
)


def table(receipt: Any, width: int | None, rows: int) -> str:
    """What `Receipt.table` returns."""
    width = width or tables.terminal_width(100)
    first, *more = _sentences(receipt)
    lines = tables.wrapped(first, width)
    if receipt.records:
        cells = [_cells(record) for record in receipt.records]
        lines += tables.table(_HEADINGS, cells, width, left=_LEFT, drop=_EXPENDABLE, most=rows)
    for sentence in more:
        lines += tables.wrapped(sentence, width)
    return "\n".join(lines)


def _sentences(receipt: Any) -> list[str]:
    totals = receipt.totals()
    parameters, matrices = totals["parameters"], totals["matrices"]
    cost = f"{receipt.seconds:.3g} s" + (f", peak memory +{receipt.memory / 1e6:.0f} MB" if receipt.memory else "")
    said = [
        f"{receipt.method}: {parameters} parameter{'s' * (parameters != 1)}, "
        f"{matrices} matri{'x' if matrices == 1 else 'ces'} changed in {cost}"
    ]
    facts = [f"{label} {tables.number(totals[key])}" for key, label in _FACTS if totals[key]]
    if totals["dfi_before"] is not None and totals["dfi_after"] is not None:
        facts.insert(0, f"DfI {tables.number(totals['dfi_before'])} → {tables.number(totals['dfi_after'])}")
    facts += [f"{amount} {key}" for key, amount in totals["counts"].items()]
    if facts:
        said.append("total: " + ", ".join(facts))
    if receipt.optimizer is not None:
        said.append("optimizer: " + str(receipt.optimizer))
    if receipt.outputs_moved is not None:
        said.append(
            f"outputs moved by {receipt.outputs_moved:.0%} of their norm on the batches given: the function has "
            "changed, train afterwards"
        )
    for amount, one, several, what in (
        (receipt.gradients_cleared, "stale gradient", "stale gradients", "cleared"),
        (receipt.biases_zeroed, "bias", "biases", "zeroed"),
        (receipt.mirrors, "mirror", "mirrors", "given the same weights"),
        (len(receipt.recalibrated), "BatchNorm layer", "BatchNorm layers", "recalibrated"),
    ):
        if amount:
            said.append(f"{amount} {one if amount == 1 else several} {what}")
    reasons: dict[str, int] = {}
    for reason in receipt.skipped.values():
        reasons[reason] = reasons.get(reason, 0) + 1
    said += [f"skipped: {amount} × {reason}" for reason, amount in reasons.items()]
    return said + [f"note: {note}" for note in receipt.notes]


def _cells(record: Any) -> list[str]:
    name = record.name + (f"[{record.part}]" if record.part else "")
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
    return [name, record.role, shape, *map(tables.number, numbers), counts]
