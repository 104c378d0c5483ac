"""One parameter as it was found, selected and planned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from rekindle.blocks.layouts import Block


@dataclass(frozen=True)
class Found:
    """One parameter on its way: as it was found, as a request chose of it, and as it is planned.

    `name` is the clean name (wrappers seen through; `layer.weight` for a parametrised weight), `key` the name in
    `named_parameters()`. `marks` map a kind ("head", "frozen", …) to the reason, in words, for which it is skipped by
    default; `refusal` says why there is nothing to project at all. `also` lists the other names of a tied parameter.
    `evidence` is what the layout and the place in the network rest on: user, recorded, class, source or name.

    A request (`rekindle.projection.targets.choose`) leaves the blocks that it means, names the others in `left`, and
    gives a `refusal` to a parameter that it does not mean. `rekindle.plan` adds the tuples that run beside `blocks`:
    `scales` (None where the rule looks at the matrix), `dfi`, `dfi_free` (at the matrix's own scale ‖W‖_F/√k), `small`
    (matrices below `min_norm`, which stay), `references` (the norms that the "reference" scale asks for); `norm` is the
    normalisation right behind the weight, which takes its scale out of the function. `estimated`: both DfI values are
    estimates.
    """

    name: str
    key: str
    role: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    blocks: tuple[Block, ...]
    module: str
    module_type: str
    refusal: str | None = None
    marks: Mapping[str, str] = field(default_factory=dict, hash=False)
    also: tuple[str, ...] = ()
    parametrized: bool = False
    evidence: str = ""
    classes: tuple[type, ...] = field(default=(), compare=False)
    left: tuple[str, ...] = ()
    scales: tuple[float | None, ...] = ()
    dfi: tuple[float | None, ...] = ()
    dfi_free: tuple[float | None, ...] = ()
    small: tuple[int, ...] = ()
    references: tuple[tuple[float, ...], ...] = ()
    norm: str = ""
    estimated: bool = False

    @property
    def reason(self) -> str | None:
        """Why it is skipped (by default, as long as no target is chosen), or None."""
        return self.refusal or next(iter(self.marks.values()), None)

    @property
    def count(self) -> int:
        """The number of matrices."""
        return sum(block.count for block in self.blocks)

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
        return row

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Found:
        """The inverse of `to_dict`."""
        row: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items()}
        row["blocks"] = tuple(Block.from_dict(b) for b in data["blocks"])
        row["references"] = tuple(tuple(r) for r in data["references"])
        row["dtype"] = getattr(torch, data["dtype"])
        return cls(refusal=row.pop("reason"), **row)


_SAVED = (
    *("name", "key", "shape", "dtype", "role", "blocks", "reason", "scales", "dfi", "dfi_free", "small", "references"),
    *("left", "also", "module", "module_type", "parametrized", "norm", "estimated"),
    "evidence",
)
