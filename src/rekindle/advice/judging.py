"""What trials show: a row per candidate, extrapolated curves, ranks, and the answer that follows from them.

Every number has a 95 % interval: over seeds for what is learned, over batches for what a remedy does right away.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Literal

from rekindle.advice.candidates import NOTHING, Candidate
from rekindle.advice.intervals import Interval, mean_interval, shared_interval, spread
from rekindle.advice.trials import Trace

Answer = Literal["apply", "do nothing", "do not", "cannot tell"]
Measure = Literal["loss", "judged", "return"]
"""What candidates are judged by: the loss, the user's `judge`, or the return of an agent.

Trials of agents have −return in place of a loss, until `risen`.
"""
LEAST = 0.25  # of the horizon: earlier nothing is decided
LEARNED = 0.2  # of the level at the beginning: until a candidate is better by this, none has learned (probe's gain)
SMALL = 0.02  # of the loss: gains below this are no reason to act
_WORDS = {"loss": "loss", "judged": "judged value"}
_NONE: Interval = (math.nan, math.nan)
_DRAWN = 60  # points of a curve that are kept for a picture


@dataclass(frozen=True)
class Row:
    """One candidate: what it did right away, how it learned, and against doing nothing.

    `level` is the mean loss over the last quarter of the steps that it took (`share` of the horizon), `difference` is
    level − that of nothing over the same steps, pairwise; `expected` the level extrapolated to the whole horizon by a
    line in log(step), with the standard error of that fit. `rise` is the change of the loss on the new data right
    after the remedy, `old_rise` and `old_end` the change on the old data right after it and at the end; `drift` how
    far the function moved (KL divergence of class scores). `curve` is [step, loss], the mean over seeds.
    `resets` says whether nothing of the old network is left.
    """

    name: str
    call: str
    share: float = 0.0
    level: float = math.nan
    interval: Interval = _NONE
    difference: float = math.nan
    difference_interval: Interval = _NONE
    expected: float = math.nan
    expected_error: float = math.nan
    rise: float = math.nan
    rise_interval: Interval = _NONE
    old_rise: float = math.nan
    old_rise_interval: Interval = _NONE
    old_end: float = math.nan
    old_end_interval: Interval = _NONE
    drift: float = math.nan
    drift_interval: Interval = _NONE
    ranks: tuple[int, ...] = ()
    curve: tuple[tuple[int, float], ...] = ()
    resets: bool = False
    error: str | None = None


def levels(traces: Sequence[Trace], steps: int | None = None) -> list[float]:
    """Per seed the mean loss over the last quarter of the first `steps` steps (of the last task, if of several)."""
    found = []
    for trace in traces:
        end = trace.steps if steps is None else steps
        curve = [(step, loss) for step, loss in trace.curve() if step <= end] or trace.curve()[:1]
        last = [loss for step, loss in curve if step > (1 - 0.25 / trace.tasks) * end] or [curve[-1][1]]
        found.append(sum(last) / len(last))
    return found


def expected(traces: Sequence[Trace], horizon: int) -> tuple[float, float]:
    """The level extrapolated to the horizon: a line in log(step) through the second half, and its error.

    Loss curves bend less in log(step) than in steps; beyond four times the measured steps it is unreliable.
    """
    level = sum(levels(traces)) / len(traces)
    taken = traces[0].steps
    seen = [(math.log(step), loss) for step, loss in mean_curve(traces) if step > taken / 2]
    if taken >= horizon or traces[0].tasks > 1:
        return level, 0.0 if taken >= horizon else math.nan
    if len(seen) < 4 or not all(math.isfinite(loss) for _, loss in seen):
        return level, math.nan  # too few points for a line
    count = len(seen)
    x_mean, y_mean = sum(x for x, _ in seen) / count, sum(y for _, y in seen) / count
    spread = sum((x - x_mean) ** 2 for x, _ in seen)
    slope = sum((x - x_mean) * (y - y_mean) for x, y in seen) / spread
    noise = math.sqrt(sum((y - y_mean - slope * (x - x_mean)) ** 2 for x, y in seen) / (count - 2))
    ahead = math.log(0.875 * horizon) - x_mean  # the middle of the last quarter
    return y_mean + slope * ahead, noise * math.sqrt(1 / count + ahead**2 / spread)


def mean_curve(traces: Sequence[Trace]) -> list[tuple[int, float]]:
    """[step, loss], the mean over seeds."""
    curves = [trace.curve() for trace in traces]
    return [(points[0][0], sum(loss for _, loss in points) / len(points)) for points in zip(*curves, strict=True)]


def typical_spread(traces: Mapping[str, Sequence[Trace]], base: str = NOTHING) -> float:
    """How far the differences from doing nothing (or another `base`) spread over seeds: the median over candidates."""
    found = []
    for name, own in traces.items():
        if name != base and not any(trace.error for trace in own):
            different = spread(_differences(own, traces[base]))
            if different is not None and math.isfinite(different):
                found.append(different)
    return median(found) if found else 0.0


def row(
    candidate: Candidate,
    traces: Sequence[Trace],
    nothing: Sequence[Trace],
    ranks: Sequence[int],
    horizon: int,
    typical: float,
    call: str | None = None,
    base: str = NOTHING,
) -> Row:
    """What the trials of a candidate show, next to those of doing nothing (or of another `base`).

    `typical` is that of `typical_spread`.
    """
    error = next((trace.error for trace in traces if trace.error), None)
    if error:
        return Row(candidate.name, call or candidate.call, resets=candidate.resets, error=error)
    taken = traces[0].steps
    level, interval = mean_interval(levels(traces))
    difference, around = 0.0, (0.0, 0.0)
    if candidate.name != base:
        difference, around = against(traces, nothing, typical)
    ahead, error_of_fit = expected(traces, horizon)
    rise, rise_interval = _over_batches([trace.rises for trace in traces])
    old_rise, old_rise_interval = _over_batches([trace.old_rises for trace in traces])
    old_end, old_end_interval = mean_interval([trace.old_end - trace.old_before for trace in traces])
    drift, drift_interval = _over_batches([trace.drifts for trace in traces])
    curve = mean_curve(traces)
    stride = max(1, -(-len(curve) // _DRAWN))
    return Row(
        candidate.name,
        call or candidate.call,
        min(taken / horizon, 1.0),
        level,
        interval,
        difference,
        around,
        ahead,
        error_of_fit,
        rise,
        rise_interval,
        old_rise,
        old_rise_interval,
        old_end,
        old_end_interval,
        drift,
        drift_interval,
        tuple(ranks),
        tuple(_thinned(curve, stride)),
        candidate.resets,
    )


def unlearned(traces: Mapping[str, Sequence[Trace]], running: Sequence[str], measure: Measure) -> str:
    """Why it is too early to decide: no candidate has learned, or seeds do not differ; empty where that is not so.

    >>> played = {"nothing": [Trace(losses=[-20.0], begun=-20.0)], "fire": [Trace(losses=[-21.0])]}
    >>> unlearned(played, ["nothing", "fire"], "return")
    'no candidate has learned anything yet, the return began at 20'
    >>> unlearned({**played, "fire": [Trace(losses=[-30.0])]}, ["nothing", "fire"], "return")
    ''
    >>> unlearned({"nothing": [Trace(losses=[2.0, 1.94])]}, ["nothing"], "loss")
    'no candidate has lowered its loss by 20% (3% at most), so the horizon is too short'
    """
    nothing = traces[NOTHING]
    reached = {name: levels(traces[name]) for name in running}
    if measure != "return":
        if len(nothing) > 1 and len({tuple(trace.losses) for trace in nothing}) == 1 and nothing[0].losses:
            return "all seeds gave the same run, so there is no interval: give several batches"
        shares = [share for name in running if not math.isnan(share := _learned(traces[name]))]
        if not shares or max(shares) >= LEARNED or not all(math.isfinite(sum(each)) for each in reached.values()):
            return ""
        most = f"{LEARNED:.0%} ({max(shares):.0%} at most)"
        return f"no candidate has lowered its loss by {most}, so the horizon is too short"
    if any(trace.losses and not math.isfinite(trace.losses[-1]) for trace in nothing):
        return ""
    begins = [trace.begun for trace in nothing if not math.isnan(trace.begun)]
    if not begins:
        return "no episode of doing nothing has ended"
    begun = sum(begins) / len(begins)
    if any(sum(each) / len(each) < begun - LEARNED * abs(begun) for each in reached.values()):
        return ""
    return f"no candidate has learned anything yet, the return began at {0.0 - begun:.3g}"


def lost(rows: Sequence[Row]) -> bool | None:
    """Whether a reset learns better than the network as it is: the test of lost plasticity. None where none was tried.

    >>> better = Row("he-reset", "", difference_interval=(-0.4, -0.1), resets=True)
    >>> lost([better]), lost([replace(better, difference_interval=(-0.1, 0.2), share=1.0)]), lost([])
    (True, False, None)
    """
    resets = [each for each in rows if each.resets and each.error is None]
    if any(each.difference_interval[1] < 0 for each in resets):
        return True
    return False if any(each.share >= 0.5 for each in resets) else None  # early on a reset is always behind


def decide(
    rows: Sequence[Row],
    running: Sequence[str],
    steps: int,
    horizon: int,
    otherwise: str = NOTHING,
    waiting: bool = False,
) -> tuple[Answer, str]:
    """The answer, and the name of the candidate that it means.

    Below a quarter of the horizon nothing is decided: the order of candidates still changes there. Nor is it where
    no candidate has learned yet (`waiting`). Where trials cannot tell, `otherwise` is meant, unless it was seen
    to be worse than doing nothing at a time when something had been learned.
    """
    alive = [each for each in rows if each.error is None and each.name in running]
    nothing = next(each for each in rows if each.name == NOTHING)
    others = [each for each in rows if each.error is None and each.name != NOTHING]
    if not others:
        return "cannot tell" if any(each.error for each in rows) else "do nothing", NOTHING
    usual = next((each.name for each in alive if each.name == otherwise and each.difference_interval[0] <= 0), NOTHING)
    if waiting:
        return "cannot tell", otherwise if any(each.name == otherwise for each in alive) else NOTHING
    if steps < round(LEAST * horizon):
        return "cannot tell", usual
    if not math.isfinite(nothing.level):
        sound = [each for each in alive if math.isfinite(each.level)]
        return ("apply", min(sound, key=lambda each: each.level).name) if sound else ("cannot tell", NOTHING)
    small = SMALL * abs(nothing.level)
    tried = [each for each in alive if each.name != NOTHING]
    better = [each for each in tried if each.difference_interval[1] < 0 and each.difference < -small]
    if better:
        best = min(better, key=lambda each: each.level)
        # Of those that learn as well as the best, the one that forgets least.
        equal = [
            each
            for each in better
            if each.interval[0] <= best.interval[1] and each.level <= best.level + 0.01 * abs(best.level)
        ]
        keeps = [each for each in equal if not math.isnan(each.old_end)]
        return "apply", (min(keeps, key=lambda each: each.old_end) if keeps else best).name
    if all(each.difference_interval[0] > 0 for each in others):
        return "do not", NOTHING
    unclear = any(each.difference_interval[0] < -small for each in tried)
    return ("cannot tell", usual) if unclear else ("do nothing", NOTHING)


def risen(row: Row) -> Row:
    """The row of an agent as people read it: returns instead of their negatives.

    >>> risen(Row("fire", "", level=-200.0, difference=-50.0, difference_interval=(-60.0, -40.0))).difference_interval
    (40.0, 60.0)
    >>> risen(Row("fire", "", difference=0.0)).difference
    0.0
    """
    (low, high), (less, more) = row.interval, row.difference_interval
    return replace(
        row,
        level=-row.level,
        interval=(-high, -low),
        difference=0.0 - row.difference,
        difference_interval=(-more, -less),
        expected=-row.expected,
        curve=tuple((step, -value) for step, value in row.curve),
    )


def sentence(
    answer: Answer,
    chosen: Row,
    rows: Sequence[Row],
    steps: int,
    horizon: int,
    measure: Measure = "loss",
    waiting: str = "",
) -> str:
    """The answer as a sentence; `rows` as they are shown, `waiting` is that of `unlearned`."""
    side, what, sign = ("higher", "return", 1) if measure == "return" else ("lower", _WORDS[measure], -1)
    if answer == "apply" and not math.isfinite(chosen.difference):
        return f"Apply {chosen.name}: doing nothing diverges."
    others = [each for each in rows if each.error is None and each.name != NOTHING]
    best = max(others, key=lambda each: sign * each.difference) if others else None
    nothing = next((each.level for each in rows if each.name == NOTHING), math.nan)
    gone = None if measure == "return" else lost(rows)
    if answer == "apply":
        low, high = sorted(map(abs, chosen.difference_interval))
        said = f"Apply {chosen.name}: its {what} is {abs(chosen.difference):.3g}{_share(chosen, nothing)} {side} than "
        said += f"doing nothing [{low:.3g}, {high:.3g}]"
        if chosen.old_end > 0:
            said += f", and the loss on the old data ends {chosen.old_end:.3g} higher than before"
        if gone is False:
            said += ". Nothing was lost, since a reset learns no better: this is a better start, not a repair"
        return f"{said}."
    if answer == "do not":
        return "Do not: every remedy that was tried learns worse than the network as it is."
    if answer == "do nothing":
        kept = "nothing was lost (a reset learns no better), and " if gone is False else ""
        if best is not None and sign * best.difference > 0:
            low, high = sorted(map(abs, best.difference_interval)) if _signed(best) else best.difference_interval
            return (
                f"Do nothing: {kept}the best remedy, {best.name}, has a {what} that is {abs(best.difference):.3g}"
                f"{_share(best, nothing)} {side} [{low:.3g}, {high:.3g}], and a gain below {SMALL:.0%} is no reason "
                "to act."
            )
        return f"Do nothing: {kept}no remedy learns better than the network as it is."
    if not others:
        return "Cannot tell: no candidate could be tried (the table says why)."
    if steps < round(LEAST * horizon):
        reason = f"a quarter of the horizon is {round(LEAST * horizon)} steps, and earlier orders mislead"
    elif waiting:
        reason = waiting
    elif best is not None and sign * best.difference > 0:
        reason = f"{best.name} may be better, but its interval includes no gain"
    else:
        reason = "nothing stands out"
    said = f"Cannot tell with this budget ({steps} of {horizon} steps): {reason}. Give more time or seeds."
    return said if chosen.name == NOTHING else f"{said} Until then {chosen.name}, as you asked."


def _signed(row: Row) -> bool:
    """Whether the interval lies on one side of zero."""
    low, high = row.difference_interval
    return low * high > 0


def _share(row: Row, nothing: float) -> str:
    """The difference as a percentage of doing nothing."""
    return f" ({abs(row.difference / nothing):.1%})" if nothing and math.isfinite(nothing) else ""


def _learned(traces: Sequence[Trace]) -> float:
    """The share of the first loss by which the last quarter of the training losses is lower, the mean over seeds."""
    shares = []
    for trace in traces:
        last = trace.losses[-max(len(trace.losses) // 4, 1) :]
        if not trace.losses or not 0 < trace.losses[0] < math.inf:
            return math.nan
        shares.append(1 - sum(last) / len(last) / trace.losses[0])
    return sum(shares) / len(shares)


def ranked(traces: Mapping[str, Sequence[Trace]], names: Sequence[str], horizon: int) -> dict[str, int]:
    """The rank of each candidate by the level that its curve leads to."""
    ahead = {name: expected(traces[name], horizon)[0] for name in names}
    return {name: place for place, name in enumerate(sorted(ahead, key=lambda name: ahead[name]), start=1)}


def _differences(own: Sequence[Trace], nothing: Sequence[Trace]) -> list[float]:
    """Per seed the level of a candidate − that of nothing over the steps that both took."""
    end = min(own[0].steps, nothing[0].steps)
    return [a - b for a, b in zip(levels(own, end), levels(nothing, end), strict=True)]


def against(own: Sequence[Trace], base: Sequence[Trace], typical: float) -> tuple[float, Interval]:
    """The difference of two candidates and its interval: over seeds, and over the held-out parts that all seeds share.

    >>> base = [Trace(looks=[(1, 0.5)], parts=[0.9, 0.1]) for _ in range(3)]
    >>> few = [Trace(looks=[(1, 0.4)], parts=[0.4, 0.4]) for _ in range(3)]  # better in one part, worse in the other
    >>> difference, (low, high) = against(few, base, 0.0)
    >>> round(difference, 3), low < 0 < high
    (-0.1, True)
    """
    mean, (low, high) = shared_interval(_differences(own, base), typical)
    apart = [[a - b for a, b in zip(one.parts, other.parts, strict=True)] for one, other in zip(own, base, strict=True)]
    if apart and len(apart[0]) > 1:
        _, (less, more) = mean_interval([sum(values) / len(values) for values in zip(*apart, strict=True)])
        half = math.hypot((high - low) / 2, (more - less) / 2)
        if not math.isnan(half):
            return mean, (mean - half, mean + half)
    return mean, (low, high)


def _over_batches(measured: Sequence[Sequence[float]]) -> tuple[float, Interval]:
    """Seeds that were looked at are averaged for each batch, and batches give the interval."""
    measured = [values for values in measured if values]
    if not measured:
        return math.nan, _NONE
    return mean_interval([sum(values) / len(values) for values in zip(*measured, strict=True)])


def _thinned(curve: Sequence[tuple[int, float]], stride: int) -> list[tuple[int, float]]:
    """Every point the mean of `stride`, at its last step."""
    parts = [curve[start : start + stride] for start in range(0, len(curve), stride)]
    return [(part[-1][0], sum(loss for _, loss in part) / len(part)) for part in parts]
