"""The public name of `rekindle.projection.targets`."""

from rekindle.projection.targets import Scale

__all__ = ["Scale"]
