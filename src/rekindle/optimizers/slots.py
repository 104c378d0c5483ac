"""What each optimizer class keeps for a parameter, and what it keeps before the first step.

Zero is not always where a slot starts: NAdam's product of momenta starts at 1, the rates of Rprop and ASGD at the
learning rate, Adagrad's sum where the user said, and SGD's buffer with dampening does not exist at first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

Group = Mapping[str, Any]
Start = float | Literal["weight"] | None | Callable[[Optimizer, Group], float | None]
"""What a slot holds before the first step: a number, the weight itself, nothing at all (None), or a function of
the optimizer and the parameter group."""


@dataclass(frozen=True)
class Slot:
    """One entry of a parameter's state: what kind of thing it is, and what it starts from.

    kind: "moment" and "second" (a second moment) describe past gradients, "count" how many steps were taken,
    "average" is a running mean of the weights, "master" a copy of the weight in higher precision.

    >>> Slot("second").start
    0.0
    """

    kind: Literal["moment", "second", "count", "average", "master"]
    start: Start = 0.0

    def begin(self, optimizer: Optimizer, group: Group) -> Any:
        """The start value for a parameter of this group."""
        return self.start(optimizer, group) if callable(self.start) else self.start


_STEP = Slot("count")
_MOMENT = Slot("moment")
_SECOND = Slot("second")
MASTER_NAMES = ("master", "master_param", "master_weight", "master_params", "main_param", "fp32_param", "float32_copy")


def _rate(optimizer: Optimizer, group: Group) -> float:
    return float(group["lr"])


def _accumulator_start(optimizer: Optimizer, group: Group) -> float:
    return float(optimizer.defaults["initial_accumulator_value"])  # torch does not look in the group either


def _momentum_start(optimizer: Optimizer, group: Group) -> float | None:
    # The first buffer is the whole gradient, later ones take (1 − dampening) of it: zero is fresh without dampening
    # only, else the slot must be absent.
    return None if group.get("dampening") else 0.0


_SLOTS: dict[type[Any], Mapping[str, Slot]] = {
    torch.optim.Adam: {"step": _STEP, "exp_avg": _MOMENT, "exp_avg_sq": _SECOND, "max_exp_avg_sq": _SECOND},
    torch.optim.SparseAdam: {"step": _STEP, "exp_avg": _MOMENT, "exp_avg_sq": _SECOND},
    torch.optim.RAdam: {"step": _STEP, "exp_avg": _MOMENT, "exp_avg_sq": _SECOND},
    torch.optim.NAdam: {
        "step": _STEP,
        "mu_product": Slot("count", 1.0),
        "exp_avg": _MOMENT,
        "exp_avg_sq": _SECOND,
    },
    torch.optim.Adamax: {"step": _STEP, "exp_avg": _MOMENT, "exp_inf": _SECOND},
    torch.optim.Adadelta: {"step": _STEP, "square_avg": _SECOND, "acc_delta": _SECOND},
    torch.optim.Adagrad: {"step": _STEP, "sum": Slot("second", _accumulator_start)},
    torch.optim.RMSprop: {"step": _STEP, "square_avg": _SECOND, "grad_avg": _MOMENT, "momentum_buffer": _MOMENT},
    torch.optim.Rprop: {"step": _STEP, "prev": _MOMENT, "step_size": Slot("moment", _rate)},
    # eta and mu are functions of the step, so they go back with it.
    torch.optim.ASGD: {
        "step": _STEP,
        "eta": Slot("count", _rate),
        "mu": Slot("count", 1.0),
        "ax": Slot("average"),
    },
    torch.optim.SGD: {"momentum_buffer": Slot("moment", _momentum_start)},
    torch.optim.Muon: {"momentum_buffer": _MOMENT},
    torch.optim.Adafactor: {"step": _STEP, "row_var": _SECOND, "col_var": _SECOND, "variance": _SECOND},
}
ONE_HISTORY: tuple[type[Any], ...] = (torch.optim.LBFGS,)
"""Classes that keep one history for all their parameters, which any change makes stale."""
_WRAPPERS = {
    "AcceleratedOptimizer": "accelerate",
    "LightningOptimizer": "lightning",
    "_FabricOptimizer": "lightning",
}


def register(optimizer_class: type[Any], fresh: Mapping[str, Start | Slot]) -> None:
    """Tell how the state of an optimizer class starts: slot name → its value before the first step.

    A value is a number, `"weight"` for a copy of the weight in higher precision, `None` for a slot that is absent at
    first, or a function of the optimizer and the parameter group that returns a number. A slot called `step` is a
    step count and one whose name ends in `_sq` or `_sqr` a second moment; give a `Slot` to say so for other names.
    Subclasses inherit.

    >>> class Lion(torch.optim.Optimizer):
    ...     '''Keeps one moment, exp_avg.'''
    >>> register(Lion, {"exp_avg": 0.0})
    """

    def slot(name: str, start: Start | Slot) -> Slot:
        if isinstance(start, Slot):
            return start
        if start == "weight":
            return Slot("master")
        if name == "step":
            return Slot("count", start)
        return Slot("second" if name.endswith(("_sq", "_sqr")) else "moment", start)

    _SLOTS[optimizer_class] = {name: slot(name, start) for name, start in fresh.items()}


def unwrap(optimizers: Any) -> tuple[Optimizer, ...]:
    """The torch optimizers behind None, one optimizer, a list of them, and accelerate's and lightning's wrappers.

    >>> adam = torch.optim.Adam([torch.nn.Parameter(torch.ones(2))])
    >>> unwrap(None), unwrap([adam, adam]) == (adam,)
    ((), True)
    """
    if optimizers is None:
        return ()
    if isinstance(optimizers, Mapping):
        optimizers = list(optimizers.values())
    if isinstance(optimizers, Sequence):
        found = [inner for one in optimizers for inner in unwrap(one)]
        return tuple({id(one): one for one in found}.values())
    while any(
        cls.__module__.split(".")[0].startswith(_WRAPPERS.get(cls.__name__, "\0")) for cls in type(optimizers).__mro__
    ):
        optimizers = optimizers.optimizer
    if not hasattr(optimizers, "param_groups") or not hasattr(optimizers, "state"):
        raise TypeError(f"expected an optimizer or a list of them, got {type(optimizers).__name__}")
    return (optimizers,)


def slots(optimizer: Optimizer, parameter: Parameter) -> Mapping[str, Slot]:
    """What each entry of `parameter`'s state in `optimizer` is; KeyError for a class that is not registered.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> sgd = torch.optim.SGD([weight], momentum=0.9)
    >>> weight.sum().backward(); sgd.step()
    >>> slots(sgd, weight)["momentum_buffer"].kind
    'moment'
    """
    known = next((_SLOTS[cls] for cls in type(optimizer).__mro__ if cls in _SLOTS), None)
    if known is None:
        raise KeyError(type(optimizer).__name__)
    masters = {name: Slot("master") for name in MASTER_NAMES}
    return {name: {**masters, **known}[name] for name in optimizer.state.get(parameter, {})}
