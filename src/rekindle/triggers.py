"""The public name of `rekindle.monitoring.triggers`."""

from rekindle.monitoring.schedules import Firing, Schedule
from rekindle.monitoring.triggers import (
    AllOf,
    AnyOf,
    AtBoundary,
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
