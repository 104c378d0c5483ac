"""health(): what the weights, units and gradients of a model say about its plasticity, and a verdict.

>>> import torch
>>> net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
>>> found = health(net, [torch.randn(64, 8, generator=torch.Generator().manual_seed(0))])
>>> found.verdict in ("healthy", "watch", "act"), found.verdict.sure, found.units["0"]["dormant"] < 0.5
(True, False, True)
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from itertools import islice
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from rekindle.blocks import parametrized
from rekindle.blocks.finding import Block, Found, find
from rekindle.blocks.names import is_sharded, locate, unwrapped
from rekindle.diagnosis.activity import Activity, Unmeasured, activity
from rekindle.diagnosis.curvature import Curvature, hessian_eigenvalue
from rekindle.diagnosis.fresh import fresh_numbers
from rekindle.diagnosis.results import Comparison, Health
from rekindle.diagnosis.units import UnitActivity
from rekindle.diagnosis.usage import Usage, unjudged
from rekindle.diagnosis.verdict import Numbers, Thresholds, Verdict
from rekindle.engine.devices import full_precision, learning
from rekindle.isolation import Batch, Loss, check_loss
from rekindle.measures.matrices import Measures, Mode, measure
from rekindle.measures.spectra import NoSpectrum, side_by_side, workers_for
from rekindle.projection.scales import Scale
from rekindle.recording.first_batch import knowing
from rekindle.recording.invariance import norms_behind
from rekindle.sharding.assembly import Assembly, Item
from rekindle.sharding.passes import passes
from rekindle.sharding.team import distributed, refuse_hidden, refuse_shards, settle
from rekindle.sharding.units import Part

# Rows of an embedding are looked up, a depthwise kernel has 1-wide matrices: their spectra say nothing.
_PASSED_OVER = ("embedding", "depthwise")
_LOOKED_AT = 8  # batches among which parts of a model that are called by themselves are looked for
_PAPER = Scale.parse("paper")
_RANKS = ("rank_limit", "feature_rank", "feature_srank", "feature_participation")
_OF_WEIGHTS = {"dead weights", "similar neurons"}
_AGAINST_FRESH = {"dormancy", "saturation", "attention", "gradient", *_OF_WEIGHTS}

__all__ = ["Comparison", "Health", "Thresholds", "Verdict", "health"]


@learning(on_host=False)
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
    optimizer: torch.optim.Optimizer | None = None,
    units: Mapping[str, str | None] | None = None,
) -> Health:
    """Measure a model, and judge it: against `reference`, an earlier Health or another model (a fresh one), if given.

    The model is left as it was: weights, `.grad`, buffers, modes, hooks and random numbers. On a model with DTensor
    parameters every process must make the call; weights are measured whole, units on each rank's own batches.

    >>> fresh = nn.Linear(8, 8)
    >>> spoilt = nn.Linear(8, 8)
    >>> _ = nn.init.ones_(spoilt.weight)
    >>> health(spoilt, reference=fresh).verdict.findings[0].sign
    'similar neurons'

    Args:
        model: any module. Weights that a normalization follows are named (`about[…]["norm"]`): their scale does not
            change the function.
        batches: data to run it on; without them only weights are measured. Experts, codes, latents of a sparse
            autoencoder and ranks of an adapter are found on the first batch, by what they do.
        loss: `loss(model, batch)`; without it no gradients are measured.
        reference: an earlier Health or another model (a fresh one) to compare with.
        mode: "full", or "cheap", which finds no eigenvalue of a weight.
        curvature: also the largest Hessian eigenvalue, by up to 100 Hessian-vector products.
        max_batches: stop after so many.
        thresholds: those of the verdict.
        optimizer: with it each weight that a normalization follows has its effective learning rate lr/‖W‖².
        units: names stacks of units by hand, {"codebook.embed": "codes"}, or leaves them out (None).
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"health needs an nn.Module, got {type(model).__name__}")
    refuse_hidden(model, "rekindle.health(model.module)", writes=False)
    settle(model)
    limits = thresholds or Thresholds()
    team, _ = distributed(model, copies=False)
    with team.together():
        check_loss(loss)
        if loss is not None and batches is None:
            raise ValueError("loss is given but batches is not: gradients need data")
        if curvature:
            if loss is None:
                raise ValueError("curvature=True needs a loss(model, batch)")
            refuse_shards(model, "health(curvature=True)", "batches")
        if reference is not None and not isinstance(reference, Health | nn.Module):
            raise TypeError(f"reference is an earlier Health or a model, got {type(reference).__name__}")
        if batches is not None and iter(batches) is batches:
            batches = list(islice(batches, max_batches))  # they may be read again
    if isinstance(reference, nn.Module):
        reference = health(
            reference, batches, loss=loss, mode=mode, curvature=curvature, max_batches=max_batches, thresholds=limits
        )
    start = time.perf_counter()
    reading = HealthBuilder(mode=mode, tau=limits.tau)
    with knowing(model, batches, loss):
        reading.read_weights(model)
    reading.add_norms(model, optimizer)
    if batches is not None:
        with passes(model, team):
            usage = usage_on(model, batches, units)
            seen = activity(model, batches, loss=loss, mode=mode, max_batches=max_batches, usage=usage)
        reading.add_activity(seen, usage)
        if curvature and loss is not None:
            reading.add_curvature(hessian_eigenvalue(model, batches, loss))
    else:
        reading.unmeasured.append(Unmeasured("", "activity and gradients", "no batches were given"))
    if batches is not None and loss is None:
        reading.unmeasured.append(Unmeasured("", "gradients", "no loss was given"))
    measured = reading.result(time.perf_counter() - start, limits)
    if reference is not None:
        return measured.against(reference)
    signs = {finding.sign for finding in measured.verdict.findings}
    if batches is None or not signs & _AGAINST_FRESH:
        return measured

    def numbers(network: nn.Module) -> Numbers:
        again = HealthBuilder(mode=mode, tau=limits.tau)
        if signs & _OF_WEIGHTS:
            with knowing(network, first, loss):
                again.read_weights(network)
        again.add_activity(activity(network, first, loss=loss, mode=mode))
        return again.result(0.0, limits).numbers

    first = list(islice(batches, max_batches))
    fresh = fresh_numbers(model, first, numbers, (mode, limits.tau, bool(signs & _OF_WEIGHTS), loss is None))
    return replace(measured, fresh=fresh, seconds=time.perf_counter() - start)


def weights_of(model: nn.Module) -> list[Found]:
    """The weights as a recording shows them, where there is one; those that did not run in it as the classes say."""
    found = find(model, sharded=True)
    if all(each.blocks or each.evidence != "recorded" for each in found):
        return found
    unaided = find(model, sharded=True, unaided=True)
    pairs = zip(found, unaided, strict=True)
    return [one if one.blocks or one.evidence != "recorded" else other for one, other in pairs]


def usage_on(model: nn.Module, batches: Iterable[Batch], units: Mapping[str, str | None] | None = None) -> Usage:
    """What counts the use of the model's stacks on these batches."""
    return Usage.of(model, islice(batches, _LOOKED_AT), units)


class Held(Protocol):
    """A weight and the matrices that it holds: a `Found`, or a tensor of a file."""

    @property
    def name(self) -> str:
        """What it is called."""
        ...

    @property
    def blocks(self) -> Sequence[Block]:
        """Its matrices."""
        ...


class HealthBuilder:
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
        self.stacks: dict[str, dict[str, float]] = {}
        self.unmeasured: list[Unmeasured] = []

    def read_weights(self, model: nn.Module, parameters: Iterable[Found] | None = None) -> None:
        """Measure every matrix; with `parameters` they are not searched for again."""
        chosen = []
        for found in weights_of(model) if parameters is None else parameters:
            reason = found.refusal or next((found.marks[mark] for mark in _PASSED_OVER if mark in found.marks), None)
            if reason is None:
                chosen.append(found)
            elif len(found.shape) > 1:
                self.unmeasured.append(Unmeasured(found.name, "weight", reason))
        shards = [found for found in chosen if not found.parametrized and is_sharded(model.get_parameter(found.key))]
        chosen = [found for found in chosen if found not in shards]
        weights = ((found, _weight(model, found)) for found in chosen)
        # Threads are for LAPACK on CPUs; one keeps an accelerator busy.
        processors = all(parameter.device.type == "cpu" for parameter in model.parameters())
        for _ in self.measured(weights, sum(math.prod(found.shape) for found in chosen) if processors else 0):
            pass
        for found, known in zip(shards, measure_shards(model, shards, self.mode), strict=True):
            self._take(found, {called(found, block): known[i] for i, block in enumerate(found.blocks) if i in known})
        self._sum_up()

    def measured(
        self, weights: Iterable[tuple[Held, Tensor]], numbers: int
    ) -> Iterator[tuple[Held, dict[str, Measures]]]:
        """Measure the matrices of the weights, `numbers` entries in all; yields each with its measures by name.

        Large models are measured by several threads, which read a few weights ahead.
        """
        for held, found in side_by_side(self._measure, weights, workers=workers_for(numbers)):
            self._take(held, found)
            yield held, found
        self._sum_up()

    def _take(self, held: Held, found: Mapping[str, Measures]) -> None:
        for block in held.blocks:
            name = called(held, block)
            self.about[name] = {"role": block.role, "shape": _shape(block.count, block.out, block.in_)}
            if name not in found:
                self.broken[name] = "the weight holds NaN or Inf"
                continue
            sizes = {"rows": block.count * block.out, "columns": block.in_, "matrices": block.count}
            self.weights[name] = {**found[name].summary(), **{key: float(size) for key, size in sizes.items()}}

    @full_precision()
    def _measure(self, weight: tuple[Held, Tensor]) -> tuple[Held, dict[str, Measures]]:
        """Measure a block if all of it is finite."""
        (held, value), found = weight, {}
        for block in held.blocks:
            with suppress(NoSpectrum):
                matrices = block.read(value)
                found[called(held, block)] = measure(matrices, scale=_PAPER.known(block) or 1.0, mode=self.mode)
        return held, found

    def _sum_up(self) -> None:
        if self.weights:
            self.whole["weight_norm"] = math.sqrt(sum(w["norm"] ** 2 for w in self.weights.values()))
            free = [(w["dfi_scale_free"], w["matrices"]) for w in self.weights.values() if "dfi_scale_free" in w]
            if free:
                self.whole["dfi_scale_free"] = sum(a * b for a, b in free) / sum(b for _, b in free)

    def add_norms(self, model: nn.Module, optimizer: Any = None) -> None:
        """Name the weights whose scale a normalization takes out, and their effective learning rates."""
        norms = norms_behind(unwrapped(model))
        rates = {
            id(parameter): float(group["lr"])
            for group in (() if optimizer is None else optimizer.param_groups)
            for parameter in group["params"]
            if "lr" in group
        }
        for name, about in self.about.items():
            layer, _, last = name.partition("[")[0].rpartition(".")
            if last != "weight" or layer not in norms:
                continue
            self.about[name] = {**about, "norm": norms[layer]}
            parameter = getattr(unwrapped(model).get_submodule(layer), "weight", None)
            norm = self.weights.get(name, {}).get("norm", 0.0)
            if id(parameter) in rates and norm > 0:
                self.weights[name]["effective_lr"] = rates[id(parameter)] / norm**2

    def add_activity(self, found: Activity, usage: Usage | None = None, *, pairs: bool = True) -> None:
        """Add what was measured of units and gradients; `pairs` also compares members of stacks with each other."""
        for layer in found.layers if usage is None else usage.neurons(found.layers):
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
        if usage is not None:
            self._add_usage(usage, pairs)
        dead = [each["dead"] for each in (*self.stacks.values(), *self.units.values()) if "dead" in each]
        if dead:
            self.whole["dead_worst"] = max(dead)
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
        """The layer whose output the units are; a second activation on it, or one without a layer, has its own name."""
        taken = layer.after in self.units or layer.after in self.broken
        return layer.name if taken or not layer.after else layer.after

    def keep(self, earlier: Health) -> None:
        """Weights and ranks of features as they were measured before, where they were not measured now."""
        self.weights = {name: dict(numbers) for name, numbers in earlier.weights.items()}
        weights = {name: dict(about) for name, about in earlier.about.items() if "role" in about}
        self.about = {**weights, **self.about}
        self.broken |= {name: why for name, why in earlier.broken.items() if name in weights}
        self.unmeasured += [each for each in earlier.unmeasured if each.what == "weight"]
        for name, numbers in self.units.items():
            numbers |= {key: value for key, value in earlier.units.get(name, {}).items() if key in _RANKS}
        for name, numbers in self.stacks.items():
            if (similar := earlier.stacks.get(name, {}).get("similar_pairs")) is not None:
                numbers["similar_pairs"] = similar
        for name in ("weight_norm", "dfi_scale_free", "feature_rank_worst"):
            if name in earlier.whole:
                self.whole[name] = earlier.whole[name]

    def _add_usage(self, usage: Usage, pairs: bool) -> None:
        kinds = {stack.name: stack.kind for stack in usage.found.stacks}
        for name, numbers in usage.numbers(pairs).items():
            self.stacks[name], self.about[name] = numbers, {"kind": kinds[name]}
        missing = {**usage.unmeasured(), **unjudged(self.stacks)}
        self.unmeasured += [Unmeasured(name, "units", reason) for name, reason in missing.items()]

    def add_curvature(self, found: Curvature) -> None:
        """Add the eigenvalue, if it converged."""
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
            self.stacks,
            tuple(self.unmeasured),
            self.mode,
            seconds,
            thresholds,
        )


def called(held: Held, block: Block) -> str:
    """What one of the blocks of a weight is called."""
    return f"{held.name}[{block.part}]" if block.part else held.name


def _weight(model: nn.Module, found: Found) -> Tensor:
    if not found.parametrized:
        return model.get_parameter(found.key).detach()
    place = locate(model, found.key)
    return parametrized.read(place.owner, place.tensor)


def _shape(count: int, out: int, in_: int) -> str:
    return f"{out}×{in_}" if count == 1 else f"{count}·{out}×{in_}"


def measure_shards(model: nn.Module, found: Sequence[Found], mode: Mode) -> list[dict[int, Measures]]:
    """For each weight (all of them DTensors): place of a block → its measures; what is not finite is left out.

    Every process of the model must make the call.
    """
    if not found:
        return []
    team, spreads = distributed(model, copies=False)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    paper = Scale.parse("paper")
    items = [Item(f.name, parameters[f.key], spreads[f.key], tuple(b.layout for b in f.blocks)) for f in found]

    @full_precision()
    def look(number: int, part: Part, box: Tensor) -> Measures | None:
        with suppress(NoSpectrum):
            scale = paper.known(found[number].blocks[part.block]) or 1.0
            return measure(part.layout.read(box), scale=scale, mode=mode)
        return None

    results: list[dict[int, Measures]] = [{} for _ in found]
    for (number, block), parts in Assembly(team, items).measure(look).items():
        known = [each for _, each in parts if each is not None]
        if len(known) == len(parts):
            results[number][block] = _joined(known)
    return results


def _joined(parts: Sequence[Measures]) -> Measures:
    """The measures of a block whose matrices were measured in several places."""
    if len(parts) == 1:
        return parts[0]
    tensors = [field.name for field in fields(Measures) if isinstance(getattr(parts[0], field.name), Tensor)]
    whole: dict[str, Any] = {name: torch.cat([getattr(part, name) for part in parts]) for name in tensors}
    return replace(parts[0], **whole)
