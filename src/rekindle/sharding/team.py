"""The processes that hold one model together: who they are, how they agree, and which wrappers the model has there.

Every step that communicates is preceded by an agreement, so that a rank that fails makes all ranks raise the same
error and none waits for a message that never comes. With one process everything here is a no-op.

FSDP2 keeps some modules unsharded after a forward pass: what is written to them then is lost at the next reshard, so
`settle` reshards them first. Wrappers that hide their parameters are refused by name, with the workaround.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rekindle.blocks.names import is_sharded, partitions, sharded_parameters
from rekindle.sharding.spread import LayoutNotSupported, Spread

# Errors sent between processes keep their type where it is one of these, so that callers may catch them as usual.
_KINDS = (
    *(ValueError, TypeError, KeyError, RuntimeError, NotImplementedError, IndexError, MemoryError),
    LayoutNotSupported,
)
_KEPT: Mapping[str, type[Exception]] = {kind.__name__: kind for kind in _KINDS}


T = TypeVar("T")

Needs = Literal["parameters", "batches", "steps", "modules"]
"""What a verb needs of a model besides whole parameters: nothing, forward passes, training steps, new modules."""


class RankError(RuntimeError):
    """Another process failed in a way that has no common type; the message names its rank."""


class LostRank(RuntimeError):
    """A process of the team is gone, or did not answer within the time-out of its process group."""


@dataclass(frozen=True)
class Team:
    """Global ranks in ascending order, this process's own rank, and the process group that joins them.

    >>> solo = Team.solo()
    >>> solo.size, solo.gather("x"), solo.agree(None)
    (1, ['x'], None)
    """

    ranks: tuple[int, ...]
    rank: int
    group: dist.ProcessGroup | None = None
    device: str = "cpu"

    @classmethod
    def solo(cls) -> Team:
        """This process alone."""
        return cls((0,), 0)

    @classmethod
    def of(cls, ranks: Iterable[int], device: str = "cpu") -> Team:
        """The team of these global ranks; all of them must call this together."""
        members = tuple(sorted(set(ranks)))
        here = dist.get_rank()
        if len(members) == 1:
            return cls(members, here)
        return cls(members, here, _group(members), device)

    @property
    def size(self) -> int:
        """The number of processes."""
        return len(self.ranks)

    @property
    def place(self) -> int:
        """This process's index in the group."""
        return self.ranks.index(self.rank)

    @property
    def leads(self) -> bool:
        """Whether this is the first process: the one that decides and logs."""
        return self.rank == self.ranks[0]

    def gather(self, value: object) -> list[Any]:
        """The (picklable) values of all processes, in the order of ranks."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        with self.waiting("exchanging results"):
            dist.all_gather_object(found, value, group=self.group)
        return found

    def sum(self, values: Tensor) -> Tensor:
        """The sum of a small tensor over all processes."""
        if self.size == 1:
            return values
        total = values.to(self.device)
        with self.waiting("adding up"):
            dist.all_reduce(total, group=self.group)
        return total.to(values.device)

    def total(self, values: Sequence[Tensor]) -> list[Tensor]:
        """The sums of these tensors over all processes, in one message."""
        if self.size == 1 or not values:
            return list(values)
        flat = self.sum(torch.cat([value.detach().double().flatten() for value in values]))
        parts = torch.split(flat, [value.numel() for value in values])
        return [part.reshape(value.shape).to(value.dtype) for part, value in zip(parts, values, strict=True)]

    def first(self, value: T) -> T:
        """The (picklable) value of the first process, on all of them."""
        if self.size == 1:
            return value
        box: list[Any] = [value if self.leads else None]
        with self.waiting("hearing from the first process"):
            dist.broadcast_object_list(box, self.ranks[0], group=self.group, device=torch.device(self.device))
        found: T = box[0]
        return found

    @torch.no_grad()
    def copy(self, tensor: Tensor) -> None:
        """Give a tensor the numbers that it has on the first process, in place."""
        if self.size == 1:
            return
        moved = tensor.detach().to(self.device).contiguous()
        with self.waiting("copying from the first process"):
            dist.broadcast(moved, self.ranks[0], group=self.group)
        if not self.leads:
            tensor.copy_(moved)

    def agree(self, error: Exception | None) -> None:
        """Raise the same error on every process if any of them has one; every process must call this.

        >>> Team.solo().agree(ValueError("x is not finite"))
        Traceback (most recent call last):
        ...
        ValueError: x is not finite
        """
        if self.size == 1:
            if error is not None:
                raise error
            return
        flag = torch.tensor([int(error is not None)], device=self.device)
        with self.waiting("agreeing that all processes are well"):
            dist.all_reduce(flag, op=dist.ReduceOp.SUM, group=self.group)
        if int(flag):
            self._raise(error)

    def _raise(self, error: Exception | None) -> None:
        mine = None if error is None else (type(error).__name__, _text(error))
        reports = self.gather(mine)
        failed = [(rank, *report) for rank, report in zip(self.ranks, reports, strict=True) if report is not None]
        rank, kind, text = failed[0]
        same = len(failed) == self.size and len({report[1:] for report in failed}) == 1
        where = "" if same else f"rank {rank}: "
        more = f" (and {len(failed) - 1} other ranks failed)" if len(failed) > 1 and not same else ""
        message = f"{where}{text}{more}"
        found = _KEPT.get(kind)
        raise (found(message) if found else RankError(f"{where}{kind}: {text}{more}")) from error

    def together(self) -> AbstractContextManager[None]:
        """Whatever is raised inside by any process is raised by all; inside there must be no communication."""
        return nullcontext() if self.size == 1 else self._together()

    @contextmanager
    def _together(self) -> Iterator[None]:
        error: Exception | None = None
        try:
            yield
        except Exception as caught:
            error = caught
        self.agree(error)

    def same(self, what: str, items: Sequence[Any]) -> None:
        """Raise on every process unless all hold the same items; the error names the first that differs."""
        if self.size == 1:
            return
        digest = hashlib.sha256(repr(list(items)).encode()).hexdigest()
        digests = self.gather(digest)
        if len(set(digests)) == 1:
            return
        lists = self.gather([str(item) for item in items])
        first = lists[0]
        for rank, other in zip(self.ranks, lists, strict=True):
            if other == first:
                continue
            length = max(len(first), len(other))
            padded = [[*each, *["nothing"] * (length - len(each))] for each in (first, other)]
            a, b = next((x, y) for x, y in zip(*padded, strict=True) if x != y)
            raise ValueError(
                f"the {what} of rank {rank} differs from that of rank {self.ranks[0]}: {b[:200]} against {a[:200]}; "
                "every process must make the same call on the same model"
            )

    @contextmanager
    def waiting(self, doing: str) -> Iterator[None]:
        """Name what was going on when a process was lost."""
        try:
            yield
        except (RuntimeError, ValueError) as error:  # gloo and nccl raise RuntimeError and its subclasses
            raise LostRank(f"rank {self.rank} lost its peers while {doing}: {_text(error)}") from error


SOLO = Team.solo()
"""This process alone: the team where nothing is distributed."""

_GROUPS: dict[tuple[int, ...], dist.ProcessGroup] = {}


def _group(ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
    if ranks == tuple(range(dist.get_world_size())):
        world: dist.ProcessGroup | None = dist.group.WORLD
        return world
    known = _GROUPS.get(ranks)
    if known is None or known not in dist.distributed_c10d._world.pg_map:
        # Only the members take part: pipeline stages fire on their own. Without a time-out of its own a new group waits
        # half an hour, whatever the user gave to init_process_group.
        known = _GROUPS[ranks] = dist.new_group(list(ranks), timeout=_timeout(), use_local_synchronization=True)
    return known


def _timeout() -> timedelta | None:
    world: Any = dist.group.WORLD
    options = getattr(world._get_backend(dist.distributed_c10d._get_pg_default_device(world)), "options", None)
    return getattr(options, "_timeout", None)


def _text(error: Exception) -> str:
    return str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)


def settle(model: nn.Module) -> int:
    """Reshard every FSDP2 module, so that parameters are what the optimizer holds; returns how many there are."""
    found = 0
    for module in model.modules():
        if is_a(module, "FSDPModule"):
            module.reshard()  # type: ignore[operator]
            found += 1
    return found


def refuse_hidden(
    model: nn.Module, call: str = "rekindle.fire(model.module, optimizer)", *, writes: bool = True
) -> None:
    """Raise if a wrapper hides the parameters: FSDP1 outside of `summon_full_params`, DeepSpeed ZeRO.

    `call` is what to write inside of `summon_full_params` instead; calls that only read may use ZeRO 1 and 2.
    """
    for name, module in model.named_modules():
        # Inside summon_full_params the root gives its parameters other names than they have: take the module in it.
        if is_a(module, "FullyShardedDataParallel") and not (name and _summoned(module)):
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
                "(rekindle.fire needs none of this)"
            )


def partitioned(model: nn.Module) -> bool:
    """Whether DeepSpeed ZeRO holds the float32 weights of the model."""
    return any(held_by_zero(parameter) for parameter in model.parameters())


def held_by_zero(parameter: Tensor) -> bool:
    """Whether DeepSpeed ZeRO holds this parameter, or its float32 copy."""
    return hasattr(parameter, "ds_id") or hasattr(parameter, "_hp_mapping")


def spreads(model: nn.Module) -> dict[str, Spread]:
    """How every distributed parameter is placed, by its name in `named_parameters()`; empty for an ordinary model.

    Under DistributedDataParallel and DeepSpeed every parameter is a copy on each rank of its process group.
    """
    found = _sharded(model)
    named = dict(model.named_parameters(remove_duplicate=False))
    for path, module in model.named_modules():
        if is_a(module, "DistributedDataParallel") or is_a(module, "DeepSpeedEngine"):
            # An engine holds copies, or whole weights for a moment (`gathered`): partitions were refused before.
            ranks = _ranks(getattr(module, "process_group", None) or getattr(module, "data_parallel_group", None))
            prefix = f"{path}." if path else ""
            for name, parameter in named.items():
                if name.startswith(prefix) and name not in found and len(ranks) > 1 and parameter.numel():
                    found[name] = Spread.replicated(tuple(parameter.shape), ranks)
    return found


def refuse_shards(
    model: nn.Module, who: str, needs: Needs = "parameters", call: str = "{}(...)(model, optimizer)"
) -> None:
    """Raise if the model has DTensor parameters, with the workaround for `who`; `call` is what to write there."""
    found = next((name for name, parameter in model.named_parameters() if is_sharded(parameter)), None)
    if found is None:
        return
    ways = {
        "parameters": f"use `with rekindle.sharding.gathered(model, optimizer): {call.format(who)}` on every rank, "
        "where the whole model fits into its memory",
        "batches": "apply it to a plain copy of the model, loaded from get_model_state_dict(model, "
        "options=StateDictOptions(full_state_dict=True)) and put back with set_model_state_dict",
        "steps": "it takes part in training steps, so train with DistributedDataParallel or one process",
        "modules": "it replaces modules, so apply it to the bare model and shard that again",
    }
    raise LayoutNotSupported(f"{who} works on whole parameters and {found!r} is sharded (DTensor): {ways[needs]}")


def opened(
    model: nn.Module, call: str = "rekindle.fire(model.module, optimizer)", *, writes: bool = True, copies: bool = True
) -> tuple[Team, dict[str, Spread]]:
    """`distributed` for a model with visible parameters: wrappers that hide them are refused, FSDP2 is resharded."""
    refuse_hidden(model, call, writes=writes)
    settle(model)
    return distributed(model, copies=copies)


def distributed(model: nn.Module, *, copies: bool = True) -> tuple[Team, dict[str, Spread]]:
    """The processes that hold this model together, and how each distributed parameter is placed, by its name.

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


def _sharded(model: nn.Module) -> dict[str, Spread]:
    found = {name: Spread.of(parameter, name) for name, parameter in sharded_parameters(model).items()}
    for name, partition in partitions(model).items():
        found[name] = Spread.replicated(partition.shape, partition.ranks)
    return found


def local(tensor: Tensor) -> Tensor:
    """This rank's own numbers of a tensor, sharing its memory; the tensor itself if it is not distributed."""
    plain = tensor.detach()
    if not is_sharded(plain):
        return plain
    own: Any = plain
    shard: Tensor = own.to_local()
    return shard.wait() if hasattr(shard, "wait") else shard


def device_of(tensor: Tensor) -> str:
    """The kind of device that the tensor's process group communicates on."""
    mesh = getattr(tensor, "device_mesh", None)
    return str(mesh.device_type) if mesh is not None else tensor.device.type


def is_a(module: nn.Module, name: str) -> bool:
    """Whether a module is of a class of this name."""
    # By name: importing the wrappers costs a second that most users never need.
    return any(kind.__name__ == name for kind in type(module).__mro__)


def _summoned(module: object) -> bool:
    return getattr(getattr(module, "training_state", None), "name", "") == "SUMMON_FULL_PARAMS"


def _ranks(group: dist.ProcessGroup | None) -> tuple[int, ...]:
    return tuple(sorted(dist.get_process_group_ranks(group)))
