"""One rank of `test_zero`: every check under every stage and precision; what each raised goes to a file per rank."""

from __future__ import annotations

import importlib
import json
import sys
import traceback
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
from rekindle.sharding import RankError

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
        generator = torch.Generator().manual_seed(dist.get_rank())
        self.x, self.y = torch.randn(4, 7, generator=generator), torch.randint(0, 3, (4,), generator=generator)
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
        with pytest.raises(ValueError, match="one 'step' for a whole partition"):
            rekindle.fire(engine, optimizer)
        assert same(before, run.whole()) and same(moments, run.slot("exp_avg"))

    def one_rank() -> None:
        before = run.whole()

        def fails() -> None:
            with rekindle.sharding.gathered(engine, optimizer) as whole:
                rekindle.fire(engine, whole, optimizer_state="none")
                if dist.get_rank() == 1:
                    raise KeyError("here alone")

        with pytest.raises(KeyError if dist.get_rank() == 1 else RankError):
            fails()
        assert same(before, run.whole())

    def forward_inside() -> None:
        before, guard = run.whole(), rekindle.Guard([run.x], lambda m, x: m(x).square().mean(), max_rise=1.0)
        with pytest.raises(RuntimeError, match="a forward pass is not possible"):
            rekindle.fire(engine, optimizer, optimizer_state="none", guard=guard)
        assert same(before, run.whole())

    def fires() -> None:
        before = run.whole()
        alone.load_state_dict(before)
        expected = rekindle.fire(alone)
        receipt = rekindle.fire(engine, optimizer, optimizer_state="moments")
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
    Path(sys.argv[1], f"{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
