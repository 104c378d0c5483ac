"""The public name of `rekindle.monitoring.monitor`."""

from rekindle.monitoring.monitor import Monitor

__all__ = ["Monitor"]
