"""Which remedy on which stream: paired differences to one arm, as a table and as one picture.

found = Atlas.of(study.results().comparisons.values(), ["he-reset", "nearest-he-heads"])
print(found.markdown())
Path("atlas.svg").write_text(found.picture().file())
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rekindle.lab.results.comparison import NOTHING, ArmComparison
from rekindle.lab.results.statistics import Difference
from rekindle.lab.results.wording import Measure, measure
from rekindle.lab.views.svg import Picture, label
from rekindle.report.markup import element

_WIDE, _HIGH, _TOP = 36, 25, 66  # of a cell, and what the streams' names take: seven fit 390 pixels


@dataclass(frozen=True)
class AtlasCell:
    """One remedy on one stream: its difference to the reference, as a gain (positive is better)."""

    remedy: str
    stream: str
    difference: Difference
    measured: Measure

    @property
    def gain(self) -> float:
        """In points; of losses in hundredths of a nat; of returns as they are."""
        size = 1.0 if self.measured.name.startswith("mean return") else 100.0
        return (size if self.measured.higher else -size) * self.difference.mean

    @property
    def sure(self) -> bool:
        """Whether the interval leaves zero out."""
        low, high = self.difference.low, self.difference.high
        return low is not None and high is not None and not low <= 0.0 <= high


@dataclass(frozen=True)
class Atlas:
    """Gains by remedy and stream, in the order of the rows and columns."""

    remedies: tuple[str, ...]
    streams: tuple[str, ...]
    cells: dict[tuple[str, str], AtlasCell]
    reference: str = NOTHING

    @classmethod
    def of(
        cls,
        found: Iterable[ArmComparison],
        remedies: Sequence[str] | None = None,
        reference: str = NOTHING,
        metric: str = "headline",
    ) -> Atlas:
        """The arms of these settings against the reference; all arms but it unless `remedies` are named.

        metric: "headline", or a number of the task rows, averaged over the same last tasks.
        """
        listed = [each for each in found if reference in each.values]
        names = dict.fromkeys(arm for each in listed for arm in each.values if arm != reference)
        rows = tuple(names) if remedies is None else tuple(remedies)
        cells = {}
        for each in listed:
            for arm in rows:
                difference = each.differences(metric, reference).get(arm)
                if difference is not None:
                    measured = each.headline if metric == "headline" else measure(metric)
                    cells[arm, each.name] = AtlasCell(arm, each.name, difference, measured)
        if not cells:
            raise ValueError(f"no study here has finished runs of {reference!r} and of {', '.join(rows) or 'an arm'}")
        return cls(rows, tuple(each.name for each in listed), cells, reference)

    def to_dict(self) -> dict[str, Any]:
        """All cells, ready for JSON."""
        cells = [
            {"remedy": c.remedy, "stream": c.stream, "gain": c.gain, "difference": c.difference.to_dict()}
            for c in self.cells.values()
        ]
        return {"reference": self.reference, "cells": cells}

    def markdown(self) -> str:
        """A table with one gain per cell; what may be chance is in brackets."""
        lines = [f"| gain over {self.reference} | {' | '.join(self.streams)} |", "|---|" + "---|" * len(self.streams)]
        for remedy in self.remedies:
            shown = [self._cell_text(self.cells.get((remedy, stream))) for stream in self.streams]
            lines.append(f"| {remedy} | {' | '.join(shown)} |")
        return "\n".join(lines)

    @staticmethod
    def _cell_text(cell: AtlasCell | None) -> str:
        if cell is None:
            return "–"
        text = f"{cell.gain:+.1f}".replace("-", "−")
        return text if cell.sure else f"({text})"

    def picture(self) -> Picture:
        """A heat map: color is the share of the largest gain or loss on that stream."""
        marks = []
        left = 10 + 6.9 * max(map(len, self.remedies))
        for at, stream in enumerate(self.streams):
            x = left + at * _WIDE + _WIDE / 2 + 4
            turn = f"rotate(-38 {x:.0f} {_TOP - 8})"
            marks.append(element("text", stream, x=x, y=_TOP - 8, class_="said", transform=turn, font_size=10))
            largest = max((abs(c.gain) for c in self.cells.values() if c.stream == stream), default=0.0) or 1.0
            for row, remedy in enumerate(self.remedies):
                cell = self.cells.get((remedy, stream))
                if cell is not None:
                    marks += self._cell_marks(cell, cell.gain / largest, left + at * _WIDE, _TOP + row * _HIGH)
        for row, remedy in enumerate(self.remedies):
            marks.append(label(remedy, left - 6, _TOP + row * _HIGH + 17, "end", "said"))
        width, height = left + len(self.streams) * _WIDE + 40, _TOP + len(self.remedies) * _HIGH + 10
        described = "; ".join(f"{c.remedy} on {c.stream} {c.gain:+.1f}" for c in self.cells.values())
        note = "Bold: the interval leaves zero out."
        return Picture(f"Gain over {self.reference}", described, width, height, element("g", *marks), note)

    def _cell_marks(self, cell: AtlasCell, share: float, x: float, y: float) -> list[Any]:
        color = "#0b6aa8" if share > 0 else "#b3450a"
        box = {"x": x + 1, "y": y + 1, "width": _WIDE - 2, "height": _HIGH - 2, "rx": 3}
        fill = element("rect", **box, fill=color, opacity=f"{0.08 + 0.62 * abs(share):.2f}")
        shown = f"{cell.gain:+.0f}" if abs(cell.gain) >= 9.5 else f"{cell.gain:+.1f}"
        weight = {"font_weight": 650} if cell.sure else {}
        at = {"x": x + _WIDE / 2, "y": y + 16, "text_anchor": "middle", "class_": "said"}
        return [fill, element("text", shown.replace("-", "−"), **at, **weight)]
