"""One rank of `test_zero`: every check under every stage and precision; what each raised goes to a file per rank."""

from __future__ import annotations

import gc
import importlib
import json
import sys
import traceback
import warnings
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import rekindle
from rekindle.methods import ShrinkPerturb
from rekindle.projection import execution
from rekindle.projection.method import MethodError
from rekindle.sharding import zero

# Not where tests are collected: DeepSpeed may not be there.
deepspeed: Any = importlib.import_module("deepspeed") if __name__ == "__main__" else None


def network() -> nn.Sequential:
    """Odd widths: no weight is divided evenly by two ranks. One bias is frozen."""
    torch.manual_seed(0)
    widths = (7, 19, 21, 21, 3)
    layers = [part for a, b in pairwise(widths) for part in (nn.Linear(a, b), nn.ReLU())]
    model = nn.Sequential(*layers[:-1])
    model[2].bias.requires_grad_(False)
    return model


def data(rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(4, 7, generator=generator), torch.randint(0, 3, (4,), generator=generator)


def storages() -> dict[int, torch.UntypedStorage]:
    """What the tensors of this process lie in, by address."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = [each.untyped_storage() for each in gc.get_objects() if type(each) in (Tensor, nn.Parameter)]
    return {storage.data_ptr(): storage for storage in found}


def same_everywhere(text: str) -> bool:
    texts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(texts, text)
    return len(set(texts)) == 1


class Trained:
    """An engine after three steps."""

    def __init__(self, stage: int, dtype: str, optimizer: Callable[[Any], Any]) -> None:
        model = network()
        self.config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 4, "steps_per_print": 10**6, "zero_optimization": {"stage": stage},
            "zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": True,
            "bf16": {"enabled": dtype == "bf16"},
        }  # fmt: skip
        self.dtype = torch.bfloat16 if dtype == "bf16" else torch.float32
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.engine, self.optimizer, _, _ = deepspeed.initialize(
            model=model, optimizer=optimizer(trained), config=self.config
        )
        self.x, self.y = data(dist.get_rank())
        for _ in range(3):
            self.step()

    def step(self) -> float:
        loss = F.cross_entropy(self.engine(self.x.to(self.dtype)).float(), self.y)
        self.engine.backward(loss)
        self.engine.step()
        return loss.item()

    def whole(self) -> dict[str, Tensor]:
        found = {}
        for name, parameter in self.engine.module.named_parameters():
            value = deepspeed.utils.safe_get_full_fp32_param(parameter)
            if value is None:
                with deepspeed.zero.GatheredParameters([parameter]):
                    value = parameter.detach().clone()
            found[name] = value.detach().float().clone()
        return found

    def slot(self, key: str) -> dict[str, Tensor]:
        named = self.engine.module.named_parameters()
        return {n: deepspeed.utils.safe_get_full_optimizer_state(p, key).clone() for n, p in named if p.requires_grad}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def checks(stage: int, dtype: str) -> dict[str, Callable[[], None]]:
    run = Trained(stage, dtype, lambda parameters: torch.optim.AdamW(parameters, lr=1e-2))
    engine, optimizer = run.engine, run.optimizer
    alone = network()

    def refused() -> None:
        before, moments = run.whole(), run.slot("exp_avg")
        with pytest.raises(ValueError, match=r"AdamW counts steps per group, and 4 of the 7 .* a group of their own"):
            rekindle.fire(engine, optimizer)
        assert same(before, run.whole()) and same(moments, run.slot("exp_avg"))

    def one_rank() -> None:
        before = run.whole()

        def fails() -> None:
            with rekindle.sharding.gathered(engine, optimizer) as whole:
                rekindle.fire(engine, whole, optimizer_state="none")
                if dist.get_rank() == 1:
                    raise KeyError("here alone")

        with pytest.raises(KeyError, match="rank 1: here alone"):
            fails()
        assert same(before, run.whole())

    def forward_inside() -> None:
        before, guard = run.whole(), rekindle.Guard([run.x], lambda m, x: m(x).square().mean(), max_rise=1.0)
        with pytest.raises(ValueError, match=r"guard= needs forward passes"):
            rekindle.fire(engine, optimizer, optimizer_state="none", guard=guard)
        with pytest.raises(ValueError, match=r"atomic= is not possible weight by weight .*gathered\(model"):
            rekindle.fire(engine, optimizer, optimizer_state="none", atomic=True)
        with (
            rekindle.sharding.gathered(engine, optimizer) as whole,
            pytest.raises(RuntimeError, match="a forward pass is not possible"),
        ):
            rekindle.fire(engine, whole, optimizer_state="none", guard=guard)
        assert same(before, run.whole())

    def fires() -> None:
        before = run.whole()
        alone.load_state_dict(before)
        expected = rekindle.fire(alone, targets="auto")
        receipt = rekindle.fire(engine, optimizer, optimizer_state="moments", targets="auto")
        assert receipt.changed == expected.changed == ("0.weight", "2.weight", "4.weight")
        assert receipt.optimizer is not None and receipt.optimizer.reset == 6
        for name, value in run.whole().items():
            wanted = alone.state_dict()[name]
            assert (value - wanted).norm() <= 1e-5 * wanted.norm(), name

    def moments() -> None:
        for key in ("exp_avg", "exp_avg_sq"):
            for name, value in run.slot(key).items():
                assert bool(value.any()) == (name not in ("0.weight", "2.weight", "4.weight")), (key, name)

    def forward() -> None:
        with torch.no_grad():
            found, wanted = engine(run.x.to(run.dtype)).float(), alone.to(run.dtype)(run.x.to(run.dtype)).float()
        assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-4), (found, wanted)

    def equal() -> None:
        mine = {**run.whole(), **{f"{name} slot": value for name, value in run.slot("exp_avg").items()}}
        for name, value in mine.items():
            low, high = value.clone(), value.clone()
            dist.all_reduce(low, op=dist.ReduceOp.MIN)
            dist.all_reduce(high, op=dist.ReduceOp.MAX)
            assert torch.equal(low, high), name

    def goes_on() -> None:
        before = run.whole()
        first = run.step()
        for _ in range(20):
            last = run.step()
        after = run.whole()
        assert last < first and not same(before, after)

    def others() -> None:
        method = ShrinkPerturb(noise="fresh", optimizer_state="moments", seed=1)
        with pytest.raises(ValueError, match=r"with rekindle.sharding.gathered\(model, engine.optimizer\) as whole"):
            method(engine, optimizer)
        before = run.whole()
        with rekindle.sharding.gathered(engine, optimizer) as whole:
            changed = method(engine, whole).changed
        after = run.whole()
        assert {name for name in before if not torch.equal(before[name], after[name])} == set(changed)
        equal()

    def momentum() -> None:
        other = Trained(stage, dtype, lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9))
        receipt = rekindle.fire(other.engine, other.optimizer, targets="2.weight")
        kept = {name for name, value in other.slot("momentum_buffer").items() if value.any()}
        assert receipt.changed == ("2.weight",) and "2.weight" not in kept and "0.weight" in kept

    def afresh() -> None:
        """Group 0 changes as a whole and starts over, group 1 goes on; then one step as a new optimizer takes it."""
        fired = ("0.weight", "2.weight", "4.weight")

        def groups(parameters: Any) -> Any:
            first = [p for p in parameters if p.numel() and p.ndim == 2][:3] or parameters[:3]
            held = {id(p) for p in first}
            return torch.optim.AdamW(
                [{"params": first}, {"params": [p for p in parameters if id(p) not in held]}], 1e-2
            )

        other = Trained(stage, dtype, groups)
        receipt = rekindle.fire(other.engine, other.optimizer, targets="auto")
        assert receipt.changed == fired and receipt.optimizer is not None and receipt.optimizer.reset == 6
        assert not any(bool(value.any()) for name, value in other.slot("exp_avg").items() if name in fired)
        assert sorted({float(s["step"]) for s in other.optimizer.optimizer.state.values() if s}) == [0.0, 3.0]
        copied = network()
        copied.load_state_dict(other.whole())
        loss = torch.stack([F.cross_entropy(copied(x), y) for x, y in map(data, range(2))]).mean()
        loss.backward()
        torch.optim.AdamW([copied.get_parameter(name) for name in fired], 1e-2).step()
        other.step()
        for name, value in other.whole().items() if dtype == "fp32" else ():
            assert name not in fired or torch.allclose(value, copied.get_parameter(name), atol=1e-4), name

    def zeroed() -> None:
        before = run.whole()
        assert rekindle.fire(engine, optimizer, optimizer_state="moments", biases="zero", targets="0.weight")
        after = run.whole()
        assert not after["0.bias"].any() and torch.equal(after["4.bias"], before["4.bias"])

    def broken() -> None:
        """Numbers that are not finite in the part of one rank."""
        other = Trained(stage, dtype, lambda parameters: torch.optim.AdamW(parameters, lr=1e-2))
        for name, parameter in other.engine.module.named_parameters() if dist.get_rank() == 1 else ():
            if name.endswith("weight") and stage == 3:
                part = deepspeed.utils.safe_get_local_fp32_param(parameter)
                deepspeed.utils.safe_set_local_fp32_param(parameter, torch.full_like(part, float("nan")))
            elif name.endswith("weight"):
                deepspeed.utils.safe_set_full_fp32_param(parameter, torch.full(parameter.shape, float("nan")))
        before = other.whole()
        with pytest.raises(ValueError, match=r"holds \d+ NaN or Inf of \d+: nothing was changed") as caught:
            rekindle.fire(other.engine, other.optimizer, optimizer_state="moments", targets="auto")
        assert same_everywhere(str(caught.value))
        after = other.whole()
        assert all(torch.equal(before[name].nan_to_num(), after[name].nan_to_num()) for name in before)

    def midway() -> None:
        """Rank 1 owns the second and the third weight by cost, and fails at the third."""
        before, solve, calls = run.whole(), execution.solve, 0
        for _ in range(2):
            run.step()
        before = run.whole()

        def fails(*args: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == 2:
                raise RuntimeError("the solver broke")
            return solve(*args, **options)

        execution.solve = fails
        try:
            with pytest.raises(MethodError, match="fire stopped: rank 1: the solver broke") as caught:
                rekindle.fire(engine, optimizer, optimizer_state="moments", targets="auto")
        finally:
            execution.solve = solve
        after, kept = run.whole(), run.slot("exp_avg")
        assert caught.value.receipt.changed == ("2.weight", "4.weight")
        assert {name for name in before if not torch.equal(before[name], after[name])} == {"2.weight", "4.weight"}
        assert not kept["2.weight"].any() and not kept["4.weight"].any() and bool(kept["0.weight"].any())
        equal()

    def few() -> None:
        """Counted whenever one is fetched, solved or put back: what lies in memory now and did not before."""
        largest, known, most = 4 * 21 * 21, storages(), 0
        kept = {name: getattr(zero.Partition, name) for name in ("fetch", "put")}

        def watched(function: Any) -> Any:
            def call(*args: Any, **options: Any) -> Any:
                nonlocal most
                found = function(*args, **options)
                new = [held.nbytes() for address, held in storages().items() if address not in known]
                most = max(most, sum(size for size in new if size >= largest // 2))
                return found

            return call

        solve = execution.solve
        execution.solve = watched(solve)
        for name, function in kept.items():
            setattr(zero.Partition, name, watched(function))
        try:
            rekindle.fire(engine, optimizer, optimizer_state="moments", targets="auto")
        finally:
            execution.solve = solve
            for name, function in kept.items():
                setattr(zero.Partition, name, function)
        assert largest <= most <= 3 * largest + 64, most / largest

    return {
        "a step count of single parameters is refused and nothing changes": refused,
        "an error on one rank is raised by all and nothing changes": one_rank,
        "a forward pass inside is refused before anything is written": forward_inside,
        "fire ends where one process ends": fires,
        "moments of changed weights are zero, of others not": moments,
        "the next forward pass uses the new weights": forward,
        "all ranks hold the same": equal,
        "training goes on from there": goes_on,
        "other methods refuse with a way that works": others,
        "momentum without a count starts afresh": momentum,
        "a parameter group that changes as a whole starts afresh": afresh,
        "biases are zeroed": zeroed,
        "a part that is not finite is found before anything is written": broken,
        "an error in the middle is raised by all with what was written": midway,
        "a rank holds three whole parameters at most": few,
    }


def main() -> None:
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    results: dict[str, str | None] = {}
    for stage in (1, 2, 3):
        for dtype in ("fp32", "bf16"):
            for name, check in checks(stage, dtype).items():
                try:
                    check()
                    results[f"{stage} {dtype} {name}"] = None
                except Exception:
                    results[f"{stage} {dtype} {name}"] = traceback.format_exc()
                Path(sys.argv[1], f"{dist.get_rank()}.json").write_text(json.dumps(results), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
