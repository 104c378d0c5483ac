"""From a result to what the page shows: one row per layer, its columns, the verdict as text, reasons counted.

A result is a dict with any of `health`, `after`, `changes`, `receipt`, `plan`, `spectra`, `source`, `target`; each
is what the object of that name gives as `to_dict()`. What is missing is left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rekindle.report.words import number, plural

Numbers = Mapping[str, Any]
MOVED = "the function has changed: train the network before it is used"
_LEVELS = ("healthy", "watch", "act")
_DIFFERENCES = {
    "only_A": "only in A",
    "only_B": "only in B",
    "shape": "another shape in B",
    "dtype": "another dtype in B",
}


@dataclass(frozen=True)
class BlockRow:
    """One block: its numbers before and after (A and B in a comparison), and what was found about it."""

    name: str
    role: str = ""
    shape: str = ""
    before: Numbers = field(default_factory=dict)
    after: Numbers = field(default_factory=dict)
    change: Numbers = field(default_factory=dict)
    record: Numbers = field(default_factory=dict)
    curves: Mapping[str, Any] = field(default_factory=dict)
    findings: tuple[Numbers, ...] = ()

    @property
    def level(self) -> str:
        """The worst of its findings."""
        return max((f["level"] for f in self.findings), key=_LEVELS.index, default="")

    @property
    def rank(self) -> int:
        """Its level as a number: 0 without findings, 2 for "act"."""
        return _LEVELS.index(self.level or "healthy")

    @property
    def changed(self) -> bool:
        """Whether a remedy, or the time between two files, changed it."""
        return bool(self.record or self.change.get("sfe"))

    @property
    def volume(self) -> int:
        """How many numbers it holds."""
        return math.prod(int(part) for part in self.shape.replace("·", "×").split("×") if part.isdigit())

    @property
    def smaller(self) -> int | None:
        """k, the number of singular values."""
        sides = self.shape.rpartition("·")[2].split("×")
        return min(map(int, sides)) if len(sides) == 2 and all(side.isdigit() for side in sides) else None

    def rank_share(self, which: str) -> float | None:
        """Effective rank ÷ k, for `before` or `after`."""
        numbers: Numbers = getattr(self, which)
        rank = numbers.get("effective_rank", numbers.get("participation_rank"))
        return rank / self.smaller if rank is not None and self.smaller else None


@dataclass(frozen=True)
class Headline:
    """The first thing to read."""

    level: str
    word: str
    sentence: str
    more: tuple[str, ...] = ()


def rows(data: Mapping[str, Any]) -> list[BlockRow]:
    """One row for every block that any part of the result mentions, in the order of the file.

    >>> rows({"health": {"weights": {"a.weight": {"norm": 2.0}}, "about": {"a.weight": {"role": "query"}}}})[0].role
    'query'
    """
    health, after = data.get("health") or {}, data.get("after") or {}
    records = {_block_name(r): r for r in (data.get("receipt") or {}).get("records", ())}
    changes = {c["name"]: c for c in data.get("changes") or ()}
    spectra = data.get("spectra") or {}
    judged = after if data.get("command") == "compare" else health
    findings: dict[str, list[Numbers]] = {}
    for finding in judged.get("findings", ()):
        findings.setdefault(finding["layer"], []).append(finding)
    broken = {**health.get("broken", {}), **after.get("broken", {})}
    names = dict.fromkeys((*health.get("weights", {}), *after.get("weights", {}), *records, *changes, *broken))
    found = []
    for name in names:
        about = {**health.get("about", {}).get(name, {}), **after.get("about", {}).get(name, {})}
        record = records.get(name, {})
        found.append(
            BlockRow(
                name,
                about.get("role") or record.get("role", ""),
                about.get("shape") or _shape(record),
                health.get("weights", {}).get(name) or _recorded(record, "before"),
                after.get("weights", {}).get(name) or _recorded(record, "after"),
                changes.get(name, {}),
                record,
                {k: v for k, v in (spectra.get(name) or {}).items() if v},
                tuple(findings.get(name, ())),
            )
        )
    return found


def sides(data: Mapping[str, Any]) -> dict[str, str]:
    """What the two columns of numbers are called.

    >>> sides({"command": "compare"})
    {'before': 'A', 'after': 'B'}
    """
    return {"before": "A", "after": "B"} if data.get("command") == "compare" else {"before": "before", "after": "after"}


@dataclass(frozen=True)
class Column:
    """A heading, what it means, and how a row gives its value; `pair` shows two with an arrow."""

    heading: str
    meaning: str
    value: Callable[[BlockRow], Any]
    pair: Callable[[BlockRow], Any] | None = None
    kind: str = ""

    def cell(self, row: BlockRow) -> tuple[str, str | None]:
        """What a row shows in this column, and the number that it is sorted by."""
        value, pair = self.value(row), self.pair(row) if self.pair else None
        shown = number(value, self.kind)
        if pair is not None:
            shown = f"{shown} → {number(pair, self.kind)}" if shown else number(pair, self.kind)
        # Before a remedy the layers differ, after it they are similar; of two moments the later one counts.
        sort = pair if pair is not None and (row.change or value is None) else value
        return shown, f"{sort:.6g}" if present(sort) and not math.isnan(sort) else None


_FRAME = "how much of the directions stayed, tr(Q_Aᵀ Q_B) ÷ k; 1 if only the spectrum changed"
_ANGLE = "the largest angle, in degrees, between the leading output directions of A and B"


def columns(table: Sequence[BlockRow]) -> list[Column]:
    """The columns that this result can fill.

    >>> [column.heading for column in columns([BlockRow("a", before={"norm": 1.0})])]
    ['‖W‖']
    """
    both = any(row.after for row in table)

    def measured(heading: str, meaning: str, key: str, kind: str = "") -> Column:
        after = (lambda row: row.after.get(key)) if both else None
        return Column(heading, meaning, lambda row: row.before.get(key), after, kind)

    share = Column(
        "eff. rank ÷ k",
        "effective rank as a share of its maximum",
        lambda row: row.rank_share("before"),
        (lambda row: row.rank_share("after")) if both else None,
        "share",
    )
    listed = [
        Column("drift", "‖B − A‖ ÷ ‖A‖", lambda row: row.change.get("drift")),
        Column(
            "SFE ÷ ‖W‖²",
            "squared Frobenius error, relative",
            lambda row: row.change.get("sfe_relative", row.record.get("sfe_relative")),
        ),
        measured("DfI ÷ k", "deviation from isometry per dimension, at the paper's scale", "dfi_per_dimension"),
        measured("scale-free", "the same at the matrix's own scale: 1 for a random square matrix", "dfi_scale_free"),
        share,
        measured("σ max", "largest singular value", "spectral_norm"),
        measured("‖W‖", "Frobenius norm", "norm"),
        Column("frame", _FRAME, lambda row: row.change.get("frame")),
        Column("angle out", _ANGLE, lambda row: row.change.get("angle_out")),
        Column("residual", "DfI per dimension of what was written", lambda row: row.record.get("residual_stored")),
    ]
    if not both:
        listed += [
            measured("condition", "σ max ÷ σ min", "condition_number"),
            measured("zero rows", "neurons without any weight", "dead_rows"),
            measured("similar", "share of neuron pairs that are nearly parallel", "similar_pairs", "share"),
        ]
    return [c for c in listed if any(present(c.value(row)) or (c.pair and present(c.pair(row))) for row in table)]


def present(value: object) -> bool:
    """Whether a number was measured.

    >>> present(0.0), present(None), present("∞")
    (True, False, False)
    """
    return isinstance(value, int | float) and not isinstance(value, bool)


def headline(data: Mapping[str, Any], table: Sequence[BlockRow]) -> Headline:
    """What the page says first.

    >>> headline({"plan": {"entries": [{"reason": None}, {"reason": "bias"}]}}, []).sentence
    '1 of 2 parameters would be projected.'
    """
    health, after, receipt = data.get("health"), data.get("after"), data.get("receipt")
    if data.get("changes") is not None and after:
        moved = sum(1 for row in table if row.change.get("sfe"))
        more = (data.get("tired") or {}).get("text", "")
        said = f"{moved} of {plural(len(data['changes']), 'block')} changed. {_sentence(more)}"
        level, word = _verdict(after)
        lines = [f"B judged against A: {after['rule']}.", *_scope(after)]
        if moved:
            lines += [
                _sentence(how_far(data.get("outputs_moved"))),
                f"If nothing was trained between A and B, {MOVED}.",
            ]
        return Headline(level, f"B: {word}", said, tuple(lines))
    if receipt:
        return _done(receipt, health, after)
    if health:
        lines = list(_scope(health))
        if not health.get("sure"):
            lines.append("There was no earlier checkpoint to compare with, so only absolute rules could fire.")
        lines += [f"Next: {data['next']}"] if data.get("next") else []
        return Headline(*_verdict(health), _judged(health, table), tuple(lines))
    if data.get("plan"):
        entries = data["plan"]["entries"]
        chosen = sum(entry["reason"] is None for entry in entries)
        return Headline("plan", "plan", f"{chosen} of {plural(len(entries), 'parameter')} would be projected.")
    return Headline("plan", "empty", "This result holds nothing to show.")


def reasons(data: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    """Why tensors were skipped or not measured: each reason with the names that it holds for, most first.

    >>> reasons({"receipt": {"skipped": {"a": "bias", "b": "head", "c": "bias"}}})
    [('bias', ['a', 'c']), ('head', ['b'])]
    """
    grouped: dict[str, list[str]] = {}
    skipped = (data.get("receipt") or {}).get("skipped", {})
    planned = {e["name"]: e["reason"] for e in (data.get("plan") or {}).get("entries", ()) if e["reason"]}
    unmeasured = {}
    if not skipped and not planned:
        unmeasured = {u["name"] if "name" in u else u["layer"]: u["reason"] for u in _unmeasured(data)}
    for name, reason in {**planned, **skipped, **unmeasured}.items():
        grouped.setdefault(reason, []).append(name)
    for kind, names in (data.get("differences") or {}).items():
        if names:
            grouped[_DIFFERENCES.get(kind, kind)] = list(names)
    return sorted(grouped.items(), key=lambda item: -len(item[1]))


def signs(findings: Sequence[Numbers]) -> list[dict[str, Any]]:
    """Findings grouped by sign and level: what was found, in which layers, what helps, worst first."""
    grouped: dict[tuple[str, str], list[Numbers]] = {}
    for finding in findings:
        grouped.setdefault((finding["sign"], finding["level"]), []).append(finding)
    listed = [
        {
            "sign": sign,
            "level": level,
            "layers": [f["layer"] for f in group if f["layer"]],
            "text": group[0]["text"],
            "rule": group[0]["rule"],
            "remedy": group[0]["remedy"],
        }
        for (sign, level), group in grouped.items()
    ]
    return sorted(listed, key=lambda item: (-_LEVELS.index(item["level"]), -len(item["layers"])))


def _done(receipt: Mapping[str, Any], health: Mapping[str, Any] | None, after: Mapping[str, Any] | None) -> Headline:
    totals = receipt.get("totals", {})
    missed = [r for r in receipt.get("records", ()) if r.get("converged") is False]
    count = totals.get("matrices", 0)
    exact = receipt.get("settings", {}).get("strength", 1) in (1, 1.0)
    said = f"{plural(count, 'matrix', 'matrices')} of {plural(totals.get('parameters', 0), 'parameter')} "
    if receipt.get("method") != "fire":
        said += f"changed by {receipt.get('method')}."
    elif missed:
        said += f"projected; {len(missed)} blocks missed the tolerance."
    else:
        said += "replaced by their nearest isometries." if exact else "pulled towards their nearest isometries."
    more = []
    if totals.get("dfi_before") is not None and totals.get("dfi_after") is not None:
        more.append(
            f"Deviation from isometry {number(totals['dfi_before'])} → {number(totals['dfi_after'])}, "
            f"at a relative change (SFE) of {number(totals.get('sfe_relative'))}."
        )
    if health and after:
        words = [_verdict(side)[1] for side in (health, after)]
        more.append(f"Verdict: {words[0]} before, {words[1]} after. {' '.join(_scope(health))}")
        if _without_sign(health):
            more.append("The weights gave no reason to change them.")
    if totals.get("matrices"):
        more += [_sentence(how_far(receipt.get("outputs_moved"))), _sentence(MOVED)]
    needless = health is not None and _without_sign(health)
    return Headline("watch" if missed or needless else "done", "watch" if missed else "done", said, tuple(more))


def how_far(outputs_moved: float | None) -> str:
    """How far outputs moved, or that it was not measured.

    >>> how_far(0.5)
    'outputs moved by 50% of their norm on the batches given'
    """
    if outputs_moved is None:
        return "how far outputs moved was not measured (--model with --data measures it)"
    return f"outputs moved by {outputs_moved:.0%} of their norm on the batches given"


def _verdict(health: Mapping[str, Any]) -> tuple[str, str]:
    """Its color and its words."""
    word = health["verdict"]
    return word, health["rule"].partition(",")[0] if word == "unknown" and _without_sign(health) else word


def _without_sign(health: Mapping[str, Any]) -> bool:
    """Whether weights were measured and no rule fired, which does not make the network healthy."""
    return bool(health.get("weights")) and health["verdict"] in ("healthy", "unknown")


def _scope(health: Mapping[str, Any]) -> list[str]:
    """What was not measured."""
    if health.get("units"):
        return []
    read = len({name.partition("[")[0] for name in health.get("weights", {})})
    skipped = sum(each.get("what") == "weight" for each in health.get("unmeasured", ()))
    return [f"From the weights alone: activity not measured, {read} of {read + skipped} weights read."]


def _judged(health: Mapping[str, Any], table: Sequence[BlockRow]) -> str:
    count = len(health.get("weights", {}))
    # A sign may be of a layer's neurons ("0"), which is no row of the table of weights ("0.weight").
    found = [finding for finding in health.get("findings", ()) if finding.get("layer")]
    worst = max((finding["level"] for finding in found), key=_LEVELS.index, default=None)
    marked = len({finding["layer"] for finding in found if finding["level"] == worst})
    if _without_sign(health):
        return f"None of {plural(count, 'block')} shows a sign of lost plasticity in its weights."
    if health["verdict"] == "unknown":
        return _sentence(health["rule"])
    if not marked:
        return f"The model as a whole shows signs: {health['rule']}."
    return f"{plural(marked, 'layer')} {'show' if marked > 1 else 'shows'} signs: {health['rule']}."


def _unmeasured(data: Mapping[str, Any]) -> list[Numbers]:
    listed = (data.get("health") or {}).get("unmeasured", ())
    return [u for u in listed if u.get("name", u.get("layer"))]


def _sentence(words: str) -> str:
    return words[:1].upper() + words[1:] + "." * (bool(words) and not words.endswith("."))


def _block_name(record: Mapping[str, Any]) -> str:
    return f"{record['name']}[{record['part']}]" if record.get("part") else str(record["name"])


def _shape(record: Mapping[str, Any]) -> str:
    if not record.get("out"):
        return ""
    several = f"{record['count']}·" if record.get("count", 1) > 1 else ""
    return f"{several}{record['out']}×{record['in_']}"


def _recorded(record: Mapping[str, Any], when: str) -> dict[str, Any]:
    """The numbers of a receipt under the names of health, for a result that holds nothing else."""
    values = record.get("values", {})
    found = {
        "dfi_per_dimension": record.get(f"dfi_{when}_per_dimension"),
        "dfi_scale_free": record.get(f"dfi_free_{when}"),
        "norm": record.get(f"norm_{when}"),
        "spectral_norm": record.get(f"spectral_{when}"),
        "effective_rank": values.get(f"effective_rank_{when}"),
        "stable_rank": values.get(f"stable_rank_{when}"),
        "condition_number": values.get(f"condition_number_{when}"),
    }
    return {key: value for key, value in found.items() if value is not None}
