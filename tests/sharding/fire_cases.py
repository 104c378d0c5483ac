"""`rekindle.fire` on shards beyond the weights: optimizer, mirrors, errors, checkpoints. Run by `launching`."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gpt import (
    GPT,
    LAYOUTS,
    OPTIONS,
    compare,
    gpt,
    placed,
    sharded,
    state_of,
    step,
    whole,
    world_mesh,
)
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import rekindle


def case_optimizer_state_is_reset() -> None:
    for options in ({"foreach": True}, {"fused": True}):
        model, alone = sharded(gpt(), world_mesh()), gpt()
        optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3, **options) for m in (model, alone)]
        for m, optimizer in zip((model, alone), optimizers, strict=True):
            step(m, optimizer)
        a, b = (rekindle.fire(m, o, **OPTIONS) for m, o in zip((alone, model), optimizers[::-1], strict=True))
        assert (a.optimizer.reset, a.optimizer.matched) == (b.optimizer.reset, b.optimizer.matched)
        for name, state in state_of(model, optimizers[0]).items():
            if name in b.changed:
                assert all(not bool(value.any()) for value in state.values()), name
            else:
                assert bool(state["step"].any()), name
        for m, optimizer in zip((model, alone), optimizers, strict=True):
            step(m, optimizer)
        # A key's bias moves nothing in a softmax: its gradient is rounding noise, which Adam blows up to a whole step.
        compare(model, alone, 1e-3, leave="qkv.bias")


def case_biases_and_mirrors() -> None:
    model, mirror = sharded(gpt(), world_mesh()), sharded(gpt(1), world_mesh())
    alone, twin = gpt(), gpt(1)
    for chosen in ("auto", "attention.qk"):
        receipt = rekindle.fire(model, biases="zero", mirrors=mirror, layouts=LAYOUTS, targets=chosen)
        expected = rekindle.fire(alone, biases="zero", mirrors=twin, layouts=LAYOUTS, targets=chosen)
        assert (receipt.biases_zeroed, receipt.mirrors) == (expected.biases_zeroed, expected.mirrors)
        compare(model, alone)
        compare(mirror, twin)


def case_zero_matrices_and_dead_experts_end_as_on_one_process() -> None:
    def broken() -> GPT:
        model = gpt()
        with torch.no_grad():
            model.layers[0].out.weight.zero_()
            model.layers[1].experts.up[1].zero_()
            model.layers[1].experts.up[2, 5:9].zero_()
        return model

    model, alone = sharded(broken(), world_mesh()), broken()
    receipt, expected = rekindle.fire(model, **OPTIONS), rekindle.fire(alone, **OPTIONS)
    compare(model, alone)
    assert receipt.skipped == expected.skipped and receipt.changed == expected.changed
    assert receipt.totals()["completed"] == expected.totals()["completed"] > 0


def case_nan_on_one_rank_only_raises_everywhere_and_changes_nothing() -> None:
    model = sharded(gpt(), world_mesh())
    last = dist.get_world_size() - 1
    weight = model.layers[1].down.weight
    if dist.get_rank() == last:
        weight.detach().to_local()[0, 0] = float("nan")
    before = [whole(p).clone() for p in model.parameters()]
    with pytest.raises(ValueError, match=rf"rank {last}: 'layers.1.down.weight' holds 1 NaN"):
        rekindle.fire(model, **OPTIONS)
    for parameter, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(whole(parameter).nan_to_num(), old.nan_to_num())


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(10, 14), nn.ReLU(), nn.Linear(14, 14), nn.ReLU(), nn.Linear(14, 14), nn.Linear(14, 3)
    )


def case_nan_in_a_whole_layer_beside_sharded_ones_changes_nothing() -> None:
    """Layers that tensor parallel leaves whole are checked before the sharded ones are written."""
    model = parallelize_module(network(), world_mesh(), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    if dist.get_rank() == 1:
        model[4].weight.data[0, 0] = float("nan")
    before = [whole(p).clone() for p in model.parameters()]
    with pytest.raises(ValueError, match=r"rank 1: '4.weight' holds 1 NaN or Inf of 196: nothing was changed"):
        rekindle.fire(model)
    for parameter, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(whole(parameter).nan_to_num(), old.nan_to_num())


def case_what_one_rank_alone_gets_wrong_is_raised_by_all_at_once() -> None:
    wrong = dist.get_rank() == 1
    copies, shards = DistributedDataParallel(network()), fully_shard(network(), mesh=world_mesh())
    data = torch.randn(2, 9 if wrong else 10)

    def loss(model: nn.Module, batch: Any) -> Any:
        if wrong:
            raise ValueError("no such label")
        return model(batch).square().mean()

    calls: list[tuple[nn.Module, dict[str, Any], str]] = [
        (copies, {"targets": "nothing" if wrong else "auto"}, "rank 1: .*nothing"),
        (copies, {"strength": 3.0 if wrong else 1.0}, "rank 1: strength=3.0"),
        (copies, {"drift": [data]}, "rank 1: .*(mat1 and mat2 shapes|does not fit the model|a batch is a tensor)"),
        (copies, {"guard": rekindle.Guard([torch.ones(2, 10)], loss, max_rise=9.0)}, "rank 1: no such label"),
        (shards, {"strength": 3.0 if wrong else 1.0}, "rank 1: strength=3.0"),
        (shards, {"scale": "nonsense" if wrong else "paper"}, "rank 1: .*nonsense"),
    ]
    for model, options, message in calls:
        before = [whole(p).clone() for p in model.parameters()]
        with pytest.raises((ValueError, RuntimeError), match=message):
            rekindle.fire(model, **options)
        assert all(torch.equal(whole(p), old) for p, old in zip(model.parameters(), before, strict=True))


def case_calls_that_differ_between_ranks_raise_everywhere() -> None:
    model = sharded(gpt(), world_mesh())
    strength = 0.5 if dist.get_rank() else 1.0
    with pytest.raises(ValueError, match="the call of rank 1 differs from that of rank 0"):
        rekindle.fire(model, strength=strength, **OPTIONS)
    chosen = "mlp" if dist.get_rank() else "attention"
    with pytest.raises(ValueError, match=r"differs from that of rank 0|matches no weight"):
        rekindle.fire(model, targets=chosen, layouts=LAYOUTS)


def case_a_failure_on_one_rank_in_the_middle_is_raised_by_all_and_put_back() -> None:
    from rekindle.projection import execution

    model = sharded(gpt(), world_mesh())
    before = [whole(p).clone() for p in model.parameters()]
    solve = execution.solve

    def fails(*args: Any, **options: Any) -> Any:
        if dist.get_rank() == 1:
            raise RuntimeError("the solver broke")
        return solve(*args, **options)

    execution.solve = fails
    try:
        with pytest.raises(RuntimeError, match="rank 1: the solver broke"):
            rekindle.fire(model, atomic=True, **OPTIONS)
    finally:
        execution.solve = solve
    for parameter, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(whole(parameter), old)


def case_a_plan_made_before_sharding_is_carried_out() -> None:
    alone = gpt()
    plan = rekindle.plan(alone, layouts=LAYOUTS)
    model = sharded(gpt(), world_mesh())
    rekindle.fire(model, plan=plan)
    rekindle.fire(alone, plan=plan)
    compare(model, alone)


def case_a_dcp_checkpoint_is_repaired_by_the_command_and_loaded_under_another_layout() -> None:
    import torch.distributed.checkpoint as dcp
    from typer.testing import CliRunner

    from rekindle.cli.app import app

    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    source, target = Path(folder[0]) / "in", Path(folder[0]) / "out"
    dcp.save({"model": sharded(gpt(), world_mesh()).state_dict()}, checkpoint_id=source)
    alone = gpt()
    plan = rekindle.plan(alone, layouts=LAYOUTS)
    if dist.get_rank() == 0:
        plan.save(Path(folder[0]) / "plan.json")
        command = ["fire", str(source), "-o", str(target), "--plan", str(Path(folder[0]) / "plan.json"), "--yes"]
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 0, done.output
    dist.barrier()
    other = placed(gpt(5), world_mesh(), lambda name, p: [Shard(1)] if p.ndim > 1 else None)
    state = {"model": other.state_dict()}
    dcp.load(state, checkpoint_id=target)
    other.load_state_dict(state["model"])
    rekindle.fire(alone, plan=plan)
    compare(other, alone)
