"""What a plan decides about one parameter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from rekindle.blocks.entries import Found
from rekindle.blocks.layouts import Block


@dataclass(frozen=True)
class PlanEntry(Found):
    """A parameter as it was found, and what becomes of it.

    A request (`rekindle.projection.targets.choose`) leaves the blocks that it means, names the others in `left`, and
    gives a `refusal` to a parameter that it does not mean. `rekindle.plan` adds the tuples that run beside `blocks`:
    `scales` (None where the rule looks at the matrix), `dfi`, `dfi_free` (at the matrix's own scale ‖W‖_F/√k), `small`
    (matrices below `min_norm`, which stay), `references` (the norms that the "reference" scale asks for). `norm` is the
    norm right behind the weight, because of which its scale has no effect. `estimated`: both DfI values are estimates.
    `before` is the parameter before the request, from which other requests can be answered for a file.
    """

    left: tuple[str, ...] = ()
    scales: tuple[float | None, ...] = ()
    dfi: tuple[float | None, ...] = ()
    dfi_free: tuple[float | None, ...] = ()
    small: tuple[int, ...] = ()
    references: tuple[tuple[float, ...], ...] = ()
    norm: str = ""
    estimated: bool = False
    before: Found | None = None

    @property
    def scale(self) -> float | None:
        """The scale, if it is known and the same for every block."""
        return self.scales[0] if self.scales and len(set(self.scales)) == 1 else None

    @property
    def dfi_now(self) -> float | None:
        """DfI summed over the blocks, None if unmeasured."""
        values = [d for d in self.dfi if d is not None]
        return sum(values) if values and len(values) == len(self.blocks) else None

    def to_dict(self) -> dict[str, Any]:
        """Everything that a plan holds about it, in JSON types."""
        row = {name: getattr(self, name) for name in _SAVED}
        row = {k: list(v) if isinstance(v, tuple) else v for k, v in row.items()}
        row["blocks"] = [block.to_dict() for block in self.blocks]
        row["references"] = [list(r) for r in self.references]
        row["dtype"] = str(self.dtype).removeprefix("torch.")
        if self.before is not None:
            then = self.before
            row["before"] = {"role": then.role, "refusal": then.refusal, "marks": dict(then.marks)}
            if then.blocks != self.blocks:
                row["before"]["blocks"] = [block.to_dict() for block in then.blocks]
        return row

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> PlanEntry:
        """The inverse of `to_dict`."""
        row: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items()}
        before = row.pop("before", None)
        row["blocks"] = tuple(Block.from_dict(b) for b in data["blocks"])
        row["references"] = tuple(tuple(r) for r in data["references"])
        row["dtype"] = getattr(torch, data["dtype"])
        entry = cls(refusal=row.pop("reason"), **row)
        if before is None:
            return entry
        held = {name: getattr(entry, name) for name in Found.__dataclass_fields__}
        if "blocks" in before:
            before["blocks"] = tuple(Block.from_dict(b) for b in before["blocks"])
        return replace(entry, before=Found(**{**held, **before}))


_SAVED = (
    *("name", "key", "shape", "dtype", "role", "blocks", "reason", "scales", "dfi", "dfi_free", "small", "references"),
    *("left", "also", "module", "module_type", "parametrized", "norm", "estimated"),
    *("evidence", "overruled"),
)
