"""Rows of tensors that become others, noted first and written together, with the optimizer's rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import Parameter

from rekindle import optimizers
from rekindle.diagnosis.usage import tensor_of
from rekindle.methods.call import Call
from rekindle.methods.replacement import check_finite
from rekindle.optimizers import StateReset
from rekindle.optimizers.rows import put_rows
from rekindle.projection.receipt import BlockRecord, Receipt
from rekindle.recording.ancestry import Slices


@dataclass
class Changes:
    """Rows of tensors that become others; written after everything was checked."""

    call: Call
    rows: dict[str, list[tuple[int | None, Tensor, Tensor | float]]] = field(default_factory=dict)  # axis, indices, new
    counts: dict[str, dict[str, int]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, member: Slices, index: Tensor, values: Tensor | float, flat: bool = False) -> None:
        """These slices of a tensor; flat: rows of (members, …), where several axes number the members."""
        self.rows.setdefault(member.tensor, []).append((None if flat else member.axis, index, values))
        self.count(member, rows=len(index))

    def count(self, member: Slices, **counts: int) -> None:
        """What the record of a tensor says."""
        own = self.counts.setdefault(member.tensor, {})
        for name, count in counts.items():
            own[name] = own.get(name, 0) + count

    @torch.no_grad()
    def write(self, method: str, skipped: Mapping[str, str]) -> Receipt:
        """Check, write, and reset exactly the optimizer's rows."""
        call, model = self.call, self.call.inner
        held = {name: tensor_of(model, name) for name in self.rows}
        parameters = {name: value for name, value in held.items() if isinstance(value, Parameter)}
        optimizers.check(call.optimizer, {n: p for n, p in parameters.items() if p.requires_grad})
        check_finite({name: value for name, value in held.items() if value.is_floating_point()})
        versions = {name: value._version for name, value in held.items()}
        total, cleared = StateReset("rows"), 0
        for name, changed in self.rows.items():
            tensor = held[name]
            for axis, index, values in changed:
                index = index.to(tensor.device)
                value = values.to(tensor) if isinstance(values, Tensor) else values
                if axis is None:
                    put_rows(tensor.view(-1, *(value.shape[1:] if isinstance(value, Tensor) else ())), 0, index, value)
                    continue
                put_rows(tensor, axis, index, value)
                if name in parameters and call.optimizer is not None and tensor.requires_grad:
                    total += optimizers.reset_rows(call.optimizer, parameters[name], index, row_dim=axis, name=name)
                if tensor.grad is not None:
                    tensor.grad.index_fill_(axis, index, 0)
                    cleared += 1
        records = [
            BlockRecord(name, out=held[name].shape[0], in_=held[name][0].numel(), counts=counts)
            for name, counts in self.counts.items()
            if held[name]._version != versions[name]
        ]
        return Receipt(
            method, tuple(records), dict(skipped), optimizer=total, gradients_cleared=cleared, notes=tuple(self.notes)
        )
