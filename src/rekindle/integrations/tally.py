"""What a method of every step did, added up over an interval: one receipt for many calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rekindle.optimizers import StateReset
from rekindle.projection.receipt import BlockRecord, Receipt

INTERVAL = 100  # steps that one receipt covers


class Tally:
    """Receipts of single steps, added up.

    >>> tally = Tally()
    >>> for step in (1, 2, 3):
    ...     _ = tally.add(step, Receipt("cbp", (BlockRecord("0.weight", counts={"neurons": 1}),) if step != 2 else ()))
    >>> receipt, reason = tally.take()
    >>> receipt.totals()["counts"], reason
    ({'neurons': 2}, '2 of 3 steps')
    """

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self.first: int | None = None
        self.last = self.acted = self.slots = self.mirrors = 0
        self.seconds = 0.0
        self.method = ""
        self.settings: Mapping[str, Any] = {}
        self.counts: dict[str, dict[str, int]] = {}
        self.notes: dict[str, None] = {}

    def add(self, step: int, receipt: Receipt) -> bool:
        """One more step; whether the interval is full."""
        if self.first is None:
            self.first = step
        self.last = step
        self.seconds += receipt.seconds
        if receipt.records:
            self.acted += 1
            self.method, self.settings = receipt.method, receipt.settings
            self.mirrors = max(self.mirrors, receipt.mirrors)
            self.slots += receipt.optimizer.reset if receipt.optimizer is not None else 0
            for record in receipt.records:
                counts = self.counts.setdefault(record.name, {})
                for name, count in record.counts.items():
                    counts[name] = counts.get(name, 0) + count
            self.notes |= dict.fromkeys(receipt.notes)
        return step - self.first + 1 >= INTERVAL

    def take(self) -> tuple[Receipt, str] | None:
        """The receipt of the interval and how often the method acted in it; None if it never did."""
        if self.first is None:
            return None
        reason = f"{self.acted} of {self.last - self.first + 1} steps"
        receipt = Receipt(
            self.method,
            tuple(BlockRecord(name, counts=counts) for name, counts in self.counts.items()),
            settings=self.settings,
            optimizer=replace(StateReset("none"), reset=self.slots),
            mirrors=self.mirrors,
            seconds=self.seconds,
            notes=tuple(self.notes),
        )
        acted = self.acted
        self._clear()
        return (receipt, reason) if acted else None

    def state_dict(self) -> dict[str, Any]:
        """What was added since the last receipt."""
        return {**vars(self), "notes": list(self.notes), "settings": dict(self.settings)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        vars(self).update(state, notes=dict.fromkeys(state["notes"]))
