"""FIRE on LoRA layers: on the weight that the layer computes with, W = W₀ + s·B·A, re-split afterwards.

`rekindle.fire(model, targets="adapter")` projects A and B each as a matrix of its own (a B that is still zero is
skipped: the adapter is inactive on purpose). But neither is what the layer multiplies with. `MergedAdapter` projects
W to W* and puts the result back in one of two ways:

- `into="adapter"`: the frozen W₀ stays, and s·B·A becomes the best rank-r approximation of W* − W₀ (Eckart & Young).
  An isometry needs a change of full rank, so an adapter of rank r holds only a share of it; the receipt says which.
- `into="base"`: W₀ becomes W*, B becomes zero and A is drawn anew, as after a merge-and-restart (ReLoRA). The layer
  then computes with W* exactly. The adapter alone is no longer enough: save the base too. Trainers that save only
  adapters still resume correctly, because the changed bases are part of the method's state.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from rekindle.blocks.names import named_modules
from rekindle.engine.devices import to_float64
from rekindle.isolation import forked_rng, undone
from rekindle.measures.matrices import scale_free_deviation
from rekindle.methods.call import Call
from rekindle.methods.remedy import Remedy
from rekindle.optimizers import resetting as optimizers
from rekindle.projection.execution import check_options
from rekindle.projection.firing import fire
from rekindle.projection.keywords import Planning
from rekindle.projection.planning import draft
from rekindle.projection.receipt import BlockRecord, Receipt
from rekindle.projection.snapshots import snapshot_of
from rekindle.projection.targets import terms
from rekindle.projection.transaction import Transaction


@dataclass(frozen=True)
class LoRALayer:
    """One Linear (or GPT-2 Conv1D) with one active adapter."""

    name: str
    adapter: str
    base: nn.Parameter
    a: nn.Parameter  # (rank, in)
    b: nn.Parameter  # (out, rank)
    factor: float
    transposed: bool  # the base holds (in, out)

    def delta(self) -> Tensor:
        """s·B·A as the base weight lies, at least in float32."""
        dtype = torch.promote_types(self.a.dtype, torch.float32)
        product = self.factor * (self.b.detach().to(dtype) @ self.a.detach().to(dtype))
        return product.mT if self.transposed else product


class MergedAdapter(Remedy):
    """FIRE on the merged weights of LoRA layers; options are those of `rekindle.fire`.

    >>> MergedAdapter(scale="nearest")
    MergedAdapter(scale='nearest')
    """

    name = "fire-merged"

    def __init__(
        self,
        *,
        into: Literal["adapter", "base"] = "adapter",
        optimizer_state: str = "fresh",
        seed: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(seed=seed)
        if into not in ("adapter", "base"):
            raise ValueError(f"into={into!r} is neither 'adapter' nor 'base'")
        self.into, self.optimizer_state = into, optimizer_state
        self._options = options
        self._changed: dict[str, weakref.ref[nn.Parameter]] = {}  # bases that hold W*
        self._stored: dict[str, Tensor] = {}  # those of a state that was loaded

    def settings(self) -> dict[str, Any]:
        """The way back, and the options of `fire`."""
        return {"into": self.into, "optimizer_state": self.optimizer_state, **self._options}

    def gathered(self) -> dict[str, Any]:
        """The bases that were changed, as they are now: a guard may have put them back."""
        held = {name: found.detach().clone() for name, ref in self._changed.items() if (found := ref()) is not None}
        return {"bases": {**self._stored, **held}}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take them back; `resume` writes them."""
        self._stored, self._changed = dict(state["bases"]), {}

    @torch.no_grad()
    def resume(self, model: nn.Module) -> None:
        """Write the changed bases into a model whose checkpoint holds adapters only; a trained base is in it."""
        bases = {f"{layer.name}.base_layer.weight": layer.base for layer in lora_layers(model)}
        for name in self._stored:
            if name not in bases or bases[name].shape != self._stored[name].shape:
                raise ValueError(f"the state holds the base weight {name!r}, which is in no LoRA layer of this model")
        for name, value in self._stored.items():
            if not bases[name].requires_grad:
                bases[name].copy_(value)
            self._changed[name] = weakref.ref(bases[name])
        self._stored = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_changed": {}}  # references cannot be copied

    def apply(self, call: Call) -> Receipt:
        """Merge, project, split again, start the adapter's optimizer slots afresh."""
        skipped: dict[str, str] = {}
        layers = {f"{layer.name}.base_layer.weight": layer for layer in lora_layers(call.inner, skipped)}
        if not layers:
            why = "; ".join(f"{name}: {reason}" for name, reason in skipped.items())
            raise ValueError(f"the model has no LoRA layer whose merged weight could be projected. {why}")
        check_options(self._options.get("strength", 1.0), self._options.get("measure", "cheap"))
        optimizers.check(call.optimizer, _adapters(layers.values()), self.optimizer_state)
        tensors = [tensor for layer in layers.values() for tensor in (layer.base, layer.a, layer.b)]
        with Transaction(self.name, [call.inner], call.optimizer, restore=snapshot_of(tensors, call.optimizer)):
            return self._applied(call, layers, skipped)

    def _applied(self, call: Call, layers: dict[str, LoRALayer], skipped: dict[str, str]) -> Receipt:
        before = {name: layer.base.detach().clone() for name, layer in layers.items()}
        with torch.no_grad():
            for layer in layers.values():
                layer.base.add_(layer.delta().to(layer.base))
        merged = {name: layer.base.detach().clone() for name, layer in layers.items()}
        planning = {key: value for key, value in self._options.items() if key in Planning.__annotations__}
        planning["exclude"] = [lambda found: found.name not in layers, *terms(planning.get("exclude", ()))]
        rest = {key: value for key, value in self._options.items() if key not in planning}
        with _unfrozen(layers.values()):
            done = fire(call.inner, plan=draft(call.inner, **planning), **rest)
        changed = [name for name in layers if name in done.changed]
        for name in layers.keys() - set(changed):
            with torch.no_grad():
                layers[name].base.copy_(before[name])
        records = []
        for name in changed:
            records += self._split(call, name, layers[name], before[name], merged[name])
        slots = _adapters(layers[name] for name in changed)
        state = optimizers.reset(call.optimizer, slots, policy=self.optimizer_state) if call.optimizer else None
        cleared = 0
        for parameter in slots.values():
            cleared += parameter.grad is not None
            parameter.grad = None
        left = {n: r for n, r in done.skipped.items() if n in layers}
        return Receipt(self.name, tuple(records), {**skipped, **left}, optimizer=state, gradients_cleared=cleared)

    @torch.no_grad()
    def _split(self, call: Call, name: str, layer: LoRALayer, base: Tensor, merged: Tensor) -> list[BlockRecord]:
        """The base holds W*: leave it there, or give it its old value and the adapter the difference."""
        goal = layer.base.detach().clone()
        norms = layer.a.norm().item(), layer.b.norm().item()
        held = 1.0
        if self.into == "base":
            self._changed[name] = weakref.ref(layer.base)
            with forked_rng(call.generator, call.inner):
                nn.init.kaiming_uniform_(layer.a, a=math.sqrt(5))  # as peft starts it
            layer.b.zero_()
        else:
            layer.base.copy_(base)
            wanted = (to_float64(goal) - to_float64(base)) / layer.factor
            u, sigma, vh = torch.linalg.svd(wanted.mT if layer.transposed else wanted, full_matrices=False)
            rank = layer.a.shape[0]
            root = sigma[:rank].sqrt()
            layer.b.zero_()
            layer.a.zero_()
            layer.b[:, : root.numel()] = (u[:, :rank] * root).to(layer.b)
            layer.a[: root.numel()] = (root[:, None] * vh[:rank]).to(layer.a)
            held = float(sigma[:rank].square().sum() / sigma.square().sum().clamp_min(1e-300))
        now = layer.base.detach() + layer.delta().to(layer.base)
        values: dict[str, Any] = {
            "held": held,
            "dfi_free_before": float(scale_free_deviation(merged.float())),
            "dfi_free_after": float(scale_free_deviation(now.float())),
        }
        moved = float((now - merged).norm() / merged.norm().clamp_min(1e-30))
        pairs = [(f"{layer.name}.lora_A.{layer.adapter}.weight", layer.a, norms[0])]
        pairs.append((f"{layer.name}.lora_B.{layer.adapter}.weight", layer.b, norms[1]))
        if self.into == "base":
            pairs.append((name, layer.base, float(base.norm())))
        return [
            BlockRecord(key, "adapter", out=p.shape[0], in_=p.shape[1], norm_before=size, norm_after=p.norm().item(),
                        sfe_relative=moved**2 if number == 0 else None, values=values if number == 0 else {})
            for number, (key, p, size) in enumerate(pairs)
        ]  # fmt: skip


def lora_layers(model: nn.Module, skipped: dict[str, str] | None = None) -> Iterator[LoRALayer]:
    """The LoRA layers of peft in a model; those that cannot be merged go to `skipped` with the reason."""
    skipped = {} if skipped is None else skipped
    for name, module in named_modules(model):
        if not (hasattr(module, "lora_A") and hasattr(module, "lora_B") and hasattr(module, "base_layer")):
            continue
        lora: Any = module
        active = [adapter for adapter in lora.active_adapters if adapter in lora.lora_A]
        base: object = getattr(lora.base_layer, "weight", None)
        if lora.merged:
            skipped[name] = "its adapter is merged: call unmerge_adapter() first"
        elif len(active) != 1:
            skipped[name] = f"{len(active)} adapters are active: how to split the difference is not defined"
        elif lora.use_dora.get(active[0]) or getattr(lora, "lora_variant", {}).get(active[0]) is not None:
            skipped[name] = "a variant of LoRA (DoRA, …) computes with more than W₀ + s·B·A"
        elif not isinstance(base, Tensor) or base.ndim != 2 or not base.is_floating_point():
            kind = type(lora.base_layer).__name__
            skipped[name] = f"its base weight is not a plain floating-point matrix ({kind})"
        else:
            a, b = lora.lora_A[active[0]].weight, lora.lora_B[active[0]].weight
            turned = bool(getattr(lora, "fan_in_fan_out", False))
            yield LoRALayer(name, active[0], lora.base_layer.weight, a, b, float(lora.scaling[active[0]]), turned)


@contextmanager
def _unfrozen(layers: Iterable[LoRALayer]) -> Iterator[None]:
    """The plan sees the base weights as trainable inside."""
    with undone() as stack:
        for layer in layers:
            stack.callback(layer.base.requires_grad_, layer.base.requires_grad)
            layer.base.requires_grad_(True)
        yield


def _adapters(layers: Iterable[LoRALayer]) -> dict[str, nn.Parameter]:
    return {f"{layer.name}.lora_{side}": p for layer in layers for side, p in (("A", layer.a), ("B", layer.b))}
