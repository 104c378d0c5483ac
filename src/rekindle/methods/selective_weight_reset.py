"""Selective weight reinitialization: single weights of low utility are drawn anew, not whole neurons."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from rekindle.methods.caching import PerModel
from rekindle.methods.call import Call
from rekindle.methods.remedy import FromStart
from rekindle.methods.selection import Share, chosen_parameters
from rekindle.optimizers import StateReset
from rekindle.projection.receipt import BlockRecord, Receipt
from rekindle.projection.targets import Targets
from rekindle.sharding.team import Needs


class SelectiveWeightReset(FromStart):
    """Every `every` steps the least useful weights of each parameter are drawn anew (arXiv:2508.00212).

    Hernandez-Garcia, Dohare, Luo & Sutton (2025). The utility of a weight is |g·w| (`utility="gradient"`) or |w|
    ("magnitude"), of the last step or, with `decay`, as a moving average since the last reset. `choose="proportional"`
    takes the share `factor` of each parameter, the part of a weight that is left over with that probability;
    "threshold" takes utilities up to `factor` times their mean. New values come from the model's own start. As in the
    authors' code the optimizer's state stays; call it after the step, with the gradients still there. Their `factor`
    and frequency are searched per problem; the defaults here are ours.

    >>> model = nn.Linear(10, 10, bias=False)
    >>> before = model.weight.detach().clone()
    >>> SelectiveWeightReset(0.05, every=1, utility="magnitude")(model).totals()["counts"]
    {'weights': 5}
    >>> int((model.weight != before).sum())
    5

    Args:
        factor: the share of weights, or the threshold as a share of the mean utility.
        every: steps between two resets.
        utility: "gradient" is |g·w|, "magnitude" is |w|.
        choose: "proportional" takes a share, "threshold" all below.
        decay: of the moving average of utilities; 0 takes the last step's.
        targets: which parameters, as for `rekindle.plan`.
        fresh: a function that returns a new model, where modules' own schemes are not how the model starts.
        seed: what its own random numbers start from, when the call gives no generator.
    """

    name = "selective-weight-reset"
    moment = "step"

    def __init__(
        self,
        factor: float = 0.01,
        *,
        every: int = 100,
        utility: Literal["gradient", "magnitude"] = "gradient",
        choose: Literal["proportional", "threshold"] = "proportional",
        decay: float = 0.0,
        targets: Targets = "trainable",
        fresh: Callable[[], nn.Module] | None = None,
        seed: int = 0,
    ) -> None:
        if utility not in ("gradient", "magnitude") or choose not in ("proportional", "threshold"):
            raise ValueError(f"utility={utility!r} and choose={choose!r}: see the docstring for what there is")
        if factor < 0 or every < 1 or not 0 <= decay < 1 or (choose == "proportional" and factor > 1):
            raise ValueError(f"factor={factor}, every={every} and decay={decay} are not all in their range")
        super().__init__(fresh=fresh, seed=seed)
        self.factor, self.every, self.utility, self.choose = factor, every, utility, choose
        self.decay, self.targets = decay, targets
        self._calls = 0
        self._averages: dict[str, Tensor] = {}
        self._chosen: PerModel[tuple[dict[str, Share], dict[str, str]]] = PerModel()

    @property
    def needs(self) -> Needs:
        """The gradients of a step."""
        return "steps"

    @torch.no_grad()
    def apply(self, call: Call) -> Receipt:
        """Update the averages, and draw anew if it is time."""
        chosen, skipped = self._chosen.get(call.model, lambda: chosen_parameters(call.model, self.targets))
        used = {n: s for n, s in chosen.items() if self.utility == "magnitude" or s.parameter.grad is not None}
        if not used:
            raise ValueError("there is no gradient: call SelectiveWeightReset after a step, before zero_grad()")
        self._calls += 1
        due = self._calls % self.every == 0
        if not due and not self.decay:
            return Receipt(self.name, (), skipped, optimizer=StateReset("none"))
        utilities = {name: self._utility(name, share) for name, share in used.items()}
        if not due:
            return Receipt(self.name, (), skipped, optimizer=StateReset("none"))
        places = {name: self._least(share.of(utilities[name]).flatten(), call) for name, share in used.items()}
        places = {name: index for name, index in places.items() if len(index)}
        drawn = self.drawn(call, list(places)) if places else {}
        for name, index in places.items():
            share = used[name]
            values, new = share.of(share.parameter).flatten(), share.of(drawn[name]).flatten()
            values[index] = new[index].to(values)
            if share.mask is None:
                share.parameter.copy_(values.view(share.parameter.shape))
            else:
                share.parameter.masked_scatter_(share.mask, values)
        self._averages.clear()
        records = [BlockRecord(name, counts={"weights": len(index)}) for name, index in places.items()]
        return Receipt(self.name, tuple(records), skipped, optimizer=StateReset("none"))

    def _utility(self, name: str, share: Share) -> Tensor:
        """|g·w| or |w|, averaged since the last reset."""
        parameter = share.parameter.detach()
        now = (
            parameter
            if share.parameter.grad is None or self.utility == "magnitude"
            else parameter * share.parameter.grad
        ).abs()
        if not self.decay:
            return now
        before = self._averages.get(name)
        before = torch.zeros_like(now) if before is None or before.shape != now.shape else before.to(now)
        self._averages[name] = before.lerp(now, 1 - self.decay)
        return self._averages[name]

    def _least(self, utility: Tensor, call: Call) -> Tensor:
        """Which of these are drawn anew."""
        if self.choose == "threshold":
            return (utility <= self.factor * utility.mean()).nonzero().flatten()
        wanted = self.factor * len(utility)
        chance = torch.rand((), generator=call.generator, device=call.generator.device)
        number = int(wanted) + int(float(chance) < wanted % 1)
        return utility.topk(number, largest=False).indices

    def gathered(self) -> dict[str, Any]:
        """Calls so far, and the averages."""
        return {"calls": self._calls, "averages": dict(self._averages)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take them back."""
        self._calls, self._averages = state["calls"], dict(state["averages"])
