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
− nothing       | difference to it over the same steps, seed by seed, with its 95 % interval
ranks           | at a sixteenth, an eighth, a quarter, a half and the whole of the horizon
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
.lines svg{width:100%;height:auto;display:block}
.lines svg.large{max-width:860px}.lines svg.small{display:none;max-width:430px}
.lines path{fill:none;stroke-width:1.8;stroke-linejoin:round}
.lines text{fill:var(--dim);font-size:12px}
.lines .axis{stroke:var(--line)}
.lines ul{display:flex;flex-wrap:wrap;gap:2px 18px;list-style:none;margin:6px 0 0;padding:0;font-size:.88rem}
.lines li{display:flex;align-items:center;gap:6px}.lines li svg{width:18px;height:8px}
.l0{stroke:var(--before)}.l1{stroke:var(--after)}.l2{stroke:#2d7dd2}.l3{stroke:#3a9e5c}.l4{stroke:#8a56c2}.l5{stroke:#c2407a}
.l6{stroke:#9a7b0a}.l7{stroke:#1c8f93}
.tried small{color:var(--dim);white-space:nowrap}.tried th:first-child{min-width:0}
@media (max-width:1500px){.tried td small{display:block}}
@media screen and (max-width:760px){.lines svg.large{display:none}.lines svg.small{display:block}
.tried td small{display:inline}.tried tr{grid-template-columns:1fr}}
"""
_COLORS = 8
_FIRST = ("nothing", "fresh")  # in gray: what the others are compared with
_LEFT = 54


def first(data: Mapping[str, Any]) -> Headline:
    """The verdict of a probe, or the answer of an advice.

    >>> first({"advice": {"answer": "do not", "sentence": "Do not: …", "judged_on": "x", "seeds": 3, "steps": 9,
    ...     "horizon": 9}}).word
    'do not'
    """
    advice, probe, ranking = data.get("advice"), data.get("probe"), data.get("ranking")
    if ranking:
        taken = f"{ranking['steps']} of {ranking['horizon']} steps, {ranking['seeds']} seeds."
        return Headline("done", ranking["order"][0], ranking["sentence"], (f"Judged on {ranking['judged_on']}.", taken))
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
    advice = data.get("advice") or data.get("ranking")
    return _advised(advice) if advice else _probed(data["probe"])


def _advised(advice: Mapping[str, Any]) -> dict[str, Any]:
    tried = [row for row in advice["rows"] if not row["error"]]
    base = advice["order"][0] if "order" in advice else "nothing"
    table = [_cells(row, base) for row in tried]
    measure = advice.get("measure", "loss")  # an older file has none
    names = {"loss": measure, "− nothing": f"− {base}"}
    headings = [(names.get(name, name), about) for name, about in listed(_HEADINGS)]
    shown = [place for place in range(len(headings)) if any(cells[place] for cells in table)]
    curves = {row["name"]: row["curve"] for row in tried}
    return {
        "call": advice.get("call", ""),
        "tiles": [],
        "headings": [headings[place] for place in shown],
        "rows": [[cells[place] for place in shown] for cells in table],
        "refused": [(row["name"], row["error"]) for row in advice["rows"] if row["error"]],
        "chart": lines(curves, measure),
        "under": "Mean over seeds. A line that ends early was dropped: it was clearly behind.",
    }


def _cells(row: Mapping[str, Any], base: str) -> list[str]:
    own = row["name"] != base
    share = "" if row["share"] >= 1 else f" ({100 * row['share']:.0f} %)"
    error = row["expected_error"]  # nan, or None in JSON, where there were too few points for a fit
    fitted = row["share"] < 1 and error is not None and error == error
    ahead = f"{number(row['expected'])} ± {number(error)}" if fitted else ""
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
        (
            f"{100 * probe['gained']:.0f} %",
            f"of its loss the fresh network lost; {100 * probe['gain']:.0f} % are needed",
        ),
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


def lines(curves: Mapping[str, Sequence[Sequence[float]]], measure: str = "loss") -> Markup | str:
    """Curves of (step, loss or return), for a window and for a phone, with their names below; empty if there are none.

    >>> str(lines({"fresh": [(1, 2.0), (9, 1.0)]})).count('class="l0"')
    3
    """
    known = {
        name: [(x, y) for x, y in curve if y is not None and abs(y) < 1e300] for name, curve in curves.items() if curve
    }
    known = {name: curve for name, curve in known.items() if curve}
    if not known:
        return ""
    others = [name for name in known if name not in _FIRST]
    ink = {name: f"l{0 if name in _FIRST else 1 + others.index(name) % (_COLORS - 1)}" for name in known}
    title = f"{measure.capitalize()} against steps: " + ", ".join(known)
    sizes = (("large", 860, 300), ("small", 340, 230))
    drawings = [
        element(
            "svg",
            element("title", title),
            _curves(known, ink, wide, high, measure),
            class_=kind,
            viewBox=f"0 0 {wide} {high}",
            role="img",
            aria_label=title,
        )
        for kind, wide, high in sizes
    ]
    names = [
        element(
            "li",
            element("svg", element("path", class_=ink[name], d="M0,4 h18"), viewBox="0 0 18 8", aria_hidden="true"),
            name,
        )
        for name in known
    ]
    return element("div", *drawings, element("ul", *names), class_="lines")


def _curves(
    known: Mapping[str, Sequence[tuple[float, float]]], ink: Mapping[str, str], wide: int, high: int, measure: str
) -> Markup:
    most = max(x for curve in known.values() for x, _ in curve)
    losses = sorted(y for curve in known.values() for _, y in curve)
    low, top = min(0.0, losses[0]), max(losses[-1], losses[0] + 1e-9)
    if measure != "return":  # remedies may start far above: the picture shows up to twice the middle of all losses
        top = max(min(top, 2 * losses[len(losses) // 2]), losses[0] + 1e-9)

    def place(x: float, y: float) -> str:
        across = _LEFT + (x / most) * (wide - _LEFT - 8)
        down = 24 + (1 - (min(y, top) - low) / (top - low)) * (high - 52)
        return f"{across:.1f},{down:.1f}"

    drawn = [element("path", class_="axis", d=f"M{_LEFT},24 L{_LEFT},{high - 28} L{wide - 8},{high - 28}")]
    drawn += [
        element("text", number(value), x=_LEFT - 6, y=28 + share * (high - 52), text_anchor="end")
        for value, share in ((top, 0.0), ((low + top) / 2, 0.5), (low, 1.0))
    ]
    drawn.append(element("text", measure, x=_LEFT - 6, y=12, text_anchor="end"))
    drawn.append(element("text", f"{number(most)} steps", x=wide - 8, y=high - 10, text_anchor="end"))
    paths = {name: "M" + " L".join(place(x, y) for x, y in curve) for name, curve in known.items()}
    drawn += [element("path", class_=ink[name], d=path) for name, path in paths.items()]
    return joined(drawn)
