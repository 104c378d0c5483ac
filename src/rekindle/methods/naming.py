"""Methods by name, as `attach`, the trainers' callbacks and `advise` take them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rekindle import methods
from rekindle.projection.method import Method

_SPECIAL: dict[str, Callable[[], Method]] = {
    "he-reset": lambda: methods.FullReset("he"),
    "orthogonal-reset": lambda: methods.FullReset("orthogonal"),
    "fire-body": lambda: methods.FIRE(targets="auto"),
    "fire-zero-biases": lambda: methods.FIRE(biases="zero"),
}


def named(name: str) -> Method:
    """A method by its name, with its default options.

    Beside the methods' own names: "lr:3" (the learning rate times 3), "he-reset", "orthogonal-reset", "fire-body"
    (FIRE without the output layer), "fire-zero-biases".

    >>> named("fire"), named("lr:0.5")
    (FIRE(), LearningRate(factor=0.5))
    """
    known: dict[str, Any] = dict(_SPECIAL)
    for public in methods.__all__:
        method = getattr(methods, public)
        if isinstance(method, type) and isinstance(getattr(method, "name", None), str):
            known[str(getattr(method, "name", ""))] = method
    kind, _, factor = name.partition(":")
    if kind == "lr" and factor:
        try:
            return methods.LearningRate(float(factor))
        except ValueError as error:
            raise ValueError(f"{name!r}: after lr: comes a positive factor, as in lr:3") from error
    if name not in known:
        raise ValueError(f"no method is called {name!r}; there are lr:FACTOR, {', '.join(sorted(known))}")
    made: Method = known[name]()
    return made
