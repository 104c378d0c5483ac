"""The table of layers: which columns a result has, and each row as HTML that can be sorted and filtered."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rekindle.report.charts import sparkline
from rekindle.report.view import Row, sides
from rekindle.report.words import name, number, plural, text

_ORDER = {"act": 2, "watch": 1, "": 0}


@dataclass(frozen=True)
class Column:
    """A heading, what it means, and how a row gives its value; `pair` shows two with an arrow."""

    heading: str
    meaning: str
    value: Callable[[Row], Any]
    pair: Callable[[Row], Any] | None = None
    kind: str = ""


def columns(data: Mapping[str, Any], table: Sequence[Row]) -> list[Column]:
    """The columns that this result can fill.

    >>> [column.heading for column in columns({"command": "inspect"}, [Row("a", before={"norm": 1.0})])]
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
        Column("frame", "1 if only the spectrum changed", lambda row: row.change.get("frame")),
        Column("angle out", "largest angle of the leading output directions", lambda row: row.change.get("angle_out")),
        Column("residual", "DfI per dimension of what was written", lambda row: row.record.get("residual_stored")),
    ]
    if not both:
        listed += [
            measured("condition", "σ max ÷ σ min", "condition_number"),
            measured("zero rows", "neurons without any weight", "dead_rows"),
            measured("similar", "share of neuron pairs that are nearly parallel", "similar_pairs", "share"),
        ]
    return [c for c in listed if any(_present(c.value(row)) or (c.pair and _present(c.pair(row))) for row in table)]


def layer_table(data: Mapping[str, Any], table: Sequence[Row]) -> str:
    """The section with its tools; empty without rows."""
    if not table:
        return ""
    shown = columns(data, table)
    drawn = any(row.curves for row in table)
    heads = [
        ("Layer", "the parameter, and its part in brackets"),
        ("role", "what it does"),
        ("shape", "matrices · out × in"),
    ]
    cells = [_heading(at, heading, meaning) for at, (heading, meaning) in enumerate(heads)]
    if drawn:
        cells.append('<th scope="col" role="columnheader">spectrum</th>')
    first = len(heads)
    cells += [_heading(first + at, c.heading, c.meaning) for at, c in enumerate(shown)]
    body = "".join(_row(at, row, shown, drawn) for at, row in enumerate(table))
    roles = "".join(f"<option>{text(role)}</option>" for role in sorted({row.role for row in table if row.role}))
    titles = [heading for heading, _ in heads] + [column.heading for column in shown]
    orders = "".join(f'<option value="{at}">{text(title)}</option>' for at, title in enumerate(titles))
    names = sides(data)
    arrow = f'<p class="note">An arrow leads from {names["before"]} to {names["after"]}.</p>' if _paired(shown) else ""
    marked = sum(bool(row.findings) for row in table)
    changed = sum(bool(row.record or row.change.get("sfe")) for row in table)
    only = f'<label><input type="checkbox" id="marked"> with findings ({marked})</label>' if marked else ""
    if any(row.record or row.change for row in table):
        only += f'<label><input type="checkbox" id="changed"> changed ({changed})</label>'
    return (
        '<section><h2 id="layers">Layers</h2><form class="tools" role="search" aria-label="Layers">'
        '<label>Filter <input type="search" id="filter" placeholder="name, role or glob such as *.query.*" '
        'autocomplete="off" spellcheck="false"></label>'
        f'<label>Role <select id="role"><option value="">all</option>{roles}</select></label>'
        f'<label>Sort <select id="order"><option value="">as stored</option>{orders}</select></label>'
        f'{only}<output id="count" aria-live="polite">{plural(len(table), "layer")}</output></form>'
        f'{arrow}<div class="scroll wide" tabindex="0" role="group" aria-label="Table of layers">'
        f'<table id="table" role="table"><thead role="rowgroup"><tr role="row">{"".join(cells)}</tr></thead>'
        f'<tbody role="rowgroup">{body}</tbody></table></div></section>'
    )


def _heading(at: int, heading: str, meaning: str) -> str:
    kind = ' class="n"' if at > 2 else ""
    return (
        f'<th scope="col" role="columnheader" aria-sort="none"{kind}>'
        f'<button type="button" data-sort="{at}" title="{text(meaning)}">{text(heading)}</button></th>'
    )


def _row(at: int, row: Row, shown: Sequence[Column], drawn: bool) -> str:
    level = f'<span class="flag {row.level}">{row.level}</span>' if row.level else ""
    state = f' data-changed="{int(bool(row.record or row.change.get("sfe")))}" data-level="{_ORDER[row.level]}"'
    cells = [
        f'<th scope="row" role="rowheader" data-label="Layer"><button type="button" class="open" aria-expanded="false">'
        f"{name(row.name)}</button>{level}</th>",
        f'<td role="cell" data-label="role">{text(row.role)}</td>',
        f'<td role="cell" data-label="shape" data-v="{_volume(row)}">{text(row.shape)}</td>',
    ]
    if drawn:
        cells.append(f'<td role="cell" class="s" data-label="spectrum">{sparkline(row.curves)}</td>')
    cells += [_cell(column, row) for column in shown]
    return f'<tr role="row" data-row="{at}"{state}>{"".join(cells)}</tr>'


def _cell(column: Column, row: Row) -> str:
    value, pair = column.value(row), column.pair(row) if column.pair else None
    shown = number(value, column.kind)
    if pair is not None:
        shown = f"{shown} → {number(pair, column.kind)}" if shown else number(pair, column.kind)
    # Before a remedy the layers differ, after it they are alike; of two moments the later one is in question.
    sort = pair if pair is not None and (row.change or value is None) else value
    attribute = f' data-v="{sort:.6g}"' if _present(sort) and not math.isnan(sort) else ""
    return f'<td role="cell" class="n" data-label="{text(column.heading)}"{attribute}>{shown}</td>'


def _paired(shown: Sequence[Column]) -> bool:
    return any(column.pair for column in shown)


def _volume(row: Row) -> int:
    total = 1
    for part in row.shape.replace("·", "×").split("×"):
        total *= int(part) if part.isdigit() else 1
    return total


def _present(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
