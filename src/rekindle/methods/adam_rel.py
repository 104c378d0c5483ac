"""Adam-Rel: only the optimizer's clock starts again."""

from __future__ import annotations

from rekindle.methods.optimizer_reset import OptimizerReset


class AdamRel(OptimizerReset):
    """Adam with relative timesteps (Ellis et al., 2024): the step count becomes 0, moments and weights stay.

    When the objective changes, gradients jump; bias correction by a small step count then bounds the update, which
    an old count would let grow far beyond the learning rate. No weight is touched.

    >>> import torch
    >>> model = torch.nn.Linear(2, 1)
    >>> adam = torch.optim.Adam(model.parameters())
    >>> model(torch.ones(1, 2)).sum().backward(); adam.step()
    >>> AdamRel()(model, adam).optimizer.reset, adam.state[model.weight]["step"].item()
    (2, 0.0)
    """

    name = "adam-rel"
    policy = "step"
