"""Names and formats of the laboratory's numbers, for the terminal, the page and the documents."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rekindle.lab.results.statistics import Difference, Interval


@dataclass(frozen=True)
class Measure:
    """A measure of a run: name, unit, factor for display, and which way is better."""

    name: str
    unit: str = ""
    times: float = 1.0
    higher: bool = True

    @property
    def axis(self) -> str:
        """For the side of a picture."""
        return f"{self.name}, {self.unit}" if self.unit else self.name

    def number(self, value: float | None) -> str:
        """The value without its unit, with as many digits as the seeds can resolve."""
        if value is None:
            return "–"
        return _fixed(value * self.times, 1 if self.times == 100 else _decimals(value))

    def value(self, value: float | None) -> str:
        r"""The value with its unit.

        >>> measure("test_accuracy").value(0.4634), measure("test_loss").value(2.23)
        ('46.3\xa0%', '2.230')
        """
        return self._with_unit(self.number(value)) if value is not None else "–"

    def ends(self, found: Interval) -> str:
        """The ends of an interval; the values themselves where there are too few for one; else nothing."""
        return _bracketed(found, self.number)

    def difference(self, value: float | None) -> str:
        """A difference with its sign; of shares in points.

        >>> measure("test_accuracy").difference(0.329), measure("test_loss").difference(-0.5)
        ('+32.9', '−0.500')
        """
        if value is None:
            return "–"
        shown = self.number(abs(value))
        sign = "" if not shown.strip("0.") else "−" if value < 0 else "+"
        return f"{sign}{shown}"

    def difference_ends(self, found: Difference) -> str:
        """The same for a difference, each with its sign."""
        return _bracketed(found, self.difference)

    @property
    def step(self) -> str:
        """The unit of a difference, for sentences."""
        return "points" if self.unit == "%" else self.unit

    def _with_unit(self, shown: str) -> str:
        return f"{shown}\N{NO-BREAK SPACE}%" if self.unit == "%" else shown


def _bracketed(found: Interval | Difference, shown: Callable[[float], str]) -> str:
    if found.low is not None and found.high is not None:
        return f"[{shown(found.low)}, {shown(found.high)}]"
    return f"({', '.join(map(shown, found.values))})" if found.values else ""


def _share(name: str, higher: bool = True) -> Measure:
    return Measure(name, "%", 100.0, higher)


def _loss(name: str) -> Measure:
    return Measure(name, "nats", 1.0, False)


MEASURES = {
    "online_accuracy": _share("accuracy while learning"),
    "train_accuracy": _share("accuracy on the task's training data"),
    "test_accuracy": _share("test accuracy"),
    "online_loss": _loss("loss while learning"),
    "train_loss": _loss("loss on the task's training data"),
    "test_loss": _loss("test loss"),
    "return": Measure("mean return"),
    "online_return": Measure("mean return while learning"),
    "old_accuracy": _share("accuracy on earlier tasks"),
    "old_loss": _loss("loss on earlier tasks"),
    "old_accuracy_start": _share("earlier tasks right after the remedy"),
    "old_loss_start": _loss("earlier tasks right after the remedy"),
    "dormant": _share("dormant neurons", higher=False),
    "effective_rank": _share("feature rank, share of the possible"),
    "dfi": Measure("DfI of the weights, scale-free", higher=False),
    "norm": Measure("norm of the weights", higher=False),
    "seconds": Measure("time", "s", 1.0, False),
    "remedy_seconds": Measure("time in the remedy", "s", 1.0, False),
    "function_drift": Measure("change of the function, KL", "nats", 1.0, False),
}


def measure(name: str) -> Measure:
    """What is known about a measure; an unknown one is shown under its own name."""
    return MEASURES.get(name) or Measure(name.replace("_", " "))


def duration(seconds: float | None) -> str:
    """A duration as text."""
    if seconds is None:
        return "–"
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms" if seconds >= 0.001 or seconds == 0 else f"{seconds * 1e6:.0f} µs"
    if seconds < 90:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if rest else f"{minutes} min"


def chance(p: float | None) -> str:
    """A p value as text."""
    return "–" if p is None else "< 0.001" if p < 0.001 else f"{p:.2f}" if p >= 0.1 else f"{p:.3f}"


def ordinal(place: int) -> str:
    """A rank as text: first, second, …"""
    spelled = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth")
    if place <= len(spelled):
        return spelled[place - 1]
    ending = "th" if place % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(place % 10, "th")
    return f"{place}{ending}"


def _decimals(value: float) -> int:
    return 3 if abs(value) < 10 else 1 if abs(value) < 1000 else 0


def _fixed(value: float, decimals: int) -> str:
    shown = f"{value:,.{decimals}f}"
    # No minus sign before a number that rounds to zero.
    shown = shown.lstrip("-") if float(shown.replace(",", "")) == 0 else shown
    return shown.replace("-", "−")
