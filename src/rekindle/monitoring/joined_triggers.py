"""Several triggers as one: any of them, or all at once.

>>> from rekindle.monitoring.triggers import DormancyAbove, Every
>>> trigger = AnyOf(Every(3), DormancyAbove(0.5))
>>> [trigger({"dormant": share}) for share in (0.1, 0.7, 0.1)]
[None, 'dormant 0.7 > 0.5', 'every 3 steps']
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rekindle.monitoring.triggers import Metrics, Trigger


class _Joined(Trigger):
    """Several triggers that are all evaluated at every step, so that each keeps its own count."""

    def __init__(self, *triggers: Trigger, cooldown: int = 0, most: int | None = None) -> None:
        super().__init__(cooldown=cooldown, most=most)
        if not triggers:
            raise ValueError(f"{type(self).__name__} needs at least one trigger")
        self.triggers = triggers
        self._spoke: list[Trigger] = []

    def reads(self) -> list[tuple[str, ...]]:
        """What its members read."""
        return list(dict.fromkeys(key for trigger in self.triggers for key in trigger.reads()))

    def _reasons(self, metrics: Metrics) -> list[str]:
        found = [(trigger, trigger.consider(metrics)) for trigger in self.triggers]
        self._spoke = [trigger for trigger, reason in found if reason is not None]
        return [reason for _, reason in found if reason is not None]

    def commit(self) -> None:
        """The members that gave a reason have fired."""
        for trigger in self._spoke:
            trigger.fire()

    def state_dict(self) -> dict[str, Any]:
        """Its own and its members' state."""
        return {**super().state_dict(), "triggers": [trigger.state_dict() for trigger in self.triggers]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state of as many members."""
        members = state.get("triggers", ())
        if len(members) != len(self.triggers):
            raise ValueError(f"the state is of {len(members)} triggers, here are {len(self.triggers)}")
        super().load_state_dict(state)
        for trigger, each in zip(self.triggers, members, strict=True):
            trigger.load_state_dict(each)


class AnyOf(_Joined):
    """Fires where one of its triggers would.

    >>> from rekindle.monitoring.triggers import DormancyAbove, Every, GradientVanished
    >>> AnyOf(Every(1), GradientVanished())({"gradient_norm": 1.0})
    'every 1 steps'
    """

    def look(self, metrics: Metrics) -> str | None:
        """The reasons of all members that would fire."""
        return " and ".join(self._reasons(metrics)) or None


class AllOf(_Joined):
    """Fires where all of its triggers would.

    >>> from rekindle.monitoring.triggers import DormancyAbove, Every
    >>> AllOf(Every(1), DormancyAbove(0.5))({"dormant": 0.2}) is None
    True
    """

    def look(self, metrics: Metrics) -> str | None:
        """All reasons, if none is missing."""
        reasons = self._reasons(metrics)
        return " and ".join(reasons) if len(reasons) == len(self.triggers) else None
