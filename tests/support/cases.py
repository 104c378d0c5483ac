"""Hand-written nets with what is true of them by construction: `@case(example, heads=…, cuts=…, routers=…)`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

CASES: dict[str, Case] = {}


@dataclass(frozen=True)
class Case:
    """A net, an example and the truth: names of weights (`.weight` may be left out), sizes of parts in rows.

    `idle` never run, `skipped` must not be projected (what is used is not the weight itself); `sizes` are (count, out,
    in) of weights that are no Linear's. `run` calls the model as its user does; by default its forward, with the
    example.
    """

    name: str
    make: Callable[[], nn.Module]
    example: Callable[[], Any]
    heads: tuple[str, ...]
    cuts: dict[str, tuple[int, ...]]
    routers: tuple[str, ...]
    idle: tuple[str, ...]
    skipped: tuple[str, ...]
    sizes: dict[str, tuple[int, int, int]]
    run: Callable[[nn.Module, Any], Any]

    def build(self) -> nn.Module:
        """The net, with the same weights each time."""
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return self.make().eval()


def case(
    example: Callable[[], Any],
    *,
    heads: str = "",
    cuts: dict[str, tuple[int, ...]] | None = None,
    routers: str = "",
    idle: str = "",
    skipped: str = "",
    sizes: dict[str, tuple[int, int, int]] | None = None,
    run: Callable[[nn.Module, Any], Any] | None = None,
) -> Callable[[Any], Any]:
    """Register a class or a function that makes a net."""

    def keep(make: Any) -> Any:
        name = make.__name__
        ends, selects, unused, left = (tuple(text.split()) for text in (heads, routers, idle, skipped))
        CASES[name] = Case(
            name, make, example, ends, dict(cuts or {}), selects, unused, left, dict(sizes or {}), run or call
        )
        return make

    return keep


def call(model: nn.Module, example: Any) -> Any:
    """The model on a batch: a tensor, a tuple of arguments, or a dict of them."""
    if isinstance(example, dict):
        return model(**example)
    return model(*example) if isinstance(example, tuple) else model(example)


def noise(*shape: int) -> Callable[[], Tensor]:
    """An example of this shape, the same each time."""
    return lambda: torch.randn(*shape, generator=torch.Generator().manual_seed(5))


def tokens(*shape: int, below: int = 16) -> Callable[[], Tensor]:
    """Token numbers of this shape."""
    return lambda: torch.randint(0, below, shape, generator=torch.Generator().manual_seed(5))
