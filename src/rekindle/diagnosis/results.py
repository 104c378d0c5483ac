"""Health and Comparison: the measures at one moment, or at two, as objects that print, save and compare."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rekindle import files
from rekindle.diagnosis import usage
from rekindle.diagnosis.activity import Unmeasured
from rekindle.diagnosis.agreement import STANDING
from rekindle.diagnosis.verdict import LEVELS, Numbers, Thresholds, Verdict, judge
from rekindle.extras import install
from rekindle.measures.matrices import Mode
from rekindle.report.showing import Page
from rekindle.spelling import advice
from rekindle.tables import number, share, table, terminal_width, wrapped

if TYPE_CHECKING:
    import pandas

_MAPPINGS = ("weights", "units", "heads", "gradients", "steps", "whole", "about", "broken", "stacks")
# heading: measure
_WEIGHTS = {
    **{"norm": "norm", "lr/‖W‖²": "effective_lr", "DfI/k": "dfi_per_dimension"},
    **{"scale-free": "dfi_scale_free", "σ max": "spectral_norm"},
    **{"cond.": "condition_number", "eff. rank": "effective_rank", "part. rank": "participation_rank"},
    **{"zero rows": "dead_rows", "similar": "similar_pairs"},
}
_UNITS = {
    **{"units": "units", "dormant": "dormant", "dead": "dead", "usage": "usage", "eff. rank": "feature_rank"},
    **{"of": "rank_limit", "linear": "linearized", "saturated": "saturation", "∂ dormant": "gradient_dormant"},
}
_SHARES = {"similar_pairs", "dormant", "dead", "usage", "linearized", "saturation", "gradient_dormant"}
_wrap = partial(wrapped, indent="    ")
_MOST_UNMEASURED = 6
_MOST_CHANGES = 40


@dataclass(frozen=True)
class Health(Page):
    """Measures of one model at one moment, and a verdict. A number that is not here was not measured.

    Attributes:
        weights: numbers of each weight.
        units: numbers of each layer's neurons, named by the layer that makes them, as `targets=` takes it.
        heads: for each attention the entropy share of its most collapsed head.
        gradients: ‖∂L/∂w‖ of each parameter.
        steps: ‖update‖/‖w‖ of each parameter, of a monitor.
        whole: numbers of the whole model.
        about: words about each layer: role, shape; for units the kind of activation and the place where it was seen.
        broken: weights with NaN or Inf.
        stacks: numbers of the experts, codes, latents, ranks or rows of each place.
        unmeasured: what could not be measured, with the reason.
        mode: "full" or "cheap".
        seconds: what it took.
        thresholds: of the verdict.
        reference: the numbers that it was judged against.
        fresh: what fresh networks of this class showed, where there was no reference and an absolute rule fired.

    >>> from torch import nn
    >>> from rekindle.diagnosis.examination import health
    >>> found = health(nn.Linear(3, 3))
    >>> found.flat()["weights/weight/norm"] == found.weights["weight"]["norm"]
    True
    """

    page = "health"
    weights: Mapping[str, Mapping[str, float]]
    units: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    heads: Mapping[str, float] = field(default_factory=dict)
    gradients: Mapping[str, float] = field(default_factory=dict)
    steps: Mapping[str, float] = field(default_factory=dict)
    whole: Mapping[str, float] = field(default_factory=dict)
    about: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    broken: Mapping[str, str] = field(default_factory=dict)
    stacks: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    unmeasured: tuple[Unmeasured, ...] = ()
    mode: Mode = "full"
    seconds: float = 0.0
    thresholds: Thresholds = field(default_factory=Thresholds)
    reference: Numbers | None = None
    fresh: Numbers | None = None

    @cached_property
    def verdict(self) -> Verdict:
        """`healthy`, `watch`, `act` or `unknown`, with findings and the rule that fired."""
        kinds = {name: self.about.get(name, {}).get("kind", "") for name in self.stacks}
        more = usage.findings(self.stacks, kinds, self.thresholds)
        return judge(
            self.numbers, self.reference, self.thresholds, self.fresh, more=more, blind=usage.unjudged(self.stacks)
        )

    @property
    def numbers(self) -> Numbers:
        """The numbers that the rules use."""
        unread = sum(each.what == "weight" for each in self.unmeasured)
        return Numbers(self.weights, self.units, self.heads, self.whole, self.broken, unread, self.stacks)

    def layers_named(self) -> list[str]:
        """The layers that findings are about, worst first: what `fire(model, targets=health)` acts on.

        >>> from torch import nn
        >>> from rekindle.diagnosis.examination import health
        >>> spoilt = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        >>> _ = nn.init.ones_(spoilt[0].weight), nn.init.eye_(spoilt[2].weight)
        >>> health(spoilt).layers_named()
        ['0.weight']
        """
        ordered = sorted(self.verdict.findings, key=lambda finding: -LEVELS.index(finding.level))
        return list(dict.fromkeys(finding.layer for finding in ordered if finding.layer))

    def against(self, reference: Health | None) -> Health:
        """The same measures judged against another Health.

        >>> from torch import nn
        >>> from rekindle.diagnosis.examination import health
        >>> now = health(nn.Linear(3, 3))
        >>> now.against(now).verdict.sure
        True
        """
        return replace(self, reference=None if reference is None else reference.numbers)

    def compare(self, other: Health) -> Comparison:
        """Every number that both have, this one's beside the other's.

        >>> from torch import nn
        >>> from rekindle.diagnosis.examination import health
        >>> now = health(nn.Linear(3, 3))
        >>> now.compare(now).rows[0].ratio
        1.0
        """
        mine, theirs = self.flat(), other.flat()
        rows = [NumberChange(name, theirs[name], mine[name]) for name in mine if name in theirs]
        only = [name for name in (*mine, *theirs) if (name in mine) != (name in theirs)]
        return Comparison(tuple(rows), tuple(only))

    def flat(self, prefix: str = "") -> dict[str, float]:
        """One flat dict of numbers, for any logger.

        >>> from torch import nn
        >>> from rekindle.diagnosis.examination import health
        >>> sorted(health(nn.Linear(3, 3)).flat("health/"))[-1]
        'health/weights/weight/stable_rank'
        """
        found = {**self.whole, "verdict": float(self.verdict.level)}
        for kind, layers in (("weights", self.weights), ("units", self.units)):
            for layer, numbers in layers.items():
                found |= {f"{kind}/{layer}/{name}": value for name, value in numbers.items()}
        for name, numbers in self.stacks.items():
            kind = self.about[name]["kind"]
            found |= {f"{kind}/{name}/{measure}": value for measure, value in numbers.items()}
        found |= {f"attention/{layer}/entropy_share": value for layer, value in self.heads.items()}
        found |= {f"gradients/{name}": value for name, value in self.gradients.items()}
        found |= {f"steps/{name}": value for name, value in self.steps.items()}
        return {prefix + name: float(value) for name, value in found.items()}

    def to_dict(self) -> dict[str, Any]:
        """Everything, in JSON types; `Health.from_dict` reads it back.

        >>> from torch import nn
        >>> from rekindle.diagnosis.examination import health
        >>> Health.from_dict(health(nn.Linear(3, 3)).to_dict()).mode
        'full'
        """
        out: dict[str, Any] = {name: _copied(getattr(self, name)) for name in _MAPPINGS}
        verdict = self.verdict
        out |= {
            "unmeasured": [asdict(each) for each in self.unmeasured],
            "mode": self.mode,
            "seconds": self.seconds,
            "thresholds": asdict(self.thresholds),
            "reference": None if self.reference is None else asdict(self.reference),
            "fresh": None if self.fresh is None else asdict(self.fresh),
            "verdict": str(verdict),
            "rule": verdict.rule,
            "sure": verdict.sure,
            "findings": [asdict(finding) for finding in verdict.findings],
        }
        return out

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Health:
        """A Health from what `to_dict` gave; the verdict is judged anew."""
        kept = {name: _copied(data[name]) for name in _MAPPINGS}
        return cls(
            **kept,
            unmeasured=tuple(Unmeasured(**each) for each in data["unmeasured"]),
            mode=data["mode"],
            seconds=data["seconds"],
            thresholds=Thresholds(**data["thresholds"]),
            reference=None if data["reference"] is None else Numbers(**data["reference"]),
            fresh=None if data["fresh"] is None else Numbers(**data["fresh"]),
        )

    def to_json(self, path: str | Path | None = None) -> str:
        """The same as text (infinities as strings are not JSON: they become null), written to `path` if given.

        >>> from torch import nn
        >>> from rekindle.diagnosis.examination import health
        >>> '"verdict"' in health(nn.Linear(3, 3)).to_json()
        True
        """
        text = json.dumps(_plain(self.to_dict()), indent=1)
        if path is not None:
            files.write(path, text)
        return text

    def to_frame(self) -> pandas.DataFrame:
        """One row per layer and measure: kind, layer, measure, value."""
        try:
            import pandas
        except ImportError as error:
            raise ImportError(f"a DataFrame needs pandas: {install('report')}") from error
        rows = [
            (kind, layer, name, value)
            for kind, layers in (("weights", self.weights), ("units", self.units))
            for layer, numbers in layers.items()
            for name, value in numbers.items()
        ]
        rows += [("whole", "", name, value) for name, value in self.whole.items()]
        return pandas.DataFrame(rows, columns=["kind", "layer", "measure", "value"])

    def __str__(self) -> str:
        return described(self, terminal_width(110, 10_000))


@dataclass(frozen=True)
class NumberChange:
    """One number then and now."""

    name: str
    then: float
    now: float

    @property
    def ratio(self) -> float:
        """now ÷ then; NaN where then is 0 and now is too."""
        if self.then == 0:
            return math.nan if self.now == 0 else math.copysign(math.inf, self.now)
        return self.now / self.then


@dataclass(frozen=True)
class Comparison:
    """Two moments side by side: `rows` that both measured, `only_one` that one of them did."""

    rows: tuple[NumberChange, ...]
    only_one: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        rows = [{"name": r.name, "then": r.then, "now": r.now, "ratio": r.ratio} for r in self.rows]
        return {"rows": rows, "only_one": list(self.only_one)}

    def __str__(self) -> str:
        return compared(self, terminal_width(110, 10_000))


def described(health: Health, width: int, following: str | None = None) -> str:
    """The whole of a Health as text; `following` is what to do next."""

    def fitted(text: str) -> list[str]:
        return _wrap(text, width)

    lines = [f"Health ({health.mode}, {health.seconds:.2g} s)"]
    rates = any("effective_lr" in numbers for numbers in health.weights.values())
    columns = {heading: name for heading, name in _WEIGHTS.items() if name != "effective_lr" or rates}
    lines += _layers("weights", health.weights, health, columns, ("role", "shape"), width)
    lines += _layers("units", health.units, health, _UNITS, ("kind", "at"), width)
    for kind, headings in usage.COLUMNS.items():
        chosen = {name: n for name, n in health.stacks.items() if health.about[name]["kind"] == kind}
        lines += _layers(kind, chosen, health, headings, (), width)
    free = [name for name, about in health.about.items() if "norm" in about and name in health.weights]
    if free:
        lines += ["", *fitted(f"scale-invariant: {_norms(free, len(health.weights))}")]
    whole = [f"{name.replace('_', ' ')} {number(value)}" for name, value in health.whole.items()]
    if whole:
        lines += ["", *fitted("whole model: " + ", ".join(whole))]
    if health.heads:
        shares = [f"{name} {share:.0%}" for name, share in health.heads.items()]
        lines += ["", *fitted(f"attention entropy of the lowest head, of its maximum: {', '.join(shares)}")]
    lines += [part for line in _unmeasured(health) for part in (fitted(line) or [line])]
    verdict = health.verdict
    lines += ["", *(part for line in verdict.lines() for part in fitted(f"! {line}"))]
    lines += fitted(f"verdict: {concluded(health)}")
    if not verdict.sure and (verdict != "unknown" or health.weights):
        against = "fresh networks of this class" if health.fresh is not None else "fixed thresholds"
        lines += fitted(
            f"low confidence: judged against {against} only; "
            + advice("earlier", "pass reference= an earlier Health or a fresh model")
        )
    if verdict != "unknown" and "broken values" not in verdict.signs_to_act():
        lines += fitted(STANDING["health"])
    for sign, remedy in verdict.remedies().items():
        lines += fitted(f"  {sign}: {remedy}")
    lines.append(f"next: {following or _following(health)}")  # in one line, to be copied
    return "\n".join(lines)


def _norms(free: list[str], total: int) -> str:
    """Which weights have a normalization behind them, and what that means."""
    named = ", ".join(free[:3]) + (", …" if len(free) > 3 else "")
    return (
        f"{len(free)} of {total} weights ({named}) have a normalization right behind them, which takes their scale "
        "out; their norm sets only how fast they learn, the effective learning rate lr/‖W‖²"
    )


def _following(health: Health) -> str:
    """The call that follows from the verdict, where `report` is this Health."""
    signs = health.verdict.signs_to_act()
    if "broken values" in signs:
        return "restore an earlier checkpoint"
    if health.verdict == "act":
        named = ", targets=report" if health.layers_named() else ""
        # A ReLU that is dead by its bias survives a projection of its weight.
        biases = ", biases='zero'" if "dormancy" in signs else ""
        return f"rekindle.plan(model{named}), then rekindle.fire(model, optimizer{named}{biases}), then train"
    if health.verdict == "watch":
        return "rekindle.probe(model, new_batches, loss=loss) measures whether plasticity is lost"
    if not health.units:
        return "rekindle.health(model, batches, loss=loss) measures activity and gradients too"
    return "train on; rekindle.health(model, batches, reference=report) later compares with now"


def concluded(health: Health) -> str:
    """The verdict with its rule, and how many weights it rests on where that is all that was measured.

    >>> from torch import nn
    >>> from rekindle.diagnosis.examination import health
    >>> concluded(health(nn.Linear(3, 3)))
    'unknown: no sign of lost plasticity in the weights (activity not measured, 1 of 1 weights read)'
    """
    if health.verdict != "unknown" or not health.weights:
        return f"{health.verdict} ({health.verdict.rule})"
    read = len({name.partition("[")[0] for name in health.weights})
    skipped = sum(each.what == "weight" for each in health.unmeasured)
    scope = f"activity not measured, {read} of {read + skipped} weights read"
    return f"unknown: no sign of lost plasticity in the weights ({scope})"


def _unmeasured(health: Health) -> list[str]:
    grouped: dict[tuple[str, str], list[str]] = {}
    for each in health.unmeasured:
        grouped.setdefault((each.what, each.reason), []).append(each.name or "(model)")
    lines = ["", "not measured:"] if grouped else []
    for (what, reason), names in grouped.items():
        shown = ", ".join(names[:_MOST_UNMEASURED])
        shown += f" and {len(names) - _MOST_UNMEASURED} more" if len(names) > _MOST_UNMEASURED else ""
        lines.append(f"  {what} of {shown}: {reason}")
    return lines


def compared(comparison: Comparison, width: int) -> str:
    """A Comparison as text, largest change first."""

    def size(ratio: float) -> float:
        return 0.0 if math.isnan(ratio) else abs(math.log(abs(ratio))) if 0 < abs(ratio) < math.inf else math.inf

    ordered = sorted(comparison.rows, key=lambda row: -size(row.ratio))
    cells = [(row.name, number(row.then), number(row.now), _ratio(row.ratio)) for row in ordered]
    lines = table(("measure", "then", "now", "now ÷ then"), cells[:_MOST_CHANGES], width)
    if len(cells) > _MOST_CHANGES:
        lines.append(f"… {len(cells) - _MOST_CHANGES} more, changed less, in .rows")
    if comparison.only_one:
        lines.append(f"measured once only: {len(comparison.only_one)} ({', '.join(comparison.only_one[:4])}, …)")
    return "\n".join(lines)


def _layers(
    title: str,
    layers: Mapping[str, Mapping[str, float]],
    health: Health,
    columns: Mapping[str, str],
    words: tuple[str, ...],
    width: int,
) -> list[str]:
    rows = []
    for layer, numbers in layers.items():
        about = health.about.get(layer, {})
        cells = [layer or "(model)", *(about.get(word, "") for word in words)]
        rows.append(cells + [(share if name in _SHARES else number)(numbers.get(name)) for name in columns.values()])
    head = [title, *words, *columns]
    # On a narrow terminal the last columns are dropped first: they say least.
    lines = table(head, rows, width, left=range(1 + len(words)), drop=range(len(head) - 1, 4, -1))
    return ["", *lines] if layers else []


def _ratio(value: float) -> str:
    return "" if math.isnan(value) else "∞" if math.isinf(value) else f"{value:.3g}×"


def _copied(mapping: Mapping[str, Any]) -> dict[str, Any]:
    # JSON has no infinity: what came back as null counts as unmeasured.
    return {
        key: _copied(value) if isinstance(value, Mapping) else value
        for key, value in mapping.items()
        if value is not None
    }


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
