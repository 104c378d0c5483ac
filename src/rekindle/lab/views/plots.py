"""Plots as SVG: curves over tasks with bands, differences with intervals, and one measure against another.

Each takes plain numbers, and gives a `Picture`, wide and for a phone, with a text description for readers who cannot
see it. No library draws what follows light and dark and shows names on hover without a script of its own.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rekindle.lab.views.svg import PHONE, Picture, apart, colors, label, labeled, rule, ticks, wide
from rekindle.report.markup import element, joined
from rekindle.report.words import number

if TYPE_CHECKING:
    from markupsafe import Markup

_ROW, _LABEL_GAP = 24, 15


@dataclass(frozen=True)
class Line:
    """A curve: its name, the places, the values there (None is a gap), and the ends of a band around it."""

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    low: Sequence[float | None] = ()
    high: Sequence[float | None] = ()


@dataclass(frozen=True)
class Whisker:
    """One line of a forest plot."""

    label: str
    value: float
    low: float | None = None
    high: float | None = None


def curves(
    title: str,
    lines: Sequence[Line],
    *,
    x: str,
    y: str,
    named: Sequence[str] | None = None,
    level: tuple[float, str] | None = None,
    start: float | None = None,
    size: tuple[float, float] = (1000, 380),
    note: str = "",
    phone: bool = False,
) -> Picture:
    """Lines with bands, each with its name at its end; on a phone the names stand below.

    `named` are the ones in color, and their order (all by default); the others are thin and gray. `level` is a
    dotted line with its name, such as chance. `start` is a value that the axis has to hold, such as 0.
    """
    lines = [line for line in lines if any(value is not None for value in line.y)]
    named = [line.name for line in lines] if named is None else [n for n in named if any(n == li.name for li in lines)]
    ink = colors(named)
    every = [v for line in lines for v in (*line.y, *line.low, *line.high) if v is not None] or [0.0, 1.0]
    every += [] if start is None else [start]
    every += [] if level is None else [level[0]]
    marked = ticks(min(every), max(every))
    places = [place for line in lines for place in line.x] or [0.0, 1.0]
    first, last = min(places), max(places)
    shown = labeled(marked)
    left, right = 34 + max(map(wide, shown)), 22 + max([wide(name) for name in ink], default=0.0)
    if phone:
        size, right = (PHONE, 240.0), 8.0
    across = _axis(first, last, left, size[0] - right)
    down = _axis(marked[0], marked[-1], size[1] - 44, 14)
    marks: list[Any] = [_axes(marked, shown, down, (left, size[0] - right), x, y, size)]
    whole = _whole_numbers(first, last, 6 if phone else 13)
    marks += [label(f"{place:g}", across(place), size[1] - 26, "middle") for place in whole]
    if level is not None:
        at = down(level[0])
        dotted = f"M{left:.1f},{at:.1f} H{size[0] - right:.1f}"
        marks.append(element("path", class_="zero", stroke_dasharray="2 4", d=dotted))
        marks.append(label(level[1], left + 6, at - 5))
    # Gray first, then from the last named to the first: what matters most lies on top.
    order = sorted(lines, key=lambda line: -named.index(line.name) if line.name in ink else -len(named))
    marks += [_band(line, ink.get(line.name, "rest"), across, down) for line in order]
    marks += [_curve(line, ink.get(line.name, "rest"), across, down) for line in order]
    ends = {line.name: down(_last(line.y)) for line in lines if ink.get(line.name, "rest") != "rest"}
    if phone:
        below, high = _legend({name: ink[name] for name in ink if name in ends}, size[1])
        marks, size = [*marks, *below], (size[0], high)
    for name, at in apart({} if phone else ends, _LABEL_GAP, 16, size[1] - 46).items():
        edge = size[0] - right
        marks.append(rule(edge + 2, ends[name], edge + 11, at, f"lead {ink[name]}"))
        marks.append(label(name, edge + 14, at + 4, kind=f"name {ink[name]}"))
    gray = sum(ink.get(line.name, "rest") == "rest" for line in lines)
    told = "; ".join(
        f"{line.name} from {number(next(v for v in line.y if v is not None))} to {number(_last(line.y))}"
        for line in lines
    )
    more = f"{gray} more in gray; point at a line for its name." if gray else ""
    small = None
    if not phone:
        small = curves(title, lines, x=x, y=y, named=named, level=level, start=start, phone=True)
    described = f"{title}: {told}."
    return Picture(title, described, *size, joined(marks), " ".join(filter(None, (note, more))), small)


def _legend(ink: Mapping[str, str], top: float) -> tuple[list[Markup], float]:
    """Names with a piece of their line, as many beside each other as fit; and where they end."""
    marks, x, y = [], 10.0, top + 14
    for name, kind in ink.items():
        if x > 10 and x + 26 + wide(name) > PHONE:
            x, y = 10.0, y + 18
        marks.append(rule(x, y - 4, x + 18, y - 4, f"line {kind}"))
        marks.append(label(name, x + 23, y, kind=f"name {kind}"))
        x += 36 + wide(name)
    return marks, y + 8


def forest(
    title: str,
    intervals: Sequence[Whisker],
    *,
    x: str,
    better: str = "",
    worse: str = "",
    named: Sequence[str] | None = None,
    phone: bool = False,
) -> Picture:
    """Differences with their intervals around a line at zero, the numbers beside them; on a phone above them.

    `better` and `worse` say what lies to the right and to the left of zero; `named` are the arms in color.
    """
    ends = [v for each in intervals for v in (each.value, each.low, each.high) if v is not None]
    marked = ticks(min([0.0, *ends]), max([0.0, *ends]), 6)
    largest = max([abs(end) for end in ends], default=0.0)
    decimals = 1 if largest >= 10 else 2 if largest >= 1 else 3
    said = [_interval_text(each, decimals) for each in intervals]
    left = 34 + max(wide(each.label) for each in intervals)
    right = 18 + max([wide(each) for each in said], default=0.0)
    width = max(1000.0, left + right + 260)
    row = _ROW
    if phone:
        left, right, width, row = 24.0, 24.0, PHONE, 40
        if marked:
            marked = ticks(marked[0], marked[-1], 4)
    height = 18 + row * len(intervals) + 62 + 16 * phone
    across = _axis(marked[0], marked[-1], left, width - right)
    bottom = height - 58 - 16 * phone
    marks: list[Any] = [rule(across(v), 10, across(v), bottom, "zero" if v == 0 else "grid") for v in marked]
    marks += [
        label(s, across(v), bottom + 16, "middle") for v, s in zip(marked, labeled(marked, signed=True), strict=True)
    ]
    below = textwrap.wrap(x, 44) if phone else [x]
    for place, part in enumerate(below):
        marks.append(
            label(part, (left + width - right) / 2, height - 8 - 16 * (len(below) - 1 - place), "middle", "said")
        )
    # Beside the zero, unless there is no room for it.
    if worse and across(0) - 8 > wide(f"← {worse}"):
        marks.append(label(f"← {worse}", across(0) - 8, bottom + 34, "end"))
    if better and width - across(0) - 8 > wide(f"{better} →"):
        marks.append(label(f"{better} →", across(0) + 8, bottom + 34))
    ink = colors([each.label for each in intervals] if named is None else named)
    for place, (each, told) in enumerate(zip(intervals, said, strict=True)):
        kind = ink.get(each.label, "rest")
        marks.append(_whisker(each, told, kind, across, 28.0 + place * row, width - right, phone))
    described = "; ".join(f"{each.label} {told}" for each, told in zip(intervals, said, strict=True))
    small = None if phone else forest(title, intervals, x=x, better=better, worse=worse, named=named, phone=True)
    return Picture(title, f"{title}: {described}.", width, height, joined(marks), narrow=small)


def _axis(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    spread = (high - low) or 1.0
    return lambda value: start + (end - start) * (value - low) / spread


def _axes(
    marked: Sequence[float],
    shown: Sequence[str],
    down: Callable[[float], float],
    ends: tuple[float, float],
    x: str,
    y: str,
    size: tuple[float, float],
) -> Markup:
    """The lines across with their numbers, and the names of both axes."""
    left, right = ends
    parts = [rule(left, down(value), right, down(value), "grid") for value in marked]
    parts += [label(said, left - 8, down(v) + 4, "end") for v, said in zip(marked, shown, strict=True)]
    parts.append(label(x, (left + right) / 2, size[1] - 6, "middle", "said"))
    middle = 14 + (size[1] - 58) / 2
    said = y if 6.6 * len(y) / 2 <= middle else y.rpartition(", ")[2]  # the title has the name, the unit is enough
    parts.append(label(said, 14, middle, "middle", "said", turn=True))
    return joined(parts)


def _whole_numbers(first: float, last: float, most: int) -> list[float]:
    """Whole numbers between the ends, the first always among them."""
    count = int(last - first)
    step = next(s for s in (1, 2, 3, 5, 10, 20, 50, 100, 200, 500, 10**9) if count / s <= most)
    return [first + at for at in range(0, count + 1, step)]


def _dot(kind: str, x: float, y: float, radius: float, told: str = "") -> Markup:
    title = [element("title", told)] if told else []
    return element("circle", *title, class_=f"dot {kind}", cx=x, cy=y, r=radius)


def _band(line: Line, kind: str, across: Callable[[float], float], down: Callable[[float], float]) -> Markup | str:
    known = [
        (across(place), down(low), down(high))
        for place, low, high in zip(line.x, line.low, line.high, strict=False)
        if low is not None and high is not None
    ]
    if len(known) < 2:
        return ""
    there = [f"{place:.1f},{high:.1f}" for place, _, high in known]
    back = [f"{place:.1f},{low:.1f}" for place, low, _ in reversed(known)]
    return element("path", class_=f"band {kind}", d=f"M{' L'.join(there + back)}Z")


def _curve(line: Line, kind: str, across: Callable[[float], float], down: Callable[[float], float]) -> Markup:
    pieces: list[list[str]] = [[]]
    for place, value in zip(line.x, line.y, strict=True):
        if value is None:
            pieces.append([])
        else:
            pieces[-1].append(f"{across(place):.1f},{down(value):.1f}")
    path = " ".join(f"M{' L'.join(piece)}" for piece in pieces if len(piece) > 1)
    alone = [piece[0].split(",") for piece in pieces if len(piece) == 1]
    dots = [_dot(kind, float(x), float(y), 3.5) for x, y in alone]
    told = f"{line.name}: {', '.join(number(value) or '–' for value in line.y)}"
    drawn = [element("path", class_=f"line {kind}", d=path), element("path", class_="hit", d=path)] if path else []
    return element("g", element("title", told), *drawn, *dots)


def _whisker(
    each: Whisker, told: str, kind: str, across: Callable[[float], float], at: float, edge: float, phone: bool
) -> Markup:
    y = at + 11 if phone else at - 4
    parts = [label(each.label, 10, at, kind=f"name {kind}")]
    if each.low is not None and each.high is not None:
        parts.append(rule(across(each.low), y, across(each.high), y, f"bar {kind}"))
        parts += [rule(across(end), y - 4, across(end), y + 4, f"bar {kind}") for end in (each.low, each.high)]
    parts.append(_dot(kind, across(each.value), y, 5.0))
    parts.append(label(told, PHONE - 6, at, "end") if phone else label(told, edge + 12, at))
    return joined(parts)


def _interval_text(each: Whisker, decimals: int) -> str:
    value = _signed(each.value, decimals)
    if each.low is None or each.high is None:
        return value
    return f"{value} [{_signed(each.low, decimals)}, {_signed(each.high, decimals)}]"


def _signed(value: float, decimals: int) -> str:
    shown = f"{abs(value):.{decimals}f}"
    sign = "" if not shown.strip("0.") else "−" if value < 0 else "+"
    return f"{sign}{shown}"


def _last(values: Sequence[float | None]) -> float:
    return next(value for value in reversed(values) if value is not None)
