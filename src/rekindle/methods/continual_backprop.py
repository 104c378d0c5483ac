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
from rekindle.methods.neurons import Handle, Judgment, NeuronOptions, NeuronRemedy
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

    Args:
        replacement_rate: ρ, the share of mature neurons that are replaced per step.
        decay: η of the running averages.
        maturity_threshold: steps that a neuron is seen before it may be replaced.
        options: `targets`, `consumers`, `second_moment`, `fresh` and `seed`, as in
            `rekindle.methods.neurons.NeuronRemedy`.
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
        self._factors = torch.empty(2, 0)  # of |h| and h: Σ|w_out| and 1
        self._factors_of: list[Tensor] = []  # Σ|w_out| of each group
        self._groups: tuple[Wiring | None, list[Group], list[str]] = (None, [], [])
        self._now = Sums()  # of |h| and h since the last call
        self._positive = False  # whether no activity has a sign, as observed

    def watchers(self, model: nn.Module, wiring: Wiring) -> Iterator[Handle]:
        """As for every neuron remedy; where all activities come from a ReLU, one sum is both, of |h| and of h."""
        inner = unwrapped(model)
        self._positive = all(
            group.reading.side == "output" and isinstance(inner.get_submodule(group.reading.module), nn.ReLU | nn.ReLU6)
            for group in wiring
        )
        return super().watchers(model, wiring)

    def record(self, group: Group, activity: Tensor) -> None:
        """Keep the sums of |h| and h until the step's call; one row where they are equal."""
        axes, dtype = others(activity), torch.promote_types(activity.dtype, torch.float32)
        total = activity.sum(axes, dtype=dtype)
        count = activity.numel() // total.numel()
        rows = total[None] if self._positive else torch.stack([sizes(activity), total])
        self._now.add(group.name, rows, count)

    def measure(self, call: Call) -> None:
        """What was observed at this step comes before the batches of the call."""
        if self._now.empty:
            super().measure(call)

    def judge(self, call: Call, wiring: Wiring) -> Judgment:
        """Update utilities with the step just taken; what is due is replaced."""
        if self._groups[0] is not wiring:
            self._groups = wiring, list(wiring), [group.name for group in wiring]
        _, groups, names = self._groups
        skipped: dict[str, str] = {}
        notes: list[str] = []
        usual = self._now.single(names) if call.replicas.size == 1 else None
        if usual is not None:
            sums, counts = usual
        else:
            now = self._now.over(call, lambda: {group.name: (2 - self._positive, group.width) for group in wiring})
            if not now.values:
                raise ValueError("no activity was recorded since the last call: train inside observe(model)")
            unseen = [name for name in names if not now.seen.get(name)]
            skipped, notes = dict.fromkeys(unseen, "no finite activity was recorded since the last call"), now.notes()
            groups = [group for group in groups if group.name not in unseen]
            if not groups:
                return Judgment({}, {}, skipped, notes)
            names = [group.name for group in groups]
            counts = [now.seen[name] for name in names]
            first = now.values[names[0]].device
            sums = torch.cat([now.values[name].to(first) for name in names], -1)
        lives = self._grow(groups, names, sums, counts)
        due: dict[str, Tensor] = {}
        means: dict[str, Tensor] = {}
        for name, life in zip(names, lives, strict=True):
            chosen = self._due(life)
            if chosen is not None:
                due[name], means[name] = chosen, life.mean / self._correction(life)
        return Judgment(due, means, skipped, notes)

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

    def _grow(
        self, groups: Sequence[Group], names: Sequence[str], sums: Tensor, counts: Sequence[float]
    ) -> list[_Life]:
        """One step older, with the sums of |h| and h of all neurons, (2, neurons); (1, neurons) if equal.

        Neurons of all groups lie side by side in one row, so that a step is a few operations on all of them.
        """
        lives = [self._lives.get(name) for name in names]
        if None in lives or lives != self._row_of:
            self._lay_out(groups, sums)
        if counts.count(counts[0]) < len(counts):
            shares = torch.tensor([counts[0] / count for count in counts], dtype=torch.float64)
            widths = torch.tensor([group.width for group in groups])
            sums = sums * shares.repeat_interleave(widths).to(sums)
        for group, factors in zip(groups, self._factors_of, strict=True):
            outgoing(group, factors)
        self._row.mul_(self.decay).addcmul_(sums.to(self._row), self._factors, value=(1 - self.decay) / counts[0])
        for life in self._row_of:
            life.clock += 1
        return self._row_of

    def _lay_out(self, groups: Sequence[Group], sums: Tensor) -> None:
        """Utilities and means of these groups as parts of one row, on the device of the sums."""
        widths = [group.width for group in groups]
        rows = torch.split(sums, widths, 1)
        lives = [self._lives.get(group.name) or _Life.new(row[0]) for group, row in zip(groups, rows, strict=True)]
        self._row = torch.cat([torch.stack([life.utility.to(sums), life.mean.to(sums)]) for life in lives], 1)
        self._row_of, self._factors = lives, torch.ones_like(self._row)
        self._factors_of = list(torch.split(self._factors[0], widths))
        for group, life, part in zip(groups, lives, torch.split(self._row, widths, 1), strict=True):
            life.utility, life.mean = part
            life.born = life.born.to(part)
            self._lives[group.name] = life

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


def outgoing(group: Group, total: Tensor) -> None:
    """Write Σ|w_out| of each neuron over all its consumers into `total`."""
    for number, consumer in enumerate(group.consumers):
        layer = consumer.layer
        weight = layer.weight.detach()
        alike = weight.ndim == 2 and weight.dtype == total.dtype and weight.device == total.device
        if number == 0 and consumer.order == "last" and alike:
            torch.sum(weight.abs(), 1 - layer.in_axis, out=total)  # the usual case: no copy
            continue
        columns = sizes(weight, layer.in_axis)
        if consumer.order == "minor":
            columns = columns.view(-1, group.width).sum(0)
        elif consumer.order == "major":
            columns = columns.view(group.width, -1).sum(1)
        elif consumer.order is None:
            columns = columns[consumer.table].sum(1)
        total.copy_(columns if number == 0 else columns + total)
