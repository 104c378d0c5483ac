"""ReDo: recycle dormant neurons."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, Unpack

from torch import Tensor, nn

from rekindle.methods.call import Call
from rekindle.methods.neurons import Judgment, NeuronOptions, NeuronRemedy
from rekindle.methods.replacement import check_finite
from rekindle.methods.statistics import Sums, sizes
from rekindle.recording.wiring import Group, Wiring


class ReDo(NeuronRemedy):
    """Recycle neurons whose activity is at most tau of their layer's mean (Sokar et al., 2023).

    s_i = mean|h_i| / mean over the layer of mean|h_k|, measured on the `batches` of the call, or on what `observe`
    has seen since the last call: one in `sample` training passes, the first included (the paper measures one batch per
    application; looking at every pass would add a third to a small step). Dormant are s_i ≤ tau; in a layer without
    any activity all are dormant. Their incoming weights are drawn again, biases and outgoing weights become zero;
    weights between two dormant neurons are drawn again, so that a chain of dead layers is revived as a whole. `period`
    is used by a `Schedule` without a trigger (1,000 steps in the paper, tau = 0.025).

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> _ = nn.init.zeros_(model[0].weight), model[0].bias.data.copy_(torch.tensor([-1.0, 1.0, 1.0]))
    >>> receipt = ReDo(tau=0)(model, batches=[torch.randn(5, 2)])
    >>> receipt.totals()["counts"], model[2].weight[0, 0].item()
    ({'neurons': 1, 'rows': 1, 'columns': 1}, 0.0)

    Args:
        tau: the score at or below which a neuron is dormant.
        period: steps between two applications, for a `Schedule` without a trigger.
        sample: one in so many training passes is measured.
        options: `targets`, `consumers`, `second_moment`, `fresh` and `seed`, as in
            `rekindle.methods.neurons.NeuronRemedy`.
    """

    name = "redo"
    batches = "any"

    def __init__(
        self, tau: float = 0.025, *, period: int = 1000, sample: int = 7, **options: Unpack[NeuronOptions]
    ) -> None:
        if tau < 0:
            raise ValueError(f"tau={tau} must not be negative")
        if sample < 1:
            raise ValueError(f"sample={sample} must be at least 1: one in so many passes is measured")
        super().__init__(**options)
        self.tau, self.period, self.sample = tau, period, sample
        self._sums = Sums()
        self._passes: dict[str, int] = {}  # of each layer while training, since the last call

    def watch(self, group: Group, activity: Tensor) -> None:
        """Record one in `sample` training passes; seven is odd, so that two alternating losses are both seen."""
        name = group.name
        number = self._passes[name] = self._passes.get(name, -1) + 1
        if number % self.sample == 0:
            self.record(group, activity)

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
        self._sums.settle()
        return self._scores(self.wiring(model), self._sums)

    def judge(self, call: Call, wiring: Wiring) -> Judgment:
        """The dormant neurons; a network that has not run since the last call is skipped."""
        self._sums.settle()
        known = self._sums.values.keys()
        unseen = [group for group in wiring if not self._shapes(replace(wiring, groups=(group,))).keys() <= known]
        skipped = {group.name: "no activity was recorded since the last call" for group in unseen}
        if len(unseen) < len(wiring) and call.batches is None:
            wiring = replace(wiring, groups=tuple(group for group in wiring if group not in unseen))
        sums = self._sums.over(call, lambda: self._shapes(wiring))
        scores = self._scores(wiring, sums)
        neurons = {name: (s <= self.tau).nonzero().flatten() for name, s in scores.items()}
        return Judgment(neurons, skipped=skipped, notes=sums.notes())

    def replaced(self, neurons: Mapping[str, Tensor]) -> None:
        """Forget what was recorded about all of them."""
        self.forget()

    def forget(self, layers: Collection[str] | None = None) -> None:
        """Start counting anew."""
        self._sums.clear(layers)
        for name in list(self._passes) if layers is None else layers:
            self._passes.pop(name, None)

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
            if not sums.seen[group.name]:
                check_finite({f"{maker.name}.weight": maker.weight for each in wiring for maker in each.makers})
                raise ValueError(f"every recorded activity of {group.name!r} holds NaN or Inf; nothing was changed")
            mean = sums.values[group.name] / sums.seen[group.name]
            found[group.name] = (mean / mean.mean()).nan_to_num(0.0)  # in an inactive layer all neurons are dormant
        return found

    def gathered(self) -> dict[str, Any]:
        """Sums and counts since the last call."""
        return {**self._sums.state(), "passes": dict(self._passes)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take them back."""
        self._sums, self._passes = Sums.of(state), dict(state["passes"])
