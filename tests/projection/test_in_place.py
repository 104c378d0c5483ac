"""What in-place writes keep: identity, storage, hooks, compiled graphs, memory layout, global state."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rekindle.projection.firing import fire
from small_networks import dfi_reference, mlp, polar_reference, same, state_of, stepped


def test_identity_storage_flags_membership_and_versions() -> None:
    model = mlp()
    optimizer = stepped(model)
    model[2].weight.register_hook(lambda grad: grad * 2)
    kept = {
        name: (p, p.data_ptr(), p.requires_grad, p.is_leaf, p._version, p.stride())
        for name, p in model.named_parameters()
    }
    members = [id(p) for group in optimizer.param_groups for p in group["params"]]
    receipt = fire(model, optimizer)
    for name, p in model.named_parameters():
        old, pointer, grad, leaf, version, stride = kept[name]
        assert p is old
        assert (p.data_ptr(), p.requires_grad, p.is_leaf, p.stride()) == (pointer, grad, leaf, stride)
        assert (p._version > version) == (name in receipt.changed)
        assert p.grad_fn is None
    assert [id(p) for group in optimizer.param_groups for p in group["params"]] == members
    optimizer.zero_grad()
    model(torch.ones(1, 12)).sum().backward()
    first = model[2].weight.grad.clone()
    model[2].weight._backward_hooks.clear()
    optimizer.zero_grad()
    model(torch.ones(1, 12)).sum().backward()
    torch.testing.assert_close(first, 2 * model[2].weight.grad)


def test_a_graph_built_before_is_noticed_by_autograd() -> None:
    model = mlp()
    loss = model(torch.ones(2, 12)).sum()
    fire(model)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_channels_last_and_non_contiguous_weights_stay_so() -> None:
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.Conv2d(8, 4, 3)).to(memory_format=torch.channels_last)
    w = model[0].weight.detach().clone()
    stride = model[0].weight.stride()
    fire(model, heads=(), targets="auto", scale="paper")
    assert model[0].weight.stride() == stride
    tap = model[0].weight.detach()[:, :, 1, 2].double()
    torch.testing.assert_close(tap, math.sqrt(2) / 9 * polar_reference(w[:, :, 1, 2]), rtol=1e-3, atol=1e-4)


def test_ddp_hooks_still_reduce(tmp_path: Any) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = mlp()
        wrapped = nn.parallel.DistributedDataParallel(model)
        calls = []

        def hook(_: Any, bucket: Any) -> Any:
            calls.append(len(bucket.parameters()))
            future: torch.futures.Future[Tensor] = torch.futures.Future()
            future.set_result(bucket.buffer())
            return future

        # DDP compares annotations with the classes themselves, which postponed evaluation turns into text
        hook.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[Tensor]}
        wrapped.register_comm_hook(None, hook)
        optimizer = torch.optim.Adam(wrapped.parameters())
        wrapped(torch.ones(2, 12)).sum().backward()
        optimizer.step()
        assert fire(wrapped, optimizer, targets="auto").changed == ("0.weight", "2.weight", "4.weight")
        seen = sum(calls)
        optimizer.zero_grad()
        wrapped(torch.ones(2, 12)).sum().backward()
        assert sum(calls) == 2 * seen == 16
        assert all(p.grad is not None for p in model.parameters())
    finally:
        dist.destroy_process_group()


def test_a_compiled_forward_is_not_compiled_again() -> None:
    import torch._dynamo as dynamo
    from torch._dynamo.utils import counters

    dynamo.reset()
    model = mlp()
    compiled = torch.compile(model, backend="eager")
    optimizer = torch.optim.Adam(compiled.parameters())
    inputs = torch.ones(2, 12)
    for _ in range(2):
        compiled(inputs).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    before = counters["stats"]["unique_graphs"]
    with dynamo.config.patch(error_on_recompile=True):
        receipt = fire(compiled, optimizer, targets="auto")
        after = compiled(inputs)
        after.sum().backward()
    assert receipt.changed == ("0.weight", "2.weight", "4.weight")
    assert counters["stats"]["unique_graphs"] == before
    torch.testing.assert_close(after, model(inputs))


def test_no_global_state_is_touched_and_the_result_is_deterministic() -> None:
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    first, second = mlp(), mlp()
    with torch.no_grad():
        for model in (first, second):
            model[2].weight[3] = 0
            model[2].weight[5] = model[2].weight[4]
    rng = torch.get_rng_state()
    receipt = fire(first, targets="auto", scale="paper")
    assert torch.equal(torch.get_rng_state(), rng)
    assert (torch.get_num_threads(), torch.get_default_dtype()) == (threads, dtype)
    torch.rand(3)
    fire(second, targets="auto", scale="paper")
    assert same(state_of(first), state_of(second))
    assert receipt.records[1].completed == 2
    assert dfi_reference(first[2].weight, math.sqrt(16 / 20)) < 1e-4


def test_a_square_matrix_that_lies_transposed_in_memory() -> None:
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(20, 20), nn.Linear(20, 3)
            self.first.weight = nn.Parameter(self.first.weight.detach().T.contiguous().T)

    model = Turned()
    w, stride = model.first.weight.detach().clone(), model.first.weight.stride()
    fire(model, targets="auto", scale="paper")
    assert model.first.weight.stride() == stride == (1, 20)
    torch.testing.assert_close(model.first.weight.detach().double(), polar_reference(w), rtol=1e-3, atol=1e-3)
