"""Changing parameters or matrices: check everything, write in place, reset optimizer state, and report it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from rekindle.blocks import names, parametrized
from rekindle.blocks.finding import Block
from rekindle.engine.devices import to_float64
from rekindle.engine.isometry import polar
from rekindle.isolation import same_values
from rekindle.measures.matrices import scale_free_deviation
from rekindle.methods.call import Call
from rekindle.methods.selection import chosen_weights
from rekindle.optimizers import StateReset
from rekindle.optimizers import resetting as optimizers
from rekindle.projection.receipt import BlockRecord, Receipt
from rekindle.projection.scales import Scale
from rekindle.projection.stores import LiveWeight
from rekindle.projection.targets import Targets

# New matrices (count, out, in) from the old ones; the name and block tell which they are.
Change = Callable[[str, Block, Tensor], Tensor]


def overwrite(
    method: str,
    call: Call,
    new: Mapping[str, Tensor],
    *,
    policy: str = "fresh",
    counts: Mapping[str, Mapping[str, int]] | None = None,
    skipped: Mapping[str, str] | None = None,
) -> Receipt:
    """Write new values (by clean name) into parameters and buffers, after checking all of them."""
    new = call.first(new)
    own = {**dict(names.named_buffers(call.model)), **dict(names.named_parameters(call.model))}
    _check_values(new, own)
    tensors = {name: own[name] for name in new}
    parameters = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, Parameter)}
    optimizers.check(call.optimizer, parameters, policy)
    records = [_record(name, p, new[name], (counts or {}).get(name, {})) for name, p in parameters.items()]
    with torch.no_grad():
        for name, tensor in tensors.items():
            if not same_values(tensor, new[name].to(tensor)):
                tensor.copy_(new[name])
    buffers = len(tensors) - len(parameters)
    return Receipt(
        method,
        tuple(records),
        {**_others(call.model, new), **(skipped or {})},
        optimizer=reset_state(call, parameters, policy),
        gradients_cleared=clear_gradients(parameters.values()),
        notes=(f"{buffers} buffers restored",) if buffers else (),
    )


def rewrite(method: str, call: Call, change: Change, *, targets: Targets = "auto", policy: str = "fresh") -> Receipt:
    """Replace the targeted matrices by what `change` makes of them; all of it is computed before the first write."""
    picked, skipped = chosen_weights(call.model, targets)
    parameters = {n: p for each in picked for n, p in each.parameters().items()}
    optimizers.check(call.optimizer, parameters, policy)
    new: list[tuple[LiveWeight, Block, Tensor, Tensor]] = []
    for each in picked:
        whole = each.read()
        if not bool(torch.isfinite(whole).all()):
            raise ValueError(f"{each.name!r} holds NaN or Inf; nothing was changed")
        trial = whole.clone()
        for block in each.blocks:
            old = block.read(whole).detach()
            old = old.to(torch.promote_types(old.dtype, torch.float32), copy=True)
            value = change(each.name, block, old)
            block.write(trial, value)
            new.append((each, block, old, value))
        refusal = parametrized.trial(each.owner, each.tensor, trial)
        if refusal is not None:
            raise ValueError(f"{each.name!r} is {refusal}; leave it out with targets=")
    records = []
    for each, block, old, value in new:
        records.append(_matrix_record(each.name, block, old, value))
        each.write(block, value)
    return Receipt(
        method,
        tuple(records),
        skipped,
        optimizer=reset_state(call, parameters, policy),
        gradients_cleared=clear_gradients(parameters.values()),
    )


def reset_state(call: Call, parameters: Mapping[str, Parameter], policy: str) -> StateReset:
    """Reset the optimizer's state of changed parameters, where there is an optimizer."""
    if call.optimizer is None:
        return StateReset("none")
    return optimizers.reset(call.optimizer, parameters, policy=policy)


def isometry_scale(scale: Scale, block: Block, matrices: Tensor) -> Tensor:
    """The scale that FIRE would give each of these matrices, (count, 1, 1)."""
    norm = torch.linalg.matrix_norm(matrices)
    nuclear = norm
    if scale.rule == "nearest":
        nuclear = (polar(matrices) * matrices).sum((-2, -1))
    return scale.values(block, norm=norm, nuclear=nuclear).to(matrices)[:, None, None]


def clear_gradients(parameters: Iterable[Parameter]) -> int:
    """Drop gradients that belong to weights that are gone; how many there were."""
    stale = [parameter for parameter in parameters if parameter.grad is not None]
    for parameter in stale:
        parameter.grad = None
    return len(stale)


def _check_values(new: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
    """Raise unless every new value fits its tensor and is finite."""
    for name, value in new.items():
        if name not in own:
            raise ValueError(f"the model has no parameter or buffer {name!r}; nothing was changed")
        if value.shape != own[name].shape:
            raise ValueError(f"{name!r}: the new value has shape {tuple(value.shape)}, not {tuple(own[name].shape)}")
        if not bool(torch.isfinite(value).all()):
            raise ValueError(f"{name!r} would become NaN or Inf; nothing was changed")


def _others(model: nn.Module, changed: Collection[str]) -> dict[str, str]:
    """Every other parameter, with the one reason that it was not among the targets."""
    return {name: "not among the targets" for name, _ in names.named_parameters(model) if name not in changed}


def _record(name: str, old: Tensor, new: Tensor, counts: Mapping[str, int]) -> BlockRecord:
    before, after = to_float64(old.detach()), to_float64(new.detach())
    norm, error = before.norm(), (before - after).square().sum()
    return BlockRecord(
        name,
        out=old.shape[0] if old.ndim > 1 else 0,
        in_=old[0].numel() if old.ndim > 1 else 0,
        sfe=float(error),
        sfe_relative=float(error / norm.square()) if norm > 0 else None,
        norm_before=float(norm),
        norm_after=float(after.norm()),
        counts=counts,
    )


def _matrix_record(name: str, block: Block, old: Tensor, new: Tensor) -> BlockRecord:
    error, energy = (old - new).square().sum().item(), old.square().sum().item()
    return BlockRecord(
        name,
        block.role,
        block.part,
        block.count,
        block.out,
        block.in_,
        dfi_free_before=_sum(scale_free_deviation(old)),
        dfi_free_after=_sum(scale_free_deviation(new)),
        sfe=error,
        sfe_relative=error / energy if energy else None,
        norm_before=energy**0.5,
        norm_after=new.norm().item(),
    )


def _sum(values: Tensor) -> float | None:
    known = values[~values.isnan()]
    return float(known.sum()) if known.numel() else None
