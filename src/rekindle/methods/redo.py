"""ReDo: recycle dormant neurons."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Unpack

from torch import Tensor, nn

from rekindle.consumers.wiring import Group, Wiring
from rekindle.methods.call import Call
from rekindle.methods.neurons import Judgement, NeuronOptions, NeuronRemedy, Sums, check_finite, sizes


class ReDo(NeuronRemedy):
    """Recycle neurons whose activity is at most tau of their layer's mean (Sokar et al., 2023).

    s_i = mean|h_i| / mean over the layer of mean|h_k|, measured on the `batches` of the call, or on what `observe`
    has seen since the last call. Dormant are s_i ≤ tau; in a layer without any activity all are dormant. Their
    incoming weights are drawn again, biases and outgoing weights become zero. `period` is used by a `Schedule` without
    a trigger (1,000 steps in the paper, tau = 0.025).

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> _ = nn.init.zeros_(model[0].weight), model[0].bias.data.copy_(torch.tensor([-1.0, 1.0, 1.0]))
    >>> receipt = ReDo(tau=0)(model, batches=[torch.randn(5, 2)])
    >>> receipt.totals()["counts"], model[2].weight[0, 0].item()
    ({'neurons': 1, 'rows': 1, 'columns': 1}, 0.0)
    """

    name = "redo"
    batches = "any"

    def __init__(self, tau: float = 0.025, *, period: int = 1000, **options: Unpack[NeuronOptions]) -> None:
        if tau < 0:
            raise ValueError(f"tau={tau} must not be negative")
        super().__init__(**options)
        self.tau, self.period = tau, period
        self._sums = Sums()

    def record(self, group: Group, activity: Tensor) -> None:
        """Add up |h| of each neuron."""
        self._sums.add(group.name, sizes(activity), activity.numel() // group.width)

    def measure(self, call: Call) -> None:
        """Judge by the batches of the call alone where there are some."""
        if call.batches is not None:
            self.forget()
        super().measure(call)

    def scores(self, model: nn.Module) -> dict[str, Tensor]:
        """The dormancy score of every neuron recorded so far, by layer."""
        return self._scores(self.wiring(model), self._sums)

    def judge(self, call: Call, wiring: Wiring) -> Judgement:
        """The dormant neurons."""
        sums = self._sums.over(call, self._shapes(wiring))
        scores = self._scores(wiring, sums)
        return Judgement({name: (s <= self.tau).nonzero().flatten() for name, s in scores.items()}, notes=sums.notes())

    def replaced(self, neurons: Mapping[str, Tensor]) -> None:
        """Forget what was recorded about all of them."""
        self.forget()

    def forget(self, layers: Collection[str] | None = None) -> None:
        """Start counting anew."""
        self._sums.clear(layers)

    def _shapes(self, wiring: Wiring) -> dict[str, tuple[int, ...]]:
        """What is summed up, by name: the same on every replica, whatever it has seen."""
        return {group.name: (group.width,) for group in wiring}

    def _scores(self, wiring: Wiring, sums: Sums) -> dict[str, Tensor]:
        found = {}
        for group in wiring:
            if group.name not in sums.values:
                raise ValueError(
                    f"no activity of {group.name!r} was recorded: give batches=, or train inside observe(model)"
                )
            if not float(sums.seen[group.name]):
                check_finite({f"{maker.name}.weight": maker.weight for each in wiring for maker in each.makers})
                raise ValueError(f"every recorded activity of {group.name!r} holds NaN or Inf; nothing was changed")
            mean = sums.values[group.name] / sums.seen[group.name].to(sums.values[group.name])
            found[group.name] = (mean / mean.mean()).nan_to_num(0.0)  # in an inactive layer all neurons are dormant
        return found

    def gathered(self) -> dict[str, Any]:
        """Sums and counts since the last call."""
        return self._sums.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take them back."""
        self._sums = Sums.of(state)
