"""Self-normalised resets: a neuron is dead when it is silent for longer than it ever used to be."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from rekindle.consumers.wiring import Group
from rekindle.methods.neurons import NeuronRemedy, Replacement, others
from rekindle.projection.receipt import Batch, Loss, Meter, Receipt

_EXACT = 16  # intervals up to this are counted each for itself
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
    Histograms have single bins up to 16 and four an octave above, so memory does not grow with `longest`. A neuron
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
    """

    name = "self-normalized-reset"
    moment = "step"

    def __init__(
        self,
        percentile: float = 0.99,
        *,
        update_every: int = 500,
        first_threshold: int = 1000,
        expansion: float = 2.0,
        longest: int = 100_000,
        targets: str | Sequence[str] = "auto",
        consumers: Mapping[str, str | Sequence[str]] | None = None,
        second_moment: Literal["mean", "zero"] = "mean",
        fresh: Callable[[], nn.Module] | None = None,
        seed: int = 0,
    ) -> None:
        if not 0 < percentile < 1:
            raise ValueError(f"percentile={percentile} must lie between 0 and 1")
        super().__init__(targets=targets, consumers=consumers, second_moment=second_moment, fresh=fresh, seed=seed)
        self.percentile, self.update_every, self.first_threshold = percentile, update_every, first_threshold
        self.expansion, self.longest = expansion, longest
        self._clocks: dict[str, _Clock] = {}
        self._calls = 0
        self._edges = upper_edges(longest)

    def record(self, group: Group, activity: Tensor) -> None:
        """Who fired just now."""
        fired = activity.amax(others(activity)) > 0
        name = group.name
        if name not in self._clocks:
            age = torch.zeros(group.width, dtype=torch.long, device=activity.device)
            histogram = torch.zeros(group.width, len(self._edges), dtype=torch.int32, device=activity.device)
            self._clocks[name] = _Clock(age, histogram, torch.full_like(age, self.first_threshold))
        clock = self._clocks[name]
        clock.age += 1
        self._count(clock, fired)
        clock.age.masked_fill_(fired, 0)

    def __call__(
        self,
        model: nn.Module,
        optimizer: Any = None,
        *,
        batches: Iterable[Batch] | None = None,
        loss: Loss | None = None,
        generator: torch.Generator | None = None,
    ) -> Receipt:
        """Reset neurons that have been silent for too long."""
        meter = Meter()
        wiring = self.wiring(model, batches)
        if batches is not None:
            self.look(model, batches)
        if not self._clocks:
            raise ValueError("no activity was recorded: train inside observe(model)")
        self._calls += 1
        if self._calls % self.update_every == 0:
            for clock in self._clocks.values():
                self._update(clock)
        silent = {n: (c.age >= c.threshold).nonzero().flatten() for n, c in self._clocks.items()}
        receipt = Replacement(model, wiring, silent, fresh=self._fresh).apply(
            self.name,
            optimizer,
            self.draws(generator),
            second_moment=self.second_moment,
            settings=self.settings(),
            meter=meter,
        )
        for name, index in silent.items():
            if len(index):
                clock = self._clocks[name]
                self._count(clock, clock.age >= clock.threshold)
                clock.age.index_fill_(0, index, 0)
        return receipt

    def _count(self, clock: _Clock, ended: Tensor) -> None:
        """Add the present age of every neuron whose silence has ended to its histogram."""
        bins = torch.searchsorted(self._edges.to(clock.age.device), clock.age.clamp_max(self.longest))
        clock.histogram.scatter_add_(1, bins[:, None], ended[:, None].to(clock.histogram.dtype))

    def _update(self, clock: _Clock) -> None:
        share = clock.histogram.cumsum(1).double() / clock.histogram.sum(1, keepdim=True).clamp_min(1)
        first = (share >= self.percentile).int().argmax(1)
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
    """The largest interval of each bin: exact up to 16, then four bins an octave.

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
