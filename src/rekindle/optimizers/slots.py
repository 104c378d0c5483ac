"""What each optimizer class keeps for a parameter, and what it keeps before the first step.

torch's own classes are in a table, others may be registered. A class that is neither goes by what it keeps: slots whose
names have one meaning everywhere (`exp_avg`, `exp_avg_sq`, `momentum_buffer`, `step`, …) and whose shapes fit it; any
other slot makes it unknown.

Zero is not always where a slot starts: NAdam's product of momenta starts at 1, the rates of Rprop and ASGD at the
learning rate, Adagrad's sum where the user said, and SGD's buffer with dampening does not exist at first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
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

    _SLOTS[optimizer_class] = {name: slot(name, start) for name, start in fresh.items()}


# Names that mean one thing wherever they are used. Row and column factors are Adafactor's; RMS is computed anew at each
# step before it is used. Schedule-free optimizers keep the point z, from which their average starts: the weight.
_COMMON: dict[str, Slot] = {
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


def group_counts(optimizer: Optimizer, group: Group) -> dict[str, float]:
    """The step counts that a group keeps for all its parameters, with their starts; none for torch's own classes.

    Only where they matter: a moment alone (Lion, Muon) starts over without them, a second moment is corrected by them.
    """
    if _registered(optimizer) is not None or builds_when_empty(optimizer):
        return {}
    counts = {name: start for name, start in GROUP_COUNTS.items() if isinstance(group.get(name), (int, float))}
    if not counts.keys() & {"step", "k"}:
        return {}
    kept = {name for parameter in group["params"] for name in optimizer.state.get(parameter, {})}
    alone = all(name in _COMMON and _COMMON[name].kind in ("moment", "count") for name in kept)
    return {} if alone else counts


def builds_when_empty(optimizer: Optimizer) -> bool:
    """Whether a parameter's state may be dropped, to be built anew at its next step: the classes of bitsandbytes."""
    return _comes_from(optimizer, "bitsandbytes", "Optimizer8bit")


def can_drop(optimizer: Optimizer) -> bool:
    """Whether a fresh state is one that is not there; for a group, once all its parameters are known to change.

    The latter are the classes of pytorch_optimizer, without those that estimate the learning rate (d): that estimate
    belongs to all groups.
    """
    rates = any("d" in group or "d0" in group for group in optimizer.param_groups)
    grouped = _comes_from(optimizer, "pytorch_optimizer", "BaseOptimizer") and not rates
    return grouped or builds_when_empty(optimizer)


def _comes_from(optimizer: Optimizer, package: str, base: str) -> bool:
    return any(cls.__name__ == base and cls.__module__.startswith(f"{package}.") for cls in type(optimizer).__mro__)


def _registered(optimizer: Optimizer) -> Mapping[str, Slot] | None:
    return next((_SLOTS[cls] for cls in type(optimizer).__mro__ if cls in _SLOTS), None)


def _by_structure(optimizer: Optimizer, parameter: Parameter) -> Mapping[str, Slot]:
    """The slots of a class that nobody registered; KeyError with the name of the first that is not understood."""
    if type(optimizer) is Optimizer:
        raise KeyError("Optimizer")
    found = {}
    for name, value in optimizer.state.get(parameter, {}).items():
        slot = Slot("master") if name in MASTER_NAMES else _COMMON.get(name)
        if slot is None or not (value is None or _is_a(slot, name, value, parameter)):
            raise KeyError(name)
        found[name] = slot
    return found


def _is_a(slot: Slot, name: str, value: Any, parameter: Parameter) -> bool:
    if slot.kind == "count":
        return isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1)
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return False
    return name in _FACTORS or value.shape == parameter.shape


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
    if isinstance(optimizers, Sequence) and not isinstance(optimizers, str | bytes):
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
    """What each entry of `parameter`'s state in `optimizer` is; KeyError where that is not known.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> sgd = torch.optim.SGD([weight], momentum=0.9)
    >>> weight.sum().backward(); sgd.step()
    >>> slots(sgd, weight)["momentum_buffer"].kind
    'moment'
    """
    known = _registered(optimizer)
    if known is None:
        return _by_structure(optimizer, parameter)
    table = {**{name: Slot("master") for name in MASTER_NAMES}, **known}
    return {name: table[name] for name in optimizer.state.get(parameter, {}) if not table[name].stacked}


def known_slots(optimizer: Optimizer, held: Iterable[Held]) -> list[Mapping[str, tuple[Slot, Any]] | str]:
    """For each of these parameters: slot name → (what it is, what it starts from), or the name that is not understood.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> sgd = torch.optim.SGD([weight], momentum=0.9)
    >>> weight.sum().backward(); sgd.step()
    >>> known_slots(sgd, [("weight", weight, sgd.param_groups[0])])
    [{'momentum_buffer': (Slot(kind='moment', ...), 0.0)}]
    """
    found: list[Mapping[str, tuple[Slot, Any]] | str] = []
    for _, parameter, group in held:
        try:
            kept = slots(optimizer, parameter)
            if not optimizer.state.get(parameter):
                slots(optimizer, group["params"][0])  # it may hold the state of the whole group in a way nobody told
        except KeyError as error:
            found.append(str(error.args[0]))
        else:
            found.append({name: (slot, slot.begin(optimizer, group)) for name, slot in kept.items()})
    return found


def stacked(
    optimizer: Optimizer, held: Iterable[Held], *, masters: bool = False
) -> list[dict[str, tuple[Slot, Any, Tensor]]]:
    """For each of these parameters its stacked slots: what each is, where it starts, and a view of what it holds.

    ValueError where there is not one entry per parameter.

    masters: only copies of the weight.
    """
    known = _registered(optimizer) or {}
    wanted = {name: slot for name, slot in known.items() if slot.stacked and (slot.kind == "master" or not masters)}
    return [_views(optimizer, parameter, group, wanted) if wanted else {} for _, parameter, group in held]


def _views(
    optimizer: Optimizer, parameter: Parameter, group: Group, wanted: Mapping[str, Slot]
) -> dict[str, tuple[Slot, Any, Tensor]]:
    members = group["params"]
    state = optimizer.state.get(members[0], {})
    place = next(number for number, member in enumerate(members) if member is parameter)
    found = {}
    for name, slot in wanted.items():
        value = state.get(name)
        if value is None:
            continue
        if not isinstance(value, Tensor) or value.ndim == 0 or len(value) != len(members):
            held = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(
                f"{type(optimizer).__name__} is registered with a stacked slot {name!r}, which must have one entry for "
                f"each of the {len(members)} parameters of its group, and it is {held}: pass optimizer_state='none'"
            )
        found[name] = slot, slot.begin(optimizer, group), value[place]
    return found
