"""The public name of `rekindle.monitoring.sinks`."""

from rekindle.monitoring.sinks import MlflowSink, TensorBoardSink, WandbSink, send

__all__ = ["MlflowSink", "TensorBoardSink", "WandbSink", "send"]
