"""The constructor arguments of every integration, parsed and checked: methods, steps, periods, monitors.

A run may act for the first time after days, so a wrong argument is an error when it is given.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from numbers import Integral
from typing import Any, Literal

from torch import nn

from rekindle.blocks.names import is_sharded
from rekindle.isolation import check_batches
from rekindle.methods.naming import named
from rekindle.methods.remedy import Moment, Remedy, moments
from rekindle.monitoring.guard import Guard
from rekindle.monitoring.monitor import Monitor
from rekindle.monitoring.triggers import Trigger
from rekindle.sharding.team import refuse_hidden, refuse_shards, settle

Watching = Monitor | int | Mapping[str, Any] | None
Period = int | Literal["epoch"] | None
_SHARDING = ("DeepSpeedOptimizerWrapper", "ZeroRedundancyOptimizer")


def acting(method: object) -> object:
    """A method, or the one of this name.

    >>> acting("fire")
    FIRE()
    """
    if isinstance(method, type):
        raise TypeError(f"method is an object, got the class itself: write {method.__name__}(...)")
    if getattr(method, "__module__", "").startswith("rekindle.") and hasattr(method, "__qualname__"):
        raise TypeError(
            f"method is an object or a name, got the function {method.__qualname__}: write methods.FIRE(...)"
        )
    found = named(method) if isinstance(method, str) else method
    if not callable(found):
        raise TypeError(f"method is a method, a Schedule or a name, got {type(method).__name__}")
    return found


def parts(method: object, timed: bool, guarded: bool) -> dict[Moment, Any]:
    """The parts of a method that is given times, or not; an error where times or a guard mean nothing for it."""
    found = moments(method)
    if timed and "event" not in found:
        if "step" not in found:
            raise ValueError(f"{method!r} acts in every step: at=, every= and when= mean nothing for it")
        found["event"] = found.pop("step")
    if "event" not in found and guarded:
        raise ValueError(f"{method!r} acts in every step: a guard is for methods that act at times")
    return found


def check_kinds(when: object, guard: object) -> None:
    """Raise unless these are a trigger and a guard."""
    if when is not None and not isinstance(when, Trigger):
        raise TypeError(f"when is a trigger of rekindle.triggers, got {type(when).__name__}")
    if guard is not None and not isinstance(guard, Guard):
        raise TypeError(f"guard is a rekindle.Guard, got {type(guard).__name__}")


def has_start(method: Any) -> bool:
    """Whether a method that goes back to a start was given one."""
    return any(bool(value) for key, value in method.state_dict().items() if key != "generator")


def name_of(method: object) -> str:
    """What a method is called in logs and checkpoints."""
    return str(getattr(method, "name", type(method).__name__))


def steps(at: int | Iterable[int] | None) -> tuple[int, ...]:
    """Steps at which to act, in order, each once.

    >>> steps([5, 2, 5])
    (2, 5)
    """
    given = () if at is None else tuple(at) if isinstance(at, Iterable) else (at,)
    if not all(_count(step) and step >= 0 for step in given):
        raise ValueError(f"at is a number of optimizer steps or several, got {at!r}")
    return tuple(sorted({int(step) for step in given}))


def period(every: Any) -> Period:
    """A number of steps, or "epoch"."""
    if every is None:
        return None
    if isinstance(every, str) and every == "epoch":
        return "epoch"
    if _count(every) and every > 0:
        return int(every)
    raise ValueError(f'every is a positive number of optimizer steps or "epoch", got {every!r}')


def warming(rewarm: Any) -> int:
    """A number of steps, 0 included."""
    if not _count(rewarm) or rewarm < 0:
        raise ValueError(f"rewarm is a number of steps, got {rewarm!r}")
    return int(rewarm)


def watching(monitor: Any) -> Watching:
    """A monitor, its sampling period, or its options."""
    if monitor is None or isinstance(monitor, Monitor | Mapping) or (_count(monitor) and monitor > 0):
        return monitor  # type: ignore[no-any-return]
    raise ValueError(f"monitor is a Monitor, a positive number of steps or a dict of its options, got {monitor!r}")


def refuse_shards_of(model: nn.Module, optimizer: object, method: object) -> None:
    """Raise where shards are hidden (FSDP1, DeepSpeed, ZeRO), or where the method does not work on them.

    >>> refuse_shards_of(nn.Linear(1, 1), None, None)
    """
    refuse_hidden(model)
    for each in optimizer if isinstance(optimizer, Sequence) else [optimizer]:
        kinds = type(each), type(getattr(each, "optimizer", each))
        if any(kind.__name__ in _SHARDING or kind.__module__.split(".")[0] == "deepspeed" for kind in kinds):
            raise NotImplementedError(
                f"{type(each).__name__} holds its state in shards that cannot be reset here: train with DDP or "
                "fully_shard; with DeepSpeed call rekindle.fire(engine, engine.optimizer, optimizer_state='moments') "
                "between two steps yourself"
            )
    settle(model)
    if any(map(is_sharded, model.parameters())):
        for member in _members(method):
            if isinstance(member, Remedy) and not member.sharded:
                refuse_shards(model, type(member).__name__, member.needs)


def _members(method: object) -> Iterator[Any]:
    joined = getattr(method, "methods", None)
    if joined is None:
        yield method
    else:
        for member in joined:
            yield from _members(member)


def again(batches: object) -> Any:
    """Batches that can be read at each application, or a function that returns them."""
    if isinstance(batches, Iterator):
        raise TypeError(
            "batches can be read only once, and a method reads them whenever it acts: give a list or a function"
        )
    if batches is not None and not callable(batches):
        check_batches(batches, "batches is a function that returns batches, or")
    return batches


def _count(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)
