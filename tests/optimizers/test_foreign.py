"""Optimizers of other packages: known by what they keep, and after a reset stepping as new ones do, bit for bit."""

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from rekindle.methods import OptimizerReset
from rekindle.optimizers import check, reset, reset_rows

warnings.filterwarnings("ignore")
SMALL = {"min_8bit_size": 16}

# Each parameter for itself: package, class, options.
ALONE: list[tuple[str, str, dict[str, Any]]] = [
    ("transformers", "Adafactor", {}),
    ("transformers", "Adafactor", {"lr": 1e-3, "relative_step": False, "beta1": 0.9}),
    ("lion_pytorch", "Lion", {}),
    ("pytorch_optimizer", "Lion", {}),
    ("pytorch_optimizer", "Tiger", {}),
    ("bitsandbytes.optim", "Adam8bit", SMALL),
    ("bitsandbytes.optim", "AdamW8bit", SMALL),
    ("bitsandbytes.optim", "PagedAdamW8bit", SMALL),
    ("bitsandbytes.optim", "Lion8bit", SMALL),
    ("bitsandbytes.optim", "SGD8bit", {"momentum": 0.9, "lr": 0.1, **SMALL}),
    ("bitsandbytes.optim", "RMSprop8bit", SMALL),
    ("bitsandbytes.optim", "AdEMAMix8bit", SMALL),
    ("bitsandbytes.optim", "AdamW", {}),
]
# Step counts are of a whole group.
GROUPED: list[tuple[str, str, dict[str, Any]]] = [
    ("schedulefree", "AdamWScheduleFree", {"lr": 0.01}),
    ("schedulefree", "AdamWScheduleFree", {"lr": 0.01, "warmup_steps": 3}),
    ("schedulefree", "SGDScheduleFree", {"lr": 0.1}),
    ("schedulefree", "RAdamScheduleFree", {"lr": 0.01}),
    ("pytorch_optimizer", "SOAP", {}),
    ("pytorch_optimizer", "AdEMAMix", {}),
    ("pytorch_optimizer", "Adan", {}),
    ("pytorch_optimizer", "AdaBelief", {}),
    ("pytorch_optimizer", "ADOPT", {}),
    ("pytorch_optimizer", "CAME", {}),
    ("pytorch_optimizer", "Shampoo", {}),
    ("pytorch_optimizer", "StableAdamW", {}),
    ("pytorch_optimizer", "ScheduleFreeAdamW", {}),
    ("pytorch_optimizer", "LaProp", {}),
]


def name_of(case: tuple[str, str, dict[str, Any]]) -> str:
    return ".".join((case[0], case[1], *case[2]))


def made(case: tuple[str, str, dict[str, Any]], parameters: Any) -> Any:
    package, name, options = case
    optimizer = getattr(pytest.importorskip(package), name)(parameters, **options)
    if hasattr(optimizer, "train"):
        optimizer.train()
    return optimizer


def step(optimizer: Any, gradients: dict[Parameter, Tensor]) -> None:
    for parameter, gradient in gradients.items():
        parameter.grad = gradient.clone()
    optimizer.step()


def trained(case: tuple[str, str, dict[str, Any]], split: bool = False) -> tuple[Any, Parameter, Parameter, Any]:
    draws = torch.Generator().manual_seed(0)
    a, b = (Parameter(torch.randn(8, 6, generator=draws)) for _ in range(2))
    optimizer = made(case, [{"params": [a]}, {"params": [b]}] if split else [a, b])
    for _ in range(6):
        step(optimizer, {p: torch.randn(8, 6, generator=draws) for p in (a, b)})
    return optimizer, a, b, draws


def compare(case: tuple[str, str, dict[str, Any]], split: bool) -> None:
    optimizer, a, b, draws = trained(case, split)
    twin, c, d, other = trained(case, split)
    with torch.no_grad():
        a.copy_(torch.randn(8, 6, generator=draws))
        c.copy_(torch.randn(8, 6, generator=other))
    new_weight = Parameter(a.detach().clone())
    new = made(case, [{"params": [new_weight]}] if split else [new_weight])
    counted = reset(optimizer, {"a": a})
    assert counted.reset + counted.masters == counted.matched > 0
    for _ in range(4):
        gradients = [torch.randn(8, 6, generator=draws) for _ in range(2)]
        step(optimizer, {a: gradients[0], b: gradients[1]})
        step(twin, {c: gradients[0], d: gradients[1]})
        step(new, {new_weight: gradients[0]})
        assert torch.equal(a, new_weight), "as a new optimizer"
        assert torch.equal(b, d), "as if nothing had happened"


@pytest.mark.parametrize("case", ALONE, ids=name_of)
def test_a_parameter_starts_as_in_a_new_optimizer_and_the_other_goes_on(case: Any) -> None:
    compare(case, split=False)


@pytest.mark.parametrize("case", GROUPED, ids=name_of)
def test_a_group_starts_as_in_a_new_optimizer_and_the_other_goes_on(case: Any) -> None:
    compare(case, split=True)


@pytest.mark.parametrize("case", GROUPED, ids=name_of)
def test_a_part_of_a_counted_group_is_refused_with_the_way_out(case: Any) -> None:
    optimizer, a, _, _ = trained(case)
    before = copy.deepcopy(optimizer.state_dict()["param_groups"])
    with pytest.raises(ValueError, match=r"counts steps per group, and 1 of the 2 .* group of their own"):
        check(optimizer, {"a": a})
    assert optimizer.state_dict()["param_groups"] == before
    check(optimizer, {"a": a}, "none")


def test_what_schedule_free_averages_follows_the_weight_in_both_modes() -> None:
    for training in (True, False):
        case = ("schedulefree", "AdamWScheduleFree", {"lr": 0.01})
        optimizer, a, _, _ = trained(case, split=True)
        (optimizer.train if training else optimizer.eval)()
        with torch.no_grad():
            a.fill_(3.0)
        reset(optimizer, {"a": a}, policy="none")
        assert torch.equal(optimizer.state[a]["z"], a)
        optimizer.train()
        optimizer.eval()
        torch.testing.assert_close(a.detach(), torch.full_like(a, 3.0))


def test_a_learning_rate_that_is_estimated_over_all_groups_is_refused() -> None:
    for name in ("Prodigy", "DAdaptAdam"):
        optimizer, a, b, _ = trained(("pytorch_optimizer", name, {}))
        with pytest.raises(ValueError, match=r"unknown slot.*register.*optimizer_state='none'"):
            check(optimizer, {"a": a, "b": b})


def test_muon_variants_are_known() -> None:
    package = pytest.importorskip("pytorch_optimizer")
    for name in ("Muon", "AdaMuon"):
        weight = Parameter(torch.randn(8, 6, generator=torch.Generator().manual_seed(0)))
        groups = [{"params": [weight], "use_muon": True}]
        optimizer = getattr(package, name)(groups)
        for seed in range(3):
            step(optimizer, {weight: torch.randn(8, 6, generator=torch.Generator().manual_seed(seed))})
        new_weight = Parameter(weight.detach().clone())
        new = getattr(package, name)([{"params": [new_weight], "use_muon": True}])
        reset(optimizer, {"w": weight})
        for seed in range(3):
            gradient = torch.randn(8, 6, generator=torch.Generator().manual_seed(seed))
            step(optimizer, {weight: gradient})
            step(new, {new_weight: gradient})
            assert torch.equal(weight, new_weight)


def test_single_rows_of_quantized_state_are_refused() -> None:
    optimizer, a, _, _ = trained(("bitsandbytes.optim", "AdamW8bit", SMALL))
    with pytest.raises(ValueError, match="single neurons cannot be reset"):
        reset_rows(optimizer, a, rows=[0], name="a")
    optimizer, a, _, _ = trained(("lion_pytorch", "Lion", {}))
    reset_rows(optimizer, a, rows=[0], name="a")
    assert optimizer.state[a]["exp_avg"][0].abs().max() == 0
    assert optimizer.state[a]["exp_avg"][1].abs().max() > 0


def test_the_optimizer_reset_of_a_whole_model_works_with_all_of_them() -> None:
    for case in (*ALONE, *GROUPED):
        torch.manual_seed(0)
        model = torch.nn.Linear(6, 8, bias=False)
        optimizer = made(case, model.parameters())
        step(optimizer, {model.weight: torch.ones(8, 6)})
        assert OptimizerReset()(model, optimizer).optimizer.parameters == 1
