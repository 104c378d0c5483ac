"""The public name of `rekindle.engine.isometry`."""

from rekindle.engine.isometry import Certificate, polar

__all__ = ["Certificate", "polar"]
