"""Continual backpropagation: replace a few of the least useful mature neurons at every step."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Unpack

import torch
from torch import Tensor

from rekindle.consumers.wiring import Group, Wiring
from rekindle.methods.call import Call
from rekindle.methods.neurons import Judgement, NeuronOptions, NeuronRemedy, Sums, others, sizes


@dataclass
class _Life:
    """What is known about the neurons of one group."""

    utility: Tensor
    mean: Tensor
    age: Tensor
    debt: float = 0.0


class ContinualBackprop(NeuronRemedy):
    """Generate-and-test (Dohare et al., 2024), to be called after every optimizer step.

    Contribution utility u_i ← η·u_i + (1 − η)·mean|h_i|·Σ|w_out,i| and mean activity f_i ← η·f_i + (1 − η)·mean h_i,
    both divided by 1 − η^age before use. Each step adds ρ·(neurons older than `maturity`) to a layer's count of due
    replacements; the whole part is done at once on the least useful mature neurons, the rest is carried over. Immature
    neurons add nothing, so replacements cannot pile up. The mean contribution f_i·w_out of a replaced neuron is added
    to the consumer's bias. Statistics come from `observe(model)`. η = 0.99, ρ = 1e-4 as in the paper.

    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(2, 50), nn.ReLU(), nn.Linear(50, 1))
    >>> method = ContinualBackprop(replacement_rate=0.02, maturity=2)
    >>> with method.observe(model):
    ...     for _ in range(3):
    ...         _ = model(torch.randn(8, 2))
    ...         receipt = method(model)
    >>> receipt.totals()["counts"]["neurons"]
    1
    """

    name = "continual-backprop"
    moment = "step"
    watches = True

    def __init__(
        self,
        replacement_rate: float = 1e-4,
        decay: float = 0.99,
        maturity: int = 100,
        **options: Unpack[NeuronOptions],
    ) -> None:
        if not 0 <= replacement_rate < 1:
            raise ValueError(f"replacement_rate={replacement_rate} must lie between 0 and 1")
        if not 0 <= decay < 1:
            raise ValueError(f"decay={decay} must be at least 0 and below 1")
        super().__init__(**options)
        self.replacement_rate, self.decay, self.maturity = replacement_rate, decay, maturity
        self._lives: dict[str, _Life] = {}
        self._now = Sums()  # of |h| and h since the last call

    def record(self, group: Group, activity: Tensor) -> None:
        """Keep the sums of |h| and h until the step's call."""
        size = sizes(activity)
        both = torch.stack([size, activity.sum(others(activity), dtype=size.dtype)])
        self._now.add(group.name, both, activity.numel() // group.width)

    def measure(self, call: Call) -> None:
        """What was observed at this step comes before the batches of the call."""
        if not self._now.values:
            super().measure(call)

    def judge(self, call: Call, wiring: Wiring) -> Judgement:
        """Update utilities with the step just taken; what is due is replaced."""
        now = self._now.over(call, {group.name: (2, group.width) for group in wiring})
        if not now.values:
            raise ValueError("no activity was recorded since the last call: train inside observe(model)")
        due: dict[str, Tensor] = {}
        means: dict[str, Tensor] = {}
        skipped = {}
        for group in wiring:
            if group.name not in now.values or not float(now.seen[group.name]):
                skipped[group.name] = "no finite activity was recorded since the last call"
                continue
            life = self._grow(group, now.values[group.name] / now.seen[group.name].to(now.values[group.name]))
            chosen = self._due(life)
            if len(chosen):
                due[group.name] = chosen
                means[group.name] = life.mean / self._correction(life)
        return Judgement(due, means, skipped, now.notes())

    def replaced(self, neurons: Mapping[str, Tensor]) -> None:
        """New neurons have no age and no utility."""
        for name, index in neurons.items():
            life = self._lives[name]
            for tensor in (life.utility, life.mean, life.age):
                tensor.index_fill_(0, index, 0)
        self._now.clear()

    def forget(self, layers: Collection[str] | None = None) -> None:
        """Start anew with neurons of no age."""
        for name in list(self._lives) if layers is None else layers:
            self._lives.pop(name, None)
        self._now.clear(layers)

    def utilities(self, group: str) -> Tensor:
        """The bias-corrected utility of a layer's neurons."""
        life = self._lives[group]
        return life.utility / self._correction(life)

    def _grow(self, group: Group, now: Tensor) -> _Life:
        """One step older; now: mean |h| and mean h of each neuron, (2, neurons)."""
        if group.name not in self._lives:
            zeros = torch.zeros_like(now[0])
            self._lives[group.name] = _Life(zeros, zeros.clone(), zeros.clone())
        life = self._lives[group.name]
        # A state that was loaded may be on another device than the model.
        life.utility, life.mean, life.age = (each.to(now.device) for each in (life.utility, life.mean, life.age))
        life.age += 1
        life.utility.lerp_(now[0] * outgoing(group), 1 - self.decay)
        life.mean.lerp_(now[1], 1 - self.decay)
        return life

    def _correction(self, life: _Life) -> Tensor:
        return (1 - self.decay**life.age).clamp_min(1e-12)

    def _due(self, life: _Life) -> Tensor:
        mature = life.age > self.maturity
        eligible = int(mature.sum())
        life.debt += self.replacement_rate * eligible
        amount = min(int(life.debt), eligible)
        life.debt -= amount
        if amount == 0:
            return torch.empty(0, dtype=torch.long)
        utility = (life.utility / self._correction(life)).masked_fill(~mature, float("inf"))
        return utility.topk(amount, largest=False).indices

    def gathered(self) -> dict[str, Any]:
        """Utilities, means, ages and due replacements."""
        return {"lives": {name: asdict(life) for name, life in self._lives.items()}}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take them back."""
        self._lives = {
            name: _Life(life["utility"].clone(), life["mean"].clone(), life["age"].clone(), life["debt"])
            for name, life in state["lives"].items()
        }


def outgoing(group: Group) -> Tensor:
    """Σ|w_out| of each neuron over all its consumers."""
    total: Tensor | float = 0.0
    for consumer in group.consumers:
        layer = consumer.layer
        columns = sizes(layer.weight.detach(), layer.in_axis)
        if consumer.order == "minor":
            total = total + columns.reshape(consumer.spread, group.width).sum(0)
        else:
            total = total + columns.reshape(group.width, consumer.spread).sum(1)
    assert isinstance(total, Tensor)
    return total
