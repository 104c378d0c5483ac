"""Plots as SVG: curves over tasks with bands, differences with intervals, and one measure against another.

Each takes plain numbers, and gives a `Picture` whose words say what it shows to whoever cannot see it.

Colors are classes of the style, so that one picture serves light and dark. They are told apart by people who see no
red or green, and never stand alone: lines also differ in their dashes and carry their names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from rekindle.report.markup import element, joined
from rekindle.report.words import number

if TYPE_CHECKING:
    from markupsafe import Markup

# Names that keep their color on every page; the others take what is left, in the order of the study.
_FIXED = {"nothing": 0, "fire": 1, "full-reset": 2}
_LIGHT = ("#6f665e", "#b3450a", "#0b6aa8", "#00795a", "#a13a7c", "#8a6400", "#3d4aa5", "#5c6b12", "#a3253f")
_DARK = ("#aaa097", "#ff9d5c", "#62b6f0", "#3ecf9f", "#ee93c6", "#e3b93f", "#a3adff", "#b9ca58", "#ff8fa3")
_DASHES = ("5 4", "none", "none", "9 3", "none", "2 3", "9 3 2 3", "1 2 5 2", "4 2")
COLORS = len(_LIGHT)


def _variables(colors: Sequence[str]) -> str:
    return "".join(f"--k{at}:{color};" for at, color in enumerate(colors))


STYLE = (
    f":root{{{_variables(_LIGHT)}}}:root[data-theme=dark]{{{_variables(_DARK)}}}"
    f"@media (prefers-color-scheme:dark){{:root:not([data-theme]){{{_variables(_DARK)}}}}}"
    f"@media print{{:root,:root[data-theme]{{{_variables(_LIGHT)}}}}}"
    + "".join(f".k{at}{{--ink:var(--k{at});--dash:{dash}}}" for at, dash in enumerate(_DASHES))
    + ".rest{--ink:var(--dim);--dash:none}"
    ".pic text{fill:var(--dim);font-size:12px}.pic .name{fill:var(--ink);font-weight:600}"
    ".pic .said{fill:var(--text)}.pic .title{fill:var(--text);font-size:15px;font-weight:650}"
    ".pic .grid{stroke:var(--line);stroke-width:1}.pic .zero{stroke:var(--dim);stroke-width:1.2}"
    ".pic .line{fill:none;stroke:var(--ink);stroke-width:2.2;stroke-dasharray:var(--dash);stroke-linejoin:round}"
    ".pic .rest.line{stroke-width:1.2;opacity:.45}.pic .band{fill:var(--ink);opacity:.15;stroke:none}"
    ".pic .rest.band{display:none}.pic .dot{fill:var(--ink);stroke:var(--card);stroke-width:1.2}"
    ".pic .bar{stroke:var(--ink);stroke-width:2.2}.pic .thin{stroke:var(--ink);stroke-width:1.2;opacity:.7}"
    ".pic .lead{stroke:var(--ink);stroke-width:1;opacity:.5}.pic .hit{stroke:transparent;stroke-width:12;fill:none}"
)
_ALONE = (
    ":root{--card:#fff;--text:#1f1a17;--dim:#6b625b;--line:#e6dfd7;color-scheme:light dark;"
    'font-family:system-ui,-apple-system,"Segoe UI",Roboto,"Noto Sans",sans-serif}'
    "@media (prefers-color-scheme:dark){:root{--card:#201c19;--text:#efe9e3;--dim:#aaa097;--line:#3a332e}}"
)
_HEADING, _ROW, _LABEL_GAP = 34, 24, 15


def colors(names: Sequence[str]) -> dict[str, str]:
    """A class for each name: the known ones their own, the next ones in turn, and grey where colors run out.

    >>> colors(["fire", "nothing", "redo"])
    {'fire': 'k1', 'nothing': 'k0', 'redo': 'k3'}
    """
    taken = {name: f"k{_FIXED[name]}" for name in names if name in _FIXED}
    free = iter(f"k{at}" for at in range(len(_FIXED), COLORS))
    return {name: taken.get(name) or next(free, "rest") for name in names}


@dataclass(frozen=True)
class Picture:
    """A drawing with its title and what it shows in words; a part of a page or a file of its own."""

    title: str
    described: str
    width: float
    height: float
    marks: Markup | str
    note: str = ""

    def figure(self) -> Markup:
        """For the page, whose style colors it.

        >>> Picture("A", "nothing", 10, 10, "").figure().startswith('<figure class="picture">')
        True
        """
        size = {"viewBox": f"0 0 {self.width:.0f} {self.height:.0f}", "width": f"{self.width:.0f}"}
        drawing = element(
            "svg", self.marks, class_="pic", **size, height=f"{self.height:.0f}", role="img", aria_label=self.described
        )
        return element(
            "figure",
            element("figcaption", self.title),
            element("div", drawing, class_="scroll", tabindex=0, role="group", aria_label=self.title),
            *([element("p", self.note, class_="note")] if self.note else []),
            class_="picture",
        )

    def file(self) -> str:
        """An SVG file with its own style: follows the reader's light or dark, on a ground of its own.

        >>> Picture("A", "nothing", 10, 10, "").file().startswith("<svg xmlns=")
        True
        """
        high = self.height + _HEADING
        drawing = element(
            "svg",
            element("title", self.title),
            element("desc", self.described),
            element("style", f"{_ALONE}{STYLE}"),
            element("rect", width="100%", height="100%", rx=10, style="fill:var(--card)"),
            element("text", self.title, class_="title", x=14, y=24),
            element("g", self.marks, transform=f"translate(0 {_HEADING})"),
            xmlns="http://www.w3.org/2000/svg",
            class_="pic",
            viewBox=f"0 0 {self.width:.0f} {high:.0f}",
            width=f"{self.width:.0f}",
            height=f"{high:.0f}",
            role="img",
            aria_label=self.described,
        )
        return f"{drawing}\n"


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers that span from `low` to `high`, both included.

    >>> ticks(0.13, 0.52)
    [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
    """
    if high <= low:
        spread = abs(low) * 0.1 or 1.0
        low, high = low - spread, high + spread
    rough = (high - low) / max(about - 1, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next((power * each for each in (1, 2, 2.5, 5) if power * each >= rough * 0.999), power * 10)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{at * step:.10g}") for at in range(first, last + 1)]


def labelled(values: Sequence[float], *, signed: bool = False) -> list[str]:
    """Ticks as text with as many decimals as their step needs.

    >>> labelled([0.0, 0.25, 0.5]), labelled([-1.0, 0.0, 1.0], signed=True)
    (['0.00', '0.25', '0.50'], ['−1', '0', '+1'])
    """
    step = min((b - a for a, b in pairwise(values)), default=1.0)
    decimals = next((d for d in range(7) if abs(round(step, d) - step) < 1e-9 * max(1.0, step)), 6)
    found = []
    for value in values:
        shown = f"{value:,.{decimals}f}".replace("-", "−")
        found.append(f"+{shown}" if signed and value > 0 else shown)
    return found


def apart(wanted: Mapping[str, float], gap: float, low: float, high: float) -> dict[str, float]:
    """Heights for labels as near as possible to where they belong, at least `gap` apart and within bounds.

    >>> apart({"a": 10.0, "b": 11.0}, 10, 0, 100)
    {'a': 5.5, 'b': 15.5}
    """
    order = sorted(wanted, key=lambda name: wanted[name])
    # Neighbours that would touch are joined into a group, which sits where its members' mean is.
    groups: list[list[str]] = [[name] for name in order]

    def centre(group: list[str]) -> float:
        half = gap * (len(group) - 1) / 2
        mean = sum(wanted[name] for name in group) / len(group)
        return min(max(mean, low + half), max(high - half, low + half))

    joined = True
    while joined:
        joined = False
        for at in range(len(groups) - 1):
            first, second = groups[at], groups[at + 1]
            room = gap * (len(first) + len(second)) / 2
            if centre(second) - centre(first) < room - 1e-9:
                groups[at : at + 2] = [first + second]
                joined = True
                break
    return {
        name: centre(group) + gap * (at - (len(group) - 1) / 2) for group in groups for at, name in enumerate(group)
    }


def _wide(words: str) -> float:
    """About how many units a label takes."""
    return 7.4 * len(words)


def _label(
    said: str, x: float, y: float, anchor: str | None = None, kind: str | None = None, turn: bool = False
) -> Markup:
    turned = f"rotate(-90 {x:.1f} {y:.1f})" if turn else None
    return element("text", said, x=float(x), y=float(y), class_=kind, text_anchor=anchor, transform=turned)


def _rule(x1: float, y1: float, x2: float, y2: float, kind: str) -> Markup:
    return element("line", class_=kind, x1=float(x1), y1=float(y1), x2=float(x2), y2=float(y2))


@dataclass(frozen=True)
class Line:
    """A curve: its name, the places, the values there (None is a gap), and the ends of a band around it."""

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    low: Sequence[float | None] = ()
    high: Sequence[float | None] = ()


@dataclass(frozen=True)
class Interval:
    """One line of a forest plot; lines of one group stand together under its name."""

    label: str
    value: float
    low: float | None = None
    high: float | None = None
    group: str = ""
    color: str = ""
    note: str = ""


@dataclass(frozen=True)
class Dot:
    """A point with its name, and the ends of its intervals where known."""

    name: str
    x: float
    y: float
    x_ends: tuple[float, float] | None = None
    y_ends: tuple[float, float] | None = None


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
) -> Picture:
    """Lines with bands, each with its name at its end.

    `named` are the ones in color, and their order (all by default); the others are thin and grey. `level` is a
    dotted line with its name, such as chance. `start` is a value that the axis has to hold, such as 0.

    >>> drawn = curves("Accuracy", [Line("fire", [1, 2], [0.5, 0.6])], x="task", y="accuracy")
    >>> drawn.described
    'Accuracy: fire from 0.5 to 0.6.'
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
    shown = labelled(marked)
    left, right = 34 + max(map(_wide, shown)), 22 + max([_wide(name) for name in ink], default=0.0)
    across = _scale(first, last, left, size[0] - right)
    down = _scale(marked[0], marked[-1], size[1] - 44, 14)
    marks: list[Any] = [_sides(marked, shown, down, (left, size[0] - right), x, y, size)]
    marks += [_label(f"{place:g}", across(place), size[1] - 26, "middle") for place in _whole(first, last)]
    if level is not None:
        at = down(level[0])
        dotted = f"M{left:.1f},{at:.1f} H{size[0] - right:.1f}"
        marks.append(element("path", class_="zero", stroke_dasharray="2 4", d=dotted))
        marks.append(_label(level[1], left + 6, at - 5))
    order = sorted(lines, key=lambda line: named.index(line.name) if line.name in ink else -1, reverse=False)
    # Grey first, then from the last named to the first: what matters most lies on top.
    order = [li for li in order if li.name not in ink] + [li for li in reversed(order) if li.name in ink]
    marks += [_band(line, ink.get(line.name, "rest"), across, down) for line in order]
    marks += [_curve(line, ink.get(line.name, "rest"), across, down) for line in order]
    ends = {line.name: down(_last(line.y)) for line in lines if ink.get(line.name, "rest") != "rest"}
    for name, at in apart(ends, _LABEL_GAP, 16, size[1] - 46).items():
        edge = size[0] - right
        marks.append(_rule(edge + 2, ends[name], edge + 11, at, f"lead {ink[name]}"))
        marks.append(_label(name, edge + 14, at + 4, kind=f"name {ink[name]}"))
    grey = sum(ink.get(line.name, "rest") == "rest" for line in lines)
    told = "; ".join(
        f"{line.name} from {number(next(v for v in line.y if v is not None))} to {number(_last(line.y))}"
        for line in lines
    )
    more = f"{grey} more in grey; point at a line for its name." if grey else ""
    return Picture(title, f"{title}: {told}.", *size, joined(marks), " ".join(filter(None, (note, more))))


def forest(
    title: str,
    intervals: Sequence[Interval],
    *,
    x: str,
    better: str = "",
    worse: str = "",
    named: Sequence[str] | None = None,
) -> Picture:
    """Differences with their intervals around a line at zero, the numbers beside them.

    `better` and `worse` say what lies to the right and to the left of zero; `named` are the arms in color.

    >>> drawn = forest("Against nothing", [Interval("fire", 0.3, 0.2, 0.4)], x="difference in accuracy")
    >>> drawn.described
    'Against nothing: fire +0.300 [+0.200, +0.400].'
    """
    ends = [v for each in intervals for v in (each.value, each.low, each.high) if v is not None]
    marked = ticks(min([0.0, *ends]), max([0.0, *ends]), 6)
    groups = list(dict.fromkeys(each.group for each in intervals))
    largest = max([abs(end) for end in ends], default=0.0)
    decimals = 1 if largest >= 10 else 2 if largest >= 1 else 3
    said = [_told(each, decimals) for each in intervals]
    left = 34 + max([_wide(each.label) + (12 if each.group else 0) for each in intervals] + [_wide(g) for g in groups])
    right = 18 + max([_wide(each) for each in said], default=0.0)
    width = max(1000.0, left + right + 260)
    lines = len(intervals) + sum(bool(group) for group in groups)
    height = 18 + _ROW * lines + 62
    across = _scale(marked[0], marked[-1], left, width - right)
    bottom = height - 58
    marks: list[Any] = [_rule(across(v), 10, across(v), bottom, "zero" if v == 0 else "grid") for v in marked]
    marks += [
        _label(s, across(v), bottom + 16, "middle") for v, s in zip(marked, labelled(marked, signed=True), strict=True)
    ]
    marks.append(_label(x, (left + width - right) / 2, height - 8, "middle", "said"))
    if worse:
        marks.append(_label(f"← {worse}", across(0) - 8, height - 24, "end"))
    if better:
        marks.append(_label(f"{better} →", across(0) + 8, height - 24))
    ink = colors(list(dict.fromkeys(each.color or each.label for each in intervals)) if named is None else named)
    at = 28.0
    for group in groups:
        if group:
            marks.append(_label(group, 10, at, kind="said"))
            at += _ROW
        for each, told in zip(intervals, said, strict=True):
            if each.group == group:
                kind = ink.get(each.color or each.label, "rest")
                marks.append(_whisker(each, told, kind, across, at, width - right))
                at += _ROW
    spoken = "; ".join(
        f"{f'{each.group}, ' if each.group else ''}{each.label} {told}"
        for each, told in zip(intervals, said, strict=True)
    )
    note = " ".join(dict.fromkeys(each.note for each in intervals if each.note))
    return Picture(title, f"{title}: {spoken}.", width, height, joined(marks), note)


def scatter(
    title: str,
    dots: Sequence[Dot],
    *,
    x: str,
    y: str,
    named: Sequence[str] | None = None,
    size: tuple[float, float] = (860, 460),
    note: str = "",
) -> Picture:
    """One measure against another, a named dot an arm, with its intervals as crosses.

    >>> drawn = scatter("Scales", [Dot("paper", 0.5, 0.8), Dot("nearest", 0.7, 0.7)], x="fitting", y="generalising")
    >>> drawn.marks.count("<circle")
    2
    """
    ink = colors([dot.name for dot in dots] if named is None else named)
    xs = ticks(*_span([v for dot in dots for v in (dot.x, *(dot.x_ends or ()))]))
    ys = ticks(*_span([v for dot in dots for v in (dot.y, *(dot.y_ends or ()))]))
    shown = labelled(ys)
    left, right = 34 + max(map(_wide, shown)), 26 + max([_wide(dot.name) for dot in dots], default=0.0) * 0.6
    across = _scale(xs[0], xs[-1], left, size[0] - right)
    down = _scale(ys[0], ys[-1], size[1] - 44, 14)
    marks: list[Any] = [_sides(ys, shown, down, (left, size[0] - right), x, y, size)]
    for value, said in zip(xs, labelled(xs), strict=True):
        marks.append(_rule(across(value), 14, across(value), size[1] - 44, "grid"))
        marks.append(_label(said, across(value), size[1] - 26, "middle"))
    for dot in dots:
        kind = ink.get(dot.name, "rest")
        if dot.x_ends:
            marks.append(_rule(across(dot.x_ends[0]), down(dot.y), across(dot.x_ends[1]), down(dot.y), f"thin {kind}"))
        if dot.y_ends:
            marks.append(_rule(across(dot.x), down(dot.y_ends[0]), across(dot.x), down(dot.y_ends[1]), f"thin {kind}"))
    heights = apart({dot.name: down(dot.y) - 8 for dot in dots}, 14, 14, size[1] - 48)
    for dot in dots:
        kind = ink.get(dot.name, "rest")
        told = f"{dot.name}: {x} {number(dot.x)}, {y} {number(dot.y)}"
        marks.append(_dot(kind, across(dot.x), down(dot.y), 5.5, told))
        marks.append(_label(dot.name, across(dot.x) + 9, heights[dot.name] + 4, kind=f"name {kind}"))
    spoken = "; ".join(f"{dot.name} at {number(dot.x)} and {number(dot.y)}" for dot in dots)
    return Picture(title, f"{title}, {y} against {x}: {spoken}.", *size, joined(marks), note)


def _scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    spread = (high - low) or 1.0
    return lambda value: start + (end - start) * (value - low) / spread


def _sides(
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
    parts = [_rule(left, down(value), right, down(value), "grid") for value in marked]
    parts += [_label(said, left - 8, down(v) + 4, "end") for v, said in zip(marked, shown, strict=True)]
    parts.append(_label(x, (left + right) / 2, size[1] - 6, "middle", "said"))
    parts.append(_label(y, 14, 14 + (size[1] - 58) / 2, "middle", "said", turn=True))
    return joined(parts)


def _whole(first: float, last: float) -> list[float]:
    """Whole numbers between the ends, the first always among them."""
    count = int(last - first)
    step = next(s for s in (1, 2, 3, 5, 10, 20, 50, 100, 200, 500, 10**9) if count / s <= 13)
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


def _whisker(each: Interval, told: str, kind: str, across: Callable[[float], float], at: float, edge: float) -> Markup:
    y = at - 4
    parts = [_label(each.label, 22 if each.group else 10, at, kind=f"name {kind}")]
    if each.low is not None and each.high is not None:
        parts.append(_rule(across(each.low), y, across(each.high), y, f"bar {kind}"))
        parts += [_rule(across(end), y - 4, across(end), y + 4, f"bar {kind}") for end in (each.low, each.high)]
    parts.append(_dot(kind, across(each.value), y, 5.0))
    parts.append(_label(told, edge + 12, at))
    return joined(parts)


def _told(each: Interval, decimals: int) -> str:
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


def _span(values: Sequence[float]) -> tuple[float, float]:
    return (min(values), max(values)) if values else (0.0, 1.0)
