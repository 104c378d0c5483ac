"""One setting of a study as its readers need it: who took part, the values seed by seed, and what they mean in words.

It is made from `Results.to_dict()` alone, so that a page can be made from a file as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from rekindle.lab.comparing import NOTHING, at
from rekindle.lab.pictures import Line
from rekindle.lab.statistics import Difference, Interval, holm, paired, t_interval
from rekindle.lab.wording import Measure, measure, ordinal

Tasks = Sequence[Mapping[str, Any]]
FIRE, FRESH, TUNED = "fire", "full-reset", " (tuned)"


@dataclass(frozen=True)
class Contest:
    """The arms of one setting: `tasks[arm][seed]` are the rows of a finished run, `values[arm][seed]` its headline."""

    setting: Mapping[str, Any]
    table: Sequence[Mapping[str, Any]]
    tasks: Mapping[str, Mapping[int, Tasks]]
    values: Mapping[str, Mapping[int, float]]
    refused: Mapping[str, str] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)
    validity: Mapping[str, Any] = field(default_factory=dict)
    chosen: Mapping[str, str] = field(default_factory=dict)  # by tuning, in words

    @property
    def name(self) -> str:
        """The setting's name."""
        return str(self.setting["name"])

    @property
    def headline(self) -> Measure:
        """What is compared."""
        return measure(str(self.setting["headline"]))

    @property
    def last(self) -> int:
        """How many of the last tasks it is averaged over."""
        return min(
            int(self.setting.get("last", 1)), max((len(t) for s in self.tasks.values() for t in s.values()), default=1)
        )

    @property
    def seeds(self) -> list[int]:
        """All seeds that any arm has finished."""
        return sorted({seed for seeds in self.values.values() for seed in seeds})

    @cached_property
    def ranked(self) -> list[str]:
        """Arms from the best mean to the worst."""
        sign = -1 if self.headline.higher else 1
        return sorted(self.values, key=lambda arm: sign * self.interval(arm).mean)

    def interval(self, arm: str) -> Interval:
        """The headline's mean over seeds with its t-interval."""
        return t_interval(list(self.values[arm].values()))

    def against(self, arm: str, reference: str) -> Difference | None:
        """Arm minus reference, paired by seed."""
        if arm.endswith(TUNED) and not reference.endswith(TUNED):
            reference += TUNED  # the budget is the same on both sides
        if not self.values.get(arm) or not self.values.get(reference):
            return None
        return paired(self.values[arm], self.values[reference])

    def lines(self, *keys: str, times: float = 1.0) -> list[Line]:
        """A curve an arm of the value at `keys` in each task's row, mean and t-interval over the seeds."""
        found = []
        for arm, seeds in self.tasks.items():
            length = max((len(tasks) for tasks in seeds.values()), default=0)
            told: list[Interval | None] = []
            for task in range(length):
                rows = [tasks[task] for tasks in seeds.values() if task < len(tasks)]
                values = [value for row in rows if (value := at(row, keys)) is not None]
                told.append(t_interval([times * value for value in values]) if values else None)
            if any(told):
                means, lows, highs = (
                    [None if each is None else getattr(each, end) for each in told] for end in ("mean", "low", "high")
                )
                found.append(Line(arm, range(1, length + 1), means, lows, highs))
        return found

    def mean(self, arm: str, *keys: str) -> Interval | None:
        """The value at `keys`, over the tasks of a run, then over seeds; None where nobody measured it."""
        runs = []
        for tasks in self.tasks.get(arm, {}).values():
            values = [value for row in tasks if (value := at(row, keys)) is not None]
            runs += [sum(values) / len(values)] if values else []
        return t_interval(runs) if runs else None

    # What was seen, in words

    def said(self) -> list[str]:
        """Sentences computed from the values: was plasticity lost, who won and by how much, did FIRE."""
        return list(self._sentences())

    @property
    def won(self) -> bool:
        """FIRE, tuned or not, has the best mean."""
        return bool(self.ranked) and _base(self.ranked[0]) == FIRE

    def _sentences(self) -> Iterator[str]:
        if not self.ranked:
            yield from self._diverged() if any(self.tasks.values()) else ["No run has finished yet."]
            return
        if self.validity.get("last") is not None:
            yield self._gap() if self.validity.get("note") else self._loss()
        best = self.ranked[0]
        if FIRE in self.values and best != FIRE:
            yield self._not_won(best)
        elif len(self.ranked) > 1:
            yield self._win(best)
        for reference, start in (
            (FRESH, "FIRE instead of a full reset made"),
            ("random-isometry", "Being the nearest isometry rather than a random one made"),
        ):
            difference = self.against(FIRE, reference)
            if difference is not None:
                yield f"{start} {self._told(difference)}{', which is within chance' if _even(difference) else ''}."
        if self.chosen:
            words = "; ".join(f"{_called(arm)}: {words}" for arm, words in self.chosen.items())
            yield f"Tuning, by the same budget for every arm and on seeds that are not reported, chose: {words}."
        if not self.headline.higher:
            yield "Less is better here: a minus is a gain."
        yield from self._diverged()
        if len(self.seeds) == 1:
            yield "One seed only: differences have no intervals, and a small one may be chance."

    def _gap(self) -> str:
        """What was lost where the first task is no measure of it."""
        measured, fresh = self.headline, self.against(FRESH, NOTHING)
        told = f"Doing nothing had {measured.value(self.validity['last'])} {measured.name} {self._span()}"
        told += "; the tasks are not equally hard, so that what it lost is what a fresh start gains"
        if fresh is None:
            return f"{told}, and no {FRESH} was run."
        if _even(fresh):
            return f"{told}: {self._told(fresh)}, which is within chance."
        gained = (fresh.mean > 0) == measured.higher
        return f"{told}: {self._told(fresh)}{'' if gained else ', which is worse: it had lost nothing'}."

    def _diverged(self) -> Iterator[str]:
        """A mean of what survived flatters, so that it must be said."""
        for arm, seeds in self.tasks.items():
            count = sum(any(row.get("diverged") for row in tasks) for tasks in seeds.values())
            without = len(seeds) - len(self.values.get(arm, ()))
            if count:
                left_out = f"; {without} of them have no value and are in no mean" if without else ""
                yield f"{_called(arm)} diverged in {count} of {len(seeds)} runs{left_out}."

    def _span(self) -> str:
        return "on the last task" if self.last == 1 else f"over the last {self.last}"

    def _loss(self) -> str:
        measured, first, end = self.headline, self.validity["first"], self.validity["last"]
        told = (
            f"Doing nothing went from {measured.value(first)} {measured.name} on the first task to "
            f"{measured.value(end)} {self._span()}"
        )
        if self.validity["valid"]:
            return f"{told}: it lost its plasticity."
        if (first - end if measured.higher else end - first) > 0.05 * abs(first):
            return f"{told}: it lost less than half, so this stream tests remedies only mildly."
        return f"{told}: it did not lose its plasticity, so this stream cannot show what a remedy gives back."

    def _win(self, best: str) -> str:
        measured, told = self.headline, self.interval(best)
        name = _called(best)
        start = f"{name} was best of {len(self.ranked)} with {measured.value(told.mean)}{_ends(measured, told)}"
        reference = NOTHING if NOTHING in self.values and best != NOTHING else self.ranked[1]
        difference = self.against(best, reference)
        if difference is not None:
            start += f", {self._told(difference)} against {_called(reference)}"
            start += ", within chance" if _even(difference) else ""
        # Held against many arms, the best one differs from some by chance: Holm's correction over all of them.
        chances = {each: found.p for each in self.ranked[1:] if (found := self.against(best, each)) is not None}
        alike = [each for each, p in holm(chances).items() if each != reference and p is not None and p >= 0.05]
        return f"{start}{f'; the seeds cannot tell it from {_joined(alike)}' if alike else ''}."

    def _not_won(self, best: str) -> str:
        measured = self.headline
        fire, told = self.interval(FIRE), self.interval(best)
        place = ordinal(self.ranked.index(FIRE) + 1)
        start = "A variant of FIRE was best" if self.won else "FIRE did not win"
        text = (
            f"{start}: {_called(best)} came first with {measured.value(told.mean)}{_ends(measured, told)}, and "
            f"FIRE {place} of {len(self.ranked)} with {measured.value(fire.mean)}{_ends(measured, fire)}"
        )
        difference = self.against(FIRE, NOTHING)
        if difference is not None and best != NOTHING:
            text += f", {self._told(difference)} against doing nothing"
            text += ", within chance" if _even(difference) else ""
        if _even(self.against(FIRE, best)):
            text += f"; the seeds cannot tell FIRE from {_called(best)}"
        return f"{text}."

    def _told(self, difference: Difference) -> str:
        measured = self.headline
        ends = measured.differences(difference.low, difference.high)
        return f"{measured.difference(difference.mean)} {measured.step}{f' {ends}' if ends else ''}"


def _even(difference: Difference | None) -> bool:
    """The interval holds zero."""
    if difference is None or difference.low is None or difference.high is None:
        return False
    return difference.low <= 0 <= difference.high


def _joined(arms: Sequence[str]) -> str:
    first = [_called(arm) for arm in arms]
    return first[0] if len(first) == 1 else f"{', '.join(first[:-1])} and {first[-1]}"


def _ends(measured: Measure, told: Interval) -> str:
    ends = measured.interval(told.low, told.high)
    return f" {ends}" if ends else ""


def _base(arm: str) -> str:
    """The arm without what follows its name: "fire (tuned)" and "fire-nearest" are FIRE too."""
    return arm.partition(" ")[0].partition("-")[0]


def _called(arm: str) -> str:
    return {FIRE: "FIRE", NOTHING: "doing nothing"}.get(arm, arm)


def _choice(made: Mapping[str, Any]) -> str:
    """What tuning changed in an arm.

    >>> _choice({"place": 1, "arm": {"lr": 0.5, "options": {"scale": "nearest"}}})
    '0.5 of the learning rate, scale=nearest'
    >>> _choice({"place": 0, "arm": {"options": {"tau": 0.1}}}), _choice({"arm": None, "note": "none ran"})
    ('its default', 'none ran')
    """
    if not made.get("arm"):
        return str(made.get("note") or "nothing yet")
    if made["place"] == 0:
        return "its default"
    arm = made["arm"]
    options = {**(arm.get("options") or {}), **(arm.get("optimizer_options") or {})}
    rate = [f"{arm['lr']:g} of the learning rate"] if arm.get("lr") else []
    return ", ".join([*rate, *(f"{key}={value}" for key, value in options.items())])


def contests(data: Mapping[str, Any]) -> list[Contest]:
    """A contest for each setting of a study, in its order.

    >>> contests({"settings": {}, "runs": [], "table": []})
    []
    """
    found = []
    for name, setting in data["settings"].items():
        table = [row for row in data["table"] if row["setting"] == name]
        tasks: dict[str, dict[int, Tasks]] = {row["arm"]: {} for row in table}
        reasons: dict[str, dict[str, str]] = {"refused": {}, "failed": {}}
        for run in data["runs"]:
            if run["setting"] != name:
                continue
            if run["state"] == "finished":
                tasks.setdefault(run["arm"], {})[run["seed"]] = run["tasks"]
            elif run["state"] in reasons:
                reasons[run["state"]][run["arm"]] = run.get("reason") or ""
        values = {row["arm"]: {int(seed): value for seed, value in row["values"].items()} for row in table}
        validity = (data.get("validity") or {}).get(name) or {}
        tuned, prefix = data.get("tuning") or {}, f"{name}/"
        chosen = {key.removeprefix(prefix): _choice(made) for key, made in tuned.items() if key.startswith(prefix)}
        contest = Contest(setting, table, tasks, values, validity=validity, chosen=chosen, **reasons)
        found.append(replace(contest, table=sorted(table, key=lambda row: contest.ranked.index(row["arm"]))))
    return found
