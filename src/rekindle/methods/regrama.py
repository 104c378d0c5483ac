"""ReGraMa: reset the neurons that no longer get gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from rekindle.consumers.graph import Layer
from rekindle.consumers.wiring import Group
from rekindle.isolation import isolated
from rekindle.methods.neurons import Handle, NeuronRemedy, Observation, Replacement, sizes
from rekindle.projection.receipt import Batch, Loss, Meter, Receipt


class ReGraMa(NeuronRemedy):
    """Resets guided by GraMa, the gradient magnitude of a neuron (Liu et al., 2025).

    g_i = mean over the incoming weights of |∂L/∂w_ij|, divided by the layer's mean; inactive are g_i ≤ tau. Unlike
    an activity score this sees saturated units, and needs no ReLU. Gradients are those of the `batches` and `loss`
    of the call, or what `observe` has seen at every backward pass since the last call. The reset is ReDo's. A
    neuron made by two layers (a gate) is inactive only if both its rows are. (The authors' code also scores the
    entries of normalisation layers by their own gradients; here an entry is renewed with its neuron.)

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> _ = model[0].bias.data.copy_(torch.tensor([-100.0, 1.0, 1.0]))
    >>> receipt = ReGraMa()(model, batches=[torch.rand(8, 2)], loss=lambda m, x: m(x).square().mean())
    >>> receipt.totals()["counts"]["neurons"]
    1
    """

    name = "regrama"

    def __init__(
        self,
        tau: float = 0.01,
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

    def observe(self, model: nn.Module, batches: Iterable[Batch] | None = None) -> Observation:
        """Record the gradients of every backward pass until the result is removed."""

        def hook(maker: Layer) -> Handle:
            def note(weight: Tensor) -> None:
                assert weight.grad is not None
                self._add(maker, weight.grad)

            handle: Handle = maker.weight.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]
            return handle

        return Observation([hook(maker) for group in self.wiring(model, batches) for maker in group.makers])

    def scores(self, model: nn.Module) -> dict[str, Tensor]:
        """GraMa of every neuron recorded so far, by layer."""
        return {group.name: self._score(group) for group in self.wiring(model)}

    def __call__(
        self,
        model: nn.Module,
        optimizer: Any = None,
        *,
        batches: Iterable[Batch] | None = None,
        loss: Loss | None = None,
        generator: torch.Generator | None = None,
    ) -> Receipt:
        """Replace the inactive neurons and forget what was recorded."""
        meter = Meter()
        wiring = self.wiring(model, batches)
        if batches is not None:
            if loss is None:
                raise ValueError("ReGraMa needs loss= beside batches=: it looks at gradients")
            self._sums.clear()
            self._look(model, batches, loss)
        inactive = {name: (score <= self.tau).nonzero().flatten() for name, score in self.scores(model).items()}
        receipt = Replacement(model, wiring, inactive, fresh=self._fresh).apply(
            self.name,
            optimizer,
            self.draws(generator),
            second_moment=self.second_moment,
            settings=self.settings(),
            meter=meter,
        )
        self._sums.clear()
        return receipt

    def _look(self, model: nn.Module, batches: Iterable[Batch], loss: Loss) -> None:
        makers = [maker for group in self.wiring(model) for maker in group.makers]
        with isolated(model), torch.enable_grad():
            for batch in batches:
                gradients = torch.autograd.grad(
                    loss(model, batch), [maker.weight for maker in makers], allow_unused=True
                )
                for maker, gradient in zip(makers, gradients, strict=True):
                    if gradient is not None:
                        self._add(maker, gradient)

    def _add(self, maker: Layer, gradient: Tensor) -> None:
        total = sizes(gradient.detach(), maker.out_axis)
        self._sums[maker.name] = self._sums[maker.name] + total if maker.name in self._sums else total

    def _score(self, group: Group) -> Tensor:
        scores = []
        for maker in group.makers:
            if maker.name not in self._sums:
                raise ValueError(
                    f"no gradient of {maker.name!r} was recorded: give batches= and loss=, or train inside observe()"
                )
            total = self._sums[maker.name]
            scores.append((total / total.mean()).nan_to_num(0.0))
        return torch.stack(scores).amax(0)

    def gathered(self) -> dict[str, Any]:
        """The sums since the last call."""
        return {"sums": dict(self._sums)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take them back."""
        self._sums = dict(state["sums"])
