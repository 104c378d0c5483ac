"""What a network's units do on data: dormancy, saturation, linearity, usage, feature rank, gradients.

Everything is measured after the activation, per unit over all rows (samples × positions, padding left out).
A unit's *score* is its mean |a| over the layer's mean (ReDo, Sokar et al. 2023); it is *dormant* at τ where
the score ≤ τ, *dead* where it is 0 on every row. What could not be measured is listed in `unmeasured`, never as 0.

>>> import torch
>>> net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU())
>>> _ = net[0].weight.data.fill_(1.0); _ = net[0].bias.data.copy_(torch.tensor([0.0, 0.0, -100.0]))
>>> layer = activity(net, [torch.rand(8, 2)]).layers[0]
>>> layer.name, layer.dead, round(layer.dormant(0.025), 3)
('1', 1, 0.333)
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from rekindle.blocks.names import cleaner, is_sharded
from rekindle.diagnosis.hooks import Activated, Attended, HeadEntropy, Watch, entropy, entropy_share
from rekindle.diagnosis.units import UnitActivity, UnitSums, rows_of
from rekindle.diagnosis.usage import Usage
from rekindle.engine.devices import full_precision
from rekindle.isolation import Batch, Loss, call, check_batches, explained, isolated, padding_mask
from rekindle.measures.matrices import Mode
from rekindle.sharding.norms import norms

__all__ = ["Activity", "Unmeasured", "activity"]

_SHARDED = "sharded (FSDP2): a Monitor sees the gradients of training steps"


@dataclass(frozen=True)
class Unmeasured:
    """One thing that was not measured, and why. Everything is either in the results or listed here."""

    name: str
    what: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name or '(model)'}: {self.what} not measured, {self.reason}"


@dataclass(frozen=True)
class Activity:
    """What the units of a model did on some batches.

    `gradient_norms` is ‖∂L/∂w‖ of the mean loss per parameter, and `loss` that mean; both only with a loss.

    >>> activity(torch.nn.ReLU(), [torch.ones(4, 3)]).layers[0].usage
    1.0
    """

    layers: tuple[UnitActivity, ...]
    attention: tuple[HeadEntropy, ...] = ()
    gradient_norms: dict[str, float] = field(default_factory=dict)
    loss: float | None = None
    batches: int = 0
    unmeasured: tuple[Unmeasured, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and lists; per-unit scores stay out.

        >>> activity(torch.nn.ReLU(), [torch.ones(4, 3)]).to_dict()["batches"]
        1
        """
        return {
            "batches": self.batches,
            "loss": self.loss,
            "layers": [layer.to_dict() for layer in self.layers],
            "attention": [each.to_dict() for each in self.attention],
            "gradient_norms": dict(self.gradient_norms),
            "unmeasured": [{"name": u.name, "what": u.what, "reason": u.reason} for u in self.unmeasured],
        }


def activity(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    loss: Loss | None = None,
    mode: Mode = "full",
    attention: bool = True,
    max_batches: int | None = None,
    rows: int | None = None,
    usage: Usage | None = None,
) -> Activity:
    """Run `model` on `batches` in evaluation mode and measure what its units did.

    With a `loss(model, batch)` gradients are measured too; `.grad` is not touched. Cheap mode leaves out
    linearized and constant units. Feature ranks use the first `rows` rows: 512, or 64 in cheap mode; a rank from
    more rows is higher, so compare only ranks with the same `rank_limit`. With rows=0 no rank is measured. `usage`
    counts experts, codes and latents in the same passes.

    >>> net = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    >>> found = activity(net, [torch.ones(8, 2)], loss=lambda model, x: model(x).square().mean())
    >>> sorted(found.gradient_norms)
    ['0.bias', '0.weight', '2.bias', '2.weight']
    """
    check_batches(batches)
    observer = _Observer(mode, (512 if mode == "full" else 64) if rows is None else rows)
    gradients = _Gradients(model) if loss is not None else None
    watch = Watch(model, observer.activated, observer.attended if attention else None)
    count = 0
    counting = nullcontext() if usage is None else usage.watching()
    with isolated(model), torch.enable_grad() if loss is not None else torch.no_grad(), watch, counting:
        for batch in islice(batches, max_batches):
            observer.begin(padding_mask(batch))
            if usage is not None:
                usage.mask = observer.mask
            if loss is None or gradients is None:
                call(model, batch)
            else:
                with explained(model, batch):
                    value = loss(model, batch)
                watch.paused = True
                gradients.add(value)
                watch.paused = False
            observer.end()
            count += 1
    if not count:
        raise ValueError("batches is empty: give at least one batch, or leave batches out to measure weights only")
    layers, unmeasured = observer.result()
    unmeasured += _unseen(model, watch, observer)
    if gradients is not None:
        unmeasured += gradients.unmeasured()
        unmeasured += [
            Unmeasured(layer.name, "gradient dormancy", "no gradient reached its output")
            for layer in layers
            if layer.gradient_scores is None
        ]
    return Activity(
        tuple(layers),
        tuple(observer.head_entropies()),
        gradients.norms() if gradients else {},
        gradients.loss() if gradients else None,
        count,
        tuple(unmeasured),
    )


class _Observer:
    """Turns events into sums: first per call, because gradients and replaced events come later, then over all calls."""

    def __init__(self, mode: Mode, rows: int) -> None:
        self.mode, self.rows = mode, rows
        self.sums: dict[str, UnitSums] = {}
        self.heads: dict[str, list[tuple[Tensor, Tensor]]] = {}
        self.refused: dict[str, Unmeasured] = {}
        self.mask: Tensor | None = None
        self._pass: dict[str, list[UnitSums]] = {}

    def begin(self, mask: Tensor | None) -> None:
        self.mask = mask
        self._pass = {}

    def activated(self, event: Activated) -> None:
        values = rows_of(event.out, event.unit_dim, self.mask)
        if values is None:
            self.refused[event.site] = Unmeasured(event.site, "units", f"its output has shape {tuple(event.out.shape)}")
            return
        if not len(values):
            return
        pre = None if event.pre is None else rows_of(event.pre, event.unit_dim, self.mask)
        pre = pre if pre is not None and pre.shape == values.shape else None
        sums = UnitSums.of(event, values, pre, full=self.mode == "full", keep=self.rows)
        calls = self._pass.setdefault(event.site, [])
        if event.replaces and calls:
            calls.pop()
        calls.append(sums)
        if event.out.requires_grad:
            mask = self.mask

            def backward(gradient: Tensor) -> None:
                found = rows_of(gradient, event.unit_dim, mask)
                if found is not None:
                    sums.add_gradient(found)

            event.out.register_hook(backward)  # type: ignore[no-untyped-call]

    @full_precision()
    def attended(self, event: Attended) -> None:
        weights = event.weights()
        rows = None
        if self.mask is not None and self.mask.shape[-1] == weights.shape[-2] and len(self.mask) >= len(weights):
            rows = self.mask[: len(weights)].to(weights.device)
        self.heads.setdefault(event.site, []).append((entropy(weights, rows), entropy_share(weights, rows)))

    def end(self) -> None:
        for site, sums in ((site, sums) for site, calls in self._pass.items() for sums in calls):
            known = self.sums.get(site)
            if known is None:
                self.sums[site] = sums
            elif known.units != sums.units:
                reason = f"its width changes from batch to batch ({known.units}, then {sums.units})"
                self.refused[site] = Unmeasured(site, "units", reason)
            else:
                known.add(sums, self.rows)
        self._pass = {}

    @full_precision()
    def result(self) -> tuple[list[UnitActivity], list[Unmeasured]]:
        layers = [sums.result(site) for site, sums in self.sums.items() if site not in self.refused]
        return layers, list(self.refused.values())

    def head_entropies(self) -> Iterable[HeadEntropy]:
        for site, pairs in self.heads.items():
            if len({len(nats) for nats, _ in pairs}) == 1:
                nats, shares = zip(*pairs, strict=True)
                yield HeadEntropy(site, torch.stack(nats).mean(0).cpu(), torch.stack(shares).nanmean(0).cpu())


class _Gradients:
    """The gradient of the mean loss, gathered without touching `.grad`."""

    def __init__(self, model: nn.Module) -> None:
        clean = cleaner(model)
        self.named = {clean(name): p for name, p in model.named_parameters() if p.requires_grad}
        self.frozen = [clean(name) for name, p in model.named_parameters() if not p.requires_grad]
        self.sums: dict[str, Tensor] = {}
        self.total, self.count = 0.0, 0

    def add(self, value: Tensor) -> None:
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise TypeError(f"loss(model, batch) must return a scalar tensor, got {_describe(value)}")
        self.total += float(value.detach())
        self.count += 1
        if not value.requires_grad:
            return
        found = torch.autograd.grad(value.reshape(()), list(self.named.values()), allow_unused=True)
        for name, gradient in zip(self.named, found, strict=True):
            if gradient is not None:
                dense = gradient.to_dense() if gradient.is_sparse else gradient
                self.sums[name] = self.sums[name] + dense if name in self.sums else dense

    def norms(self) -> dict[str, float]:
        if any(is_sharded(total) for total in self.sums.values()):  # each norm is that of all shards
            lengths = norms([total.float() for total in self.sums.values()]).tolist()
            return {name: length / self.count for name, length in zip(self.sums, lengths, strict=True)}
        return {name: float(total.float().norm()) / self.count for name, total in self.sums.items()}

    def loss(self) -> float:
        return self.total / self.count

    def unmeasured(self) -> list[Unmeasured]:
        missing = [
            Unmeasured(name, "gradient", _SHARDED if is_sharded(self.named[name]) else "no gradient reaches it")
            for name in self.named
            if name not in self.sums
        ]
        return missing + [Unmeasured(name, "gradient", "it is frozen") for name in self.frozen]


def _unseen(model: nn.Module, watch: Watch, observer: _Observer) -> list[Unmeasured]:
    found = [Unmeasured(name, "activity", reason) for name, reason in watch.blind.items()]
    clean = cleaner(model)
    for raw, module in model.named_modules():
        name = clean(raw)
        if name in watch.blind or not any(p is not None and p.dim() > 1 for p in module._parameters.values()):
            continue
        # An embedding has no units; a MultiheadAttention uses its projection's weight without calling it.
        if isinstance(module, nn.Embedding | nn.EmbeddingBag | nn.modules.linear.NonDynamicallyQuantizableLinear):
            continue
        if name not in watch.ran:
            found.append(Unmeasured(name, "activity", "its forward did not run on these batches"))
        elif name not in watch.followed and not isinstance(module, nn.RNNBase | nn.RNNCellBase):
            found.append(Unmeasured(name, "units", "no activation was seen on its output"))
    return found


def _describe(value: object) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
