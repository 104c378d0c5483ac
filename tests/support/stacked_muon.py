"""A small optimizer like nanochat's MuonAdamW: groups of Muon keep one stacked state, those of Adam do not."""

from __future__ import annotations

from typing import Any

import torch


class StackedMuonAdam(torch.optim.Optimizer):
    """Groups have kind "muon" (matrices of one shape, state of all in that of the first) or "adam"."""

    def __init__(self, groups: list[dict[str, Any]], lr: float = 0.02, momentum: float = 0.9) -> None:
        super().__init__(groups, {"lr": lr, "momentum": momentum, "kind": "adam"})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            if group["kind"] == "muon":
                self._muon(group)
            else:
                for parameter in group["params"]:
                    self._adam(parameter, group)

    def _muon(self, group: dict[str, Any]) -> None:
        members = group["params"]
        gradients = torch.stack([p.grad for p in members])
        state = self.state[members[0]]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(gradients)
            state["second_momentum_buffer"] = gradients.new_zeros(*gradients.shape[:2], 1)
        state["momentum_buffer"].lerp_(gradients, 1 - group["momentum"])
        state["second_momentum_buffer"].lerp_(gradients.square().mean(-1, keepdim=True), 0.1)
        u, _, vh = torch.linalg.svd(state["momentum_buffer"], full_matrices=False)
        update = u @ vh / (state["second_momentum_buffer"].sqrt() + 1e-3)
        for parameter, change in zip(members, update, strict=True):
            parameter.add_(change, alpha=-group["lr"])

    def _adam(self, parameter: torch.nn.Parameter, group: dict[str, Any]) -> None:
        assert parameter.grad is not None
        state = self.state[parameter]
        if not state:
            state.update(step=0, exp_avg=torch.zeros_like(parameter), exp_avg_sq=torch.zeros_like(parameter))
        state["step"] += 1
        state["exp_avg"].lerp_(parameter.grad, 0.1)
        state["exp_avg_sq"].lerp_(parameter.grad.square(), 0.01)
        first, second = state["exp_avg"] / (1 - 0.9 ** state["step"]), state["exp_avg_sq"] / (1 - 0.99 ** state["step"])
        parameter.add_(first / (second.sqrt() + 1e-8), alpha=-group["lr"])
