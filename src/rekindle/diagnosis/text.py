"""How a Health and a Comparison read when printed: one row a layer, one line a finding, then the verdict."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from rekindle.tables import number, share, table, wrapped

if TYPE_CHECKING:
    from rekindle.diagnosis.examination import Comparison, Health

# heading: measure
_WEIGHTS = {
    **{"norm": "norm", "DfI/k": "dfi_per_dimension", "scale-free": "dfi_scale_free", "σ max": "spectral_norm"},
    **{"cond.": "condition_number", "eff. rank": "effective_rank", "part. rank": "participation_rank"},
    **{"zero rows": "dead_rows", "similar": "similar_pairs"},
}
_UNITS = {
    **{"units": "units", "dormant": "dormant", "dead": "dead", "usage": "usage", "eff. rank": "feature_rank"},
    **{"of": "rank_limit", "linear": "linearised", "saturated": "saturation", "∂ dormant": "gradient_dormant"},
}
_SHARES = {"similar_pairs", "dormant", "dead", "usage", "linearised", "saturation", "gradient_dormant"}
_wrap = partial(wrapped, indent="    ")
_MOST_UNMEASURED = 6
_MOST_CHANGES = 40


def described(health: Health, width: int) -> str:
    """The whole of a Health as text."""
    lines = [f"Health ({health.mode}, {health.seconds:.2g} s)"]
    lines += _layers("weights", health.weights, health, _WEIGHTS, ("role", "shape"), width)
    lines += _layers("units", health.units, health, _UNITS, ("kind", "at"), width)
    whole = [f"{name.replace('_', ' ')} {number(value)}" for name, value in health.whole.items()]
    if whole:
        lines += ["", *_wrap("whole model: " + ", ".join(whole), width)]
    if health.heads:
        shares = [f"{name} {share:.0%}" for name, share in health.heads.items()]
        lines += ["", *_wrap(f"attention entropy of the lowest head, of its maximum: {', '.join(shares)}", width)]
    lines += _unmeasured(health, width)
    verdict = health.verdict
    lines += ["", *(part for line in verdict.lines() for part in _wrap(f"! {line}", width))]
    lines += _wrap(f"verdict: {concluded(health)}", width)
    if not verdict.sure and verdict != "unknown":
        lines += _wrap(
            "low confidence: there is no reference to compare with, so only absolute rules could fire; pass "
            "reference= an earlier Health or a fresh model",
            width,
        )
    for sign, remedy in verdict.remedies().items():
        lines += _wrap(f"  {sign}: {remedy}", width)
    return "\n".join(lines)


def concluded(health: Health) -> str:
    """The verdict with its rule; without signs, weights alone do not make a network healthy: its neurons may be dead.

    >>> from torch import nn
    >>> from rekindle.diagnosis.examination import health
    >>> concluded(health(nn.Linear(3, 3)))
    'no sign in the weights (activity not measured, 1 of 1 weights read)'
    """
    if health.verdict != "healthy" or health.units:
        return f"{health.verdict} ({health.verdict.rule})"
    read = len({name.partition("[")[0] for name in health.weights})
    skipped = sum(each.what == "weight" for each in health.unmeasured)
    return f"no sign in the weights (activity not measured, {read} of {read + skipped} weights read)"


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
    cells = [(row.name, number(row.then), number(row.now), _ratio(row.ratio)) for row in ordered]
    lines = table(("measure", "then", "now", "now ÷ then"), cells[:_MOST_CHANGES], width)
    if len(cells) > _MOST_CHANGES:
        lines.append(f"… {len(cells) - _MOST_CHANGES} more, changed less, in .rows")
    if comparison.only_one:
        lines.append(f"measured once only: {len(comparison.only_one)} ({', '.join(comparison.only_one[:4])}, …)")
    return "\n".join(lines)


def _layers(
    title: str,
    layers: Mapping[str, Mapping[str, float]],
    health: Health,
    columns: Mapping[str, str],
    words: tuple[str, str],
    width: int,
) -> list[str]:
    rows = []
    for layer, numbers in layers.items():
        about = health.about.get(layer, {})
        cells = [layer or "(model)", *(about.get(word, "") for word in words)]
        rows.append(cells + [(share if name in _SHARES else number)(numbers.get(name)) for name in columns.values()])
    head = [title, *words, *columns]
    # On a narrow terminal the last columns go first: they are the least telling.
    lines = table(head, rows, width, left=(0, 1, 2), drop=range(len(head) - 1, 4, -1))
    return ["", *lines] if layers else []


def _ratio(value: float) -> str:
    return "" if math.isnan(value) else "∞" if math.isinf(value) else f"{value:.3g}×"
