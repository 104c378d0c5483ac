"""What each optimizer class keeps for a parameter, and what it keeps before the first step.

torch's own classes are in a table, others may be registered. Any other class is recognized by what it keeps: slots
whose names have one meaning everywhere (`exp_avg`, `exp_avg_sq`, `momentum_buffer`, `step`, …) and whose shapes fit it;
any other slot makes it unknown. Queries of a live optimizer are in `live_slots`.

Zero is not always where a slot starts: NAdam's product of momenta starts at 1, the rates of Rprop and ASGD at the
learning rate, Adagrad's sum at a value that the user sets, and SGD's buffer with dampening does not exist at first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

Group = Mapping[str, Any]
Held = tuple[str, Parameter, Group]  # a parameter under its name, and the group that it is in
Start = float | Literal["weight"] | None | Callable[[Optimizer, Group], float | None]
"""What a slot holds before the first step: a number, the weight itself, nothing at all (None), or a function of
the optimizer and the parameter group."""


@dataclass(frozen=True)
class Slot:
    """One entry of a parameter's state: what kind of thing it is, and what it starts from.

    kind: "moment" and "second" (a second moment) describe past gradients, "count" how many steps were taken,
    "average" is a running mean of the weights, "master" a copy of the weight in higher precision.
    stacked: the state of a group's first parameter holds this slot for the whole group, one entry along dimension 0 per
    parameter, in the order of the group (nanochat's Muon).

    >>> Slot("second").start
    0.0
    """

    kind: Literal["moment", "second", "count", "average", "master"]
    start: Start = 0.0
    stacked: bool = False

    def __post_init__(self) -> None:
        if self.stacked and self.start is None:
            raise ValueError("a stacked slot cannot be absent for one parameter: give the number that it starts from")


_STEP = Slot("count")
_MOMENT = Slot("moment")
_SECOND = Slot("second")
MASTERS = dict.fromkeys(
    ("master", "master_param", "master_weight", "master_params", "main_param", "fp32_param", "float32_copy"),
    Slot("master"),
)


def _rate(optimizer: Optimizer, group: Group) -> float:
    return float(group["lr"])


def _accumulator_start(optimizer: Optimizer, group: Group) -> float:
    return float(optimizer.defaults["initial_accumulator_value"])  # torch does not look in the group either


def _momentum_start(optimizer: Optimizer, group: Group) -> float | None:
    # The first buffer is the whole gradient, later ones take (1 − dampening) of it: zero is fresh without dampening
    # only, else the slot must be absent.
    return None if group.get("dampening") else 0.0


SLOTS: dict[type[Any], Mapping[str, Slot]] = {
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


def register(optimizer_class: type[Any], fresh: Mapping[str, Start | Slot]) -> None:
    """Register how the state of an optimizer class starts: slot name → its value before the first step.

    A value is a number, `"weight"` for a copy of the weight in higher precision, `None` for a slot that is absent at
    first, or a function of the optimizer and the parameter group that returns a number. A slot called `step` is a
    step count and one whose name ends in `_sq` or `_sqr` a second moment; give a `Slot` to say so for other names, and
    `Slot(..., stacked=True)` for one tensor that holds the slot of all parameters of a group. Subclasses inherit.

    >>> class Lion(torch.optim.Optimizer):
    ...     '''Keeps one moment, exp_avg.'''
    >>> register(Lion, {"exp_avg": 0.0})
    >>> class StackedMuon(torch.optim.Optimizer):
    ...     '''Keeps the momenta of a group in one tensor, in the state of the group's first parameter.'''
    >>> register(StackedMuon, {"momentum_buffer": Slot("moment", stacked=True)})
    """

    def slot(name: str, start: Start | Slot) -> Slot:
        if isinstance(start, Slot):
            return start
        if start == "weight":
            return Slot("master")
        if name == "step":
            return Slot("count", start)
        return Slot("second" if name.endswith(("_sq", "_sqr")) else "moment", start)

    SLOTS[optimizer_class] = {name: slot(name, start) for name, start in fresh.items()}


# Names that mean one thing wherever they are used. Row and column factors are Adafactor's; RMS is computed anew at each
# step before it is used. Schedule-free optimizers keep the point z, from which their average starts: the weight.
COMMON: dict[str, Slot] = {
    "step": _STEP,
    "RMS": Slot("count"),
    "z": Slot("master"),
    **dict.fromkeys(("exp_avg", "exp_avg_slow", "momentum_buffer", "momentum"), _MOMENT),
    **dict.fromkeys(("exp_avg_sq", "max_exp_avg_sq", "exp_inf", "exp_avg_var", "square_avg"), _SECOND),
    **dict.fromkeys(("exp_avg_sq_row", "exp_avg_sq_col", "row_var", "col_var"), _SECOND),
}
_FACTORS = ("exp_avg_sq_row", "exp_avg_sq_col", "row_var", "col_var")
# Step counts of a whole group, and what they start from: pytorch_optimizer, apex, schedulefree.
GROUP_COUNTS: dict[str, float] = {"step": 0, "k": 0, "weight_sum": 0.0, "lr_max": -1.0}


def by_structure(optimizer: Optimizer, parameter: Parameter) -> Mapping[str, Slot]:
    """The slots of a class that is not registered; KeyError with the name of the first that is not understood."""
    if type(optimizer) is Optimizer:
        raise KeyError("Optimizer")
    found = {}
    for name, value in optimizer.state.get(parameter, {}).items():
        slot = MASTERS.get(name) or COMMON.get(name)
        if slot is None or not (value is None or _is_a(slot, name, value, parameter)):
            raise KeyError(name)
        found[name] = slot
    return found


def _is_a(slot: Slot, name: str, value: object, parameter: Parameter) -> bool:
    if slot.kind == "count":
        return isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1)
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return False
    return name in _FACTORS or value.shape == parameter.shape
