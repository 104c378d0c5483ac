"""Forward passes in which processes communicate: what one of them raises is raised by all.

Tensor parallel exchanges activations in the middle of modules, FSDP2 weights before them, DistributedDataParallel
buffers. A process that fails would leave the others waiting in such a message until its time-out. So inside `passes`
all processes of the team agree right before each message, wherever it is sent from: there they detect a process that
has failed, one that has fewer batches, and one that is about to send something else than its group.

Messages are seen by a dispatch mode, which lets DTensors turn into the messages they are made of first.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rekindle.sharding.team import Team, is_a

_SPACES = ("c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd")
# Operations of these namespaces that are not messages, or point-to-point ones, which other processes do not see.
_APART = ("check_for_nan", "wait_tensor", "_wrap_tensor_autograd", "send", "isend", "irecv", "batch_p2p_ops")
_UNEVEN = ("alltoall", "all_to_all", "gather_", "scatter_", "allgather_", "reduce_scatter_")  # sizes may differ


@contextmanager
def passes(model: nn.Module, team: Team) -> Iterator[None]:
    """Where a model runs on batches: what is raised inside by any process of its team is raised by all.

    Every process must run the same modules on the same number of batches, as far as they exchange anything.

    >>> from rekindle.sharding.team import SOLO
    >>> layer = nn.Linear(2, 2)
    >>> with passes(layer, SOLO):
    ...     _ = layer(layer.weight)
    """
    if team.size == 1:
        yield
        return
    raised: list[Exception] = []  # raised by an agreement: all processes know it

    def meet(error: Exception | None = None, *, ended: bool = False, message: _Message | None = None) -> None:
        try:
            _meet(team, error, ended, message)
        except Exception as known:
            raised.append(known)
            raise

    # An error before FSDP2's own hook leaves a clean state; one in the middle of the hook does not.
    sharded = [module for module in model.modules() if is_a(module, "FSDPModule")]
    hooks = [each.register_forward_pre_hook(lambda *_: meet(), prepend=True) for each in sharded]
    error: Exception | None = None
    try:
        with _Messages(lambda message: meet(message=message)):
            yield
    except Exception as caught:
        error = caught
    finally:
        for hook in hooks:
            hook.remove()
    try:
        if raised:
            raise raised[0] from error
        meet(error, ended=True)
    except Exception:
        _recover(sharded)
        raise


def _recover(sharded: list[nn.Module]) -> None:
    """Reset FSDP2 after an interrupted forward pass: without this the next training step waits for a lost message."""
    for module in sharded:
        reset: Any = getattr(module, "reset_iter_state", None)  # since torch 2.13
        if reset is not None:
            with suppress(RuntimeError, AttributeError):  # an inner module, or one that never ran
                reset()


class _Message:
    """What a process is about to send: the processes that take part, the operation, and the shapes of its tensors."""

    def __init__(self, name: str, values: list[Any]) -> None:
        self.ranks = next((ranks for value in values if (ranks := _members(value))), ())
        shapes = [tuple(value.shape) for value in values if isinstance(value, Tensor)]
        even = not any(part in name for part in _UNEVEN)
        self.text = f"{name} of {', '.join(map(str, shapes))}" if even else name


class _Messages(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Calls `before` with every message that several processes take part in."""

    supports_higher_order_operators = True  # flex_attention, which has no namespace

    def __init__(self, before: Callable[[_Message], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.before = before

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> object:
        if any(kind.__name__ == "DTensor" for each in types for kind in each.__mro__):
            return NotImplemented  # it comes back as operations on shards, and messages
        name = getattr(func, "_opname", "")
        if getattr(func, "namespace", "") in _SPACES and name not in _APART and not name.startswith("recv"):
            self.before(_Message(name, tree_leaves((args, kwargs or {}))))
        return func(*args, **(kwargs or {}))


def _members(value: object) -> tuple[int, ...]:
    """The ranks of a process group, given as torch's operations are given it; none if this is no group."""
    if isinstance(value, str):
        groups: Any = dist.distributed_c10d
        try:
            value = groups._resolve_process_group(value)
        except (RuntimeError, ValueError, KeyError):
            return ()  # the name of a reduction
    elif isinstance(value, torch.ScriptObject):
        try:
            value = dist.ProcessGroup.unbox(value)
        except (RuntimeError, TypeError):
            return ()  # the reduction
    if not isinstance(value, dist.ProcessGroup):
        return ()
    return tuple(sorted(dist.get_process_group_ranks(value)))


def _meet(team: Team, error: Exception | None, ended: bool, message: _Message | None) -> None:
    """Agree that no process has failed, that all or none have ended, and that each group is about to do the same."""
    ranks = () if message is None else tuple(rank for rank in message.ranks if rank in team.ranks)
    table = torch.zeros(team.size, 5, dtype=torch.int64)
    own = [int(error is not None), int(ended), _number(ranks), len(ranks), _number(message.text if message else "")]
    table[team.place] = torch.tensor(own)
    table = team.sum(table)
    if bool(table[:, 0].any()):
        team.agree(error)
    count = int(table[:, 1].sum())
    if 0 < count < team.size:
        raise ValueError(f"{count} of {team.size} ranks have fewer batches than the others")
    rows = [tuple(row) for row in table[:, 2:].tolist()]
    for row in rows:
        group, size, _ = row
        if size and (rows.count(row) != size or any(other[0] == group and other != row for other in rows)):
            texts = team.gather(f"{message.text} among ranks {list(ranks)}" if message else "the start of a module")
            place, text = next((i, text) for i, text in enumerate(texts) if text != texts[rows.index(row)])
            raise ValueError(
                f"rank {team.ranks[rows.index(row)]} is at {texts[rows.index(row)]} while rank {team.ranks[place]} is "
                f"at {text}: in a forward pass all ranks must run the same modules, and those of one tensor-parallel "
                "group the same batches"
            )


def _number(value: object) -> int:
    digest = hashlib.sha256(repr(value).encode()).digest()
    return int.from_bytes(digest[:7], "big") if value else 0
