"""How a study is shown: sentences and tables, the terminal, drawings, the page, the atlas.

- here: what the numbers mean in sentences, the columns of the table;
- `terminal`: the live table while a study runs, the tables of its result;
- `svg`: colors, ticks, labels, the picture as SVG;
- `plots`: curves and forest plots as SVG that follows light and dark and shows names on hover;
- `atlas`: gains by remedy and stream, as a table and a heat map;
- `page`: the page, one self-contained HTML file, and which plots it has.

Imports `lab.results` and the markup of `report`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rekindle.lab.arms import Arm
from rekindle.lab.results.comparison import BODY, FIRE, FRESH, NOTHING, ArmComparison, references
from rekindle.lab.results.statistics import SEEDS_FOR_INTERVAL, Difference, Interval, holm
from rekindle.lab.results.wording import Measure, chance, duration, measure, ordinal
from rekindle.lab.settings import Setting

NOT_YET = "No run has finished yet."


def sentences(found: ArmComparison) -> list[str]:
    """Was plasticity lost, who won and by how much, did FIRE, and what limits the conclusions."""
    return list(_sentences(found))


def won(found: ArmComparison) -> bool:
    """FIRE, tuned or not, has the best mean; "fire (tuned)" and "fire-nearest" are FIRE too."""
    return bool(found.ranked) and found.ranked[0].partition(" ")[0].partition("-")[0] == FIRE


def _sentences(found: ArmComparison) -> Iterator[str]:
    if not found.ranked:
        yield from _diverged(found) if found.arms else [NOT_YET]
        return
    validity = found.validity()
    if validity["last"] is not None:
        yield _gap(found, validity) if validity["note"] else _loss(found, validity)
    best = found.ranked[0]
    if FIRE in found.values and best != FIRE:
        yield _not_won(found, best)
    elif len(found.ranked) > 1:
        yield _win(found, best)
    nearest = "Being the nearest isometry rather than a random one"
    for arm, reference, start in (
        (FIRE, FRESH, "FIRE instead of a full reset made"),
        (FIRE, references(FIRE)[-1], f"{nearest} made"),
        (FIRE + BODY, references(FIRE + BODY)[-1], f"{nearest}, both without the output layer, made"),
    ):
        difference = found.against(arm, reference)
        if difference is not None:
            yield f"{start} {_change_text(found, difference)}{', which is within chance' if _even(difference) else ''}."
    if found.chosen:
        words = "; ".join(f"{_name_of(arm)}: {words}" for arm, words in found.chosen.items())
        yield f"Tuning, by the same budget for every arm and on seeds that are not reported, chose: {words}."
    if not found.headline.higher:
        yield "Less is better here: a minus is a gain."
    yield from _diverged(found)
    if len(found.seeds) < SEEDS_FOR_INTERVAL:
        count = "One seed only" if len(found.seeds) == 1 else "Two seeds only, whose values are in parentheses"
        yield f"{count}: differences have no intervals, and a small one may be chance."


def _gap(found: ArmComparison, validity: Mapping[str, Any]) -> str:
    """What was lost where the first task is no measure of it."""
    measured, fresh = found.headline, found.against(FRESH, NOTHING)
    told = f"Doing nothing had {measured.value(validity['last'])} {measured.name} {_span(found)}"
    told += "; the tasks are not equally hard, so that what it lost is what a fresh start gains"
    if fresh is None:
        return f"{told}, and no {FRESH} was run."
    if _even(fresh):
        return f"{told}: {_change_text(found, fresh)}, which is within chance."
    gained = (fresh.mean > 0) == measured.higher
    return f"{told}: {_change_text(found, fresh)}{'' if gained else ', which is worse: it had lost nothing'}."


def _loss(found: ArmComparison, validity: Mapping[str, Any]) -> str:
    measured, first, end = found.headline, validity["first"], validity["last"]
    told = f"Doing nothing went from {measured.value(first)} {measured.name} on the first task"
    told += f" to {measured.value(end)} {_span(found)}"
    if validity["valid"]:
        return f"{told}: it lost its plasticity."
    if validity["valid"] is None and found.setting.agents:
        return f"{told}; random actions do as well as the first task did, so that there was nothing to lose."
    if (first - end if measured.higher else end - first) > 0.05 * abs(first):
        return f"{told}: it lost less than half, so this stream tests remedies only mildly."
    return f"{told}: it did not lose its plasticity, so this stream cannot show what a remedy gives back."


def _diverged(found: ArmComparison) -> Iterator[str]:
    """A mean of the surviving runs is too favorable, so divergence is reported."""
    for name, arm in found.arms.items():
        without = len(arm.runs) - len(found.values.get(name, ()))
        if arm.diverged:
            left_out = f"; {without} of them have no value and are in no mean" if without else ""
            yield f"{_name_of(name)} diverged in {arm.diverged} of {len(arm.runs)} runs{left_out}."


def _win(found: ArmComparison, best: str) -> str:
    start = f"{_name_of(best)} was best of {len(found.ranked)} with {_mean_text(found, best)}"
    reference = NOTHING if NOTHING in found.values and best != NOTHING else found.ranked[1]
    difference = found.against(best, reference)
    if difference is not None:
        start += f", {_change_text(found, difference)} against {_name_of(reference)}"
        start += ", within chance" if _even(difference) else ""
    # Compared with many arms, the best one differs from some by chance: Holm's correction over all of them.
    chances = {each: pair.p for each in found.ranked[1:] if (pair := found.against(best, each)) is not None}
    alike = [_name_of(each) for each, p in holm(chances).items() if each != reference and p is not None and p >= 0.05]
    names = " and ".join(filter(None, (", ".join(alike[:-1]), *alike[-1:])))
    return f"{start}{f'; the seeds cannot tell it from {names}' if alike else ''}."


def _not_won(found: ArmComparison, best: str) -> str:
    place = ordinal(found.ranked.index(FIRE) + 1)
    start = "A variant of FIRE was best" if won(found) else "FIRE did not win"
    text = f"{start}: {_name_of(best)} came first with {_mean_text(found, best)}, and "
    text += f"FIRE {place} of {len(found.ranked)} with {_mean_text(found, FIRE)}"
    difference = found.against(FIRE, NOTHING)
    if difference is not None and best != NOTHING:
        text += f", {_change_text(found, difference)} against doing nothing"
        text += ", within chance" if _even(difference) else ""
    if _even(found.against(FIRE, best)):
        text += f"; the seeds cannot tell FIRE from {_name_of(best)}"
    return f"{text}."


def _span(found: ArmComparison) -> str:
    return "on the last task" if found.last == 1 else f"over the last {found.last}"


def _mean_text(found: ArmComparison, arm: str) -> str:
    measured, interval = found.headline, found.interval(arm)
    return f"{measured.value(interval.mean)} {measured.ends(interval)}".strip()


def _change_text(found: ArmComparison, difference: Difference) -> str:
    measured = found.headline
    parts = (measured.difference(difference.mean), measured.step, measured.difference_ends(difference))
    return " ".join(part for part in parts if part)


def _even(difference: Difference | None) -> bool:
    """The interval holds zero; of two seeds, one gained and one lost."""
    if difference is None:
        return False
    ends = difference.values if difference.low is None or difference.high is None else (difference.low, difference.high)
    return bool(ends) and min(ends) <= 0 <= max(ends)


def _name_of(arm: str) -> str:
    return {FIRE: "FIRE", NOTHING: "doing nothing"}.get(arm, arm)


def call(arm: Mapping[str, Any], setting: Setting) -> str:
    """What an arm is in Python: its method with every option that it has in this setting, and when it acts."""
    if not arm:
        return "not recorded"
    extra = [f"learning rate × {arm['lr']:g}"] if arm.get("lr") else []
    if arm.get("optimizer"):
        given = {"lr": setting.lr, **(arm.get("optimizer_options") or {})}
        extra.append(f"optimizer {arm['optimizer']}({_keywords(given)})")
    if not arm.get("method"):
        return ", ".join(["no remedy", *extra])
    made = Arm(**{key: arm[key] for key in {"name", "method", "options"} & arm.keys()}).within(setting)
    when = arm.get("when", "boundary")
    moment = "at the start of every task but the first" if when == "boundary" else f"every {when} within a task"
    ordered = {key: made.options[key] for key in sorted(made.options, key=lambda key: key != "targets")}
    return ", ".join([f"{made.method}({_keywords(ordered)})", moment, *extra])


def _keywords(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in options.items())


@dataclass(frozen=True)
class ArmColumn:
    """A heading, what it means, the number that it is sorted by, how that is written, and its interval."""

    heading: str
    meaning: str
    value: Callable[[str], float | None]
    shown: Callable[[float | None], str]
    ends: Callable[[str], str] = lambda arm: ""

    def text(self, arm: str) -> str:
        """The whole cell of an arm."""
        value = self.value(arm)
        return f"{self.shown(value)} {self.ends(arm) if value is not None else ''}".strip()


def columns(found: ArmComparison) -> list[ArmColumn]:
    """The columns that at least one arm fills; each is asked by the arm's name."""
    measured = found.headline
    old = measure("old_accuracy" if measured.unit == "%" else "old_loss")
    span = "the last task" if found.last == 1 else f"the last {found.last} tasks"
    few = len(found.seeds) < SEEDS_FOR_INTERVAL
    around = "the values of the seeds in parentheses" if few else "with its 95 % interval"

    def against(arm: str) -> Difference | None:
        return found.against(arm, NOTHING)

    def number(heading: str, key: str, shown: Callable[[float | None], str], meaning: str) -> ArmColumn:
        return ArmColumn(heading, meaning, lambda arm: _mean_of(found.number(arm, key)), shown)

    listed = [
        ArmColumn(
            measured.axis,
            f"mean over {span} and the seeds, {around}",
            lambda arm: found.interval(arm).mean,
            measured.number,
            lambda arm: measured.ends(found.interval(arm)),
        ),
        ArmColumn(
            f"against {NOTHING}",
            f"paired difference, seed by seed, {around}{'' if measured.higher else '; a minus is a gain'}",
            lambda arm: _mean_of(against(arm)),
            measured.difference,
            lambda arm: "" if (pair := against(arm)) is None else measured.difference_ends(pair),
        ),
        ArmColumn(
            "p (Holm)",
            "how often chance alone gives such a difference, corrected for all arms",
            lambda arm: None if (pair := against(arm)) is None else pair.holm,
            chance,
        ),
        number("first task", "first_task", measured.number, "the same measure on the first task"),
        number(
            "drop",
            "drop",
            old.number,
            "what the remedy costs at once: how much worse the previous task is right after it, in " + old.step,
        ),
        number(
            "recovery, steps",
            "recovery",
            _whole_number,
            "training steps in which a task is learned as well as doing nothing learns it by its end; a task in which "
            "that never happens counts with all its steps",
        ),
        number("peak", "peak", old.number, "the highest loss in the first 20 steps of a task, its mean"),
        number(
            "kept",
            "retention",
            old.number,
            f"{old.name} right after the remedy{_unit(old)}: up to five, the one just learned among them, "
            "mean over all boundaries",
        ),
        number("remedy", "remedy_seconds", duration, "time that the remedy takes in a task"),
        ArmColumn("seeds", "runs that the mean is over", lambda arm: float(len(found.values[arm])), _whole_number),
    ]
    listed = [column for column in listed if column.heading != "peak" or old.unit == "nats"]
    return [column for column in listed if any(column.value(arm) is not None for arm in found.ranked)]


def _whole_number(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"


def _unit(measured: Measure) -> str:
    return f", {measured.unit}" if measured.unit else ""


def _mean_of(found: Interval | Difference | None) -> float | None:
    return None if found is None else found.mean
