"""The public name of `rekindle.projection.reinitializer`."""

from rekindle.projection.reinitializer import FIREConfig, FIREReinitializer, ReinitStats

__all__ = ["FIREConfig", "FIREReinitializer", "ReinitStats"]
