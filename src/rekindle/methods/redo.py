"""ReDo: recycle dormant neurons."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from rekindle.consumers.wiring import Group
from rekindle.methods.neurons import NeuronRemedy, Replacement, sizes
from rekindle.projection.receipt import Batch, Loss, Meter, Receipt


class ReDo(NeuronRemedy):
    """Recycle neurons whose activity is at most tau of their layer's mean (Sokar et al., 2023).

    s_i = mean|h_i| / mean over the layer of mean|h_k|, measured on the `batches` of the call, or on what `observe`
    has seen since the last call. Dormant are s_i ≤ tau; a layer that is wholly silent is wholly dormant. Their
    incoming weights are drawn again, biases and outgoing weights become zero. Apply it every `period` steps (1,000
    in the paper, tau = 0.025).

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> _ = nn.init.zeros_(model[0].weight), model[0].bias.data.copy_(torch.tensor([-1.0, 1.0, 1.0]))
    >>> receipt = ReDo(tau=0)(model, batches=[torch.randn(5, 2)])
    >>> receipt.totals()["counts"], model[2].weight[0, 0].item()
    ({'neurons': 1, 'rows': 1, 'columns': 1}, 0.0)
    """

    name = "redo"

    def __init__(
        self,
        tau: float = 0.025,
        *,
        period: int = 1000,
        targets: str | Sequence[str] = "auto",
        consumers: Mapping[str, str | Sequence[str]] | None = None,
        second_moment: Literal["mean", "zero"] = "mean",
        fresh: Callable[[], nn.Module] | None = None,
        seed: int = 0,
    ) -> None:
        if tau < 0:
            raise ValueError(f"tau={tau} must not be negative")
        super().__init__(targets=targets, consumers=consumers, second_moment=second_moment, fresh=fresh, seed=seed)
        self.tau, self.period = tau, period
        self._sums: dict[str, Tensor] = {}
        self._seen: dict[str, int] = {}

    def record(self, group: Group, activity: Tensor) -> None:
        """Add up |h| of each neuron."""
        total = sizes(activity)
        name = group.name
        self._sums[name] = self._sums[name] + total if name in self._sums else total
        self._seen[name] = self._seen.get(name, 0) + activity.numel() // group.width

    def scores(self, model: nn.Module) -> dict[str, Tensor]:
        """The dormancy score of every neuron recorded so far, by layer."""
        found = {}
        for group in self.wiring(model):
            if group.name not in self._sums:
                raise ValueError(
                    f"no activity of {group.name!r} was recorded: give batches=, or train inside observe(model)"
                )
            mean = self._sums[group.name] / self._seen[group.name]
            found[group.name] = (mean / mean.mean()).nan_to_num(0.0)
        return found

    def __call__(
        self,
        model: nn.Module,
        optimizer: Any = None,
        *,
        batches: Iterable[Batch] | None = None,
        loss: Loss | None = None,
        generator: torch.Generator | None = None,
    ) -> Receipt:
        """Replace the dormant neurons and forget what was recorded."""
        meter = Meter()
        if batches is not None:
            self.forget()
            self.look(model, batches)
        dormant = {name: (score <= self.tau).nonzero().flatten() for name, score in self.scores(model).items()}
        receipt = Replacement(model, self.wiring(model), dormant, fresh=self._fresh).apply(
            self.name,
            optimizer,
            self.draws(generator),
            second_moment=self.second_moment,
            settings=self.settings(),
            meter=meter,
        )
        self.forget()
        return receipt

    def forget(self) -> None:
        """Start counting anew."""
        self._sums.clear()
        self._seen.clear()

    def gathered(self) -> dict[str, Any]:
        """Sums and counts since the last call."""
        return {"sums": dict(self._sums), "seen": dict(self._seen)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take them back."""
        self._sums, self._seen = dict(state["sums"]), dict(state["seen"])
