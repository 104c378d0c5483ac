"""The public name of `rekindle.projection.receipt`."""

from rekindle.projection.receipt import BlockRecord, Method, MethodError, Receipt

__all__ = ["BlockRecord", "Method", "MethodError", "Receipt"]
