"""Self-normalized resets: a neuron is dead when it is silent for longer than it ever used to be."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from rekindle.engine.devices import to_float64
from rekindle.methods.call import Call
from rekindle.methods.neurons import Judgment, NeuronOptions, NeuronRemedy
from rekindle.methods.statistics import others
from rekindle.projection.method import Batch
from rekindle.recording.graph import Graph
from rekindle.recording.wiring import Group, Wiring
from rekindle.sharding.replicas import replicas

_EXACT = 16  # intervals up to this have a bin each
_PER_OCTAVE = 4  # above it, bins grow by 2^(1/4)


@dataclass
class _Clock:
    """How long each neuron of a group has been silent, how long its silences used to be, and its limit."""

    age: Tensor  # (neurons,) observations since the neuron last fired
    histogram: Tensor  # (neurons, bins) of completed silences
    threshold: Tensor  # (neurons,)


class SelfNormalizedReset(NeuronRemedy):
    """SNR (Farias & Jozefiak, 2024), to be called after every optimizer step.

    A neuron fires in an observation (one training forward pass) if any of its values is above zero. Each neuron
    has its own histogram of inter-firing times; it is reset when its present silence reaches the `percentile` of
    them. Every `update_every` calls the thresholds are taken from the histograms and these start anew: a reset cuts
    a silence short at the threshold and is counted there, so a percentile that comes out at the old threshold or
    above means "longer than could be seen", and the threshold grows by `expansion`; otherwise it contracts.
    Histograms have single bins up to 16 and four per octave above, so memory does not grow with `longest`. A neuron
    whose activation has no zero (GELU fires at any positive value) is seldom reset.

    >>> method = SelfNormalizedReset(first_threshold=2)
    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> _ = model[0].bias.data.copy_(torch.tensor([-100.0, 1.0, 1.0]))
    >>> with method.observe(model):
    ...     for _ in range(2):
    ...         _ = model(torch.zeros(4, 2))
    ...         receipt = method(model)
    >>> receipt.totals()["counts"]["neurons"]
    1

    Args:
        percentile: of its inter-firing times, at which a silent neuron is reset.
        update_every: calls between two updates of the thresholds.
        first_threshold: silence at which a neuron is reset before the first update.
        expansion: factor by which a threshold grows that was too short to see the percentile.
        longest: the largest threshold.
        options: `targets`, `consumers`, `second_moment`, `fresh` and `seed`, as in
            `rekindle.methods.neurons.NeuronRemedy`.
    """

    name = "self-normalized-reset"
    moment = "step"
    watches = True

    def __init__(
        self,
        percentile: float = 0.99,
        *,
        update_every: int = 500,
        first_threshold: int = 1000,
        expansion: float = 2.0,
        longest: int = 100_000,
        **options: Unpack[NeuronOptions],
    ) -> None:
        if not 0 < percentile < 1:
            raise ValueError(f"percentile={percentile} must lie between 0 and 1")
        super().__init__(**options)
        self.percentile, self.update_every, self.first_threshold = percentile, update_every, first_threshold
        self.expansion, self.longest = expansion, longest
        self._clocks: dict[str, _Clock] = {}
        self._passes: dict[str, list[Tensor]] = {}  # not counted yet: who fired, −1 in a pass with NaN or Inf
        self._left_out: dict[str, int] = {}
        self._seen: set[str] = set()  # since the last call
        self._alone = True
        self._calls = 0
        self._edges = upper_edges(longest)

    def wiring(self, model: nn.Module, batches: Iterable[Batch] | None = None, graphs: Sequence[Graph] = ()) -> Wiring:
        """As for every neuron remedy; replicas are combined at the call, a single model is counted at once."""
        self._alone = replicas(model).size == 1
        return super().wiring(model, batches, graphs)

    def record(self, group: Group, activity: Tensor) -> None:
        """Who fired just now: 1 or 0 for each neuron."""
        most = activity.amax(others(activity))
        fired = (most > 0).to(torch.int8)
        fired = torch.where(most.isfinite().all(), fired, torch.full_like(fired, -1))
        self._passes.setdefault(group.name, []).append(fired)
        if self._alone:
            self._advance(group, None)

    def judge(self, call: Call, wiring: Wiring) -> Judgment:
        """The neurons that have been silent for too long."""
        if not self._passes and not self._clocks:
            raise ValueError("no activity was recorded: train inside observe(model)")
        for group in wiring:
            self._advance(group, call)
        self._calls += 1
        if self._calls % self.update_every == 0:
            for clock in self._clocks.values():
                self._update(clock)
        clocks = {name: clock for name, clock in self._clocks.items() if name in self._seen}
        silent = {n: (c.age >= c.threshold).nonzero().flatten() for n, c in clocks.items()}
        unseen = {g.name: "no activity was recorded since the last call" for g in wiring if g.name not in self._seen}
        self._seen.clear()
        notes = [f"{name}: {n} passes with NaN or Inf were left out" for name, n in self._left_out.items() if n]
        self._left_out.clear()
        return Judgment(silent, skipped=unseen, notes=notes)

    def replaced(self, neurons: Mapping[str, Tensor]) -> None:
        """A reset ends a silence."""
        for name, index in neurons.items():
            if len(index):
                clock = self._clocks[name]
                self._count(clock, clock.age >= clock.threshold)
                clock.age.index_fill_(0, index, 0)

    def forget(self, layers: Collection[str] | None = None) -> None:
        """Start the clocks anew."""
        for name in list(self._clocks) if layers is None else layers:
            self._clocks.pop(name, None)
            self._passes.pop(name, None)

    def _advance(self, group: Group, call: Call | None) -> None:
        """Advance a group's clock over the recorded passes.

        A neuron fires if it does so on any replica of the model; replicas make equally many passes.
        """
        passes = self._passes.pop(group.name, [])
        if not passes:
            return
        self._seen.add(group.name)
        fired = torch.stack(passes)
        counts = [(fired > 0).float(), (fired < 0).any(1).float()]
        firing, bad = counts if call is None else call.total(counts)
        if group.name not in self._clocks:
            age = torch.zeros(group.width, dtype=torch.long, device=fired.device)
            histogram = torch.zeros(group.width, len(self._edges), dtype=torch.int32, device=fired.device)
            self._clocks[group.name] = _Clock(age, histogram, torch.full_like(age, self.first_threshold))
        clock = self._clocks[group.name]
        if clock.age.device != fired.device:  # loaded from a state on another device
            there = (each.to(fired.device) for each in (clock.age, clock.histogram, clock.threshold))
            clock = self._clocks[group.name] = _Clock(*there)
        for who, left_out in zip(firing > 0, bad.tolist(), strict=True):
            if left_out:
                self._left_out[group.name] = self._left_out.get(group.name, 0) + 1
                continue
            clock.age += 1
            self._count(clock, who)
            clock.age.masked_fill_(who, 0)

    def _count(self, clock: _Clock, ended: Tensor) -> None:
        """Add the present age of every neuron whose silence has ended to its histogram."""
        bins = torch.searchsorted(self._edges.to(clock.age.device), clock.age.clamp_max(self.longest))
        clock.histogram.scatter_add_(1, bins[:, None], ended[:, None].to(clock.histogram.dtype))

    def _update(self, clock: _Clock) -> None:
        histogram = to_float64(clock.histogram)
        share = histogram.cumsum(1) / histogram.sum(1, keepdim=True).clamp_min(1)
        first = (share >= self.percentile).int().argmax(1).to(clock.histogram.device)
        silent = clock.histogram.sum(1) == 0
        # A threshold of t observations means "longer than any of the usual silences", hence one more.
        usual = self._edges.to(clock.age.device)[first] + 1
        seen = (usual <= clock.threshold) & ~silent
        grown = (clock.threshold * self.expansion).round().long().clamp_max(self.longest)
        clock.threshold = torch.where(seen, usual, torch.where(silent, clock.threshold, grown))
        clock.histogram.zero_()

    def gathered(self) -> dict[str, Any]:
        """Ages, histograms and thresholds."""
        return {"clocks": {name: asdict(clock) for name, clock in self._clocks.items()}, "calls": self._calls}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take them back."""
        self._clocks = {n: _Clock(**{k: v.clone() for k, v in c.items()}) for n, c in state["clocks"].items()}
        self._calls = state["calls"]


def upper_edges(longest: int) -> Tensor:
    """The largest interval of each bin: exact up to 16, then four bins per octave.

    >>> upper_edges(40).tolist()[-6:]
    [19, 22, 26, 32, 38, 40]
    """
    if longest < 1:
        raise ValueError(f"longest={longest} must be at least 1")
    edges = list(range(1, min(_EXACT, longest) + 1))
    octaves = max(0.0, math.log2(longest / _EXACT))
    for step in range(1, math.ceil(octaves * _PER_OCTAVE) + 1):
        edges.append(min(longest, int(_EXACT * 2 ** (step / _PER_OCTAVE))))
    return torch.tensor(edges)
