"""A guard: measure the loss before and after a remedy, and take the remedy back if it did too much damage.

`Guard.watch` copies everything that a method may change: modules, parameters, buffers, gradients and the whole state
of the optimizers. `Guarded.settle` measures again and, above the limit, puts every value back into the same tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from rekindle.isolation import Batch, Loss, call, check_loss, isolated
from rekindle.optimizers import unwrap
from rekindle.projection.method import Method
from rekindle.projection.receipt import Receipt
from rekindle.sharding.passes import passes
from rekindle.sharding.team import distributed, settle


class Guard:
    """Rolls a remedy back if the mean loss on `batches` rises by more than `max_rise`.

    batches: data that can be iterated again, for example a list with a few held-out batches.
    loss: `loss(model, batch) -> scalar`; without it the model's own `.loss` is taken (transformers with labels).
    max_rise: the largest rise of the mean loss that is accepted; a loss that is not finite is never accepted.

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
    """

    def __init__(self, batches: Iterable[Batch], loss: Loss | None = None, *, max_rise: float) -> None:
        if isinstance(batches, Iterator):
            raise TypeError("batches can be read only once, and a guard reads them before and after: give a list")
        if math.isnan(max_rise):
            raise ValueError("max_rise is NaN: no rise could be compared with it")
        check_loss(loss)
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

    def watch(self, model: nn.Module, optimizer: Any = None, *, also: nn.Module | Iterable[nn.Module] = ()) -> Guarded:
        """Measure, and copy the model, the modules in `also` (mirrors) and the optimizers."""
        others = (also,) if isinstance(also, nn.Module) else tuple(also)
        return Guarded(self, model, self.measure(model), keep((model, *others), optimizer))

    def __call__(self, method: Method, model: nn.Module, optimizer: Any = None, **options: Any) -> Receipt:
        """Apply a method under guard; `options` are those of the method's call.

        >>> from rekindle.methods import FullReset
        >>> layer = nn.Linear(2, 1)
        >>> Guard([torch.zeros(1, 2)], lambda m, x: m(x).square().mean(), max_rise=9.0)(FullReset(), layer).rolled_back
        False
        """
        with self.watch(model, optimizer) as watch:
            return watch.settle(method(model, optimizer, **options))

    def _one(self, model: nn.Module, batch: Batch) -> Tensor:
        if self.loss is not None:
            return self.loss(model, batch)
        found = getattr(call(model, batch), "loss", None)
        if found is None:
            raise ValueError("the model's output has no .loss on this batch: give the guard a loss(model, batch)")
        value: Tensor = found
        return value


class Guarded:
    """One remedy under guard: made before it, settled after it. In a `with` statement an error takes it back too."""

    def __init__(self, guard: Guard, model: nn.Module, before: float, restore: Callable[[], None]) -> None:
        self.guard, self.model, self.before, self._restore = guard, model, before, restore

    def __enter__(self) -> Guarded:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is not None:
            self.restore()

    def restore(self) -> None:
        """Put everything back as it was."""
        settle(self.model)  # a pass that was interrupted leaves FSDP2 modules whole
        self._restore()

    def settle(self, receipt: Receipt) -> Receipt:
        """Measure again; the receipt with both losses, and everything put back if the rise is above the limit."""
        after = self.guard.measure(self.model)
        receipt = replace(receipt, loss_before=self.before, loss_after=after)
        # A remedy that makes the loss finite again is no damage.
        if math.isfinite(after) and (not math.isfinite(self.before) or after - self.before <= self.guard.max_rise):
            return receipt
        self.restore()
        limit = self.guard.max_rise
        note = f"rolled back: the loss went from {self.before:.4g} to {after:.4g}, max_rise is {limit:g}"
        return replace(receipt, rolled_back=True, notes=(*receipt.notes, note))


def keep(models: Iterable[nn.Module], optimizer: Any = None) -> Callable[[], None]:
    """Copy models and optimizers; calling the result puts everything back, into the same objects.

    >>> layer = nn.Linear(2, 2)
    >>> restore, weight = keep([layer]), layer.weight.clone()
    >>> _ = nn.init.zeros_(layer.weight)
    >>> restore(); torch.equal(layer.weight, weight)
    True
    """
    modules = [module for model in models for module in model.modules()]
    # A method may also replace modules (plasticity injection), so the tables of each module are kept too.
    tables = [
        (module, name, dict(getattr(module, name)))
        for module in modules
        for name in ("_modules", "_parameters", "_buffers")
    ]
    parameters = {id(p): p for module in modules for p in module._parameters.values() if p is not None}
    buffers = {id(b): b for module in modules for b in module._buffers.values() if b is not None}
    values = [(tensor, tensor.detach().clone()) for tensor in (*parameters.values(), *buffers.values())]
    gradients = [
        (p, p.requires_grad, p.grad, None if p.grad is None else p.grad.detach().clone()) for p in parameters.values()
    ]
    states = [_kept_optimizer(each) for each in unwrap(optimizer)]

    def restore() -> None:
        for module, name, table in tables:
            held = getattr(module, name)
            held.clear()
            held.update(table)
        with torch.no_grad():
            for tensor, value in values:
                tensor.copy_(value)
            for parameter, trained, gradient, copied in gradients:
                parameter.requires_grad_(trained)
                parameter.grad = gradient
                if gradient is not None and copied is not None:
                    gradient.copy_(copied)
        for state in states:
            state()

    return restore


def _kept_optimizer(optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    state = _kept(optimizer.state)
    # The parameters themselves are restored with the model: only their places are kept here.
    groups = [
        (group, list(group["params"]), {k: _kept(v) for k, v in group.items() if k != "params"})
        for group in optimizer.param_groups
    ]

    def restore() -> None:
        state()
        optimizer.param_groups[:] = [group for group, _, _ in groups]
        for group, members, options in groups:
            places = group["params"]
            places[:] = members
            group.clear()
            group.update({"params": places, **{key: value() for key, value in options.items()}})

    return restore


def _kept(value: Any) -> Callable[[], Any]:
    """A function that returns the same object with its present contents."""
    if isinstance(value, Tensor):
        copy = value.detach().clone()

        def tensor() -> Tensor:
            with torch.no_grad():
                value.copy_(copy)
            return value

        return tensor
    if isinstance(value, dict):
        entries = {key: _kept(item) for key, item in value.items()}

        def mapping() -> dict[Any, Any]:
            value.clear()
            value.update({key: entry() for key, entry in entries.items()})
            return value

        return mapping
    if isinstance(value, list):
        items = [_kept(item) for item in value]

        def sequence() -> list[Any]:
            value[:] = [item() for item in items]
            return value

        return sequence
    return lambda: value
