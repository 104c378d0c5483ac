"""What the weights, units and gradients of a model say about its plasticity, and a verdict.

May import everything up to `projection`. `examination` is the verb `health`, `results` what it gives; `activity`,
`units` and `hooks` watch a forward pass, `usage` counts experts, codes and latents there, `curvature` looks at the
loss, `verdict` has the rules, `fresh` what new networks show, `agreement` says which of health, probe and advise
stands. Start reading at `examination.health`.
"""

from rekindle.diagnosis.examination import Comparison, Health, Thresholds, Verdict, health

__all__ = ["Comparison", "Health", "Thresholds", "Verdict", "health"]
