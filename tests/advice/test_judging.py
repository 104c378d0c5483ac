"""What the curves of trials say, on curves built by hand."""

from __future__ import annotations

import math

import pytest
import torch

from rekindle.advice import judging
from rekindle.advice.candidates import Candidate
from rekindle.advice.trials import Trace
from rekindle.methods import FIRE, FullReset


def traces(*curves: list[float]) -> list[Trace]:
    return [Trace(losses=curve, rises=[0.0, 0.1], drifts=[0.2, 0.3]) for curve in curves]


def test_nothing_is_decided_before_a_quarter() -> None:
    """A remedy that is far ahead after a tenth of the horizon: nobody knows yet."""
    curves = {"nothing": traces([2.0] * 100, [2.1] * 100), "fire": traces([1.0] * 100, [1.1] * 100)}
    for horizon, answer in ((1000, "cannot tell"), (400, "apply")):
        rows = [judging.row(Candidate(n, None), t, curves["nothing"], [], horizon, 0.0) for n, t in curves.items()]
        assert judging.decide(rows, list(curves), 100, horizon)[0] == answer
    assert rows[1].difference == pytest.approx(-1) and rows[1].share == 0.25


def test_what_is_done_otherwise_must_not_be_seen_to_do_harm() -> None:
    levels = {"nothing": (2.0, 2.0, 2.0), "fire": (1.6, 2.5, 1.9), "dash": (2.3, 2.4, 2.35)}
    curves = {name: traces(*([level] * 100 for level in each)) for name, each in levels.items()}
    rows = [judging.row(Candidate(n, None), t, curves["nothing"], [], 100, 0.0) for n, t in curves.items()]
    for steps in (100, 10):
        assert judging.decide(rows, list(curves), steps, 100) == ("cannot tell", "nothing")
        assert judging.decide(rows, list(curves), steps, 100, "fire") == ("cannot tell", "fire")
        assert judging.decide(rows, list(curves), steps, 100, "dash") == ("cannot tell", "nothing")
    said = judging.sentence("cannot tell", rows[1], rows, 100, 100)
    assert said.startswith("Cannot tell") and said.endswith("Until then fire, as you asked.")


def test_gains_too_small_to_matter_are_no_reason_to_act() -> None:
    curves = {"nothing": traces([2.0] * 100, [2.1] * 100), "fire": traces([1.99] * 100, [2.09] * 100)}
    rows = [judging.row(Candidate(n, None), t, curves["nothing"], [], 100, 0.0) for n, t in curves.items()]
    assert rows[1].difference_interval[1] < 0 and judging.decide(rows, list(curves), 100, 100)[0] == "do nothing"


def test_a_curve_is_extrapolated_with_the_error_of_its_fit() -> None:
    generator = torch.Generator().manual_seed(0)
    noise = (0.01 * torch.randn(200, generator=generator)).tolist()
    straight = [3 - 0.3 * math.log(step) + each for step, each in enumerate(noise, start=1)]
    value, error = judging.expected(traces(straight), 800)
    assert value == pytest.approx(3 - 0.3 * math.log(700), abs=4 * error) and 0 < error < 0.02
    assert judging.expected(traces(straight), 200)[1] == 0  # all of it was seen


def test_the_spread_over_seeds_is_shared_among_candidates() -> None:
    levels = {"nothing": (1.0, 1.0, 1.0), "a": (0.8, 0.9, 1.0), "b": (0.5, 0.7, 0.6)}
    curves = {name: traces(*([level] * 8 for level in each)) for name, each in levels.items()}
    typical = judging.typical_spread(curves)
    assert typical == pytest.approx(0.1)
    row = judging.row(Candidate("b", FIRE()), curves["b"], curves["nothing"], [], 8, typical)
    low, high = row.difference_interval
    assert row.difference == pytest.approx(-0.4) and high - low == pytest.approx(2 * 2.447 * 0.1 / 3**0.5)
    alone = judging.row(Candidate("nothing"), curves["nothing"], curves["nothing"], [], 8, typical)
    assert (alone.difference, alone.difference_interval) == (0.0, (0.0, 0.0))


def test_nothing_is_decided_before_anybody_has_learned() -> None:
    worse = judging.Row("fire", "", 1.0, -9.0, difference=10.0, difference_interval=(8.0, 12.0))
    rows, running = [judging.Row("nothing", "", 1.0, -19.0), worse], ["nothing", "fire"]
    said = []
    for begun in (-19.0, -10.0, math.nan):
        played = {"nothing": [Trace(losses=[-19.0], begun=begun)], "fire": [Trace(losses=[-9.0])]}
        said.append(judging.unlearned(played, running, "return"))
    assert "the return began at 19" in said[0] and said[1] == "" and "no episode" in said[2]
    assert judging.decide(rows, running, 100, 100, "fire", waiting=True) == ("cannot tell", "fire")
    assert judging.decide(rows, running, 100, 100, "fire") == ("do not", "nothing")
    refused = [rows[0], judging.Row("fire", "", error="ValueError: no")]
    other = judging.Row("dash", "", 1.0, -9.0, difference=10.0, difference_interval=(8.0, 12.0))
    assert judging.decide([*refused, other], ["nothing", "dash"], 9, 9, "fire", waiting=True) == (
        "cannot tell",
        "nothing",
    )
    assert said[0] in judging.sentence("cannot tell", rows[0], rows, 100, 100, "return", said[0])


def test_where_doing_nothing_diverges_something_is_done() -> None:
    rows = [judging.Row("fire", "", 1.0, 2.0, difference=-math.inf), judging.Row("nothing", "", 1.0, math.inf)]
    assert judging.decide(rows, ["nothing", "fire"], 9, 9) == ("apply", "fire")
    assert judging.sentence("apply", rows[0], rows, 9, 9) == "Apply fire: doing nothing diverges."


def rows_of(levels: dict[str, tuple[float, ...]], resets: str = "he-reset") -> list[judging.Row]:
    """Rows of curves that begin at 3 and lie at these levels."""
    curves = {name: traces(*([3.0, *([level] * 99)] for level in each)) for name, each in levels.items()}
    made = {name: Candidate(name, FullReset() if name == resets else None) for name in levels}
    return [judging.row(made[name], t, curves["nothing"], [], 100, 0.01) for name, t in curves.items()]


def test_a_better_start_is_not_called_a_repair() -> None:
    """A reset that learns no better than the network as it is shows that nothing was lost."""
    fine = {"nothing": (2.0, 2.1, 2.05), "fire": (1.0, 1.1, 1.05), "he-reset": (2.1, 2.3, 2.2)}
    tired = {**fine, "he-reset": (1.3, 1.4, 1.35)}
    for levels, lost in ((fine, False), (tired, True)):
        rows = rows_of(levels)
        assert judging.lost(rows) is lost
        answer, name = judging.decide(rows, list(levels), 100, 100)
        said = judging.sentence(answer, next(row for row in rows if row.name == name), rows, 100, 100)
        assert (answer, name) == ("apply", "fire") and "(48.8%) lower" in said
        assert ("not a repair" in said) is not lost


def test_a_sentence_never_contradicts_its_table() -> None:
    """Below 2% the answer names the best remedy, its gain and the rule."""
    rows = rows_of({"nothing": (2.0, 2.1), "fire": (1.98, 2.08)})
    assert rows[1].difference_interval[1] < 0
    said = judging.sentence("do nothing", rows[0], rows, 100, 100)
    assert "the best remedy, fire" in said and "(1.0%) lower" in said and "below 2%" in said
    worse = rows_of({"nothing": (2.0, 2.1), "fire": (2.2, 2.3)})
    assert judging.sentence("do nothing", worse[0], worse, 100, 100).endswith(
        "learns better than the network as it is."
    )


def test_equal_runs_and_short_horizons_decide_nothing() -> None:
    same = traces([2.0] * 20, [2.0] * 20)
    assert "all seeds gave the same run" in judging.unlearned({"nothing": same}, ["nothing"], "loss")
    short = {"fire": traces([3.0, 2.9]), "nothing": traces([3.0, 2.97])}
    assert "too short" in judging.unlearned(short, ["fire", "nothing"], "loss")
    enough = {**short, "he-reset": traces([3.0, 2.0])}
    assert judging.unlearned(enough, list(enough), "loss") == ""
    assert "too short" in judging.unlearned(enough, ["fire", "nothing"], "loss")
