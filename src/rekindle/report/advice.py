"""The page of a probe and of an advice: the answer, the numbers behind it, and the curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rekindle.report.markup import element, joined
from rekindle.report.view import Headline
from rekindle.report.words import listed, number

if TYPE_CHECKING:
    from markupsafe import Markup

_LEVELS = {
    "lost": "act",
    "as fresh": "done",
    "better than fresh": "healthy",
    "unknown": "unknown",
    "apply": "watch",
    "do nothing": "healthy",
    "do not": "healthy",
    "cannot tell": "unknown",
}
_SAID = {
    "lost": "The model learns less than a fresh network: plasticity is lost.",
    "as fresh": "The model is not distinguishable from a fresh network.",
    "better than fresh": "The model learns better than a fresh network: nothing is lost.",
    "unknown": "Too short to say: even the fresh network has not learned enough.",
}
_HEADINGS = """
candidate       | what was tried on copies of the model
loss            | mean over the last quarter of the steps that it took; where it was dropped, their share
− nothing       | difference to doing nothing over the same steps, seed by seed, with its 95 % interval
ranks           | at a quarter, a half and the whole of the horizon
expected        | the curve's line in log(step) at the whole horizon ± the error of the fit
right after     | change of the loss on the new data by the remedy itself, with a 95 % interval over batches
old: right after | change of the loss on the old data by the remedy itself
old: at the end | change of the loss on the old data after learning, with a 95 % interval over seeds
drift           | how far the function moved: KL divergence of class scores
"""
WORDS = """
plasticity | how well a network can still learn something new; it is often lost in long training.
score      | what the model learns ÷ what a fresh network learns, with the same batches, budget and optimizer.
candidate  | a remedy that was tried on copies of the model; all have the same seeds and batches.
horizon    | how long training goes on; nothing is dropped before a quarter of it.
"""
STYLE = """
.lines{width:100%;max-width:860px;height:auto;display:block}
.lines path{fill:none;stroke-width:1.6;stroke-linejoin:round}
.lines text{fill:var(--dim);font-size:11px}
.lines .axis{stroke:var(--line)}
.l0{stroke:var(--before)}.l1{stroke:var(--after)}.l2{stroke:#2d7dd2}.l3{stroke:#3a9e5c}.l4{stroke:#8a56c2}.l5{stroke:#c2407a}
.l6{stroke:#9a7b0a}.l7{stroke:#1c8f93}
"""
_COLORS = 8
_WIDE, _HIGH, _LEFT, _KEY = 860, 300, 50, 170


def first(data: Mapping[str, Any]) -> Headline:
    """The verdict of a probe, or the answer of an advice.

    >>> first({"advice": {"answer": "do not", "sentence": "Do not: …", "judged_on": "x", "seeds": 3, "steps": 9,
    ...     "horizon": 9}}).word
    'do not'
    """
    advice, probe = data.get("advice"), data.get("probe")
    if advice:
        taken = f"{advice['steps']} of {advice['horizon']} steps, {advice['seeds']} seeds."
        return Headline(
            _LEVELS[advice["answer"]],
            advice["answer"],
            advice["sentence"],
            (f"Judged on {advice['judged_on']}.", taken),
        )
    assert probe is not None
    word = probe["verdict"]
    return Headline(_LEVELS[word], word, _SAID[word], (f"Task: {probe['task']}.",))


def parts(data: Mapping[str, Any]) -> dict[str, Any]:
    """What the template shows under the verdict."""
    advice = data.get("advice")
    return _advised(advice) if advice else _probed(data["probe"])


def _advised(advice: Mapping[str, Any]) -> dict[str, Any]:
    tried = [row for row in advice["rows"] if not row["error"]]
    table = [_cells(row) for row in tried]
    headings = listed(_HEADINGS)
    shown = [place for place in range(len(headings)) if any(cells[place] for cells in table)]
    curves = {row["name"]: row["curve"] for row in tried}
    return {
        "call": advice["call"],
        "tiles": [],
        "headings": [headings[place] for place in shown],
        "rows": [[cells[place] for place in shown] for cells in table],
        "refused": [(row["name"], row["error"]) for row in advice["rows"] if row["error"]],
        "chart": lines(curves),
        "under": "Mean over seeds. A line that ends early was dropped: it was clearly behind.",
    }


def _cells(row: Mapping[str, Any]) -> list[str]:
    own = row["name"] != "nothing"
    share = "" if row["share"] >= 1 else f" ({row['share']:.0%})"
    ahead = f"{number(row['expected'])} ± {number(row['expected_error'])}" if row["share"] < 1 else ""
    around = [_around(row[name], row[f"{name}_interval"]) for name in ("rise", "old_rise", "old_end", "drift")]
    return [
        row["name"],
        number(row["level"]) + share,
        _around(row["difference"], row["difference_interval"]) if own else "",
        " / ".join(map(str, row["ranks"])),
        ahead,
        around[0] if own else "",
        around[1] if own else "",
        around[2],
        around[3] if own else "",
    ]


def _probed(probe: Mapping[str, Any]) -> dict[str, Any]:
    enough = probe["enough"]
    tiles = [
        (
            _around(probe["score"], probe["interval"]) if enough else "unknown",
            "score: learned ÷ learned by a fresh one",
        ),
        (_around(probe["difference"], probe["difference_interval"]), "learned − learned by a fresh one, in loss"),
        (_around(probe["speed"], probe["speed_interval"]), "steps of a fresh network per step of the model"),
        (f"{probe['gained']:.0%}", f"of its loss the fresh network lost; {probe['gain']:.0%} are needed"),
        (number(probe["steps"]), f"steps, {probe['seeds']} seeds"),
    ]
    curves = {}
    for name in ("fresh", "model"):
        mean = [sum(losses) / len(losses) for losses in zip(*probe[name], strict=True)]
        stride = max(1, len(mean) // 60)
        kept = [mean[start : start + stride] for start in range(0, len(mean), stride)]
        curves[name] = [(min((at + 1) * stride, len(mean)), sum(each) / len(each)) for at, each in enumerate(kept)]
    return {
        "call": "",
        "tiles": tiles,
        "headings": [],
        "rows": [],
        "refused": [],
        "chart": lines(curves),
        "under": "Mean over seeds.",
    }


def _around(value: float | None, interval: Sequence[float | None]) -> str:
    """A number with its interval, empty where nothing was measured."""
    if value is None or value != value:
        return ""
    low, high = interval
    known = low is not None and high is not None and low == low and abs(low) + abs(high) < 1e300
    return number(value) + (f" [{number(low)}, {number(high)}]" if known else "")


def lines(curves: Mapping[str, Sequence[Sequence[float]]]) -> Markup | str:
    """Curves of (step, loss) with their names at the right; empty where there is nothing to draw.

    >>> str(lines({"fresh": [(1, 2.0), (9, 1.0)]})).count("<path")
    3
    """
    known = {
        name: [(x, y) for x, y in curve if y is not None and abs(y) < 1e300] for name, curve in curves.items() if curve
    }
    known = {name: curve for name, curve in known.items() if curve}
    if not known:
        return ""
    most = max(x for curve in known.values() for x, _ in curve)
    # Remedies may start far above: the picture shows up to twice the middle of all losses.
    losses = sorted(y for curve in known.values() for _, y in curve)
    low, high = min(0.0, losses[0]), max(min(losses[-1], 2 * losses[len(losses) // 2]), losses[0] + 1e-9)

    def place(x: float, y: float) -> str:
        across = _LEFT + (x / most) * (_WIDE - _LEFT - _KEY)
        down = 12 + (1 - (min(y, high) - low) / (high - low)) * (_HIGH - 40)
        return f"{across:.1f},{down:.1f}"

    frame = f"M{_LEFT},12 L{_LEFT},{_HIGH - 28} L{_WIDE - _KEY},{_HIGH - 28}"
    drawn = [element("path", class_="axis", d=frame)]
    drawn += [
        element("text", number(value), x=_LEFT - 6, y=16 + share * (_HIGH - 40), text_anchor="end")
        for value, share in ((high, 0.0), ((low + high) / 2, 0.5), (low, 1.0))
    ]
    drawn.append(element("text", f"{number(most)} steps", x=_WIDE - _KEY, y=_HIGH - 10, text_anchor="end"))
    for at, (name, curve) in enumerate(known.items()):
        drawn.append(element("path", class_=f"l{at % _COLORS}", d="M" + " L".join(place(x, y) for x, y in curve)))
        drawn.append(element("path", class_=f"l{at % _COLORS}", d=f"M{_WIDE - _KEY + 12},{18 + 18 * at} h16"))
        drawn.append(element("text", name, x=_WIDE - _KEY + 34, y=22 + 18 * at))
    title = element("title", "Loss against steps: " + ", ".join(known))
    high_enough = max(_HIGH, 30 + 18 * len(known))
    return element("svg", title, joined(drawn), class_="lines", viewBox=f"0 0 {_WIDE} {high_enough}", role="img")
