"""Draw what is left of each remedy when norms are equal, from the runs of studies/norms.yaml or norms-continual.yaml.

    python benchmarks/norms.py results/lab/norms docs/evidence/norms.svg

Settings whose name ends in `-norm-NUMBER` gave every arm that norm at a boundary; the others leave norms to the arms.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path

from rekindle.advice.intervals import mean_interval
from rekindle.lab.views.svg import Picture, apart, colors, label, labelled, rule, ticks
from rekindle.report.markup import element, joined

LEFT, RIGHT, TOP, BOTTOM = 60.0, 640.0, 14.0, 380.0
Values = dict[str, dict[str, list[float]]]


def values(folder: Path) -> Values:
    """Norm → arm → headline of every whole run: the mean over the setting's last tasks."""
    found: Values = defaultdict(lambda: defaultdict(list))
    for path in sorted(folder.rglob("*.jsonl")):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        if not rows or rows[-1]["kind"] != "end":
            continue
        run = rows[0]["run"]
        _, marked, norm = run["setting"]["name"].rpartition("-norm-")
        scores = [row[run["setting"]["headline"]] for row in rows if row["kind"] == "task"]
        last = scores[-run["setting"]["last"] :]
        found[norm if marked else "as it is"][run["arm"]["name"]].append(sum(last) / len(last))
    return found


def picture(found: Values) -> str:
    """Lines over norms, one per arm, with 95 % intervals over seeds."""
    norms = sorted(found, key=lambda norm: float("inf") if norm == "as it is" else float(norm), reverse=True)
    arms = list(dict.fromkeys(name for norm in norms for name in found[norm]))
    known = {(norm, arm): mean_interval(found[norm][arm]) for norm in norms for arm in arms if found[norm][arm]}
    heights = ticks(min(low for _, (low, _) in known.values()), max(high for _, (_, high) in known.values()))

    def down(value: float) -> float:
        return BOTTOM - (value - heights[0]) / (heights[-1] - heights[0]) * (BOTTOM - TOP)

    def across(norm: str, arm: str) -> float:
        step = (RIGHT - LEFT) / len(norms)
        return LEFT + step * (norms.index(norm) + 0.5) + 7 * (arms.index(arm) - (len(arms) - 1) / 2)

    marks = []
    for value, text in zip(heights, labelled([100 * height for height in heights]), strict=True):
        marks += [rule(LEFT, down(value), RIGHT, down(value), "grid"), label(text, LEFT - 8, down(value) + 4, "end")]
    for norm in norms:
        middle = sum(across(norm, arm) for arm in arms) / len(arms)
        marks.append(label(norm if norm == "as it is" else f"{float(norm):g} × start", middle, BOTTOM + 20, "middle"))
    inks = colors(arms)
    for arm in arms:
        there = [norm for norm in norms if (norm, arm) in known and norm != "as it is"]
        points = " ".join(f"{across(norm, arm):.1f},{down(known[norm, arm][0]):.1f}" for norm in there)
        marks.append(element("polyline", class_=f"line {inks[arm]}", points=points))
        for norm in (norm for norm in norms if (norm, arm) in known):
            mean, (low, high) = known[norm, arm]
            x = across(norm, arm)
            told = element("title", f"{arm}, {norm}: {100 * mean:.1f} [{100 * low:.1f}, {100 * high:.1f}]")
            marks.append(rule(x, down(low), x, down(high), f"thin {inks[arm]}"))
            marks.append(element("circle", told, class_=f"dot {inks[arm]}", cx=x, cy=down(mean), r=4.5))
    ends = {arm: down(known[norms[-1], arm][0]) + 4 for arm in arms if (norms[-1], arm) in known}
    for arm, y in apart(ends, 16, TOP, BOTTOM).items():
        marks.append(label(arm, RIGHT + 6, y, kind=f"name {inks[arm]}"))
    marks.append(label("norm of scale-invariant weights at a boundary", (LEFT + RIGHT) / 2, 420, "middle", "said"))
    marks.append(label("test accuracy, %", 16, (TOP + BOTTOM) / 2, "middle", "said", turn=True))
    title = "What is left of each remedy when the norm is equal?"
    means = [f"{arm} {norm}: {100 * mean:.1f}" for (norm, arm), (mean, _) in known.items()]
    return Picture(title, f"{title} {'; '.join(means)}.", 800, 430, joined(marks)).file()


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(picture(values(Path(sys.argv[1]))), encoding="utf-8")
