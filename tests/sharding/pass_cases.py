"""What goes wrong on one rank while a model runs on batches is raised by all of them, at once. Run by `launching`.

A rank that waits instead would end by the time-out of its process group, with another text: so a text that names the
failed rank shows that nobody waited.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gpt import OPTIONS, TOKENS, compare, gpt, sharded, whole, world_mesh
from launching import world
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import rekindle
from rekindle.sharding.team import settle


def case_an_error_in_a_forward_pass_of_one_rank_is_raised_by_all() -> None:
    last = dist.get_world_size() - 1
    here = dist.get_rank() == last
    wrong = torch.full_like(TOKENS, 10**6)  # no such token: an error in the middle of FSDP2's messages
    bad = [TOKENS, wrong] if here else [TOKENS, TOKENS]

    def late(model: nn.Module, batch: Tensor) -> Tensor:
        loss = model(batch).square().mean()
        if here:
            raise KeyError("no label")
        return loss

    def early(model: nn.Module, batch: Tensor) -> Tensor:
        if here:
            raise TypeError("no batch")
        return plain(model, batch)

    def deep(module: nn.Module, given: Any, output: Any) -> None:
        if here:
            raise RuntimeError("out of memory")

    def guard(batches: Any, loss: Any) -> rekindle.Guard:
        return rekindle.Guard(batches, loss, max_rise=100.0)

    def plain(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).square().mean()

    attempts: list[tuple[Callable[[nn.Module], Any], type[Exception], str]] = [
        (lambda m: rekindle.fire(m, guard=guard(bad, plain), **OPTIONS), IndexError, "index out of range"),
        (lambda m: rekindle.fire(m, guard=guard([TOKENS], late), **OPTIONS), KeyError, "no label"),
        (lambda m: rekindle.fire(m, guard=guard([TOKENS], early), **OPTIONS), TypeError, "no batch"),
        (lambda m: rekindle.fire(m, guard=guard([TOKENS] * (1 + (not here)), plain), **OPTIONS), ValueError, "fewer"),
        (lambda m: rekindle.fire(m, drift=bad, **OPTIONS), IndexError, "index out of range"),
        (lambda m: rekindle.health(m, bad), IndexError, "index out of range"),
    ]
    for attempt, kind, said in attempts:
        model = sharded(gpt(), world_mesh())
        kept = [whole(parameter.detach()).clone() for parameter in model.parameters()]
        with pytest.raises(kind, match=said if said == "fewer" else f"rank {last}: .*{said}"):
            attempt(model)
        settle(model)
        assert all(torch.equal(a, whole(b.detach())) for a, b in zip(kept, model.parameters(), strict=True))
        rekindle.fire(model, drift=[TOKENS], **OPTIONS)  # all ranks can go on
    model = sharded(gpt(), world_mesh())
    handle = model.layers[0].down.register_forward_hook(deep)
    with pytest.raises(RuntimeError, match=f"rank {last}: out of memory"):
        rekindle.fire(model, guard=guard([TOKENS], plain), **OPTIONS)
    handle.remove()
    settle(model)
    compare(model, gpt())


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 3))


PLAN = {"0": ColwiseParallel(), "2": RowwiseParallel(), "4": ColwiseParallel(), "5": RowwiseParallel()}


def plain(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def guard(batches: Any, loss: Any = plain) -> rekindle.Guard:
    return rekindle.Guard(batches, loss, max_rise=100.0)


def fails_alone(make: Callable[[], nn.Module]) -> None:
    """Every way in which the last rank alone can fail around and inside of the model's own messages."""
    last = dist.get_world_size() - 1
    here = dist.get_rank() == last
    x = torch.linspace(-1, 1, 24).reshape(4, 6)
    wrong = torch.ones(4, 5) if here else x

    def early(model: nn.Module, batch: Tensor) -> Tensor:
        if here:
            raise TypeError("no batch")
        return plain(model, batch)

    def late(model: nn.Module, batch: Tensor) -> Tensor:
        found = plain(model, batch)
        if here:
            raise KeyError("no label")
        return found

    class Reading:
        def __iter__(self) -> Iterator[Tensor]:
            yield x
            if here:
                raise OSError("the disk is gone")
            yield x

    def unlike(model: nn.Module) -> Any:
        """In the middle of the model, between two of its messages."""

        def breaks(*_: Any) -> None:
            if here:
                raise RuntimeError("out of memory")

        handle = model.get_submodule("3").register_forward_hook(breaks)
        try:
            return rekindle.fire(model, guard=guard([x]))
        finally:
            handle.remove()

    said = f"rank {last}: "
    attempts: list[tuple[Callable[[nn.Module], Any], type[Exception], str]] = [
        (lambda m: rekindle.fire(m, guard=guard([x, wrong])), RuntimeError, said + "mat1 and mat2|a and b must have"),
        (lambda m: rekindle.fire(m, guard=guard([x], early)), TypeError, said + "no batch"),
        (lambda m: rekindle.fire(m, guard=guard([x, x], late)), KeyError, said + "no label"),
        (lambda m: rekindle.fire(m, guard=guard([x] * (1 + (not here)))), ValueError, "1 of . ranks have fewer"),
        (lambda m: rekindle.fire(m, drift=Reading()), RuntimeError, said + "OSError: the disk is gone"),
        (unlike, RuntimeError, said + "out of memory"),
        (lambda m: rekindle.health(m, [x, wrong]), RuntimeError, said + "mat1 and mat2|a and b must have"),
        (lambda m: rekindle.health(m, [x], loss=late), KeyError, said + "no label"),
        (lambda m: rekindle.health(m, [x], loss=nn.MSELoss() if here else plain), TypeError, said + "loss is called"),
    ]
    model = make()
    kept = [whole(parameter.detach()).clone() for parameter in model.parameters()]
    for attempt, kind, message in attempts:
        with pytest.raises(kind) as caught:
            attempt(model)
        texts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(texts, str(caught.value))
        assert len(set(texts)) == 1, texts
        caught.match(message)
        settle(model)
        assert all(torch.equal(a, whole(b.detach())) for a, b in zip(kept, model.parameters(), strict=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    monitor = rekindle.Monitor(model, optimizer, every=1, batches=[x, wrong])
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        plain(model, x).backward()
        optimizer.step()
    assert [each for each in told if said in str(each.message)] and not monitor.history
    monitor.detach()
    optimizer.zero_grad()
    alone = network()
    alone.load_state_dict({name: whole(p.detach()) for name, p in model.named_parameters()})
    receipts = [rekindle.fire(m, guard=guard([x]), drift=[x]) for m in (model, alone)]  # all ranks can go on
    assert receipts[0].loss_before == pytest.approx(receipts[1].loss_before, rel=1e-4)
    compare(model, alone)


def case_errors_of_one_rank_under_tensor_parallel_alone() -> None:
    fails_alone(lambda: parallelize_module(network(), world_mesh(), PLAN))


def case_gradients_under_tensor_parallel_are_those_of_whole_weights() -> None:
    x = torch.linspace(-1, 1, 24).reshape(4, 6)
    model, alone = parallelize_module(network(), world_mesh(), PLAN), network()
    found, expected = (rekindle.health(m, [x], loss=plain) for m in (model, alone))
    assert found.gradients == pytest.approx(expected.gradients, rel=1e-4)
    assert found.whole["loss"] == pytest.approx(expected.whole["loss"], rel=1e-5)


@world(4)
def case_errors_of_one_rank_under_fsdp2_over_tensor_parallel() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))

    def make() -> nn.Module:
        model = parallelize_module(network(), mesh["tensor"], PLAN)
        for number in ("0", "4"):
            fully_shard(model.get_submodule(number), mesh=mesh["data"])
        return fully_shard(model, mesh=mesh["data"])

    fails_alone(make)


def case_batches_that_differ_within_a_tensor_parallel_group_are_named() -> None:
    model = parallelize_module(network(), world_mesh(), PLAN)
    rows = 3 if dist.get_rank() == 1 else 4
    with pytest.raises(ValueError, match=r"rank 0 is at all_reduce of \(4, 8\) .*rank 1 is at all_reduce of \(3, 8\)"):
        rekindle.health(model, [torch.ones(rows, 6)])
