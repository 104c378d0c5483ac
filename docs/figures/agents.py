"""Makes docs/images/agents.svg: an agent that stops learning new tasks, and one that is treated at each switch.

    python docs/figures/agents.py

The runs are those of docs/evidence/rl.md: PPO on CartPole, whose observations come in a new order at each task.
"""

from __future__ import annotations

import json
import tarfile
from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import Any

from rekindle.lab.views.plots import Line, curves

DOCS = Path(__file__).parents[1]
RUNS = DOCS / "evidence" / "runs" / "rl-observations.tar.gz"
SETTING, ARMS = "ppo-cartpole-short", ("nothing", "fire", "full-reset")
STEPS = 8192  # of a task
JOINED = 4  # points of a task's curve that become one, for it is noisy


def returns() -> dict[str, dict[int, list[float]]]:
    """By arm and environment step: the mean return since the place before, one per seed."""
    found: dict[str, dict[int, list[float]]] = {arm: defaultdict(list) for arm in ARMS}
    with tarfile.open(RUNS) as packed:
        for member in packed.getmembers():
            file = packed.extractfile(member)
            rows: list[dict[str, Any]] = [] if file is None else [json.loads(line) for line in file]
            run = rows[0]["run"] if rows else None
            if run is None or run["setting"]["name"] != SETTING or run["arm"]["name"] not in ARMS:
                continue
            begun = 0
            for row in rows:
                if row["kind"] == "task":
                    points = row["curve"]
                    for first in range(0, len(points), JOINED):
                        near = points[first : first + JOINED]
                        if known := [value for _, value, _ in near if value is not None]:
                            found[run["arm"]["name"]][begun + near[-1][0]].append(fmean(known))
                    begun += row["steps"]
    return found


def main() -> None:
    """Draw both arms over all tasks."""
    lines = []
    for arm, points in returns().items():
        places = sorted(points)
        means = [fmean(points[place]) for place in places]
        lines.append(Line(arm, [0, *(place / STEPS for place in places)], [None, *means]))
    drawn = curves(
        "Return of PPO on CartPole, whose observations come in a new order at each task (mean of five seeds)",
        lines,
        x="tasks done",
        y="return",
        named=ARMS,
        start=0.0,
    )
    (DOCS / "images" / "agents.svg").write_text(drawn.file(), "utf-8")
    print(drawn.described)


if __name__ == "__main__":
    main()
