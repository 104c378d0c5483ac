"""A schedule without a trigger goes by what its method says of itself."""

import pytest

from rekindle.integrations.application import Application
from rekindle.methods import FIRE, UPGD, ReDo, WeightClip
from rekindle.monitoring.schedules import Schedule
from rekindle.monitoring.triggers import AtBoundary, Every


def test_without_a_trigger_the_method_says_when() -> None:
    own = Schedule(ReDo(period=7)).trigger
    assert isinstance(own, Every)
    assert own.n == 7
    assert isinstance(Schedule(FIRE()).trigger, AtBoundary)
    after = Schedule(WeightClip()).trigger
    assert isinstance(after, Every)
    assert after.n == 1
    with pytest.raises(ValueError, match="nothing to decide"):
        Schedule(UPGD())


def test_the_period_acts_inside_trainers_too() -> None:
    assert Application(ReDo(period=7)).when.every == 7
    assert Application(ReDo(period=7), every=3).when.every == 3
    assert Application(ReDo(period=7), at=3).when.every is None
    assert Application(FIRE()).when.every is None
