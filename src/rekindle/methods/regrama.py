"""ReGraMa: reset the neurons that no longer get gradients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Unpack

import torch
from torch import Tensor, nn

from rekindle.blocks.layers import Layer
from rekindle.isolation import isolated
from rekindle.methods.call import Call
from rekindle.methods.neurons import Handle, NeuronOptions
from rekindle.methods.redo import ReDo
from rekindle.methods.replacement import check_finite
from rekindle.methods.statistics import Sums, sizes
from rekindle.recording.wiring import Wiring


class ReGraMa(ReDo):
    """Resets guided by GraMa, the gradient magnitude of a neuron (Liu et al., 2025).

    g_i = mean over the incoming weights of |∂L/∂w_ij|, divided by the layer's mean; inactive are g_i ≤ tau. Unlike
    an activity score this sees saturated units, and needs no ReLU. Gradients are those of the `batches` and `loss`
    of the call, or what `observe` has seen since the last call, at one in `sample` backward passes. The
    reset and the `period` are ReDo's. A neuron made by two layers (a gate) is inactive only if both its rows are. (The
    authors' code also scores
    the entries of normalization layers by their own gradients; here an entry is renewed with its neuron.)

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> _ = model[0].bias.data.copy_(torch.tensor([-100.0, 1.0, 1.0]))
    >>> receipt = ReGraMa()(model, batches=[torch.rand(8, 2)], loss=lambda m, x: m(x).square().mean())
    >>> receipt.totals()["counts"]["neurons"]
    1

    Args:
        tau: the gradient score at or below which a neuron is inactive.
        period: steps between two applications, for a `Schedule` without a trigger.
        sample: one in so many backward passes is measured.
        options: `targets`, `consumers`, `second_moment`, `fresh` and `seed`, as in
            `rekindle.methods.neurons.NeuronRemedy`.
    """

    name = "regrama"

    def __init__(
        self, tau: float = 0.01, *, period: int = 1000, sample: int = 7, **options: Unpack[NeuronOptions]
    ) -> None:
        super().__init__(tau, period=period, sample=sample, **options)

    def watchers(self, model: nn.Module, wiring: Wiring) -> Iterator[Handle]:
        """Record the gradients of every backward pass."""
        for maker in (maker for group in wiring for maker in group.makers):

            def note(weight: Tensor, maker: Layer = maker) -> None:
                number = self._passes[maker.name] = self._passes.get(maker.name, -1) + 1
                if number % self.sample == 0:
                    assert weight.grad is not None
                    self._add(maker, weight.grad)

            yield maker.weight.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]

    def measure(self, call: Call) -> None:
        """Take the gradients of the call's batches, where there are some."""
        if call.batches is None:
            return
        if call.loss is None:
            raise ValueError("ReGraMa needs loss= beside batches=: it looks at gradients")
        self.forget()
        makers = [maker for group in self.wiring(call.model, call.batches) for maker in group.makers]
        weights = [maker.weight for maker in makers]
        with isolated(call.inner), torch.enable_grad():
            for batch in call.batches:
                gradients = torch.autograd.grad(call.loss(call.inner, batch), weights, allow_unused=True)
                for maker, gradient in zip(makers, gradients, strict=True):
                    if gradient is not None:
                        self._add(maker, gradient)

    def _shapes(self, wiring: Wiring) -> dict[str, tuple[int, ...]]:
        return {maker.name: (maker.out_size,) for group in wiring for maker in group.makers}

    def _add(self, maker: Layer, gradient: Tensor) -> None:
        self._sums.add(maker.name, sizes(gradient.detach(), maker.out_axis))

    def _scores(self, wiring: Wiring, sums: Sums) -> dict[str, Tensor]:
        makers = {f"{maker.name}.weight": maker for group in wiring for maker in group.makers}
        if not all(sums.seen.get(maker.name, 1) for maker in makers.values()):
            check_finite({name: maker.weight for name, maker in makers.items()})
        return {group.name: torch.stack([_score(m, sums) for m in group.makers]).amax(0) for group in wiring}


def _score(maker: Layer, sums: Sums) -> Tensor:
    if maker.name not in sums.values:
        raise ValueError(
            f"no gradient of {maker.name!r} was recorded: give batches= and loss=, or train inside observe()"
        )
    if not sums.seen[maker.name]:
        raise ValueError(f"every recorded gradient of {maker.name!r} holds NaN or Inf; nothing was changed")
    total = sums.values[maker.name]
    return (total / total.mean()).nan_to_num(0.0)
