"""Health, Monitor, guard and the other methods on models that are spread over processes. Run by `launching`."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gpt import (
    LAYOUTS,
    OPTIONS,
    TOKENS,
    compare,
    gpt,
    near,
    sharded,
    state_of,
    step,
    whole,
    world_mesh,
)
from launching import world
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import rekindle
from rekindle import methods
from rekindle.methods.remedy import Remedy
from rekindle.sharding import gathered
from rekindle.sharding.team import Team


def case_health_measures_whole_matrices_of_shards() -> None:
    for mode in ("cheap", "full"):
        alone = rekindle.health(gpt(), mode=mode)
        found = rekindle.health(sharded(gpt(), world_mesh()), mode=mode)
        assert found.weights.keys() == alone.weights.keys()
        for name, numbers in alone.weights.items():
            for key, value in numbers.items():
                assert math.isclose(found.weights[name][key], value, rel_tol=1e-4, abs_tol=1e-5), (name, key)
        assert found.whole == pytest.approx(alone.whole, rel=1e-4)
        assert str(found.verdict) == str(alone.verdict)


def case_health_of_a_broken_shard_says_so_everywhere() -> None:
    model = sharded(gpt(), world_mesh())
    if dist.get_rank() == 1:
        model.layers[0].up.weight.detach().to_local()[0, 0] = float("nan")
    assert "layers.0.up.weight" in rekindle.health(model).broken


def case_health_with_batches_and_gradients() -> None:
    model, alone = sharded(gpt(), world_mesh()), gpt()

    def loss(m: nn.Module, batch: Any) -> Tensor:
        return m(batch).logsumexp(-1).mean()

    found, expected = (rekindle.health(m, [TOKENS], loss=loss) for m in (model, alone))
    assert all("Monitor" in each.reason for each in found.unmeasured if each.what == "gradient")
    assert found.units.keys() == expected.units.keys()
    compare(model, gpt(), 0)
    model(TOKENS)


def case_monitor() -> None:
    model = sharded(gpt(), world_mesh())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    monitor = rekindle.Monitor(model, optimizer, every=2)
    for _ in range(4):
        step(model, optimizer)
    monitor.detach()
    health = monitor.history[-1].health
    alone = gpt()
    other = torch.optim.AdamW(alone.parameters(), lr=1e-3)
    twin = rekindle.Monitor(alone, other, every=2)
    for _ in range(4):
        step(alone, other)
    expected = twin.history[-1].health
    twin.detach()
    assert health.gradients == pytest.approx(expected.gradients, rel=1e-2, abs=1e-5)
    assert health.whole["effective_learning_rate"] == pytest.approx(expected.whole["effective_learning_rate"], rel=1e-2)


def case_methods_refuse_by_name_with_a_way_out_that_works() -> None:
    model, alone = sharded(gpt(), world_mesh()), gpt()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (model, alone)]
    for m, optimizer in zip((model, alone), optimizers, strict=True):
        step(m, optimizer)
    before = [whole(p).clone() for p in model.parameters()]
    with pytest.raises(ValueError, match=r"ShrinkPerturb works on whole parameters and .* is sharded .*gathered"):
        methods.ShrinkPerturb(seed=1)(model, optimizers[0])
    with pytest.raises(ValueError, match=r"ReDo works on whole parameters.*plain copy"):
        methods.ReDo()(model, optimizers[0], batches=[TOKENS])
    assert all(torch.equal(whole(p), old) for p, old in zip(model.parameters(), before, strict=True))
    with gathered(model, optimizers[0]):
        methods.RandomIsometry(seed=1)(model, optimizers[0])
        with pytest.raises(RuntimeError, match="forward pass is not possible"):
            model(TOKENS)
    methods.RandomIsometry(seed=1)(alone, optimizers[1])
    compare(model, alone, 1e-4)
    for name, state in state_of(model, optimizers[0]).items():
        for key, value in state_of(alone, optimizers[1])[name].items():
            assert torch.allclose(state[key], value, atol=1e-6), (name, key)
    for m, optimizer in zip((model, alone), optimizers, strict=True):
        step(m, optimizer)
    compare(model, alone, 1e-3)


def case_every_method_works_on_shards_or_names_a_way_that_works() -> None:
    """In `gathered`, twice, it ends where one process ends; other ways are named, with the class."""
    made: dict[str, Callable[[], Any]] = {
        "LayerReset": lambda: methods.LayerReset(last=1),
        "Compose": lambda: methods.Compose([methods.FullReset()]),
    }
    seen, x = set(), torch.linspace(-1, 1, 24).reshape(4, 6)

    def network() -> nn.Sequential:
        torch.manual_seed(0)
        first = nn.Linear(6, 8, bias=False), nn.LayerNorm(8), nn.ReLU()  # no bias: its norm is free (StartNorm)
        return nn.Sequential(*first, nn.Linear(8, 9), nn.ReLU(), nn.Linear(9, 3))

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).square().mean()

    for name, kind in sorted(vars(methods).items()):
        if not (inspect.isclass(kind) and issubclass(kind, Remedy)) or kind is Remedy:
            continue
        method, other = (made.get(name, kind)() for _ in range(2))
        model, alone = fully_shard(network(), mesh=world_mesh()), network()
        optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (model, alone)]
        for m, optimizer in zip((model, alone), optimizers, strict=True):
            loss(m, x).backward()
            optimizer.step()
            optimizer.zero_grad()
        if method.sharded and name != "Compose":
            continue  # other cases
        own = "FullReset" if name == "Compose" else name
        with pytest.raises(ValueError, match=f"^{own} works on whole parameters") as refused:
            method(model, optimizers[0], batches=[x], loss=loss)
        for verb in ("remember", "loss_term"):
            if hasattr(method, verb) and name != "Compose":
                with pytest.raises(ValueError, match=f"^{own} works on whole parameters"):
                    getattr(method, verb)(model)
        compare(model, alone, 1e-5)
        ways = {"batches": "plain copy", "steps": "DistributedDataParallel", "modules": "bare model"}
        assert ways.get(method.needs, "gathered(model, optimizer)") in str(refused.value)
        if method.needs != "parameters":
            continue
        for _ in range(2):
            with gathered(model, optimizers[0]):
                for each, m, optimizer in ((method, model, optimizers[0]), (other, alone, optimizers[1])):
                    if hasattr(each, "remember") and not seen & {name}:
                        each.remember(m)
                    each(m, optimizer)
            seen.add(name)
        try:
            compare(model, alone, 1e-4)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error
    assert len(seen) >= 12, seen


def case_gradients_changed_while_a_model_is_whole_are_kept() -> None:
    model = sharded(gpt(), world_mesh())
    model(TOKENS).logsumexp(-1).mean().backward()
    before = {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    with gathered(model):
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)
    assert before and all(torch.equal(whole(model.get_parameter(n).grad), g * 0.5) for n, g in before.items())


def case_what_copies_a_model_refuses_by_name() -> None:
    model = sharded(gpt(), world_mesh())
    optimizer = torch.optim.AdamW(model.parameters())

    def loss(m: nn.Module, batch: Tensor) -> Tensor:
        return m(batch).square().mean()

    calls: list[tuple[Callable[[], Any], str]] = [
        (lambda: rekindle.probe(model, [TOKENS], loss=loss), r"^probe\(\) works on whole .*plain copy"),
        (lambda: rekindle.advise(model, [TOKENS], loss=loss), r"^advise\(\) works on whole .*plain copy"),
        (
            lambda: rekindle.health(model, [TOKENS], loss=loss, curvature=True),
            r"^health\(curvature=True\) .*plain copy",
        ),
        (lambda: rekindle.Keeper([TOKENS], loss=loss).bind(model, optimizer), "Keeper.*Monitor"),
    ]
    for call, message in calls:
        with pytest.raises(ValueError, match=message):
            call()


def case_fire_as_a_method_and_the_optimizer_reset_work_on_shards() -> None:
    model, alone = sharded(gpt(), world_mesh()), gpt()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (model, alone)]
    for m, optimizer in zip((model, alone), optimizers, strict=True):
        step(m, optimizer)
        methods.Compose([methods.FIRE(layouts=LAYOUTS), methods.OptimizerReset()])(m, optimizer)
    compare(model, alone, 1e-4)
    assert all(not bool(v.any()) for s in state_of(model, optimizers[0]).values() for v in s.values())


def case_batches_and_guard_leave_nothing_unsharded() -> None:
    model, alone = sharded(gpt(), world_mesh()), gpt()
    receipt = rekindle.fire(model, drift=[TOKENS], **OPTIONS)
    expected = rekindle.fire(alone, drift=[TOKENS], **OPTIONS)
    assert near(receipt.outputs_moved, expected.outputs_moved)
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()
    compare(model, alone)


def case_a_guard_that_is_interrupted_restores_and_training_goes_on() -> None:
    model, alone = sharded(gpt(), world_mesh()), gpt()
    calls: list[int] = []

    def late(m: Any, batch: Any) -> Any:
        calls.append(1)
        value = m(batch).square().mean()
        if len(calls) > 1:
            raise ValueError("now")
        return value

    with pytest.raises(ValueError, match="now"):
        rekindle.fire(model, guard=rekindle.Guard([TOKENS], late, max_rise=9.0), **OPTIONS)
    compare(model, alone)
    step(model, torch.optim.AdamW(model.parameters(), lr=1e-3))


def case_batch_norm_statistics_are_those_of_all_ranks() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    data = [torch.randn(16, 6) for _ in range(dist.get_world_size())]
    alone = copy.deepcopy(net)
    model = DistributedDataParallel(net)
    rekindle.fire(model, recalibrate=[data[dist.get_rank()]])
    rekindle.fire(alone, recalibrate=data)
    assert torch.allclose(model.module[1].running_mean, alone[1].running_mean, atol=1e-5)
    copies = [torch.empty(8) for _ in range(dist.get_world_size())]
    dist.all_gather(copies, model.module[1].running_var)
    assert all(torch.equal(copies[0], each) for each in copies)


def case_what_fsdp1_hides_is_refused_by_name_by_every_verb() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 9), nn.ReLU(), nn.Linear(9, 2))
    model = FullyShardedDataParallel(net, use_orig_params=True, device_id=torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters())
    calls: list[tuple[Callable[[], Any], str]] = [
        (lambda: rekindle.plan(model), r"FSDP1.*writeback=False\): rekindle.plan\(model.module\)"),
        (lambda: rekindle.health(model), r"FSDP1.*rekindle.health\(model.module\)"),
        (lambda: rekindle.Monitor(model, optimizer), "FSDP1"),
        (lambda: methods.FullReset()(model, optimizer), r"FSDP1.*writeback=True\): FullReset\(...\)\(model.module"),
        (lambda: methods.ReDo()(model, optimizer, batches=[torch.ones(1, 5)]), r"FSDP1.*ReDo\(...\)"),
    ]
    for call, message in calls:
        with pytest.raises(ValueError, match=message):
            call()


def case_looking_at_a_model_that_is_left_unsharded_does_not_break_it() -> None:
    for look in (rekindle.health, rekindle.plan, None):
        model = sharded(gpt(), world_mesh(), reshard_after_forward=False)
        optimizer = torch.optim.AdamW(model.parameters())
        model(TOKENS)
        monitor = rekindle.Monitor(model, optimizer, every=1) if look is None else look(model)
        step(model, optimizer)
        for module in model.modules():
            if hasattr(module, "reshard"):
                module.reshard()
        if look is None:
            assert len(monitor.history) == 1
            monitor.detach()


@world(4)
def case_a_guard_asks_its_own_stage_alone() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "data"))
    number = mesh["stage"].get_local_rank()
    torch.manual_seed(number)
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    data = torch.ones(3, 6)
    expected = float(net(data).square().mean())
    model = fully_shard(net, mesh=mesh["data"])
    guard = rekindle.Guard([data], lambda m, batch: m(batch).square().mean(), max_rise=1e9) if number == 0 else None
    receipt = rekindle.fire(model, guard=guard)
    assert guard is None or receipt.loss_before == pytest.approx(expected, rel=1e-5)
    group = Team.of(mesh["data"].mesh.flatten().tolist()).group
    assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=60)  # that of the world
