"""Continual backpropagation: replace a few of the least useful mature neurons at every step."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from rekindle.blocks.names import unwrapped
from rekindle.methods.call import Call
from rekindle.methods.neurons import Handle, Judgement, NeuronOptions, NeuronRemedy
from rekindle.methods.statistics import Sums, others, sizes
from rekindle.recording.wiring import Group, Wiring


@dataclass(eq=False)
class _Life:
    """What is known about the neurons of one group.

    All of them grow older together, so an age is `clock` − `born`, and how many are mature needs no look at a tensor.
    """

    utility: Tensor
    mean: Tensor
    born: Tensor
    clock: int = 0
    debt: float = 0.0
    mature: int = 0
    young: deque[tuple[int, int]] = field(default_factory=deque)  # when and how many were born, not mature yet

    @classmethod
    def new(cls, like: Tensor) -> _Life:
        """Neurons of no age, one per entry of `like`."""
        zeros = torch.zeros_like(like)
        return cls(zeros, zeros.clone(), zeros.clone(), young=deque([(0, len(like))]))

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> _Life:
        """Back from `state()`."""
        born = -state["age"]
        young = Counter(int(birth) for birth in born.tolist())
        return cls(
            state["utility"].clone(),
            state["mean"].clone(),
            born,
            debt=state["debt"],
            young=deque(sorted(young.items())),
        )

    def state(self) -> dict[str, Any]:
        """What a state dict keeps."""
        return {"utility": self.utility.clone(), "mean": self.mean.clone(), "age": self.age, "debt": self.debt}

    @property
    def age(self) -> Tensor:
        """How many steps each neuron was seen."""
        return self.clock - self.born

    def ripen(self, threshold: int) -> None:
        """Count those that have become older than the threshold as mature."""
        while self.young and self.clock - self.young[0][0] > threshold:
            self.mature += self.young.popleft()[1]

    def renew(self, index: Tensor) -> None:
        """These mature neurons are new ones."""
        self.utility.index_fill_(0, index, 0)
        self.mean.index_fill_(0, index, 0)
        self.born.index_fill_(0, index, self.clock)
        self.mature -= len(index)
        self.young.append((self.clock, len(index)))


class ContinualBackprop(NeuronRemedy):
    """Generate-and-test (Dohare et al., 2024), to be called after every optimizer step.

    Contribution utility u_i ← η·u_i + (1 − η)·mean|h_i|·Σ|w_out,i| and mean activity f_i ← η·f_i + (1 − η)·mean h_i,
    both divided by 1 − η^age before use. Each step adds ρ·(neurons older than `maturity_threshold`) to a layer's
    count of due replacements; the whole part is done at once on the least useful mature neurons, the rest is carried
    over. Immature neurons add nothing, so replacements cannot pile up. The mean contribution f_i·w_out of a replaced
    neuron is added to the consumer's bias. Statistics come from `observe(model)`. η = 0.99, ρ = 1e-4 as in the paper.

    >>> model = nn.Sequential(nn.Linear(2, 50), nn.ReLU(), nn.Linear(50, 1))
    >>> method = ContinualBackprop(replacement_rate=0.02, maturity_threshold=2)
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
        maturity_threshold: int = 100,
        **options: Unpack[NeuronOptions],
    ) -> None:
        if not 0 <= replacement_rate < 1:
            raise ValueError(f"replacement_rate={replacement_rate} must lie between 0 and 1")
        if not 0 <= decay < 1:
            raise ValueError(f"decay={decay} must be at least 0 and below 1")
        super().__init__(**options)
        self.replacement_rate, self.decay, self.maturity_threshold = replacement_rate, decay, maturity_threshold
        self._lives: dict[str, _Life] = {}
        self._row, self._row_of = torch.empty(2, 0), list[_Life]()  # their utilities and means, side by side
        self._now = Sums()  # of |h| and h since the last call
        self._positive: set[str] = set()  # layers whose activity has no sign, as observed

    def watchers(self, model: nn.Module, wiring: Wiring) -> Iterator[Handle]:
        """As for every neuron remedy; behind a ReLU one sum is both, of |h| and of h."""
        inner = unwrapped(model)
        self._positive = {
            group.name
            for group in wiring
            if group.reading.side == "output"
            and isinstance(inner.get_submodule(group.reading.module), nn.ReLU | nn.ReLU6)
        }
        return super().watchers(model, wiring)

    def watch(self, group: Group, activity: Tensor) -> None:
        """Keep the sums of |h| and h until the step's call."""
        if group.name not in self._positive:
            self.record(group, activity)
            return
        total = activity.sum(others(activity), dtype=torch.promote_types(activity.dtype, torch.float32))
        self._now.add(group.name, total.expand(2, -1), activity.numel() // len(total))

    def record(self, group: Group, activity: Tensor) -> None:
        """The same for an activity of any sign."""
        size = sizes(activity)
        both = torch.stack([size, activity.sum(others(activity), dtype=size.dtype)])
        self._now.add(group.name, both, activity.numel() // len(size))

    def measure(self, call: Call) -> None:
        """What was observed at this step comes before the batches of the call."""
        if self._now.empty:
            super().measure(call)

    def judge(self, call: Call, wiring: Wiring) -> Judgement:
        """Update utilities with the step just taken; what is due is replaced."""
        now = self._now.over(call, lambda: {group.name: (2, group.width) for group in wiring})
        if not now.values:
            raise ValueError("no activity was recorded since the last call: train inside observe(model)")
        groups = [group for group in wiring if now.seen.get(group.name)]
        lives = self._grow(groups, now) if groups else []
        due: dict[str, Tensor] = {}
        means: dict[str, Tensor] = {}
        for group, life in zip(groups, lives, strict=True):
            chosen = self._due(life)
            if chosen is not None:
                due[group.name] = chosen
                means[group.name] = life.mean / self._correction(life)
        unseen = [group.name for group in wiring if not now.seen.get(group.name)]
        skipped = dict.fromkeys(unseen, "no finite activity was recorded since the last call")
        return Judgement(due, means, skipped, now.notes())

    def replaced(self, neurons: Mapping[str, Tensor]) -> None:
        """New neurons have no age and no utility."""
        for name, index in neurons.items():
            self._lives[name].renew(index)
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

    def _grow(self, groups: Sequence[Group], now: Sums) -> list[_Life]:
        """One step older, with the sums of |h| and h of each neuron, (2, neurons) per group.

        Neurons of all groups lie side by side in one row, so that a step is a few operations on all of them.
        """
        sums = [now.values[group.name] for group in groups]
        lives = [self._lives.get(group.name) or _Life.new(each[0]) for group, each in zip(groups, sums, strict=True)]
        if lives != self._row_of:
            self._lay_out(lives, sums)
            self._lives |= {group.name: life for group, life in zip(groups, lives, strict=True)}
        counts = {now.seen[group.name] for group in groups}
        if len(counts) > 1:
            sums = [each / now.seen[group.name] for group, each in zip(groups, sums, strict=True)]
        means = torch.cat([each.to(self._row) for each in sums], 1)
        if len(counts) == 1:
            means /= counts.pop()
        means[0] *= torch.cat([outgoing(group).to(self._row) for group in groups])
        self._row.lerp_(means, 1 - self.decay)
        for life in lives:
            life.clock += 1
        return lives

    def _lay_out(self, lives: list[_Life], sums: Sequence[Tensor]) -> None:
        """Utilities and means of these lives as parts of one row, on the device of the first group."""
        like = torch.empty(
            0, dtype=max((s.dtype for s in sums), key=lambda dtype: dtype.itemsize), device=sums[0].device
        )
        self._row = torch.cat([torch.stack([life.utility.to(like), life.mean.to(like)]) for life in lives], 1)
        self._row_of = lives
        for life, part in zip(lives, torch.split(self._row, [len(life.born) for life in lives], 1), strict=True):
            life.utility, life.mean = part
            life.born = life.born.to(part)

    def _correction(self, life: _Life) -> Tensor:
        return (1 - self.decay**life.age).clamp_min(1e-12)

    def _due(self, life: _Life) -> Tensor | None:
        life.ripen(self.maturity_threshold)
        life.debt += self.replacement_rate * life.mature
        amount = min(int(life.debt), life.mature)
        life.debt -= amount
        if amount == 0:
            return None
        immature = life.age <= self.maturity_threshold
        return (
            (life.utility / self._correction(life)).masked_fill(immature, torch.inf).topk(amount, largest=False).indices
        )

    def gathered(self) -> dict[str, Any]:
        """Utilities, means, ages and due replacements."""
        return {"lives": {name: life.state() for name, life in self._lives.items()}}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take them back."""
        self._lives = {name: _Life.of(life) for name, life in state["lives"].items()}


def outgoing(group: Group) -> Tensor:
    """Σ|w_out| of each neuron over all its consumers."""
    parts = []
    for consumer in group.consumers:
        columns = sizes(consumer.layer.weight.detach(), consumer.layer.in_axis)
        if consumer.order == "minor":
            columns = columns.view(-1, group.width).sum(0)
        elif consumer.order == "major":
            columns = columns.view(group.width, -1).sum(1)
        elif consumer.order is None:
            columns = columns[consumer.table].sum(1)
        parts.append(columns)
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)
