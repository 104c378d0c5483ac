"""health(): what the weights, units and gradients of a model say about its plasticity, and a verdict.

>>> import torch
>>> net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
>>> found = health(net, [torch.randn(64, 8, generator=torch.Generator().manual_seed(0))])
>>> found.verdict in ("healthy", "watch", "act"), found.verdict.sure, found.units["0"]["dormant"] < 0.5
(True, False, True)
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from rekindle.blocks import parametrized
from rekindle.blocks.finding import Block, Found, find
from rekindle.blocks.names import locate
from rekindle.diagnosis.activity import Activity, Unmeasured, activity
from rekindle.diagnosis.curvature import Curvature, hessian_eigenvalue
from rekindle.diagnosis.text import compared, described
from rekindle.diagnosis.units import UnitActivity
from rekindle.diagnosis.verdict import LEVELS, Numbers, Thresholds, Verdict, judge
from rekindle.engine.precision import full_precision
from rekindle.extras import install
from rekindle.isolation import Batch, Loss, check_loss
from rekindle.measures.matrices import Measures, Mode, measure
from rekindle.measures.spectra import NotFinite
from rekindle.measures.threads import side_by_side, workers_for
from rekindle.projection.scales import Scale

if TYPE_CHECKING:
    import pandas

_MAPPINGS = ("weights", "units", "heads", "gradients", "steps", "whole", "about", "broken")
# Rows of an embedding are looked up, a depthwise kernel has 1-wide matrices: their spectra say nothing.
_PASSED_OVER = ("embedding", "depthwise", "sharded")

__all__ = ["Comparison", "Health", "Thresholds", "Verdict", "health"]


@dataclass(frozen=True)
class Health:
    """Measures of one model at one moment, and a verdict. A number that is not here was not measured.

    `weights` and `units` map a layer to its numbers, `about` each layer to words (role, shape; for units the kind of
    activation and the place `at` which it was seen). Units are named by the layer that makes them, as methods and
    `targets=` take it. `heads` each attention to the entropy share of its most collapsed head, `gradients` and `steps`
    each parameter to ‖∂L/∂w‖ and to ‖update‖/‖w‖ (a monitor's); `whole` holds numbers of the whole model, and
    `reference` those that it was judged against.

    >>> found = health(nn.Linear(3, 3))
    >>> found.flat()["weights/weight/norm"] == found.weights["weight"]["norm"]
    True
    """

    weights: Mapping[str, Mapping[str, float]]
    units: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    heads: Mapping[str, float] = field(default_factory=dict)
    gradients: Mapping[str, float] = field(default_factory=dict)
    steps: Mapping[str, float] = field(default_factory=dict)
    whole: Mapping[str, float] = field(default_factory=dict)
    about: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    broken: Mapping[str, str] = field(default_factory=dict)
    unmeasured: tuple[Unmeasured, ...] = ()
    mode: Mode = "full"
    seconds: float = 0.0
    thresholds: Thresholds = field(default_factory=Thresholds)
    reference: Numbers | None = None

    @cached_property
    def verdict(self) -> Verdict:
        """`healthy`, `watch`, `act` or `unknown`, with findings and the rule that fired."""
        return judge(self.numbers, self.reference, self.thresholds)

    @property
    def numbers(self) -> Numbers:
        """What the rules look at."""
        unread = sum(each.what == "weight" for each in self.unmeasured)
        return Numbers(self.weights, self.units, self.heads, self.whole, self.broken, unread)

    def layers_named(self) -> list[str]:
        """The layers that findings are about, worst first: what `fire(model, targets=health)` acts on.

        >>> spoilt = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        >>> _ = nn.init.ones_(spoilt[0].weight), nn.init.eye_(spoilt[2].weight)
        >>> health(spoilt).layers_named()
        ['0.weight']
        """
        ordered = sorted(self.verdict.findings, key=lambda finding: -LEVELS.index(finding.level))
        return list(dict.fromkeys(finding.layer for finding in ordered if finding.layer))

    def against(self, reference: Health | None) -> Health:
        """The same measures judged against another moment.

        >>> now = health(nn.Linear(3, 3))
        >>> now.against(now).verdict.sure
        True
        """
        return replace(self, reference=None if reference is None else reference.numbers)

    def compare(self, other: Health) -> Comparison:
        """Every number that both have, this one's beside the other's.

        >>> now = health(nn.Linear(3, 3))
        >>> now.compare(now).rows[0].ratio
        1.0
        """
        mine, theirs = self.flat(), other.flat()
        rows = [Change(name, theirs[name], mine[name]) for name in mine if name in theirs]
        only = [name for name in (*mine, *theirs) if (name in mine) != (name in theirs)]
        return Comparison(tuple(rows), tuple(only))

    def flat(self, prefix: str = "") -> dict[str, float]:
        """One flat dict of numbers, for any logger.

        >>> sorted(health(nn.Linear(3, 3)).flat("health/"))[-1]
        'health/weights/weight/stable_rank'
        """
        found = {**self.whole, "verdict": float(self.verdict.level)}
        for kind, layers in (("weights", self.weights), ("units", self.units)):
            for layer, numbers in layers.items():
                found |= {f"{kind}/{layer}/{name}": value for name, value in numbers.items()}
        found |= {f"attention/{layer}/entropy_share": value for layer, value in self.heads.items()}
        found |= {f"gradients/{name}": value for name, value in self.gradients.items()}
        found |= {f"steps/{name}": value for name, value in self.steps.items()}
        return {prefix + name: float(value) for name, value in found.items()}

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON can hold it; `Health.from_dict` reads it back.

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
        # Until units were named by their layer they went by the activation, with the layer beside it.
        layers = {name: about["after"] for name, about in kept["about"].items() if about.get("after")}
        for name in ("units", "about", "broken"):
            kept[name] = {layers.get(key, key): value for key, value in kept[name].items()}
        return cls(
            **kept,
            unmeasured=tuple(Unmeasured(**each) for each in data["unmeasured"]),
            mode=data["mode"],
            seconds=data["seconds"],
            thresholds=Thresholds(**data["thresholds"]),
            reference=None if data["reference"] is None else Numbers(**data["reference"]),
        )

    def to_json(self, path: str | Path | None = None) -> str:
        """The same as text (infinities as strings are not JSON: they become null), written to `path` if given.

        >>> '"verdict"' in health(nn.Linear(3, 3)).to_json()
        True
        """
        text = json.dumps(_plain(self.to_dict()), indent=1)
        if path is not None:
            Path(path).write_text(text)
        return text

    def to_frame(self) -> pandas.DataFrame:
        """One row a layer and measure: kind, layer, measure, value."""
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
        return described(self, shutil.get_terminal_size((110, 24)).columns)


@dataclass(frozen=True)
class Change:
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

    rows: tuple[Change, ...]
    only_one: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        rows = [{"name": r.name, "then": r.then, "now": r.now, "ratio": r.ratio} for r in self.rows]
        return {"rows": rows, "only_one": list(self.only_one)}

    def __str__(self) -> str:
        return compared(self, shutil.get_terminal_size((110, 24)).columns)


def health(
    model: nn.Module,
    batches: Iterable[Batch] | None = None,
    *,
    loss: Loss | None = None,
    reference: Health | nn.Module | None = None,
    mode: Mode = "full",
    curvature: bool = False,
    max_batches: int | None = None,
    thresholds: Thresholds | None = None,
) -> Health:
    """Measure a model, and judge it: against `reference`, an earlier Health or another model (a fresh one), if given.

    Without batches only weights are measured, without a `loss(model, batch)` no gradients. `curvature` adds the
    largest Hessian eigenvalue (up to 100 Hessian-vector products). Cheap mode finds no eigenvalue of a weight.
    The model is left as it was: weights, `.grad`, buffers, modes, hooks and random numbers.

    >>> fresh = nn.Linear(8, 8)
    >>> spoilt = nn.Linear(8, 8)
    >>> _ = nn.init.ones_(spoilt.weight)
    >>> health(spoilt, reference=fresh).verdict.findings[0].sign
    'similar neurons'
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"health needs an nn.Module, got {type(model).__name__}")
    check_loss(loss)
    if loss is not None and batches is None:
        raise ValueError("loss is given but batches is not: gradients need data")
    if curvature and loss is None:
        raise ValueError("curvature=True needs a loss(model, batch)")
    if reference is not None and not isinstance(reference, Health | nn.Module):
        raise TypeError(f"reference is an earlier Health or a model, got {type(reference).__name__}")
    limits = thresholds or Thresholds()
    if batches is not None and (curvature or isinstance(reference, nn.Module)) and iter(batches) is batches:
        batches = list(batches)
    if isinstance(reference, nn.Module):
        reference = health(
            reference, batches, loss=loss, mode=mode, curvature=curvature, max_batches=max_batches, thresholds=limits
        )
    start = time.perf_counter()
    reading = Reading(mode=mode, tau=limits.tau)
    reading.read_weights(model)
    if batches is not None:
        reading.add_activity(activity(model, batches, loss=loss, mode=mode, max_batches=max_batches))
        if curvature and loss is not None:
            reading.add_curvature(hessian_eigenvalue(model, batches, loss))
    else:
        reading.unmeasured.append(Unmeasured("", "activity and gradients", "no batches were given"))
    if batches is not None and loss is None:
        reading.unmeasured.append(Unmeasured("", "gradients", "no loss was given"))
    measured = reading.result(time.perf_counter() - start, limits)
    return measured.against(reference)


@dataclass(frozen=True)
class Stored:
    """A weight and the matrices that it holds."""

    name: str
    blocks: Sequence[Block]
    weight: Tensor

    def called(self, block: Block) -> str:
        """What one of its matrices is called."""
        return f"{self.name}[{block.part}]" if block.part else self.name


class Reading:
    """Collects numbers on the way to a Health; `health` and the monitor each take the steps they need."""

    def __init__(self, mode: Mode, tau: float) -> None:
        self.mode, self.tau = mode, tau
        self.weights: dict[str, dict[str, float]] = {}
        self.units: dict[str, dict[str, float]] = {}
        self.heads: dict[str, float] = {}
        self.gradients: dict[str, float] = {}
        self.steps: dict[str, float] = {}
        self.whole: dict[str, float] = {}
        self.about: dict[str, dict[str, str]] = {}
        self.broken: dict[str, str] = {}
        self.unmeasured: list[Unmeasured] = []

    def read_weights(self, model: nn.Module, parameters: Iterable[Found] | None = None) -> None:
        """Measure every matrix; `parameters` spares looking for them again."""
        chosen = []
        for found in find(model) if parameters is None else parameters:
            reason = found.refusal or next((found.marks[mark] for mark in _PASSED_OVER if mark in found.marks), None)
            if reason is None:
                chosen.append(found)
            elif len(found.shape) > 1:
                self.unmeasured.append(Unmeasured(found.name, "weight", reason))
        stored = (Stored(found.name, found.blocks, _weight(model, found)) for found in chosen)
        # Threads are for LAPACK on processors; an accelerator is kept busy by one.
        processors = all(parameter.device.type == "cpu" for parameter in model.parameters())
        for _ in self.measured(stored, sum(math.prod(found.shape) for found in chosen) if processors else 0):
            pass

    def measured(self, weights: Iterable[Stored], numbers: int) -> Iterator[tuple[Stored, dict[str, Measures]]]:
        """Measure the matrices of the weights, which hold so many numbers in all; gives each with its measures by name.

        Large models are measured by several threads, which see a few weights ahead.
        """
        for stored, found in side_by_side(self._measure, weights, workers=workers_for(numbers)):
            for block in stored.blocks:
                name = stored.called(block)
                self.about[name] = {"role": block.role, "shape": _shape(block.count, block.out, block.in_)}
                if name not in found:
                    self.broken[name] = "the weight holds NaN or Inf"
                    continue
                sizes = {"rows": block.count * block.out, "columns": block.in_, "matrices": block.count}
                self.weights[name] = {**found[name].summary(), **{key: float(size) for key, size in sizes.items()}}
            yield stored, found
        self._sum_up()

    @full_precision()
    def _measure(self, stored: Stored) -> tuple[Stored, dict[str, Measures]]:
        """What is finite has measures."""
        paper = Scale.parse("paper")
        found = {}
        for block in stored.blocks:
            with suppress(NotFinite):
                matrices = block.read(stored.weight)
                found[stored.called(block)] = measure(matrices, scale=paper.known(block) or 1.0, mode=self.mode)
        return stored, found

    def _sum_up(self) -> None:
        if self.weights:
            self.whole["weight_norm"] = math.sqrt(sum(w["norm"] ** 2 for w in self.weights.values()))
            free = [(w["dfi_scale_free"], w["matrices"]) for w in self.weights.values() if "dfi_scale_free" in w]
            if free:
                self.whole["dfi_scale_free"] = sum(a * b for a, b in free) / sum(b for _, b in free)

    def add_activity(self, found: Activity) -> None:
        """Take over what units and gradients did."""
        for layer in found.layers:
            name = self._unit_name(layer)
            self.about[name] = {"kind": layer.kind, "at": layer.name}
            if not layer.finite:
                self.broken[name] = "its output holds NaN or Inf"
                continue
            counts = {"units": float(layer.units), "rows": float(layer.rows), "rank_limit": float(layer.rank_limit)}
            self.units[name] = {**counts, **layer.summary(self.tau)}
        for attention in found.attention:
            known = attention.share[~attention.share.isnan()]
            if known.numel():
                self.heads[attention.name] = float(known.min())
        self.gradients = dict(found.gradient_norms)
        self.unmeasured += found.unmeasured
        if self.units:
            total = sum(u["units"] for u in self.units.values())
            for name in ("dormant", "dead"):
                self.whole[name] = sum(u[name] * u["units"] for u in self.units.values()) / total
            self.whole["dormant_worst"] = max(u["dormant"] for u in self.units.values())
            ranks = [u["feature_rank"] / u["rank_limit"] for u in self.units.values() if "feature_rank" in u]
            if ranks:
                self.whole["feature_rank_worst"] = min(ranks)
        if self.gradients:
            self.whole["gradient_norm"] = math.sqrt(sum(g * g for g in self.gradients.values()))
        if found.loss is not None:
            self.whole["loss"] = found.loss
        for name, value in [*self.gradients.items(), ("loss", self.whole.get("loss", 0.0))]:
            if not math.isfinite(value):
                self.broken[name] = (
                    "the gradient is NaN or infinite" if name != "loss" else "the loss is NaN or infinite"
                )

    def _unit_name(self, layer: UnitActivity) -> str:
        """The layer whose output the units are; a second activation on it, or one on none, goes by its own name."""
        taken = layer.after in self.units or layer.after in self.broken
        return layer.name if taken or not layer.after else layer.after

    def add_curvature(self, found: Curvature) -> None:
        """Take over an eigenvalue, if it is one."""
        if found.converged:
            self.whole["curvature"] = found.value
        else:
            reason = f"power iteration did not converge in {found.steps} steps (about {found.value:.3g})"
            self.unmeasured.append(Unmeasured("", "curvature", reason))

    def result(self, seconds: float, thresholds: Thresholds) -> Health:
        """The Health, not yet judged against anything."""
        return Health(
            self.weights,
            self.units,
            self.heads,
            self.gradients,
            self.steps,
            self.whole,
            self.about,
            self.broken,
            tuple(self.unmeasured),
            self.mode,
            seconds,
            thresholds,
        )


def _weight(model: nn.Module, found: Found) -> Tensor:
    if not found.parametrized:
        return model.get_parameter(found.key).detach()
    place = locate(model, found.key)
    return parametrized.read(place.owner, place.tensor)


def _shape(count: int, out: int, in_: int) -> str:
    return f"{out}×{in_}" if count == 1 else f"{count}·{out}×{in_}"


def _copied(mapping: Mapping[str, Any]) -> dict[str, Any]:
    # JSON has no infinity: what came back as null counts as unmeasured.
    return {
        key: _copied(value) if isinstance(value, Mapping) else value
        for key, value in mapping.items()
        if value is not None
    }


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
