"""One parameter as it was found: which matrices it holds, what they do, and why it is skipped by default."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from rekindle.blocks.layouts import Block


@dataclass(frozen=True)
class Found:
    """What a parameter is; what a plan decides about it is a `rekindle.projection.entries.PlanEntry`.

    `name` is the clean name (wrappers seen through; `layer.weight` for a parametrized weight), `key` the name in
    `named_parameters()`. `marks` map a kind ("head", "frozen", …) to the reason, in words, for which it is skipped by
    default; `refusal` says why there is nothing to project at all. `also` lists the other names of a tied parameter.
    `evidence` is what the layout and the place in the network rest on: user, recorded, class, source or name;
    `overruled` what the best of the others would have said, where the recording says otherwise.
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
    overruled: str = ""
    classes: tuple[type, ...] = field(default=(), compare=False)

    @property
    def reason(self) -> str | None:
        """Why it is skipped (by default, as long as no target is chosen), or None."""
        return self.refusal or next(iter(self.marks.values()), None)

    @property
    def count(self) -> int:
        """The number of matrices."""
        return sum(block.count for block in self.blocks)
