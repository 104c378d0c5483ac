"""The public name of `rekindle.measures.bounds`."""

from rekindle.measures.bounds import covariance_bound, curvature_bound, rank_bound, score_bounds

__all__ = ["covariance_bound", "curvature_bound", "rank_bound", "score_bounds"]
