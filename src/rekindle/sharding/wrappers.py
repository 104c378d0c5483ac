"""What wraps a model in distributed training, and what has to happen before its parameters are read.

FSDP2 keeps some modules unsharded after a forward pass: what is written to them then is thrown away at the next
reshard, so `settle` reshards them first. Wrappers that hide their parameters are refused by name, with the way out.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn

from rekindle.blocks.names import is_sharded, sharded_parameters
from rekindle.sharding.spread import LayoutNotSupported, Spread
from rekindle.sharding.team import SOLO, Team


def settle(model: nn.Module) -> int:
    """Reshard every FSDP2 module, so that parameters are what the optimizer holds; returns how many there are.

    >>> settle(nn.Linear(2, 2))
    0
    """
    found = 0
    for module in model.modules():
        if _is(module, "FSDPModule"):
            module.reshard()  # type: ignore[operator]
            found += 1
    return found


def refuse_hidden(
    model: nn.Module, call: str = "rekindle.fire(model.module, optimizer)", *, writes: bool = True
) -> None:
    """Raise if a wrapper hides the parameters: FSDP1 outside of `summon_full_params`, DeepSpeed ZeRO.

    `call` is what to write inside of `summon_full_params` instead; what only reads may look at ZeRO 1 and 2.

    >>> refuse_hidden(nn.Linear(2, 2))
    """
    for name, module in model.named_modules():
        # Inside summon_full_params the root gives its parameters other names than they have: take the module in it.
        if _is(module, "FullyShardedDataParallel") and not (name and _summoned(module)):
            raise LayoutNotSupported(
                f"{name or 'the model'} is wrapped by FSDP1, which flattens its parameters. Use fully_shard (FSDP2), "
                f"or `with FullyShardedDataParallel.summon_full_params(model, writeback={writes}): {call}` "
                "with use_orig_params=True, on every rank"
            )
    for name, parameter in model.named_parameters():
        third = hasattr(parameter, "ds_id")
        if (third or hasattr(parameter, "_hp_mapping")) and (writes or (third and not parameter.numel())):
            inside = call.replace("model.module", "model").replace("optimizer", "whole")
            raise LayoutNotSupported(
                f"{name!r} is partitioned by DeepSpeed ZeRO. Use `with rekindle.sharding.gathered(model, "
                f"engine.optimizer) as whole: {inside}` on every rank, where the whole model fits into its memory "
                "(rekindle.fire does so by itself)"
            )


def spreads(model: nn.Module) -> dict[str, Spread]:
    """How every distributed parameter lies, by its name in `named_parameters()`; empty for an ordinary model.

    Under DistributedDataParallel and DeepSpeed every parameter is a copy on each rank of its process group.

    >>> spreads(nn.Linear(2, 2))
    {}
    """
    found = _sharded(model)
    named = dict(model.named_parameters(remove_duplicate=False))
    for path, module in model.named_modules():
        if _is(module, "DistributedDataParallel") or _is(module, "DeepSpeedEngine"):
            # An engine holds copies, or whole weights for a moment (`gathered`): partitions were refused before.
            ranks = _ranks(getattr(module, "process_group", None) or getattr(module, "data_parallel_group", None))
            prefix = f"{path}." if path else ""
            for name, parameter in named.items():
                if name.startswith(prefix) and name not in found and len(ranks) > 1 and parameter.numel():
                    found[name] = Spread.replicated(tuple(parameter.shape), ranks)
    return found


def refuse_shards(model: nn.Module, who: str, batches: bool) -> None:
    """Raise if the model has DTensor parameters: `who` works on whole parameters, or looks at batches too.

    >>> refuse_shards(nn.Linear(2, 2), "ReDo", True)
    """
    found = next((name for name, parameter in model.named_parameters() if is_sharded(parameter)), None)
    if found is None:
        return
    if batches:
        way = (
            "apply it to a plain copy of the model, loaded from get_model_state_dict(model, "
            "options=StateDictOptions(full_state_dict=True)) and put back with set_model_state_dict"
        )
    else:
        way = (
            f"use `with rekindle.sharding.gathered(model, optimizer): {who}(...)(model, optimizer)` on every rank, "
            "where the whole model fits into its memory"
        )
    raise LayoutNotSupported(f"{who} works on whole parameters and {found!r} is sharded (DTensor): {way}")


def distributed(model: nn.Module, *, copies: bool = True) -> tuple[Team, dict[str, Spread]]:
    """The processes that hold this model together, and how each distributed parameter lies, by its name.

    copies: also the parameters that DistributedDataParallel keeps equal; without them only DTensors count.

    >>> team, found = distributed(nn.Linear(2, 2))
    >>> team.size, found
    (1, {})
    """
    found = spreads(model) if copies else _sharded(model)
    if not found:
        return SOLO, {}
    first = dict(model.named_parameters(remove_duplicate=False))[next(iter(found))]
    return Team.of((rank for spread in found.values() for rank in spread.ranks), device_of(first)), found


def passes(model: nn.Module, team: Team) -> AbstractContextManager[None]:
    """Where a model runs on batches: what is raised inside by any process of its team is raised by all.

    Copies are alone in their forward passes. FSDP2 assembles weights before each of its modules. Tensor parallel alone
    talks in the middle of modules, where nobody can agree: there an error is that of its own process.

    >>> layer = nn.Linear(2, 2)
    >>> with passes(layer, SOLO):
    ...     _ = layer(layer.weight)
    """
    if not sharded_parameters(model):
        return team.together()
    exchanging = [module for module in model.modules() if _is(module, "FSDPModule")]
    return team.passes(exchanging) if exchanging else SOLO.together()


def _sharded(model: nn.Module) -> dict[str, Spread]:
    return {name: Spread.of(parameter, name) for name, parameter in sharded_parameters(model).items()}


def local(tensor: Tensor) -> Tensor:
    """This rank's own numbers of a tensor, sharing its memory; the tensor itself if it is not distributed.

    >>> local(nn.Linear(2, 2).weight).requires_grad
    False
    """
    plain = tensor.detach()
    if not is_sharded(plain):
        return plain
    own: Any = plain
    shard: Tensor = own.to_local()
    return shard.wait() if hasattr(shard, "wait") else shard


def device_of(tensor: Tensor) -> str:
    """The kind of device that the tensor's process group talks from."""
    mesh = getattr(tensor, "device_mesh", None)
    return str(mesh.device_type) if mesh is not None else tensor.device.type


def _is(module: nn.Module, name: str) -> bool:
    # By name: importing the wrappers costs a second that most users never need.
    return any(kind.__name__ == name for kind in type(module).__mro__)


def _summoned(module: Any) -> bool:
    return getattr(getattr(module, "training_state", None), "name", "") == "SUMMON_FULL_PARAMS"


def _ranks(group: Any) -> tuple[int, ...]:
    import torch.distributed as dist

    return tuple(sorted(dist.get_process_group_ranks(group)))
