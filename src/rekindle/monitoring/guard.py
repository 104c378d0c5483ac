"""A guard: measure the loss before and after a remedy, and take the remedy back if it did too much damage.

`Guard.watch` copies everything that a method may change (`projection.snapshots`). `Guarded.settle` measures
again and, above the limit, puts everything back into the same objects.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from rekindle.isolation import Batch, Loss, call, check_batches, check_loss, explained, isolated, surely
from rekindle.projection.method import Method
from rekindle.projection.receipt import Receipt
from rekindle.projection.snapshots import Restore, snapshot
from rekindle.projection.transaction import Transaction
from rekindle.sharding.passes import passes
from rekindle.sharding.team import distributed, settle


class Guard:
    """Rolls a remedy back if the mean loss on `batches` rises by more than `max_rise`.

    An error or Ctrl-C while the remedy acts, or while the loss is measured after it, takes everything back too.

    The loss is measured in evaluation mode; the model and the random state are left as they were. Under DDP the mean
    over all ranks decides, so that all ranks decide alike; so it does for a model in shards, where every rank must have
    the same number of batches.

    >>> import rekindle
    >>> _ = torch.manual_seed(0)
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    >>> data = [(torch.ones(3, 4), torch.zeros(3, 1))]
    >>> error = lambda model, batch: (model(batch[0]) - batch[1]).square().mean()
    >>> before = model[0].weight.clone()
    >>> receipt = rekindle.fire(model, guard=Guard(data, error, max_rise=-1.0))
    >>> receipt.rolled_back, receipt.changed, torch.equal(model[0].weight, before)
    (True, (), True)

    Args:
        batches: data that can be iterated again, for example a list with a few held-out batches.
        loss: `loss(model, batch) -> scalar`; without it the model's own `.loss` is taken (transformers with labels).
        max_rise: the largest rise of the mean loss that is accepted; a loss that is not finite is never accepted.
    """

    def __init__(self, batches: Iterable[Batch], loss: Loss | None = None, *, max_rise: float) -> None:
        if isinstance(batches, Iterator):
            raise TypeError("batches can be read only once, and a guard reads them before and after: give a list")
        if math.isnan(max_rise):
            raise ValueError("max_rise is NaN: no rise could be compared with it")
        check_loss(loss)
        check_batches(batches)
        self.batches, self.loss, self.max_rise = batches, loss, max_rise

    def measure(self, model: nn.Module) -> float:
        """The mean loss on the batches now."""
        settle(model)
        team, _ = distributed(model)
        total, count = 0.0, 0
        with passes(model, team):
            with isolated(model), torch.no_grad():
                for batch in self.batches:
                    total += float(self._one(model, batch))
                    count += 1
            if not count:
                raise ValueError("the guard has no batches: it could not measure anything")
        settle(model)  # a forward pass alone leaves FSDP2 modules whole
        sums = team.sum(torch.tensor([total, count], dtype=torch.float64))
        return float(sums[0] / sums[1])

    def watch(
        self,
        model: nn.Module,
        optimizer: object = None,
        *,
        also: nn.Module | Iterable[nn.Module] = (),
        method: Method | None = None,
    ) -> Guarded:
        """Measure, and copy the model, the modules in `also` (mirrors), the optimizers and what the method gathered."""
        others = (also,) if isinstance(also, nn.Module) else tuple(also)
        return Guarded(self, model, self.measure(model), snapshot((model, *others), optimizer, method))

    def __call__(self, method: Method, model: nn.Module, optimizer: object = None, **options: Any) -> Receipt:
        """Apply a method under guard; `options` are those of the method's call.

        >>> from rekindle.methods import FullReset
        >>> layer = nn.Linear(2, 1)
        >>> Guard([torch.zeros(1, 2)], lambda m, x: m(x).square().mean(), max_rise=9.0)(FullReset(), layer).rolled_back
        False
        """
        with self.watch(model, optimizer, method=method) as watch:
            return watch.settle(method(model, optimizer, **options))

    def _one(self, model: nn.Module, batch: Batch) -> Tensor:
        if self.loss is not None:
            with explained(model, batch):
                return self.loss(model, batch)
        found = getattr(call(model, batch), "loss", None)
        if found is None:
            raise ValueError("the model's output has no .loss on this batch: give the guard a loss(model, batch)")
        value: Tensor = found
        return value


def watched(
    guard: Guard | None, name: str, models: Sequence[nn.Module], optimizer: object = None, method: Method | None = None
) -> Transaction:
    """What wraps one application of a method: the guard's roll-back where there is a guard, else a transaction.

    models: the model first, then its mirrors.
    """
    if guard is None:
        return Transaction(name, models, optimizer)
    return guard.watch(models[0], optimizer, also=models[1:], method=method)


class Guarded(Transaction):
    """One remedy under guard: made before it, settled after it. In a `with` statement an error takes it back too."""

    def __init__(self, guard: Guard, model: nn.Module, before: float, restore: Restore) -> None:
        super().__init__("guard", (model,), restore=self.restore)
        self.guard, self.model, self.before, self._kept = guard, model, before, restore

    def restore(self) -> None:
        """Put everything back as it was."""
        settle(self.model)  # a pass that was interrupted leaves FSDP2 modules whole
        self._kept()

    def settle(self, receipt: Receipt) -> Receipt:
        """Measure again; the receipt with both losses, and everything put back if the rise is above the limit."""
        after = self.guard.measure(self.model)
        receipt = replace(receipt, loss_before=self.before, loss_after=after)
        # A remedy that makes the loss finite again is no damage.
        if math.isfinite(after) and (not math.isfinite(self.before) or after - self.before <= self.guard.max_rise):
            return receipt
        surely(self.restore)
        limit = self.guard.max_rise
        note = f"rolled back: the loss went from {self.before:.4g} to {after:.4g}, max_rise is {limit:g}"
        return replace(receipt, rolled_back=True, notes=(*receipt.notes, note))
