"""The protocol that every method follows, and the error of one that stopped half-way."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from rekindle.isolation import Batch, Loss
from rekindle.projection.receipt import Receipt

__all__ = ["Batch", "Loss", "Method", "MethodError", "MethodInterrupt"]


@runtime_checkable
class Method(Protocol):
    """A remedy that can be applied: FIRE, shrink-and-perturb, ReDo, …

    >>> class Nothing:
    ...     def __call__(self, model, optimizer=None, *, batches=None, loss=None, generator=None):
    ...         return Receipt("nothing")
    >>> isinstance(Nothing(), Method)
    True
    """

    def __call__(
        self,
        model: nn.Module,
        optimizer: object = None,
        *,
        batches: Iterable[Batch] | None = None,
        loss: Loss | None = None,
        generator: torch.Generator | None = None,
    ) -> Receipt:
        """Change `model` in place and say what was done."""
        ...


class MethodError(RuntimeError):
    """A method stopped after its first write; `receipt.differs` names what had been changed by then.

    >>> try:
    ...     raise MethodError("the SVD of fc.weight failed", Receipt("fire"))
    ... except MethodError as error:
    ...     error.receipt.changed
    ()
    """

    def __init__(self, message: str, receipt: Receipt) -> None:
        super().__init__(message)
        self.receipt = receipt


class MethodInterrupt(MethodError, KeyboardInterrupt):
    """Ctrl-C after the first write: a `MethodError`, and still the interrupt that a program waits for."""
