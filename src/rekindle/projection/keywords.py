"""The keywords that make a plan, as types: an editor completes them, and a type checker knows them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypedDict

from torch import Tensor, nn

from rekindle.blocks.finding import Conv
from rekindle.blocks.layouts import Recipe
from rekindle.projection.receipt import Measuring
from rekindle.projection.scales import Scale
from rekindle.projection.targets import Targets


class Planning(TypedDict, total=False):
    """The keywords that make a plan, in `plan`, in `fire` and in the methods."""

    targets: Targets
    include: Targets
    exclude: Targets
    heads: Iterable[str] | str | None
    scale: str | float | Scale
    split_heads: bool
    conv: Conv
    min_norm: float
    reference: nn.Module | Mapping[str, Tensor] | None
    layouts: Mapping[str, Recipe] | None
    example: object


class PlanOptions(Planning, total=False):
    """What `plan` takes: what makes a plan, and how to look at the source."""

    config: object
    measure: Measuring
    sharded: bool
    allow_empty: bool
