"""Continual backpropagation: replace a few of the least useful mature neurons at every step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from rekindle.consumers.wiring import Group
from rekindle.methods.neurons import NeuronRemedy, Replacement, others, sizes
from rekindle.projection.receipt import Batch, Loss, Meter, Receipt


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
    both divided by 1 − η^age before use. Each step a layer owes ρ·(neurons older than `maturity`) replacements;
    whole ones are paid at once with the least useful mature neurons, the rest is carried over. Nothing is owed for
    neurons that are not mature, so debts cannot burst. A leaving neuron hands f_i·w_out to the consumer's bias.
    Statistics come from `observe(model)`. η = 0.99, ρ = 1e-4 as in the paper.

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

    def __init__(
        self,
        replacement_rate: float = 1e-4,
        decay: float = 0.99,
        maturity: int = 100,
        *,
        targets: str | Sequence[str] = "auto",
        consumers: Mapping[str, str | Sequence[str]] | None = None,
        second_moment: Literal["mean", "zero"] = "mean",
        fresh: Callable[[], nn.Module] | None = None,
        seed: int = 0,
    ) -> None:
        if not 0 <= replacement_rate < 1:
            raise ValueError(f"replacement_rate={replacement_rate} must lie between 0 and 1")
        if not 0 <= decay < 1:
            raise ValueError(f"decay={decay} must be at least 0 and below 1")
        super().__init__(targets=targets, consumers=consumers, second_moment=second_moment, fresh=fresh, seed=seed)
        self.replacement_rate, self.decay, self.maturity = replacement_rate, decay, maturity
        self._lives: dict[str, _Life] = {}
        self._now: dict[str, tuple[Tensor, Tensor, int]] = {}

    def record(self, group: Group, activity: Tensor) -> None:
        """Keep the sums of h and |h| until the step's call."""
        size, count = sizes(activity), activity.numel() // group.width
        total = activity.sum(others(activity), dtype=size.dtype)
        if group.name in self._now:
            before = self._now[group.name]
            size, total = size + before[0], total + before[1]
            self._now[group.name] = (size, total, before[2] + count)
        else:
            self._now[group.name] = (size, total, count)

    def __call__(
        self,
        model: nn.Module,
        optimizer: Any = None,
        *,
        batches: Iterable[Batch] | None = None,
        loss: Loss | None = None,
        generator: torch.Generator | None = None,
    ) -> Receipt:
        """Update utilities with the step just taken and replace what is due."""
        meter = Meter()
        wiring = self.wiring(model, batches)
        if batches is not None and not self._now:
            self.look(model, batches)
        if not self._now:
            raise ValueError("no activity was recorded since the last call: train inside observe(model)")
        due: dict[str, Tensor] = {}
        means: dict[str, Tensor] = {}
        for group in wiring:
            if group.name not in self._now:
                continue
            life = self._grow(group)
            chosen = self._due(life)
            if len(chosen):
                due[group.name] = chosen
                means[group.name] = life.mean / self._correction(life)
        receipt = Replacement(model, wiring, due, means, fresh=self._fresh).apply(
            self.name,
            optimizer,
            self.draws(generator),
            second_moment=self.second_moment,
            settings=self.settings(),
            meter=meter,
        )
        for name, index in due.items():
            life = self._lives[name]
            for tensor in (life.utility, life.mean, life.age):
                tensor.index_fill_(0, index, 0)
        self._now.clear()
        return receipt

    def utilities(self, group: str) -> Tensor:
        """The bias-corrected utility of a layer's neurons."""
        life = self._lives[group]
        return life.utility / self._correction(life)

    def _grow(self, group: Group) -> _Life:
        size, total, count = self._now[group.name]
        if group.name not in self._lives:
            zeros = torch.zeros_like(size)
            self._lives[group.name] = _Life(zeros, zeros.clone(), zeros.clone())
        life = self._lives[group.name]
        life.age += 1
        life.utility.lerp_(size / count * outgoing(group), 1 - self.decay)
        life.mean.lerp_(total / count, 1 - self.decay)
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
        """Utilities, means, ages and debts."""
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
