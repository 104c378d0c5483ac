"""The public name of `rekindle.monitoring.triggers`."""

from rekindle.monitoring.joined_triggers import AllOf, AnyOf
from rekindle.monitoring.schedules import Firing, Schedule
from rekindle.monitoring.triggers import (
    AtBoundary,
    DeadAbove,
    DfIAbove,
    DormancyAbove,
    Every,
    GradientVanished,
    Plateau,
    RankBelow,
    Trigger,
    VerdictIs,
)

__all__ = [
    "AllOf",
    "AnyOf",
    "AtBoundary",
    "DeadAbove",
    "DfIAbove",
    "DormancyAbove",
    "Every",
    "Firing",
    "GradientVanished",
    "Plateau",
    "RankBelow",
    "Schedule",
    "Trigger",
    "VerdictIs",
]
