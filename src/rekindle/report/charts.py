"""Charts as inline SVG: a small spectrum for each row, and heat maps over depth. Colors are classes of the style."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rekindle.report.markup import element, joined
from rekindle.report.view import BlockRow
from rekindle.report.words import number

if TYPE_CHECKING:
    from markupsafe import Markup

_SPARK = (104, 28)
_SPARK_POINTS = 24
_MOST_LINES = 28
# Cells between these bounds share a color. The last is the strongest color, and the worse end.
DFI_BOUNDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
RANK_BOUNDS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
DRIFT_BOUNDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)


def sparkline(curves: Mapping[str, Any]) -> Markup | str:
    """The spectra of a row, before and after, in the size of a word; empty without curves.

    >>> sparkline({"before": {"mean": [2.0, 1.0]}}).count("<path")
    2
    """
    drawn = {which: curves[which]["mean"] for which in ("before", "after") if curves.get(which)}
    top = max((value for values in drawn.values() for value in values), default=0.0)
    if not top:
        return ""
    wide, high = _SPARK
    paths = []
    for which, values in drawn.items():
        stride = max(1, -(-len(values) // _SPARK_POINTS))
        kept = values[::stride] if len(values) > 1 else values * 2
        across = wide / (len(kept) - 1)
        points = [(at * across, high - 1 - (high - 3) * value / top) for at, value in enumerate(kept)]
        line = " ".join(f"{x:.0f},{y:.1f}" for x, y in points)
        if len(drawn) == 1:
            paths.append(element("path", class_="under", d=f"M0,{high} L{line} L{wide},{high}Z"))
        paths.append(element("path", class_=which, d=f"M{line}"))
    return element("svg", *paths, class_="spark", viewBox=f"0 0 {wide} {high}", aria_hidden="true")


@dataclass(frozen=True)
class Grid:
    """Layers laid out by depth: which column and line each name has."""

    columns: tuple[str, ...]
    lines: tuple[str, ...]
    places: Mapping[str, tuple[int, int]]


def grid(names: Sequence[str]) -> Grid:
    """Where each layer goes: across by its number (its block of the network), down by the rest of its name.

    >>> found = grid(["h.0.q", "h.0.k", "h.1.q", "h.1.k"])
    >>> found.columns, found.lines, found.places["h.1.k"]
    (('0', '1'), ('q', 'k'), (1, 1))
    """
    split = {name: _split(name) for name in names}
    if len({line for _, _, line in split.values()}) > _MOST_LINES:
        # Many experts or heads: their numbers share a line, and the last one is shown.
        split = {name: (a, b, re.sub(r"\d+", "*", line)) for name, (a, b, line) in split.items()}
    columns = {column: label for column, label, _ in split.values()}
    lines = dict.fromkeys(line for _, _, line in split.values())
    across, down = list(columns), list(lines)
    places = {name: (across.index(column), down.index(line)) for name, (column, _, line) in split.items()}
    return Grid(tuple(columns.values()), tuple(lines), places)


def _split(name: str) -> tuple[str, str, str]:
    """(column, its label, line) of a name."""
    parts = name.split(".")
    at = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    if at is not None:
        prefix, label = ".".join(parts[: at + 1]), parts[at]
        stage = re.search(r"\d+$", parts[at - 1]) if at else None
        return prefix, f"{stage[0]}.{label}" if stage else label, ".".join(parts[at + 1 :]) or "weight"
    numbered = re.match(r"([a-zA-Z_]+?)_?(\d+)(.*)$", name)
    if numbered:
        return f"#{numbered[2]}", numbered[2], f"{numbered[1]}*{numbered[3]}"
    return "", "–", name


def heat_map(
    title: str, rows: Sequence[BlockRow], values: Mapping[str, float | None], bounds: Sequence[float], worse: str
) -> Markup | str:
    """One map: a cell per layer, colored by its value; `worse` is "high" or "low" and takes the strongest color.

    >>> "<rect" in heat_map("DfI", [BlockRow("a.0.w")], {"a.0.w": 0.5}, DFI_BOUNDS, "high")
    True
    """
    known = {name: value for name, value in values.items() if value is not None}
    if not known:
        return ""
    placed = grid([row.name for row in rows])
    label = min(300, 12 + 6.4 * max(len(line) for line in placed.lines))
    cell_w = max(14, min(44, 560 / max(1, len(placed.columns))))
    cell_h = 20
    wide, high = label + cell_w * len(placed.columns) + 4, 20 + cell_h * len(placed.lines) + 4
    every = max(1, -(-len(placed.columns) * 22 // int(cell_w * len(placed.columns))))
    marks = [
        element("text", column, class_="tick", x=label + cell_w * (at + 0.5), y=13, text_anchor="middle")
        for at, column in enumerate(placed.columns)
        if at % every == 0
    ]
    for at, line in enumerate(placed.lines):
        short = line if len(line) <= 46 else f"…{line[-45:]}"
        marks.append(element("text", short, class_="tick", x=label - 8.0, y=20 + cell_h * at + 14, text_anchor="end"))
    for row in rows:
        if row.name not in known:
            continue
        across, down = placed.places[row.name]
        value = known[row.name]
        step = bisect_right(bounds, value)
        shade = step if worse == "high" else len(bounds) - step
        place = {"x": label + cell_w * across + 1.0, "y": 20 + cell_h * down + 1}
        size = {"width": cell_w - 2.0, "height": cell_h - 2, "rx": 3, "data_layer": row.name}
        title_ = element("title", f"{row.name}: {number(value)}")
        marks.append(element("rect", title_, class_=f"q{shade}", **place, **size))
    low, top = min(known.values()), max(known.values())
    described = f"{title}: {len(known)} layers from {number(low)} to {number(top)}; the table has every number"
    size = {"viewBox": f"0 0 {wide:.0f} {high}", "width": f"{wide:.0f}", "height": high}
    drawing = element("svg", *marks, **size, role="img", aria_label=described)
    return element(
        "figure",
        element("figcaption", title),
        element("div", drawing, class_="scroll", tabindex=0, role="group", aria_label=title),
        _legend(bounds, worse),
        class_="heat",
    )


def _legend(bounds: Sequence[float], worse: str) -> Markup:
    shades = range(len(bounds) + 1) if worse == "high" else range(len(bounds), -1, -1)
    # A space inside: HTML knows no element i that ends at once.
    boxes = joined(element("i", " ", class_=f"q{shade}") for shade in shades)
    ramp = element("span", boxes, class_="ramp", aria_hidden="true")
    low, high = element("span", f"< {number(bounds[0])}"), element("span", f"> {number(bounds[-1])}")
    return element("p", low, ramp, high, class_="legend")
