"""The public name of `rekindle.projection.scales`."""

from rekindle.projection.scales import Scale

__all__ = ["Scale"]
