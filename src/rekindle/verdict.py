"""The public name of `rekindle.diagnosis.verdict`."""

from rekindle.diagnosis.verdict import Thresholds, Verdict

__all__ = ["Thresholds", "Verdict"]
