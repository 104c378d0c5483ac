"""The same small budget of tuning for every arm: a few configurations, chosen on seeds that are never reported.

Published comparisons tune the new method and take the old ones as they are. Here every arm tries as many
configurations as any other (its own coefficient, or the learning rate), on seeds 100 and 101, judged by the setting's
headline; the chosen one is then run on the reported seeds and shown beside the untuned one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from rekindle.lab.arms import Arm

SEEDS = (100, 101)
BUDGET = 4
RATES = (0.5, 2.0, 0.25, 4.0)
"""Factors of the learning rate that fill up the budget of an arm that names fewer configurations."""


def candidates(arm: Arm, budget: int = BUDGET) -> list[Arm]:
    """The arm itself and what may be tried instead, exactly `budget` in all."""
    found = arm.variants()
    if len(found) > budget:
        raise ValueError(
            f"arm {arm.name!r} names {len(found)} configurations, itself included; every arm has the same {budget}: "
            "take some out of its tuning"
        )
    for rate in RATES:
        more = replace(arm, lr=rate * (arm.lr or 1.0))
        if len(found) < budget and more not in found:
            found.append(more)
    return found


def at_rates(arm: Arm, rates: Sequence[float]) -> list[Arm]:
    """The arm at each of these factors of the learning rate."""
    return [replace(arm, lr=float(rate) * (arm.lr or 1.0)) for rate in rates]


@dataclass(frozen=True)
class TunedChoice:
    """The configuration that did best on the tuning seeds: its place among the candidates, and all their values.

    `arm` is None, and `note` says why, if no candidate finished on every tuning seed.
    """

    arm: Arm | None
    place: int | None
    values: tuple[float | None, ...]
    note: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """All fields, ready for JSON."""
        arm = None if self.arm is None else self.arm.to_dict()
        return {"arm": arm, "place": self.place, "values": list(self.values), "note": self.note}


def choose(tried: Sequence[Arm], values: Sequence[Mapping[int, float]], *, falling: bool) -> TunedChoice:
    """The candidate with the best mean over the tuning seeds; of equals the first, so that the default stays.

    values: for each candidate the headline by seed. One that did not finish on every tuning seed is out.
    """
    means = [fmean(value[seed] for seed in SEEDS) if all(seed in value for seed in SEEDS) else None for value in values]
    places = [place for place, mean in enumerate(means) if mean is not None]
    if not places:
        return TunedChoice(None, None, tuple(means), "no configuration finished on the tuning seeds")
    sign = 1.0 if falling else -1.0
    best = min(places, key=lambda place: (sign * (means[place] or 0.0), place))
    return TunedChoice(tried[best], best, tuple(means))


def tuned_name(name: str) -> str:
    """The name of a tuned arm."""
    return f"{name} (tuned)"
