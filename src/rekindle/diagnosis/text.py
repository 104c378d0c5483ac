"""How a Health and a Comparison read when printed: one row a layer, one line a finding, then the verdict."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rekindle.diagnosis.examination import Comparison, Health

# (heading, measure, how it is shown)
_WEIGHTS = (
    ("norm", "norm", "number"),
    ("DfI/k", "dfi_per_dimension", "number"),
    ("scale-free", "dfi_scale_free", "number"),
    ("σ max", "spectral_norm", "number"),
    ("cond.", "condition_number", "number"),
    ("eff. rank", "effective_rank", "number"),
    ("part. rank", "participation_rank", "number"),
    ("zero rows", "dead_rows", "number"),
    ("similar", "similar_pairs", "share"),
)
_UNITS = (
    ("units", "units", "number"),
    ("dormant", "dormant", "share"),
    ("dead", "dead", "share"),
    ("usage", "usage", "share"),
    ("eff. rank", "feature_rank", "number"),
    ("of", "rank_limit", "number"),
    ("linear", "linearised", "share"),
    ("saturated", "saturation", "share"),
    ("∂ dormant", "gradient_dormant", "share"),
)
_MOST_UNMEASURED = 6
_MOST_CHANGES = 40


def described(health: Health, width: int) -> str:
    """The whole of a Health as text."""
    lines = [f"Health ({health.mode}, {health.seconds:.2g} s)"]
    lines += _table("weights", health.weights, health, _WEIGHTS, ("role", "shape"), width)
    lines += _table("units", health.units, health, _UNITS, ("kind", "after"), width)
    whole = [f"{_words(name)} {_number(value)}" for name, value in health.whole.items()]
    if whole:
        lines += ["", *_wrap("whole model: " + ", ".join(whole), width)]
    if health.heads:
        shares = [f"{name} {share:.0%}" for name, share in health.heads.items()]
        lines += ["", *_wrap(f"attention entropy of the lowest head, of its maximum: {', '.join(shares)}", width)]
    lines += _unmeasured(health, width)
    verdict = health.verdict
    lines += ["", *(part for line in verdict.lines() for part in _wrap(f"! {line}", width))]
    lines += _wrap(f"verdict: {verdict} ({verdict.rule})", width)
    if not verdict.sure:
        lines += _wrap(
            "less sure: there was no reference to compare with, so only absolute rules could fire; pass "
            "reference= an earlier Health or a fresh model",
            width,
        )
    for sign, remedy in verdict.remedies().items():
        lines += _wrap(f"  {sign}: {remedy}", width)
    return "\n".join(lines)


def _unmeasured(health: Health, width: int) -> list[str]:
    grouped: dict[tuple[str, str], list[str]] = {}
    for each in health.unmeasured:
        grouped.setdefault((each.what, each.reason), []).append(each.name or "(model)")
    lines = ["", "not measured:"] if grouped else []
    for (what, reason), names in grouped.items():
        shown = ", ".join(names[:_MOST_UNMEASURED])
        shown += f" and {len(names) - _MOST_UNMEASURED} more" if len(names) > _MOST_UNMEASURED else ""
        lines += _wrap(f"  {what} of {shown}: {reason}", width)
    return lines


def compared(comparison: Comparison, width: int) -> str:
    """A Comparison as text, largest change first."""

    def size(ratio: float) -> float:
        return 0.0 if math.isnan(ratio) else abs(math.log(abs(ratio))) if 0 < abs(ratio) < math.inf else math.inf

    ordered = sorted(comparison.rows, key=lambda row: -size(row.ratio))
    cells = [(row.name, _number(row.then), _number(row.now), _ratio(row.ratio)) for row in ordered]
    lines = _aligned([("measure", "then", "now", "now ÷ then"), *cells[:_MOST_CHANGES]], width)
    if len(cells) > _MOST_CHANGES:
        lines.append(f"… {len(cells) - _MOST_CHANGES} more, changed less, in .rows")
    if comparison.only_one:
        lines.append(f"measured once only: {len(comparison.only_one)} ({', '.join(comparison.only_one[:4])}, …)")
    return "\n".join(lines)


def _table(
    title: str,
    layers: Mapping[str, Mapping[str, float]],
    health: Health,
    columns: Sequence[tuple[str, str, str]],
    words: tuple[str, str],
    width: int,
) -> list[str]:
    rows = [[title, *words, *(heading for heading, _, _ in columns)]]
    for layer, numbers in layers.items():
        about = health.about.get(layer, {})
        cells = [layer or "(model)", *(about.get(word, "") for word in words)]
        rows.append(cells + [_cell(numbers.get(name), how) for _, name, how in columns])
    kept = [at for at in range(len(rows[0])) if at == 0 or any(row[at] for row in rows[1:])]
    # On a narrow terminal the last columns go first: they are the least telling.
    while len(kept) > 5 and _width(rows, kept) > width:
        kept.pop()
    return ["", *_aligned([[row[at] for at in kept] for row in rows], width)] if layers else []


def _aligned(rows: Sequence[Sequence[str]], width: int) -> list[str]:
    """Columns as wide as their cells; where that is too wide, names lose their middle."""
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    widths[0] = max(min(widths[0], 12), min(widths[0], width - sum(widths[1:]) - 2 * (len(widths) - 1)))
    lines = []
    for row in rows:
        name = row[0]
        if len(name) > widths[0]:
            tail = (widths[0] - 1) * 3 // 5
            name = f"{name[: widths[0] - 1 - tail]}…{name[len(name) - tail :]}"
        cells = [cell.ljust(wide) for cell, wide in zip([name, *row[1:]], widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return lines


def _width(rows: list[list[str]], kept: list[int]) -> int:
    names = min(24, max(len(row[0]) for row in rows))
    return names + sum(2 + max(len(row[at]) for row in rows) for at in kept[1:])


def _wrap(line: str, width: int) -> list[str]:
    return textwrap.wrap(line, width, subsequent_indent="    ", break_on_hyphens=False, drop_whitespace=True)


def _cell(value: float | None, how: str) -> str:
    # An empty cell is unmeasured; a measured zero is shown.
    if value is None:
        return ""
    if how == "share":
        return f"{value:.1%}" if 0 < value < 0.1 else f"{value:.0%}"
    return "∞" if value == math.inf else f"{value:.3g}"


def _ratio(value: float) -> str:
    return "" if math.isnan(value) else "∞" if math.isinf(value) else f"{value:.3g}×"


def _number(value: float) -> str:
    return f"{value:.3g}"


def _words(name: str) -> str:
    return name.replace("_", " ")
