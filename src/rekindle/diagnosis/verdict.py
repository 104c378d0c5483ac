"""Rules that turn measured numbers into findings and a verdict.

Each rule looks at one number of one layer, alone or against a reference, and states its threshold. One sign is a reason
to watch. Two different signs against the reference, or one strong absolute sign, are a reason to act: dormancy, for
one, also rises while a network learns a task well, but its features do not lose half their rank at the same time.

>>> units = {"fc": {"dormant": 0.41, "feature_rank": 12.0, "rank_limit": 512.0}}
>>> then = {"fc": {"dormant": 0.05, "feature_rank": 37.2, "rank_limit": 512.0}}
>>> verdict = judge(Numbers(units=units), Numbers(units=then), Thresholds())
>>> verdict == "act", sorted({finding.sign for finding in verdict.findings})
(True, ['dormancy', 'feature rank'])
>>> print(verdict.lines()[0].replace("; ", ";\\n    "))
fc: 41 % of neurons dormant at τ=0.025, 5 % at the reference;
    effective rank 12 of 512, 3.1× lower than at the reference
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from rekindle.spelling import advice

Level = Literal["unknown", "healthy", "watch", "act"]
LEVELS: tuple[Level, ...] = ("healthy", "watch", "act")  # in order; "unknown" is below all


@dataclass(frozen=True)
class Thresholds:
    """Every threshold of the verdict. `docs/evidence/instruments.md` says how they were set and how often they err.

    The rules down to `load_act` are absolute; where fresh networks of the class could be drawn, the number must also
    exceed theirs. The others compare with a reference.

    Attributes:
        tau: a neuron is dormant where its score is at most this (ReDo's 0.025).
        dormant_watch: share of a layer's neurons that are dormant.
        dormant_act: the same, from which on the verdict is `act`.
        saturation_watch: share of a bounded activation's values that lie at its bounds.
        dead_rows_watch: share of a weight's rows that are zero.
        similar_watch: share of neuron pairs with |cosine| > 0.8, for neurons with at least 8 inputs.
        entropy_watch: attention entropy of a head, as a share of its maximum, at or below which it has collapsed.
        gradient_watch: total gradient norm at or below which learning has stopped.
        dead_units_watch: share of the experts, codes, latents or ranks of one stack that are dead.
        dead_units_act: the same, from which on the verdict is `act`.
        load_watch: evenness of the load of experts, 0 where the same few get every token.
        load_act: the same, from which on the verdict is `act`.
        dormant_rise_watch: rise of the dormant share, as a difference.
        dormant_rise_act: the same, from which on the verdict is `act`.
        dormant_limit: share that is reported even where the reference was as bad.
        rank_fall_watch: feature rank then ÷ now.
        rank_fall_act: the same, from which on the verdict is `act`.
        usage_fall_watch: usage then ÷ now.
        saturation_rise_act: rise of the saturated share of a bounded activation, as a difference.
        norm_growth_watch: weight norm now ÷ then, over all weights.
        norm_growth_act: the same, from which on the verdict is `act`.
        weight_rank_fall_watch: rank of a weight then ÷ now.
        weight_rank_fall_act: the same, from which on the verdict is `act`.
        dfi_growth_watch: scale-free DfI now ÷ then (and a rise of at least 1 per dimension).
        gradient_fall_act: gradient norm then ÷ now while the loss is no lower than then.
        curvature_growth_watch: |eigenvalue| now ÷ then.
        signs_to_act: how many different signs at their act threshold make the verdict `act`.

    >>> Thresholds(dormant_act=0.9).dormant_watch
    0.25
    """

    tau: float = 0.025
    dormant_watch: float = 0.25
    dormant_act: float = 0.5
    saturation_watch: float = 0.5
    dead_rows_watch: float = 0.25
    similar_watch: float = 0.25
    entropy_watch: float = 0.05
    gradient_watch: float = 1e-6
    dead_units_watch: float = 0.25
    dead_units_act: float = 0.5
    load_watch: float = 0.25
    load_act: float = 0.1
    dormant_rise_watch: float = 0.15
    dormant_rise_act: float = 0.25
    dormant_limit: float = 0.9
    rank_fall_watch: float = 1.5
    rank_fall_act: float = 2.0
    usage_fall_watch: float = 5.0
    saturation_rise_act: float = 0.25
    norm_growth_watch: float = 1.5
    norm_growth_act: float = 2.0
    weight_rank_fall_watch: float = 1.5
    weight_rank_fall_act: float = 2.0
    dfi_growth_watch: float = 3.0
    gradient_fall_act: float = 100.0
    curvature_growth_watch: float = 10.0
    signs_to_act: int = 2


@dataclass(frozen=True)
class Numbers:
    """What the rules may look at: layer → measure → value. A missing measure is unmeasured and fires no rule.

    `unread` counts weights that could not be read.
    """

    weights: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    units: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    heads: Mapping[str, float] = field(default_factory=dict)
    whole: Mapping[str, float] = field(default_factory=dict)
    broken: Mapping[str, str] = field(default_factory=dict)
    unread: int = 0
    stacks: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Finding:
    """One rule that fired on one layer (or on the whole model, where `layer` is empty)."""

    layer: str
    sign: str
    level: Level
    text: str
    rule: str
    remedy: str
    absolute: bool = False

    def __str__(self) -> str:
        return f"{self.layer or 'whole model'}: {self.text}"


class Verdict(str):
    """`"healthy"`, `"watch"`, `"act"` or `"unknown"`, and why: it compares as the word and carries the findings.

    >>> Verdict("watch", (), "one sign alone") == "watch"
    True
    """

    findings: tuple[Finding, ...]
    rule: str
    sure: bool

    def __new__(cls, level: Level, findings: Iterable[Finding], rule: str, *, sure: bool = True) -> Verdict:  # noqa: D102
        self = super().__new__(cls, level)
        self.findings, self.rule, self.sure = tuple(findings), rule, sure
        return self

    @property
    def level(self) -> int:
        """0 healthy, 1 watch, 2 act, −1 unknown."""
        return -1 if self == "unknown" else LEVELS.index(str(self))

    def lines(self) -> list[str]:
        """One line per layer, worst first."""
        grouped: dict[str, list[Finding]] = {}
        for finding in sorted(self.findings, key=lambda f: -LEVELS.index(f.level)):
            grouped.setdefault(finding.layer, []).append(finding)
        return [f"{layer or 'whole model'}: {'; '.join(f.text for f in group)}" for layer, group in grouped.items()]

    def remedies(self) -> dict[str, str]:
        """Which remedy fits which sign, worst first.

        >>> Verdict("healthy", (), "").remedies()
        {}
        """
        ordered = sorted(self.findings, key=lambda f: -LEVELS.index(f.level))
        return {finding.sign: finding.remedy for finding in ordered}

    def signs_to_act(self) -> set[str]:
        """The signs that passed their act threshold.

        >>> Verdict("healthy", (), "").signs_to_act()
        set()
        """
        return {finding.sign for finding in self.findings if finding.level == "act"}

    def __reduce__(self) -> Any:
        return _restore, (str(self), self.findings, self.rule, self.sure)


def _restore(level: Level, findings: tuple[Finding, ...], rule: str, sure: bool) -> Verdict:
    return Verdict(level, findings, rule, sure=sure)


REMEDIES = {
    "broken values": "restore an earlier checkpoint: no remedy here repairs NaN or Inf",
    "dormancy": "recycle the dormant neurons (ReDo, continual backprop), or FIRE with biases='zero'",
    "feature rank": "FIRE, which makes the spectrum flat again; shrink-and-perturb",
    "usage": "ReDo or continual backprop, if it falls further",
    "saturation": "shrink-and-perturb or FIRE at a smaller scale: the inputs of the activation are too large",
    "dead weights": "FIRE, which completes zero rows to an isometry",
    "similar neurons": "an orthogonal start or FIRE: polar factors have no similar rows where out ≤ in",
    "weight norm": "shrink-and-perturb, L2-init, weight decay or a norm-keeping projection",
    "weight rank": "FIRE",
    "deviation from isometry": "FIRE",
    "gradient": "FIRE or a full reset: nothing is learned any more",
    "curvature": "FIRE or shrink-and-perturb, and a fresh optimizer state",
    "attention": "FIRE on attention.qk",
}


def _remedy(sign: str) -> str:
    return advice(f"remedy for {sign}", REMEDIES[sign])


def judge(
    now: Numbers,
    then: Numbers | None,
    thresholds: Thresholds,
    fresh: Numbers | None = None,
    *,
    more: Iterable[Finding] = (),
    blind: Collection[str] = (),
) -> Verdict:
    """All findings, and the verdict that follows from them.

    then: the reference that the user gave. fresh: what fresh networks of this class show on the same batches; an
        absolute rule fires only where the number also exceeds theirs.
    more: findings of other rules (`usage`). blind: stacks that could not be judged.

    Weights alone can show a sign, but never that a network is healthy: its neurons may be dead.

    >>> judge(Numbers(), None, Thresholds())
    'unknown'
    >>> judge(Numbers(weights={"fc.weight": {"rows": 8.0}}), None, Thresholds()).rule
    'no sign of lost plasticity in the weights, and activity was not measured'
    >>> judge(Numbers(units={"fc": {"dormant": 0.1}}), None, Thresholds())
    'healthy'
    >>> third = Numbers(units={"fc": {"dormant": 0.3, "units": 100.0}})
    >>> judge(third, None, Thresholds()), judge(third, None, Thresholds(), fresh=third)
    ('watch', 'healthy')
    """
    t = thresholds
    fresh = fresh or Numbers()
    findings = [
        *_broken(now),
        *_units(now, then, fresh, t),
        *_weights(now, then, fresh, t),
        *_whole(now, then, fresh, t),
        *more,
    ]
    certain = [f for f in findings if f.level == "act" and f.absolute]
    signs = sorted({f.sign for f in findings if f.level == "act" and not f.absolute})
    sure = then is not None
    if certain:
        return Verdict("act", findings, certain[0].rule, sure=sure or certain[0].sign == "broken values")
    rules = "; ".join(dict.fromkeys(f.rule for f in findings if f.level == "act"))
    if len(signs) >= t.signs_to_act:
        return Verdict("act", findings, f"{len(signs)} signs ({t.signs_to_act} needed): {rules}", sure=sure)
    if signs:
        rule = f"{len(signs)} of {t.signs_to_act} signs needed to act: {rules}"
        return Verdict("watch", findings, rule, sure=sure)
    if findings:
        rule = "; ".join(dict.fromkeys(f.rule for f in findings))
        return Verdict("watch", findings, rule, sure=sure)
    if blind:
        return Verdict("unknown", (), f"no rule fired, and {', '.join(sorted(blind)[:3])} was not judged", sure=False)
    if not (now.weights or now.units or now.heads or now.whole):
        return Verdict("unknown", (), "no weight and no unit could be measured", sure=False)
    if not now.weights and now.unread:
        rule = f"no rule fired on activity, and none of {now.unread} weights could be measured"
        return Verdict("unknown", (), rule, sure=False)
    if not (now.units or now.heads or now.stacks):
        rule = "no sign of lost plasticity in the weights, and activity was not measured"
        return Verdict("unknown", (), rule, sure=sure)
    return Verdict("healthy", (), "no rule fired", sure=sure)


def _finding(layer: str, sign: str, level: Level, text: str, rule: str, *, absolute: bool = False) -> Finding:
    return Finding(layer, sign, level, text, rule, _remedy(sign), absolute)


def _broken(now: Numbers) -> Iterator[Finding]:
    for layer, what in now.broken.items():
        yield _finding(layer, "broken values", "act", what, "a value is NaN or infinite", absolute=True)


def _units(now: Numbers, then: Numbers | None, fresh: Numbers, t: Thresholds) -> Iterator[Finding]:
    for layer, numbers in now.units.items():
        before = (then.units.get(layer) if then else None) or {}
        drawn = fresh.units.get(layer, {})
        yield from _dormancy(layer, numbers, before, drawn, t)
        # A rank from fewer rows is lower by itself: only equal limits compare.
        if {"feature_rank", "rank_limit"} <= numbers.keys() & before.keys():
            limit, fall = numbers["rank_limit"], _ratio(before["feature_rank"], numbers["feature_rank"])
            if limit == before["rank_limit"]:
                text, words = f"effective rank {numbers['feature_rank']:.3g} of {limit:.0f}", "effective feature rank"
                yield from _grown(layer, "feature rank", text, fall, t.rank_fall_watch, t.rank_fall_act, "lower", words)
        if "usage" in numbers and "usage" in before:
            fall = _ratio(before["usage"], numbers["usage"])
            text = f"neurons active on {numbers['usage']:.0%} of rows"
            yield from _grown(layer, "usage", _percent(text), fall, t.usage_fall_watch, None, "lower", "usage")
        yield from _saturation(layer, numbers, before, drawn, t)


def _saturation(
    layer: str, now: Mapping[str, float], before: Mapping[str, float], drawn: Mapping[str, float], t: Thresholds
) -> Iterator[Finding]:
    if "saturation" not in now:
        return
    share = now["saturation"]
    text = _percent(f"{share:.0%} of values at the activation's bounds")
    if "saturation" in before and share - before["saturation"] >= t.saturation_rise_act:
        text += _percent(f", {before['saturation']:.0%} at the reference")
        yield _finding(layer, "saturation", "act", text, f"saturated share rose by ≥ {t.saturation_rise_act:g}")
    elif share >= t.saturation_watch and share - drawn.get("saturation", 0.0) >= t.saturation_rise_act:
        yield _finding(layer, "saturation", "watch", text, f"saturation ≥ {t.saturation_watch:g}")


def _dormancy(
    layer: str, now: Mapping[str, float], before: Mapping[str, float], drawn: Mapping[str, float], t: Thresholds
) -> Iterator[Finding]:
    if "dormant" not in now:
        return
    share = now["dormant"]
    text = _percent(f"{share:.0%} of neurons dormant at τ={t.tau:g}")
    if "dormant" in before:
        rise = share - before["dormant"]
        text += _percent(f", {before['dormant']:.0%} at the reference")
        for level, bound in (("act", t.dormant_rise_act), ("watch", t.dormant_rise_watch)):
            if rise >= bound:
                yield _finding(layer, "dormancy", level, text, f"dormant share rose by ≥ {bound:g}")  # type: ignore[arg-type]
                return
        if share >= t.dormant_limit:
            yield _finding(layer, "dormancy", "watch", text, f"dormant share ≥ {t.dormant_limit:g}")
        return
    rise, chance = share, 0.0
    if "dormant" in drawn:
        usual = drawn["dormant"]
        text += _percent(f", {usual:.0%} in fresh networks of this class")
        # Fresh networks differ among themselves by chance; in a small layer all of it may be needed to exceed that.
        chance = min(3 * math.sqrt(usual * (1 - usual) / now.get("units", 1.0)), 1 - usual)
        rise = share - usual
    if share >= t.dormant_act and rise >= max(t.dormant_rise_act, chance):
        yield _finding(layer, "dormancy", "act", text, f"dormant share ≥ {t.dormant_act:g}", absolute=True)
    elif share >= t.dormant_watch and rise >= max(t.dormant_rise_watch, chance):
        yield _finding(layer, "dormancy", "watch", text, f"dormant share ≥ {t.dormant_watch:g}")


def _weights(now: Numbers, then: Numbers | None, fresh: Numbers, t: Thresholds) -> Iterator[Finding]:
    for layer, numbers in now.weights.items():
        before = (then.weights.get(layer) if then else None) or {}
        drawn, rows = fresh.weights.get(layer, {}), numbers.get("rows", 0.0)
        if rows and (numbers.get("dead_rows", 0.0) - drawn.get("dead_rows", 0.0)) / rows >= t.dead_rows_watch:
            text = _percent(f"{numbers['dead_rows'] / rows:.0%} of the weight's rows are zero")
            yield _finding(layer, "dead weights", "watch", text, f"zero rows ≥ {t.dead_rows_watch:g}")
        # In a few dimensions any two directions are close: 1 % of random pairs are this similar in eight.
        similar = numbers.get("similar_pairs", 0.0) - drawn.get("similar_pairs", 0.0)
        if numbers.get("columns", 0.0) >= 8 and similar >= t.similar_watch:
            text = _percent(f"{numbers['similar_pairs']:.0%} of neuron pairs nearly parallel")
            yield _finding(layer, "similar neurons", "watch", text, f"similar pairs ≥ {t.similar_watch:g}")
        name = "effective_rank" if "effective_rank" in numbers else "participation_rank"
        if name in numbers and name in before:
            words = name.replace("_", " ")
            fall = _ratio(before[name], numbers[name])
            text = f"{words} of the weight {numbers[name]:.3g}"
            bounds = t.weight_rank_fall_watch, t.weight_rank_fall_act
            yield from _grown(layer, "weight rank", text, fall, *bounds, "lower", words)
        name = "dfi_scale_free"
        if name in numbers and name in before and numbers[name] - before[name] >= 1:
            growth = _ratio(numbers[name], before[name])
            text = f"scale-free DfI {numbers[name]:.3g} per dimension"
            sign = "deviation from isometry"
            yield from _grown(layer, sign, text, growth, t.dfi_growth_watch, None, "higher", "scale-free DfI")


def _whole(now: Numbers, then: Numbers | None, fresh: Numbers, t: Thresholds) -> Iterator[Finding]:
    before = then.whole if then else {}
    whole = now.whole
    for layer, share in now.heads.items():
        usual = (then or fresh).heads.get(layer, 1.0)
        if share <= t.entropy_watch < usual:
            text = _percent(f"attention entropy of a head at {share:.0%} of its maximum")
            yield _finding(layer, "attention", "watch", text, f"entropy share ≤ {t.entropy_watch:g}")
    if "weight_norm" in whole and "weight_norm" in before:
        growth = _ratio(whole["weight_norm"], before["weight_norm"])
        text, bounds = f"weight norm {whole['weight_norm']:.3g}", (t.norm_growth_watch, t.norm_growth_act)
        yield from _grown("", "weight norm", text, growth, *bounds, "higher", "weight norm")
    if "gradient_norm" in whole:
        text, bound = f"gradient norm {whole['gradient_norm']:.2g}", t.gradient_fall_act
        found: list[Finding] = []
        if "gradient_norm" in before and whole.get("loss", 0.0) >= before.get("loss", 0.0):
            fall = _ratio(before["gradient_norm"], whole["gradient_norm"])
            found += _grown("", "gradient", text, fall, bound, bound, "lower", "gradient norm")
        if not found and whole["gradient_norm"] <= t.gradient_watch < fresh.whole.get("gradient_norm", math.inf):
            found.append(_finding("", "gradient", "watch", text, f"gradient norm ≤ {t.gradient_watch:g}"))
        yield from found
    if "curvature" in whole and "curvature" in before:
        growth = _ratio(abs(whole["curvature"]), abs(before["curvature"]))
        text = f"largest Hessian eigenvalue {whole['curvature']:.3g}"
        yield from _grown("", "curvature", text, growth, t.curvature_growth_watch, None, "higher", "curvature")


def _grown(
    layer: str, sign: str, text: str, factor: float, watch: float, act: float | None, where: str, words: str
) -> Iterator[Finding]:
    level: Level
    if act is not None and factor >= act:
        level, bound = "act", act
    elif factor >= watch:
        level, bound = "watch", watch
    else:
        return
    text += f", {_times(factor)} {where} than at the reference"
    yield _finding(layer, sign, level, text, f"{words} {'fell' if where == 'lower' else 'grew'} ≥ {bound:g}×")


def _ratio(a: float, b: float) -> float:
    if b > 0:
        return a / b
    return float("inf") if a > 0 else 1.0


def _times(factor: float) -> str:
    return "infinitely" if factor == float("inf") else f"{factor:.2g}×"


def _percent(text: str) -> str:
    return text.replace("%", " %")
