"""`fire` on parts as DeepSpeed ZeRO 3 holds them, with stand-ins for its accessors: `test_zero` has the real ones.

Every parameter is empty in the model; its float32 numbers lie in a flat part per rank, one after the other in the flat
tensor of the parameter group, which the inner optimizer steps.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gpt import LAYOUTS, gpt, near
from torch import Tensor, nn

import rekindle
from rekindle.projection.method import MethodError
from rekindle.sharding import zero


class Parts:
    """What DeepSpeed's optimizer is for `rekindle`, over parameter groups given by name."""

    def __init__(self, model: nn.Module, groups: list[list[str]]) -> None:
        named = dict(model.named_parameters())
        size, rank = dist.get_world_size(), dist.get_rank()
        self.fp16_groups = [[named[name] for name in group] for group in groups]
        self.sub_group_to_group_id = dict(enumerate(range(len(groups))))
        self.fp32_partitioned_groups_flat = []
        self.places: dict[int, tuple[int, int, int]] = {}  # parameter → group, start, length
        for number, group in enumerate(self.fp16_groups):
            parts, start = [], 0
            for parameter in group:
                length = -(-parameter.numel() // size)
                flat = torch.zeros(length * size)
                flat[: parameter.numel()] = parameter.detach().flatten()
                parts.append(flat[length * rank : length * (rank + 1)])
                self.places[id(parameter)] = number, start, length
                start += length
            self.fp32_partitioned_groups_flat.append(nn.Parameter(torch.cat(parts)))
        for number, parameter in enumerate(named.values()):
            parameter.ds_id, parameter.ds_shape = number, parameter.shape
            parameter.data = torch.empty(0)
        self.optimizer = torch.optim.AdamW([{"params": [flat]} for flat in self.fp32_partitioned_groups_flat], 1e-3)

    def step(self) -> None:
        for flat in self.fp32_partitioned_groups_flat:
            flat.grad = torch.ones_like(flat)
        self.optimizer.step()

    def own(self, parameter: Tensor, key: str | None = None) -> Tensor:
        number, start, length = self.places[id(parameter)]
        flat = self.fp32_partitioned_groups_flat[number]
        return (flat.detach() if key is None else self.optimizer.state[flat][key])[start : start + length]

    def full(self, parameter: Any, key: str | None = None) -> Tensor:
        own = self.own(parameter, key)
        found = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(found, own)
        return torch.cat(found)[: parameter.ds_shape.numel()].view(parameter.ds_shape)

    def accessors(self) -> ModuleType:
        @contextmanager
        def gathered(parameters: list[Any], modifier_rank: int | None = None) -> Iterator[None]:
            for parameter in parameters:
                parameter.data = torch.empty(parameter.ds_shape)
            yield
            for parameter in parameters:
                parameter.data = torch.empty(0)

        module: Any = ModuleType("deepspeed")
        module.utils, module.zero = ModuleType("deepspeed.utils"), ModuleType("deepspeed.zero")
        module.utils.safe_get_full_fp32_param = self.full
        module.utils.safe_get_full_optimizer_state = self.full
        module.utils.safe_get_local_fp32_param = self.own
        module.utils.safe_set_local_fp32_param = lambda p, value: self.own(p).copy_(value)
        module.utils.safe_set_local_optimizer_state = lambda p, value, key: self.own(p, key).copy_(value)
        module.zero.GatheredParameters = gathered
        return module


@contextmanager
def partitioned(apart: bool = True) -> Iterator[tuple[nn.Module, Parts]]:
    """A GPT in parts: what `fire` changes in a group of its own, or all in one."""
    model = gpt()
    fired = [entry.key for entry in rekindle.plan(model, layouts=LAYOUTS).selected]
    others = [name for name, _ in model.named_parameters() if name not in fired]
    parts = Parts(model, [fired, others] if apart else [[*fired, *others]])
    parts.step()
    sys.modules["deepspeed"] = parts.accessors()
    try:
        yield model, parts
    finally:
        del sys.modules["deepspeed"]


def wholes(model: nn.Module, parts: Parts, key: str | None = None) -> dict[str, Tensor]:
    return {name: parts.full(parameter, key) for name, parameter in model.named_parameters()}


def case_partitions_end_as_on_one_process() -> None:
    with partitioned() as (model, parts):
        alone = gpt()
        alone.load_state_dict(wholes(model, parts), strict=False)
        expected = rekindle.fire(alone, layouts=LAYOUTS, biases="zero")
        fetched: list[int] = []
        fetch = zero.Partition.fetch
        zero.Partition.fetch = lambda self: fetched.append(self.parameter.ds_id) or fetch(self)  # type: ignore
        try:
            receipt = rekindle.fire(model, parts, layouts=LAYOUTS, biases="zero", optimizer_state="moments")
        finally:
            zero.Partition.fetch = fetch
        assert max(fetched.count(each) for each in set(fetched)) == 3  # plan, check, solve
        assert (receipt.changed, receipt.skipped) == (expected.changed, expected.skipped)
        assert receipt.biases_zeroed == expected.biases_zeroed > 0
        for a, b in zip(expected.records, receipt.records, strict=True):
            assert (a.name, a.part, a.count) == (b.name, b.part, b.count) and near(a.sfe, b.sfe)
        for name, value in wholes(model, parts).items():
            wanted = alone.get_parameter(name).detach()
            assert (value - wanted).norm() <= 1e-5 * wanted.norm(), name
        zeroed = {name for name, value in wholes(model, parts, "exp_avg").items() if not value.any()}
        assert set(receipt.changed) <= zeroed and "embedding.weight" not in zeroed
        assert all(not parameter.numel() for parameter in model.parameters())


def case_partitions_start_a_step_count_again_with_its_whole_group() -> None:
    with partitioned() as (model, parts):
        rekindle.fire(model, parts, layouts=LAYOUTS)
        assert [float(state["step"]) for state in parts.optimizer.state.values()] == [0.0, 1.0]
    with partitioned(apart=False) as (model, parts):
        before = wholes(model, parts)
        with pytest.raises(ValueError, match=r"AdamW counts steps per group, and .* into a group of their own"):
            rekindle.fire(model, parts, layouts=LAYOUTS)
        assert all(torch.equal(before[name], value) for name, value in wholes(model, parts).items())


def case_partitions_are_checked_before_and_written_together() -> None:
    from rekindle.projection import execution

    last = dist.get_world_size() - 1
    with partitioned() as (model, parts):
        if dist.get_rank() == last:
            parts.own(model.get_parameter("layers.1.down.weight")).fill_(float("nan"))
        before = wholes(model, parts)
        with pytest.raises(ValueError, match=r"'layers.1.down.weight' holds \d+ NaN or Inf"):
            rekindle.fire(model, parts, layouts=LAYOUTS)
        after = wholes(model, parts)
        assert all(torch.equal(before[name].nan_to_num(), after[name].nan_to_num()) for name in before)
    solve, calls = execution.solve, 0

    def fails(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2 and dist.get_rank() == 1:
            raise RuntimeError("the solver broke")
        return solve(*args, **options)

    with partitioned() as (model, parts):
        before, execution.solve = wholes(model, parts), fails
        try:
            with pytest.raises(MethodError, match=r"fire stopped: .*rank 1: the solver broke") as caught:
                rekindle.fire(model, parts, layouts=LAYOUTS, optimizer_state="moments")
        finally:
            execution.solve = solve
        after = wholes(model, parts)
        changed = {name for name in before if not torch.equal(before[name], after[name])}
        assert changed == set(caught.value.receipt.changed) and changed
