"""Pictures of a study: curves over tasks with bands, differences with intervals, and one measure against another.

Each takes plain numbers, and gives a `Picture` whose words say what it shows to whoever cannot see it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rekindle.lab.canvas import Picture, apart, colours, labelled, rule, ticks, wide, words
from rekindle.report.words import number, text

_ROW = 24
_LABEL_GAP = 15


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
    colour: str = ""
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

    `named` are the ones in colour, and their order (all by default); the others are thin and grey. `level` is a
    dotted line with its name, such as chance. `start` is a value that the axis has to hold, such as 0.

    >>> drawn = curves("Accuracy", [Line("fire", [1, 2], [0.5, 0.6])], x="task", y="accuracy")
    >>> drawn.described
    'Accuracy: fire from 0.5 to 0.6.'
    """
    lines = [line for line in lines if any(value is not None for value in line.y)]
    named = [line.name for line in lines] if named is None else [n for n in named if any(n == li.name for li in lines)]
    ink = colours(named)
    every = [v for line in lines for v in (*line.y, *line.low, *line.high) if v is not None] or [0.0, 1.0]
    every += [] if start is None else [start]
    every += [] if level is None else [level[0]]
    marked = ticks(min(every), max(every))
    places = [place for line in lines for place in line.x] or [0.0, 1.0]
    first, last = min(places), max(places)
    shown = labelled(marked)
    left, right = 34 + max(map(wide, shown)), 22 + max([wide(name) for name in ink], default=0.0)
    across = _scale(first, last, left, size[0] - right)
    down = _scale(marked[0], marked[-1], size[1] - 44, 14)
    marks = [_sides(marked, shown, down, (left, size[0] - right), x, y, size)]
    marks += [words(f"{place:g}", across(place), size[1] - 26, "middle") for place in _whole(first, last)]
    if level is not None:
        at = down(level[0])
        marks.append(f'<path class="zero" stroke-dasharray="2 4" d="M{left:.1f},{at:.1f} H{size[0] - right:.1f}"/>')
        marks.append(words(level[1], left + 6, at - 5))
    order = sorted(lines, key=lambda line: named.index(line.name) if line.name in ink else -1, reverse=False)
    # Grey first, then from the last named to the first: what matters most lies on top.
    order = [li for li in order if li.name not in ink] + [li for li in reversed(order) if li.name in ink]
    marks += [_band(line, ink.get(line.name, "rest"), across, down) for line in order]
    marks += [_curve(line, ink.get(line.name, "rest"), across, down) for line in order]
    ends = {line.name: down(_last(line.y)) for line in lines if ink.get(line.name, "rest") != "rest"}
    for name, at in apart(ends, _LABEL_GAP, 16, size[1] - 46).items():
        edge = size[0] - right
        marks.append(rule(edge + 2, ends[name], edge + 11, at, f"lead {ink[name]}"))
        marks.append(words(name, edge + 14, at + 4, kind=f"name {ink[name]}"))
    grey = sum(ink.get(line.name, "rest") == "rest" for line in lines)
    told = "; ".join(
        f"{line.name} from {number(next(v for v in line.y if v is not None))} to {number(_last(line.y))}"
        for line in lines
    )
    more = f"{grey} more in grey; point at a line for its name." if grey else ""
    return Picture(title, f"{title}: {told}.", *size, "".join(marks), " ".join(filter(None, (note, more))))


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

    `better` and `worse` say what lies to the right and to the left of zero; `named` are the arms in colour.

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
    left = 34 + max([wide(each.label) + (12 if each.group else 0) for each in intervals] + [wide(g) for g in groups])
    right = 18 + max([wide(each) for each in said], default=0.0)
    width = max(1000.0, left + right + 260)
    lines = len(intervals) + sum(bool(group) for group in groups)
    height = 18 + _ROW * lines + 62
    across = _scale(marked[0], marked[-1], left, width - right)
    bottom = height - 58
    marks = [rule(across(v), 10, across(v), bottom, "zero" if v == 0 else "grid") for v in marked]
    marks += [
        words(s, across(v), bottom + 16, "middle") for v, s in zip(marked, labelled(marked, signed=True), strict=True)
    ]
    marks.append(words(x, (left + width - right) / 2, height - 8, "middle", "said"))
    if worse:
        marks.append(words(f"← {worse}", across(0) - 8, height - 24, "end"))
    if better:
        marks.append(words(f"{better} →", across(0) + 8, height - 24))
    ink = colours(list(dict.fromkeys(each.colour or each.label for each in intervals)) if named is None else named)
    at = 28.0
    for group in groups:
        if group:
            marks.append(words(group, 10, at, kind="said"))
            at += _ROW
        for each, told in zip(intervals, said, strict=True):
            if each.group == group:
                kind = ink.get(each.colour or each.label, "rest")
                marks.append(_whisker(each, told, kind, across, at, width - right))
                at += _ROW
    spoken = "; ".join(
        f"{f'{each.group}, ' if each.group else ''}{each.label} {told}"
        for each, told in zip(intervals, said, strict=True)
    )
    note = " ".join(dict.fromkeys(each.note for each in intervals if each.note))
    return Picture(title, f"{title}: {spoken}.", width, height, "".join(marks), note)


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
    ink = colours([dot.name for dot in dots] if named is None else named)
    xs = ticks(*_span([v for dot in dots for v in (dot.x, *(dot.x_ends or ()))]))
    ys = ticks(*_span([v for dot in dots for v in (dot.y, *(dot.y_ends or ()))]))
    shown = labelled(ys)
    left, right = 34 + max(map(wide, shown)), 26 + max([wide(dot.name) for dot in dots], default=0.0) * 0.6
    across = _scale(xs[0], xs[-1], left, size[0] - right)
    down = _scale(ys[0], ys[-1], size[1] - 44, 14)
    marks = [_sides(ys, shown, down, (left, size[0] - right), x, y, size)]
    for value, said in zip(xs, labelled(xs), strict=True):
        marks.append(rule(across(value), 14, across(value), size[1] - 44, "grid"))
        marks.append(words(said, across(value), size[1] - 26, "middle"))
    for dot in dots:
        kind = ink.get(dot.name, "rest")
        if dot.x_ends:
            marks.append(rule(across(dot.x_ends[0]), down(dot.y), across(dot.x_ends[1]), down(dot.y), f"thin {kind}"))
        if dot.y_ends:
            marks.append(rule(across(dot.x), down(dot.y_ends[0]), across(dot.x), down(dot.y_ends[1]), f"thin {kind}"))
    heights = apart({dot.name: down(dot.y) - 8 for dot in dots}, 14, 14, size[1] - 48)
    for dot in dots:
        kind = ink.get(dot.name, "rest")
        told = f"{dot.name}: {x} {number(dot.x)}, {y} {number(dot.y)}"
        marks.append(
            f'<circle class="dot {kind}" cx="{across(dot.x):.1f}" cy="{down(dot.y):.1f}" r="5.5">'
            f"<title>{text(told)}</title></circle>"
        )
        marks.append(words(dot.name, across(dot.x) + 9, heights[dot.name] + 4, kind=f"name {kind}"))
    spoken = "; ".join(f"{dot.name} at {number(dot.x)} and {number(dot.y)}" for dot in dots)
    return Picture(title, f"{title}, {y} against {x}: {spoken}.", *size, "".join(marks), note)


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
) -> str:
    """The lines across with their numbers, and the names of both axes."""
    left, right = ends
    parts = [rule(left, down(value), right, down(value), "grid") for value in marked]
    parts += [words(said, left - 8, down(v) + 4, "end") for v, said in zip(marked, shown, strict=True)]
    parts.append(words(x, (left + right) / 2, size[1] - 6, "middle", "said"))
    parts.append(words(y, 14, 14 + (size[1] - 58) / 2, "middle", "said", turn=True))
    return "".join(parts)


def _whole(first: float, last: float) -> list[float]:
    """Whole numbers between the ends, the first always among them."""
    count = int(last - first)
    step = next(s for s in (1, 2, 3, 5, 10, 20, 50, 100, 200, 500, 10**9) if count / s <= 13)
    return [first + at for at in range(0, count + 1, step)]


def _band(line: Line, kind: str, across: Callable[[float], float], down: Callable[[float], float]) -> str:
    known = [
        (across(place), down(low), down(high))
        for place, low, high in zip(line.x, line.low, line.high, strict=False)
        if low is not None and high is not None
    ]
    if len(known) < 2:
        return ""
    there = [f"{place:.1f},{high:.1f}" for place, _, high in known]
    back = [f"{place:.1f},{low:.1f}" for place, low, _ in reversed(known)]
    return f'<path class="band {kind}" d="M{" L".join(there + back)}Z"/>'


def _curve(line: Line, kind: str, across: Callable[[float], float], down: Callable[[float], float]) -> str:
    pieces: list[list[str]] = [[]]
    for place, value in zip(line.x, line.y, strict=True):
        if value is None:
            pieces.append([])
        else:
            pieces[-1].append(f"{across(place):.1f},{down(value):.1f}")
    path = " ".join(f"M{' L'.join(piece)}" for piece in pieces if len(piece) > 1)
    alone = [piece[0].split(",") for piece in pieces if len(piece) == 1]
    dots = "".join(f'<circle class="dot {kind}" cx="{a}" cy="{b}" r="3.5"/>' for a, b in alone)
    told = f"{line.name}: {', '.join(number(value) or '–' for value in line.y)}"
    drawn = f'<path class="line {kind}" d="{path}"/><path class="hit" d="{path}"/>' if path else ""
    return f"<g><title>{text(told)}</title>{drawn}{dots}</g>"


def _whisker(each: Interval, told: str, kind: str, across: Callable[[float], float], at: float, edge: float) -> str:
    y = at - 4
    parts = [words(each.label, 22 if each.group else 10, at, kind=f"name {kind}")]
    if each.low is not None and each.high is not None:
        parts.append(rule(across(each.low), y, across(each.high), y, f"bar {kind}"))
        parts += [rule(across(end), y - 4, across(end), y + 4, f"bar {kind}") for end in (each.low, each.high)]
    parts.append(f'<circle class="dot {kind}" cx="{across(each.value):.1f}" cy="{y:.1f}" r="5"/>')
    parts.append(words(told, edge + 12, at))
    return "".join(parts)


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
