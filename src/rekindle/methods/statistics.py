"""What passes show of every neuron: sums of its values, gathered while a model trains."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rekindle.methods.call import Call

_AT_ONCE = 16  # passes that wait until they are added up together


def _finite(values: Sequence[Tensor]) -> list[bool]:
    """Which of these hold neither NaN nor Inf."""
    first = values[0].device
    if math.isfinite(torch.cat([value.to(first).flatten() for value in values]).sum().item()):
        return [True] * len(values)  # one question for all, which is nearly always answered so
    return [bool(value.isfinite().all()) for value in values]


def sizes(values: Tensor, axis: int = -1) -> Tensor:
    """Σ|v| over all axes but one, at least in float32."""
    # Five times as fast as vector_norm with ord=1 on a CPU, for activities of (128, 120).
    return values.abs().sum(others(values, axis), dtype=torch.promote_types(values.dtype, torch.float32))


def others(values: Tensor, axis: int = -1) -> list[int]:
    """All axes but one."""
    if values.ndim == 2:
        return [1 - axis % 2]
    return [dim for dim in range(values.ndim) if dim != axis % values.ndim]


@dataclass
class Sums:
    """Sums over passes of one row or more of numbers per neuron, by name.

    A pass that holds NaN or Inf is left out and counted: one bad batch must not decide about every neuron. Passes are
    checked and added together, many at a time, because a check waits for the device.

    >>> sums = Sums()
    >>> for value in (1.0, torch.nan, 2.0):
    ...     sums.add("layer", torch.tensor([value]), count=4)
    >>> sums.settle(); sums.values["layer"], sums.seen["layer"], sums.left_out["layer"]
    (tensor([3.]), 8.0, 1.0)
    """

    values: dict[str, Tensor] = field(default_factory=dict)  # (…, neurons)
    seen: dict[str, float] = field(default_factory=dict)  # how many values each sum is of
    left_out: dict[str, float] = field(default_factory=dict)  # passes
    _waiting: list[tuple[str, Tensor, int]] = field(default_factory=list)

    def add(self, name: str, values: Tensor, count: int = 1) -> None:
        """Add one pass of `count` values per neuron."""
        self._waiting.append((name, values, count))
        if len(self._waiting) >= _AT_ONCE:
            self.settle()

    @property
    def empty(self) -> bool:
        """Whether nothing was added."""
        return not self.values and not self._waiting

    def single(self, names: list[str]) -> tuple[Tensor, list[float]] | None:
        """One finite pass of each of these names, side by side, with their counts; None if anything else was added."""
        if self.values or [name for name, _, _ in self._waiting] != names:
            return None
        if len({values.device for _, values, _ in self._waiting}) > 1:
            return None
        row = torch.cat([values for _, values, _ in self._waiting], -1)
        if not math.isfinite(row.sum().item()):
            return None
        return row, [float(count) for _, _, count in self._waiting]

    def settle(self) -> None:
        """Add up the passes that wait."""
        if not self._waiting:
            return
        passes, self._waiting = self._waiting, []
        for (name, values, count), good in zip(passes, _finite([values for _, values, _ in passes]), strict=True):
            if name not in self.values:
                self.values[name] = values if good else torch.zeros_like(values)
                self.seen[name], self.left_out[name] = float(count * good), float(not good)
                continue
            self.left_out[name] += not good
            self.seen[name] += count * good
            if good:
                self.values[name] = self.values[name] + values

    def over(self, call: Call, shapes: Callable[[], Mapping[str, tuple[int, ...]]]) -> Sums:
        """The sums over all replicas of the model, of the names in `shapes()`; one that saw nothing adds nothing."""
        self.settle()
        if call.replicas.size == 1:
            return self
        sizes = shapes()
        device = next(call.inner.parameters()).device
        flat = []
        for name, size in sizes.items():
            counts = torch.tensor([self.seen.get(name, 0.0), self.left_out.get(name, 0.0)], dtype=torch.float64)
            flat += [self.values.get(name, torch.zeros(size, device=device)), counts.to(device)]
        flat = call.total(flat)
        total = Sums()
        for at, name in enumerate(sizes):
            seen, left_out = flat[2 * at + 1].tolist()
            if seen or left_out:
                total.values[name], total.seen[name], total.left_out[name] = flat[2 * at], seen, left_out
        return total

    def notes(self) -> list[str]:
        """What was left out, as text."""
        bad = {name: int(count) for name, count in self.left_out.items() if count}
        return [f"{name}: {count} passes with NaN or Inf were left out" for name, count in bad.items()]

    def clear(self, names: Collection[str] | None = None) -> None:
        """Start counting anew, of these names or of all."""
        if names is None:
            if self.values:
                self.values, self.seen, self.left_out = {}, {}, {}
            self._waiting = []
            return
        for table in (self.values, self.seen, self.left_out):
            for name in names:
                table.pop(name, None)
        self._waiting = [one for one in self._waiting if one[0] not in names]

    def state(self) -> dict[str, Any]:
        """What a state dict keeps; counts as tensors, which processes average as they do sums."""
        self.settle()
        seen, left_out = (
            {name: torch.tensor(count, dtype=torch.float64) for name, count in table.items()}
            for table in (self.seen, self.left_out)
        )
        return {"sums": dict(self.values), "seen": seen, "left_out": left_out}

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Sums:
        """Back from `state()`."""
        seen = {name: float(count) for name, count in state["seen"].items()}
        return cls(dict(state["sums"]), seen, {name: float(count) for name, count in state["left_out"].items()})
