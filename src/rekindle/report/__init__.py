"""The page: a result as one self-contained HTML file. It takes what `to_dict()` gives and knows nothing else."""

from rekindle.report.page import render

__all__ = ["render"]
