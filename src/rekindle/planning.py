"""The public name of `rekindle.projection.planning`."""

from rekindle.projection.planning import Plan, plan

__all__ = ["Plan", "plan"]
