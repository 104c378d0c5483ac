"""`rekindle.fire` and its kin on models that are spread over processes: run by `launching`.

The model is a small GPT of the awkward kind: fused q/k/v whose thirds do not end where shards end, a tied embedding,
stacked experts, widths that no number of ranks divides. Every layout is compared with the same call on one process.
"""

from __future__ import annotations

import copy
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launching import world
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import rekindle
from rekindle.blocks.layouts import matrices

WIDTH, VOCABULARY = 30, 41


class Experts(nn.Module):
    def __init__(self, count: int = 3) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(count, 22, WIDTH) / 5)
        self.down = nn.Parameter(torch.randn(count, WIDTH, 22) / 5)

    def forward(self, x: Tensor) -> Tensor:
        inner = torch.relu(torch.einsum("eoi,bti->beto", self.up, x))
        return torch.einsum("eoi,beti->bto", self.down, inner)


class Layer(nn.Module):
    def __init__(self, experts: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, 53)
        self.down = nn.Linear(53, WIDTH)
        self.experts = Experts() if experts else None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        x = x + self.down(torch.relu(self.up(x)))
        return x if self.experts is None else x + self.experts(x)


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.tall = nn.Linear(4, 400, bias=False)
        self.layers = nn.ModuleList([Layer(False), Layer(True)])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x) + 0 * self.tall(x[..., :4]).sum()


LAYOUTS = {
    "*.qkv.weight": matrices("(part out) in", part=("query", "key", "value")),
    "*.experts.*": matrices("expert out in", count="expert"),
}


def gpt(seed: int = 0) -> GPT:
    torch.manual_seed(seed)
    return GPT()


TOKENS = torch.arange(24).reshape(2, 12) % VOCABULARY


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(TOKENS).logsumexp(-1).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def world_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def sharded(model: GPT, mesh: DeviceMesh, **options: Any) -> GPT:
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def placed(model: GPT, mesh: DeviceMesh, placement: Callable[[str, Tensor], Any]) -> GPT:
    """Make every weight of at least two dimensions a DTensor, as tensor and expert parallel code does."""
    done: dict[int, nn.Parameter] = {}
    for path, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            placements = placement(f"{path}.{name}", parameter)
            if placements is not None:
                if id(parameter) not in done:
                    distributed = distribute_tensor(parameter.detach().clone(), mesh, placements)
                    done[id(parameter)] = nn.Parameter(distributed)
                module.register_parameter(name, done[id(parameter)])
    return model


def compare(model: nn.Module, alone: nn.Module, tolerance: float = 1e-5, leave: str | None = None) -> None:
    other = dict(alone.named_parameters())
    for name, parameter in model.named_parameters():
        if leave is not None and name.endswith(leave):
            continue
        expected = other[name.removeprefix("module.")].detach()
        off = float((whole(parameter).detach() - expected).norm() / expected.norm().clamp_min(1e-12))
        assert off <= tolerance, (name, off)


def near(a: float | None, b: float | None) -> bool:
    return a is b if a is None or b is None else math.isclose(a, b, rel_tol=1e-3, abs_tol=1e-6)


OPTIONS: dict[str, Any] = {"layouts": LAYOUTS, "targets": "auto"}


def check(model: GPT, **options: Any) -> None:
    """Plan, receipt and weights are those of one process."""
    options = {**OPTIONS, **options}
    alone = gpt()
    planning = {key: options[key] for key in ("layouts", "targets", "scale") if key in options}
    expected_plan, plan = rekindle.plan(alone, **planning), rekindle.plan(model, **planning)
    for a, b in zip(expected_plan.entries, plan.entries, strict=True):
        assert (a.name.removeprefix("module."), a.reason, a.shape, a.left) == (b.name, b.reason, b.shape, b.left)
        assert near(a.dfi_now, b.dfi_now), (a.name, a.dfi_now, b.dfi_now)
    expected, receipt = rekindle.fire(alone, **options), rekindle.fire(model, **options)
    compare(model, alone)
    assert receipt.changed == expected.changed
    assert receipt.skipped == expected.skipped
    for a, b in zip(expected.records, receipt.records, strict=True):
        assert (a.name, a.part, a.count, a.out, a.in_) == (b.name, b.part, b.count, b.out, b.in_)
        for field in ("scale", "dfi_before", "sfe", "norm_before", "norm_after"):
            assert near(getattr(a, field), getattr(b, field)), (a.name, field, getattr(a, field), getattr(b, field))
        assert b.converged


def case_fsdp2() -> None:
    check(sharded(gpt(), world_mesh()))


def case_fsdp2_nearest_scale_and_strength() -> None:
    check(sharded(gpt(), world_mesh()), scale="nearest", strength=0.3)


def case_fsdp2_only_queries_and_full_measures() -> None:
    check(sharded(gpt(), world_mesh()), targets="attention.qk", measure="full")


def case_fsdp2_left_unsharded_after_forward() -> None:
    model = sharded(gpt(), world_mesh(), reshard_after_forward=False)
    model(TOKENS)
    alone = gpt()
    rekindle.fire(alone, **OPTIONS)
    rekindle.fire(model, **OPTIONS)
    assert torch.allclose(model(TOKENS), alone(TOKENS), atol=1e-4)
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()
    compare(model, alone)


def case_fsdp2_mixed_precision_keeps_float32_weights() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)
    check(sharded(gpt(), world_mesh(), mp_policy=policy))


def case_fsdp2_cpu_offload() -> None:
    check(sharded(gpt(), world_mesh(), offload_policy=CPUOffloadPolicy(pin_memory=False)))


def case_distributed_data_parallel_is_bit_identical() -> None:
    model = DistributedDataParallel(gpt())
    alone = gpt()
    rekindle.fire(alone, **OPTIONS)
    rekindle.fire(model, **OPTIONS)
    compare(model, alone)
    for parameter in model.parameters():
        copies = [torch.empty_like(parameter) for _ in range(dist.get_world_size())]
        dist.all_gather(copies, parameter.detach())
        assert all(torch.equal(copies[0], each) for each in copies)


def case_every_weight_cut_by_rows_by_columns_or_copied() -> None:
    for placement in (Shard(0), Shard(1), Replicate()):
        check(placed(gpt(), world_mesh(), lambda _, p, s=placement: [s] if p.ndim > 1 else None))


def case_experts_cut_along_their_axis() -> None:
    check(placed(gpt(), world_mesh(), lambda name, p: [Shard(0)] if "experts" in name else None))


def case_tensor_parallel_plan_of_torch() -> None:
    mesh = world_mesh()
    model = gpt()
    for layer in model.layers:
        parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    check(model)


@world(4)
def case_cut_in_both_dimensions() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    check(placed(gpt(), mesh, lambda _, p: [Shard(0), Shard(1)] if p.ndim > 1 else None))
    check(placed(gpt(), mesh, lambda _, p: [Shard(0), Shard(0)] if p.ndim > 1 else None))


@world(4)
def case_fsdp2_over_tensor_parallel() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = gpt()
    for layer in model.layers:
        parallelize_module(layer, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    # 53 rows over two tensor ranks and then two data ranks: neither cut is even.
    check(sharded(model, mesh["data"]))


@world(4)
def case_hybrid_shards_and_copies() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copy", "shard"))
    check(sharded(gpt(), mesh))


@world(4)
def case_pipeline_stages_fire_their_own_part() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "data"))
    stage, alone = gpt(), gpt()
    number = mesh["stage"].get_local_rank()
    layer, twin = stage.layers[number], alone.layers[number]
    fully_shard(layer, mesh=mesh["data"])
    receipt = rekindle.fire(layer, heads=(), layouts=LAYOUTS)
    expected = rekindle.fire(twin, heads=(), layouts=LAYOUTS)
    compare(layer, twin)
    assert receipt.changed == expected.changed


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Tensor]]:
    names = {id(p): name for name, p in model.named_parameters()}
    return {
        names[id(p)]: {key: whole(value) if isinstance(value, Tensor) else value for key, value in state.items()}
        for p, state in optimizer.state.items()
    }


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


def case_calls_that_differ_between_ranks_raise_everywhere() -> None:
    model = sharded(gpt(), world_mesh())
    strength = 0.5 if dist.get_rank() else 1.0
    with pytest.raises(ValueError, match="the call of rank 1 differs from that of rank 0"):
        rekindle.fire(model, strength=strength, **OPTIONS)
    chosen = "mlp" if dist.get_rank() else "attention"
    with pytest.raises(ValueError, match=r"differs from that of rank 0|matches no weight"):
        rekindle.fire(model, targets=chosen, layouts=LAYOUTS)


def case_a_failure_on_one_rank_in_the_middle_is_raised_by_all_and_put_back() -> None:
    from rekindle.projection import firing

    model = sharded(gpt(), world_mesh())
    before = [whole(p).clone() for p in model.parameters()]
    solve = firing.solve

    def fails(*args: Any, **options: Any) -> Any:
        if dist.get_rank() == 1:
            raise RuntimeError("the solver broke")
        return solve(*args, **options)

    firing.solve = fails
    try:
        with pytest.raises(RuntimeError, match="rank 1: the solver broke"):
            rekindle.fire(model, atomic=True, **OPTIONS)
    finally:
        firing.solve = solve
    for parameter, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(whole(parameter), old)


def case_ranks_with_empty_shards() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 1), nn.Linear(1, 3), nn.Linear(3, 2))
    alone = copy.deepcopy(model)
    model = fully_shard(model, mesh=world_mesh())
    receipt = rekindle.fire(model, heads=(), min_norm=0)
    rekindle.fire(alone, heads=(), min_norm=0)
    compare(model, alone)
    assert len(receipt.records) == 3


def case_a_plan_made_before_sharding_is_carried_out() -> None:
    alone = gpt()
    plan = rekindle.plan(alone, layouts=LAYOUTS)
    model = sharded(gpt(), world_mesh())
    rekindle.fire(model, plan=plan)
    rekindle.fire(alone, plan=plan)
    compare(model, alone)


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
    from rekindle import methods
    from rekindle.sharding import gathered

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


def case_fire_as_a_method_and_the_optimizer_reset_work_on_shards() -> None:
    from rekindle import methods

    model, alone = sharded(gpt(), world_mesh()), gpt()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (model, alone)]
    for m, optimizer in zip((model, alone), optimizers, strict=True):
        step(m, optimizer)
        methods.Compose([methods.FIRE(layouts=LAYOUTS), methods.OptimizerReset()])(m, optimizer)
    compare(model, alone, 1e-4)
    assert all(not bool(v.any()) for s in state_of(model, optimizers[0]).values() for v in s.values())


def case_stacked_experts_on_a_part_of_the_mesh() -> None:
    """Expert parallel beside data parallel: two groups of ranks hold the same experts, dense weights are on all."""
    if dist.get_world_size() < 4:
        return
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "expert"))
    model = placed(gpt(), mesh["expert"], lambda name, p: [Shard(0)] if "experts" in name else None)
    check(placed(model, world_mesh(), lambda name, p: [Shard(0)] if name.endswith("out.weight") else None))


def case_fsdp1_is_refused_and_works_when_summoned() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 9), nn.ReLU(), nn.Linear(9, 7), nn.ReLU(), nn.Linear(7, 2))
    alone = copy.deepcopy(model)
    model[2] = FullyShardedDataParallel(model[2], use_orig_params=True, device_id=torch.device("cpu"))
    wrapped = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (wrapped, alone)]
    data = torch.randn(4, 5)
    for m, optimizer in zip((wrapped, alone), optimizers, strict=True):
        m(data).square().mean().backward()
        optimizer.step()
    with pytest.raises(ValueError, match=r"wrapped by FSDP1.*summon_full_params"):
        rekindle.fire(wrapped, optimizers[0])
    rekindle.fire(alone, optimizers[1])
    with FullyShardedDataParallel.summon_full_params(wrapped, writeback=True):
        receipt = rekindle.fire(wrapped.module, optimizers[0])
    assert receipt.changed == ("0.weight", "2.weight")
    with FullyShardedDataParallel.summon_full_params(wrapped):
        for a, b in zip(wrapped.parameters(), alone.parameters(), strict=True):
            assert torch.allclose(a, b, atol=1e-5)


def case_a_parametrised_sharded_weight_is_skipped_with_the_reason() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(6, 6)), nn.Linear(6, 6), nn.Linear(6, 2))
    plan = rekindle.plan(fully_shard(model, mesh=world_mesh()))
    assert "parametrised and sharded" in next(e.reason for e in plan.entries if e.name == "0.weight")


def case_a_dcp_checkpoint_is_repaired_as_a_file_and_loaded_under_another_layout() -> None:
    import torch.distributed.checkpoint as dcp

    from rekindle.checkpoint import fire_file

    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    source, target = Path(folder[0]) / "in", Path(folder[0]) / "out"
    dcp.save({"model": sharded(gpt(), world_mesh()).state_dict()}, checkpoint_id=source)
    alone = gpt()
    plan = rekindle.plan(alone, layouts=LAYOUTS)
    if dist.get_rank() == 0:
        fire_file(source, target, plan=plan)
    dist.barrier()
    other = placed(gpt(5), world_mesh(), lambda name, p: [Shard(1)] if p.ndim > 1 else None)
    state = {"model": other.state_dict()}
    dcp.load(state, checkpoint_id=target)
    other.load_state_dict(state["model"])
    rekindle.fire(alone, plan=plan)
    compare(other, alone)


def case_batches_and_guard_leave_nothing_unsharded() -> None:
    model, alone = sharded(gpt(), world_mesh()), gpt()
    receipt = rekindle.fire(model, batches=[TOKENS], **OPTIONS)
    expected = rekindle.fire(alone, batches=[TOKENS], **OPTIONS)
    assert near(receipt.outputs_moved, expected.outputs_moved)
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()
    compare(model, alone)


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
