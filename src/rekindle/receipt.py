"""The public name of `rekindle.projection.receipt`."""

from rekindle.projection.method import Method, MethodError
from rekindle.projection.receipt import BlockRecord, Receipt

__all__ = ["BlockRecord", "Method", "MethodError", "Receipt"]
