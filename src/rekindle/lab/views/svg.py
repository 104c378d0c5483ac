"""What every plot is drawn with: colors, ticks, labels that keep apart, and the picture as a part of a page or a file.

Colors are classes of the style, so that one picture serves light and dark. Color-blind readers can distinguish them,
and color is never the only cue: lines also differ in their dashes and carry their names.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from rekindle.report.markup import element

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
    ".pic text{fill:var(--dim);font-size:12px;paint-order:stroke;stroke:var(--card);stroke-width:3px}"
    ".pic .name{fill:var(--ink);font-weight:600}"
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
_MOVING = (
    "@keyframes draw{from{clip-path:inset(0 100% 0 0)}60%,to{clip-path:inset(0 0 0 0)}}"
    ".drawn{animation:draw 10s linear 3}@media (prefers-reduced-motion:reduce){.drawn{animation:none}}"
)
_HEADING = 34
PHONE = 330.0  # wide on a phone of 390 pixels, margins and card taken off


def colors(names: Sequence[str]) -> dict[str, str]:
    """A class for each name: the known ones their own, the next ones in turn, and gray where colors run out."""
    taken = {name: f"k{_FIXED[name]}" for name in names if name in _FIXED}
    free = iter(f"k{at}" for at in range(len(_FIXED), COLORS))
    return {name: taken.get(name) or next(free, "rest") for name in names}


@dataclass(frozen=True)
class Picture:
    """A drawing with its title and a text description; a part of a page or a file of its own."""

    title: str
    described: str
    width: float
    height: float
    marks: Markup | str
    note: str = ""
    narrow: Picture | None = None  # the same for a phone

    def figure(self) -> Markup:
        """For the page, whose style colors it."""
        kinds = [(self, "pic")] if self.narrow is None else [(self, "pic large"), (self.narrow, "pic small")]
        drawings = [each._drawing(kind, self.described) for each, kind in kinds]
        return element(
            "figure",
            element("figcaption", self.title),
            element("div", *drawings, class_="scroll", tabindex=0, role="group", aria_label=self.title),
            *([element("p", self.note, class_="note")] if self.note else []),
            class_="picture",
        )

    def _drawing(self, kind: str, described: str) -> Markup:
        size = {"viewBox": f"0 0 {self.width:.0f} {self.height:.0f}", "width": f"{self.width:.0f}"}
        size["height"] = f"{self.height:.0f}"
        return element("svg", self.marks, class_=kind, **size, role="img", aria_label=described)

    def file(self, moving: bool = False) -> str:
        """An SVG file with its own style: follows the reader's light or dark, on a ground of its own.

        A moving one is drawn from left to right, three times, and then stays; at once for readers who want no motion.
        """
        high = self.height + _HEADING
        drawing = element(
            "svg",
            element("title", self.title),
            element("desc", self.described),
            element("style", f"{_ALONE}{STYLE}{_MOVING if moving else ''}"),
            element("rect", width="100%", height="100%", rx=10, style="fill:var(--card)"),
            element("text", self.title, class_="title", x=14, y=24),
            element("g", element("g", self.marks, class_="drawn"), transform=f"translate(0 {_HEADING})"),
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
    """Round numbers that span from `low` to `high`, both included."""
    if high <= low:
        spread = abs(low) * 0.1
        low, high = low - spread, high + (spread or 1.0)
    rough = (high - low) / max(about - 1, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next((power * each for each in (1, 2, 2.5, 5) if power * each >= rough * 0.999), power * 10)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{at * step:.10g}") for at in range(first, last + 1)]


def labeled(values: Sequence[float], *, signed: bool = False) -> list[str]:
    """Ticks as text with as many decimals as their step needs."""
    step = min((b - a for a, b in pairwise(values)), default=1.0)
    decimals = next((d for d in range(7) if abs(round(step, d) - step) < 1e-9 * max(1.0, step)), 6)
    found = []
    for value in values:
        shown = f"{value:,.{decimals}f}".replace("-", "−")
        found.append(f"+{shown}" if signed and value > 0 else shown)
    return found


def apart(wanted: Mapping[str, float], gap: float, low: float, high: float) -> dict[str, float]:
    """Heights for labels as near as possible to where they belong, at least `gap` apart and within bounds."""
    order = sorted(wanted, key=lambda name: wanted[name])
    # Neighbors that would touch are joined into a group, which sits where its members' mean is.
    groups: list[list[str]] = [[name] for name in order]

    def center(group: list[str]) -> float:
        half = gap * (len(group) - 1) / 2
        mean = sum(wanted[name] for name in group) / len(group)
        return min(max(mean, low + half), max(high - half, low + half))

    joined = True
    while joined:
        joined = False
        for at in range(len(groups) - 1):
            first, second = groups[at], groups[at + 1]
            room = gap * (len(first) + len(second)) / 2
            if center(second) - center(first) < room - 1e-9:
                groups[at : at + 2] = [first + second]
                joined = True
                break
    return {
        name: center(group) + gap * (at - (len(group) - 1) / 2) for group in groups for at, name in enumerate(group)
    }


def wide(words: str) -> float:
    """About how many units a label takes."""
    return 7.4 * len(words)


def label(
    said: str, x: float, y: float, anchor: str | None = None, kind: str | None = None, turn: bool = False
) -> Markup:
    """A text, upright or turned."""
    turned = f"rotate(-90 {x:.1f} {y:.1f})" if turn else None
    return element("text", said, x=float(x), y=float(y), class_=kind, text_anchor=anchor, transform=turned)


def rule(x1: float, y1: float, x2: float, y2: float, kind: str) -> Markup:
    """A straight line."""
    return element("line", class_=kind, x1=float(x1), y1=float(y1), x2=float(x2), y2=float(y2))
