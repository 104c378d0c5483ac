"""Tuning: the same budget for every arm, on seeds of its own; and what results make of it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from lab_fakes import TASKS, Inline, row
from rekindle.lab import tuning
from rekindle.lab.arms import ARMS, Arm
from rekindle.lab.execution.store import RunRecord
from rekindle.lab.results import Results, RunEntry
from rekindle.lab.results.comparison import ArmComparison
from rekindle.lab.results.metrics import ArmRuns
from rekindle.lab.results.statistics import holm, paired, t_interval
from rekindle.lab.settings import Setting
from rekindle.lab.study import Study

TINY = Setting("tiny", "random-labels", "mlp", last=2)


@pytest.mark.parametrize("arm", ARMS.values(), ids=lambda arm: arm.name)
def test_every_arm_has_the_same_budget(arm: Arm) -> None:
    tried = tuning.candidates(arm)
    assert len(tried) == tuning.BUDGET and tried[0] == arm, "the default is among them"
    assert len({json.dumps(each.to_dict(), sort_keys=True) for each in tried}) == tuning.BUDGET, "all different"
    assert {each.name for each in tried} == {arm.name}


def test_more_than_the_budget_is_refused() -> None:
    with pytest.raises(ValueError, match="names 5 configurations"):
        tuning.candidates(Arm("x", tuning=tuple({"lr": 0.1 * i} for i in range(1, 5))))


def test_the_best_mean_is_chosen_whichever_way_is_better_and_the_default_of_equals() -> None:
    tried = tuning.candidates(Arm("nothing"))
    values = [{100: 0.5, 101: 0.7}, {100: 0.7, 101: 0.6}, {100: 0.2, 101: 0.3}, {100: 9.0}]
    assert tuning.choose(tried, values, falling=False).place == 1
    assert tuning.choose(tried, values, falling=True).place == 2
    assert tuning.choose(tried, [values[0]] * 4, falling=False).place == 0
    none = tuning.choose(tried, [{}, {}, {}, {}], falling=False)
    assert none.arm is None and "no configuration finished" in str(none.note)
    assert json.dumps(none.to_dict())


def study(folder: Path, **options: Any) -> Study:
    return Study(
        "s", [TINY], [Arm("nothing"), Arm("fire", "FIRE"), Arm("full-reset", "FullReset")], [0, 1, 2], folder, **options
    )


def test_a_tuned_study_reports_both_and_tunes_on_seeds_of_its_own(tmp_path: Path) -> None:
    made, executor = study(tmp_path, tune=True), Inline()
    results = made.run(on=executor)
    # The fake's accuracy grows with the learning rate, so 2.0 is best of the four; the default is not.
    assert executor.performed == 3 * 3 + 3 * tuning.BUDGET * 2 + 3 * 3
    names = [line["arm"] for line in results.table()]
    assert names == [*(a.name for a in made.arms), *(f"{a.name} (tuned)" for a in made.arms)]
    assert {run.seed for run in made.tuning_runs()} == {100, 101}
    assert {entry.seed for entry in results.entries} == {0, 1, 2}, "tuning seeds are not reported"
    tuned = {line["arm"]: line for line in results.table()}
    assert tuned["fire (tuned)"]["mean"] > tuned["fire"]["mean"] + 0.5
    assert results.choices is not None and results.choices["tiny", "fire"].arm == Arm("fire", "FIRE", lr=2.0)
    given = results.to_dict()
    assert given["tuning"]["tiny/fire"]["place"] == 2 and len(given["tuning"]["tiny/fire"]["values"]) == 4
    json.dumps(given, allow_nan=False)
    again = Inline()
    made.run(on=again)
    assert again.performed == 0


def test_a_choice_that_is_the_default_costs_no_more_runs(tmp_path: Path) -> None:
    class Flat(Inline):
        """The learning rate makes no difference."""

        def events(self, timeout: float) -> list[tuple[str, dict[str, Any]]]:
            self._waiting[0][1]["arm"]["lr"] = None
            return super().events(timeout)

    made, executor = study(tmp_path, tune=True), Flat()
    results = made.run(on=executor)
    assert executor.performed == 3 * 3 + 3 * tuning.BUDGET * 2
    tuned = {line["arm"]: line["values"] for line in results.table()}
    assert tuned["fire (tuned)"] == tuned["fire"]


# What results make of runs


def test_the_table_is_what_the_rows_say(tmp_path: Path) -> None:
    results = study(tmp_path).run(on=Inline())
    lines = {line["arm"]: line for line in results.table()}
    by_hand: dict[str, dict[int, float]] = {}
    for each in results.rows:
        if each["task"] >= TASKS - 2:
            by_hand.setdefault(each["arm"], {}).setdefault(each["seed"], 0.0)
            by_hand[each["arm"]][each["seed"]] += each["online_accuracy"] / 2
    p_values: dict[str, float | None] = {}
    for arm, values in by_hand.items():
        interval, line = t_interval(list(values.values())), lines[arm]
        assert (line["mean"], line["low"], line["high"]) == pytest.approx((interval.mean, interval.low, interval.high))
        assert line["values"] == {str(seed): pytest.approx(value) for seed, value in values.items()}
        difference = paired(values, by_hand["nothing"])
        assert difference is not None
        if arm != "nothing":
            assert line["difference"] == pytest.approx(difference.mean)
            assert line["p"] == pytest.approx(difference.p)
            p_values[arm] = difference.p
    assert {arm: lines[arm]["holm"] for arm in p_values} == pytest.approx(holm(p_values))
    assert lines["nothing"]["difference"] is None and lines["nothing"]["drop"] is None
    fire = lines["fire"]
    assert (fire["first_task"], fire["drop"]) == pytest.approx((0.9, 0.2))
    assert fire["retention"] == pytest.approx(0.5) and fire["retention_end"] == pytest.approx(0.4)
    ends = {(row["arm"], row["seed"], row["task"]): row["online_accuracy"] for row in results.rows}
    pairs = [(ends[arm, *rest], ends["nothing", *rest]) for arm, *rest in ends if arm == "fire" and rest[-1]]
    assert fire["recovery"] == pytest.approx(sum(5 if best / 2 >= end else 10 for best, end in pairs) / len(pairs))
    assert lines["nothing"]["recovery"] is None
    assert fire["remedy_seconds"] == pytest.approx(0.01) and fire["function_drift"] == pytest.approx(0.25)
    assert fire["full_reset"] == pytest.approx(fire["mean"] - lines["full-reset"]["mean"])
    assert fire["random_isometry"] is None, "an arm that is not in the study"
    assert "fire" in str(results) and len(results.frame()) == 3 * 3 * TASKS
    with pytest.raises(ValueError, match="no setting 'other'"):
        results.table(setting="other")


def test_another_metric_than_the_headline(tmp_path: Path) -> None:
    results = study(tmp_path).run(on=Inline())
    lines = {line["arm"]: line for line in results.table("test_loss")}
    assert lines["nothing"]["metric"] == "test_loss" and lines["fire"]["difference"] < 0
    assert [line["arm"] for line in results.table("remedy.loss_after")] == ["fire", "full-reset"]


def test_the_dictionary_has_all_that_a_page_needs(tmp_path: Path) -> None:
    results = study(tmp_path).run(on=Inline())
    given = json.loads(json.dumps(results.to_dict(), allow_nan=False))
    (compared,) = results.comparisons.values()
    curve = compared.curve("fire", "online_accuracy")
    assert curve is not None
    assert curve["task"] == list(range(TASKS)) and curve["mean"][0] == pytest.approx(0.9)
    rows = [each for each in results.rows if each["arm"] == "fire" and each["task"] == 3]
    assert curve["mean"][3] == pytest.approx(fmean(each["online_accuracy"] for each in rows))
    assert curve["low"][3] < curve["mean"][3] < curve["high"][3]
    old, dormant = compared.curve("fire", "old_accuracy"), compared.curve("fire", "health", "dormant")
    assert old is not None and old["mean"][0] is None, "the first task has no earlier one"
    assert dormant is not None and dormant["mean"] == pytest.approx([0.0, 0.1, 0.2, 0.3])
    assert given["settings"]["tiny"]["classes"] == 10 and given["settings"]["tiny"]["tasks"] == TASKS
    assert given["validity"]["tiny"]["valid"] is True and given["validity"]["tiny"]["fall"] > 0.5
    assert {run["state"] for run in given["runs"]} == {"finished"} and len(given["runs"]) == 9


def test_a_study_that_has_not_begun_has_empty_results(tmp_path: Path) -> None:
    results = study(tmp_path).results()
    assert results.table() == [] and "9 of 9 runs are not done yet" in str(results)
    given = results.to_dict()
    assert given["validity"]["tiny"]["valid"] is None and {run["state"] for run in given["runs"]} == {"new"}
    assert len(results.frame()) == 0
    json.dumps(given, allow_nan=False)


def contender(name: str, values: dict[int, float], *, setting: Setting = TINY, tuned: bool = False) -> ArmRuns:
    rows = {seed: [row(task, value, remedy=False) for task in range(3)] for seed, value in values.items()}
    return ArmRuns(setting, name, Arm(name).to_dict(), tuned, rows)


def test_tuned_arms_are_held_against_tuned_references() -> None:
    arms = [
        contender("nothing", {0: 0.1, 1: 0.2}),
        contender("fire", {0: 0.5, 1: 0.7}),
        contender("nothing (tuned)", {0: 0.4, 1: 0.5}, tuned=True),
        contender("fire (tuned)", {0: 0.6, 1: 0.8}, tuned=True),
    ]
    found = ArmComparison(TINY, {each.name: each for each in arms}).differences("headline", "nothing")
    assert found["fire"] is not None and found["fire"].mean == pytest.approx(0.45)
    assert found["fire (tuned)"] is not None and found["fire (tuned)"].mean == pytest.approx(0.25)
    assert "nothing (tuned)" not in found


def test_a_diverged_run_is_counted_and_said(tmp_path: Path) -> None:
    setting = Setting("loss", "random-labels", "mlp", headline="online_loss", last=1)
    good, bad = row(0, 0.5, remedy=False), row(0, 0.5, remedy=False) | {"online_loss": None, "diverged": True}
    start = {"kind": "start", "stream": {"classes": 10, "tasks": 1}}
    entries = tuple(
        RunEntry(
            setting, "fire", Arm("fire"), False, seed, str(seed), RunRecord("finished", (start, task, {"kind": "end"}))
        )
        for seed, task in enumerate((good, good, bad))
    )
    (line,) = Results({"name": "s"}, entries).table()
    assert line["seeds"] == 2 and line["diverged"] == 1 and "1 of 3 runs diverged" in line["note"]
    json.dumps(Results({"name": "s"}, entries).to_dict(), allow_nan=False)


def test_a_loss_is_valid_by_its_distance_to_chance() -> None:
    setting = Setting("loss", "random-labels", "mlp", headline="online_loss", last=1)
    start = {"kind": "start", "stream": {"classes": 10, "tasks": 2}}
    tasks = [row(0, 0.5, remedy=False) | {"online_loss": 0.5}, row(1, 0.5, remedy=False) | {"online_loss": 2.0}]
    rows = (start, *tasks, {"kind": "end"})
    results = Results(
        {"name": "s"}, (RunEntry(setting, "nothing", Arm("nothing"), False, 0, "x", RunRecord("finished", rows)),)
    )
    got = results.validity("loss")
    chance = math.log(10)
    assert got["valid"] is True and got["fall"] == pytest.approx(1.5 / (chance - 0.5))
