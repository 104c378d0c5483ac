"""The comparisons that a study wrote down before its first run, and nothing else.

    for claim in planned(study.results()):
        print(claim)

Holm's correction is over exactly these. A list of arms stands for the one that did best on the seeds of tuning. A
comparison with `same` is a test of equivalence: two one-sided t-tests of the paired difference against ± that margin.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean, stdev
from typing import Any

from rekindle.lab.results.metrics import final
from rekindle.lab.results.statistics import Difference, holm, paired, scipy_stats
from rekindle.lab.results.study import Results
from rekindle.lab.results.wording import measure

LEVEL = 0.05


@dataclass(frozen=True)
class PlannedComparison:
    """One comparison in one setting: arm − other of the headline, paired by seed.

    `p` is of a difference, or of the lack of one larger than `same`; `holm` the same corrected over all claims of the
    study; `end` is the difference of the last tasks' accuracy at their end, where the headline is while learning.
    """

    setting: str
    about: str
    arm: str
    minus: str
    difference: Difference
    same: float | None
    higher: bool
    p: float | None
    holm: float | None = None
    end: Difference | None = None

    @property
    def verdict(self) -> str:
        """ "better", "worse", "the same", or "open" where the runs do not decide."""
        if self.holm is None or self.holm >= LEVEL:
            return "open"
        if self.same is not None:
            return "the same"
        return "better" if (self.difference.mean > 0) == self.higher else "worse"

    def to_dict(self) -> dict[str, Any]:
        """All fields, ready for JSON."""
        return {**asdict(self), "verdict": self.verdict}

    def __str__(self) -> str:
        return f"{self.setting}: {self.arm} − {self.minus} = {self.difference}, {self.verdict}"


def planned(results: Results) -> list[PlannedComparison]:
    """Every comparison of the study, in every setting that has finished both arms."""
    found = []
    for setting in results.study["settings"]:
        for wanted in results.study.get("comparisons", ()):
            if setting["name"] in wanted.get("settings", [setting["name"]]):
                claim = _claim(results, setting, wanted)
                found += [] if claim is None else [claim]
    corrected = holm({str(place): claim.p for place, claim in enumerate(found)})
    return [replace(claim, holm=corrected[str(place)]) for place, claim in enumerate(found)]


def _claim(results: Results, setting: Mapping[str, Any], wanted: Mapping[str, Any]) -> PlannedComparison | None:
    name, metric = setting["name"], setting["headline"]
    first, second = names = [_best(results, setting, wanted[key]) for key in ("arm", "minus")]
    arm, other = (values(results, name, each, metric) for each in names)
    difference = paired(arm, other)
    if difference is None:
        return None
    same = wanted.get("same")
    p = difference.p if same is None else equivalence(arm, other, float(same))
    end = None
    if metric.startswith("online"):
        after = metric.replace("online", "train")
        end = paired(*(values(results, name, each, after) for each in names))
    about = wanted.get("about", "")
    higher = measure(metric).higher
    return PlannedComparison(name, about, first, second, difference, same, higher, p, end=end)


def _best(results: Results, setting: Mapping[str, Any], names: str | Sequence[str]) -> str:
    """The arm; of several the one whose chosen configuration did best on the seeds of tuning."""
    if isinstance(names, str):
        return names
    sign = 1.0 if measure(setting["headline"]).higher else -1.0

    def tuned(name: str) -> float:
        choice = (results.choices or {}).get((setting["name"], name))
        known = [] if choice is None else [sign * value for value in choice.values if value is not None]
        return max(known, default=-math.inf)

    return max(names, key=tuned)


def values(results: Results, setting: str, arm: str, metric: str) -> dict[int, float]:
    """A metric of the last tasks, by seed, of the finished runs of an arm."""
    entries = [each for each in results.entries if each.setting.name == setting and each.name == arm]
    found = {e.seed: final(e.record.rows, metric, e.setting.last) for e in entries if e.record.state == "finished"}
    return {seed: value for seed, value in found.items() if value is not None}


def equivalence(arm: Mapping[int, float], other: Mapping[int, float], margin: float) -> float | None:
    """The p-value of "they differ by the margin or more": the larger one of two one-sided paired t-tests.

    >>> a = {seed: 0.50 + 0.001 * seed for seed in range(5)}
    >>> b = {seed: 0.50 - 0.001 * seed for seed in range(5)}
    >>> equivalence(a, b, 0.02) < 0.05 < equivalence(a, b, 0.004)
    True
    """
    gaps = [arm[seed] - other[seed] for seed in arm.keys() & other.keys()]
    if len(gaps) < 2:
        return None
    error = stdev(gaps) / math.sqrt(len(gaps))
    if error == 0:
        return 0.0 if abs(fmean(gaps)) < margin else 1.0
    distance = (margin - abs(fmean(gaps))) / error
    return float(scipy_stats().t.sf(distance, len(gaps) - 1))
