"""After a reset the changed parameter is stepped as by a new optimizer, every other one as if nothing had happened."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, optim
from torch.nn import Parameter

from rekindle.optimizers import check, live_slots, register, reset, reset_rows, unwrap
from rekindle.optimizers import slots as optimizer_slots
from rekindle.projection.snapshots import snapshot_of

ALL = [
    cls
    for cls in vars(optim).values()
    if isinstance(cls, type) and issubclass(cls, optim.Optimizer) and cls is not optim.Optimizer
]

VARIANTS: list[tuple[Any, dict[str, Any]]] = [
    (optim.Adam, {}),
    (optim.Adam, {"amsgrad": True, "weight_decay": 0.1}),
    (optim.Adam, {"fused": True, "amsgrad": True, "maximize": True}),
    (optim.Adam, {"foreach": True, "betas": (0.8, 0.99)}),
    (optim.Adam, {"lr": torch.tensor(1e-2), "foreach": False}),
    (optim.AdamW, {}),
    (optim.AdamW, {"fused": True}),
    (optim.AdamW, {"foreach": True, "amsgrad": True, "maximize": True}),
    (optim.Adamax, {"foreach": False}),
    (optim.Adamax, {"foreach": True, "maximize": True, "weight_decay": 0.1}),
    (optim.NAdam, {"foreach": False}),
    (optim.NAdam, {"foreach": True, "decoupled_weight_decay": True, "weight_decay": 0.1}),
    (optim.RAdam, {"foreach": False, "maximize": True}),
    (optim.RAdam, {"foreach": True, "lr": 0.1}),
    (optim.Adadelta, {"foreach": False}),
    (optim.Adadelta, {"foreach": True, "maximize": True}),
    (optim.Adagrad, {"foreach": False, "lr_decay": 0.3, "initial_accumulator_value": 0.7}),
    (optim.Adagrad, {"foreach": True, "maximize": True}),
    (optim.Adagrad, {"fused": True, "initial_accumulator_value": 0.2}),
    (optim.RMSprop, {"foreach": False}),
    (optim.RMSprop, {"foreach": True, "centered": True, "momentum": 0.9, "maximize": True}),
    (optim.Rprop, {"foreach": False, "lr": 0.02}),
    (optim.Rprop, {"foreach": True, "maximize": True}),
    (optim.ASGD, {"foreach": False, "t0": 2, "lambd": 0.1}),
    (optim.ASGD, {"foreach": True, "t0": 2, "maximize": True}),
    (optim.SGD, {}),
    (optim.SGD, {"momentum": 0.9, "foreach": False}),
    (optim.SGD, {"momentum": 0.9, "nesterov": True, "foreach": True, "maximize": True}),
    (optim.SGD, {"momentum": 0.9, "dampening": 0.4, "foreach": False}),
    (optim.SGD, {"momentum": 0.9, "dampening": 0.4, "foreach": True, "weight_decay": 0.1}),
    (optim.SGD, {"momentum": 0.9, "fused": True, "nesterov": True}),
    (optim.SparseAdam, {}),
    (optim.SparseAdam, {"maximize": True}),
    (optim.Muon, {}),
    (optim.Muon, {"nesterov": False, "weight_decay": 0.0, "momentum": 0.5}),
    (optim.Adafactor, {"foreach": False}),
    (optim.Adafactor, {"foreach": True, "maximize": True, "weight_decay": 0.1}),
]


def name_of(case: tuple[Any, dict[str, Any]]) -> str:
    return case[0].__name__ + "".join(f"-{key}" for key in case[1])


def step(optimizer: Any, gradients: dict[Parameter, Tensor]) -> None:
    for parameter, gradient in gradients.items():
        sparse = isinstance(optimizer, optim.SparseAdam)
        parameter.grad = gradient.to_sparse() if sparse else gradient.clone()
    optimizer.step()


def trained(cls: Any, options: dict[str, Any]) -> tuple[Any, Parameter, Parameter, torch.Generator]:
    generator = torch.Generator().manual_seed(0)
    a, b = (Parameter(torch.randn(4, 3, generator=generator)) for _ in range(2))
    optimizer = cls([a, b], **options)
    for _ in range(6):
        step(optimizer, {p: torch.randn(4, 3, generator=generator) for p in (a, b)})
    return optimizer, a, b, generator


def test_every_optimizer_of_torch_is_known() -> None:
    known = set(optimizer_slots.SLOTS) | set(optimizer_slots.ONE_HISTORY)
    assert [cls.__name__ for cls in ALL if not any(base in known for base in cls.__mro__)] == []
    assert {case[0] for case in VARIANTS} | {optim.LBFGS} == set(ALL)


@pytest.mark.parametrize("case", VARIANTS, ids=name_of)
def test_fresh_is_a_new_optimizer_for_the_changed_and_nothing_for_the_rest(case: tuple[Any, dict[str, Any]]) -> None:
    cls, options = case
    optimizer, a, b, generator = trained(cls, options)
    a_kept, b_kept, untouched = copy.deepcopy((a, b, optimizer))
    a_kept, b_kept = untouched.param_groups[0]["params"]
    objects = {key: value for key, value in optimizer.state[a].items() if isinstance(value, Tensor)}

    with torch.no_grad():
        a.copy_(torch.randn(4, 3, generator=generator))
    counted = reset(optimizer, {"a": a})

    fresh_a = Parameter(a.detach().clone())
    new = cls([fresh_a], **options)
    for _ in range(3):
        gradient_a, gradient_b = (torch.randn(4, 3, generator=generator) for _ in range(2))
        step(optimizer, {a: gradient_a, b: gradient_b})
        step(new, {fresh_a: gradient_a})
        step(untouched, {a_kept: gradient_a, b_kept: gradient_b})
        assert torch.equal(a, fresh_a)
        assert torch.equal(b, b_kept)
    assert counted.parameters == 1
    assert counted.matched == counted.reset == len(objects) + (cls is optim.SparseAdam)
    if not options.get("dampening"):
        assert all(optimizer.state[a][key] is value for key, value in objects.items())


@pytest.mark.parametrize("case", VARIANTS, ids=name_of)
def test_moments_keeps_the_count_and_step_keeps_the_moments(case: tuple[Any, dict[str, Any]]) -> None:
    cls, options = case
    for policy in ("moments", "step"):
        optimizer, a, _, _ = trained(cls, options)
        before = copy.deepcopy(dict(optimizer.state[a]))
        reset(optimizer, {"a": a}, policy=policy)
        for key, slot in live_slots.slots(optimizer, a).items():
            same = torch.equal(torch.as_tensor(optimizer.state[a][key]), torch.as_tensor(before[key]))
            stays = (slot.kind == "count") == (policy == "moments")
            # ASGD's mu and eta may not have left their start yet, RMSprop's momentum of a first step neither
            assert same if stays else (not same or cls is optim.ASGD), (policy, key)


@pytest.mark.parametrize(
    "cls",
    [
        optim.Adam,
        optim.AdamW,
        optim.Adamax,
        optim.NAdam,
        optim.RAdam,
        optim.Adadelta,
        optim.RMSprop,
        optim.Rprop,
        optim.ASGD,
    ],
)
def test_capturable_state_is_written_in_place(cls: Any) -> None:
    optimizer, a, _, _ = trained(cls, {"foreach": False})
    optimizer.param_groups[0]["capturable"] = True  # stepping needs an accelerator; the state is the same
    objects = {key: (value, value.data_ptr(), value.device, value.dtype) for key, value in optimizer.state[a].items()}
    reset(optimizer, {"a": a})
    for key, (value, pointer, device, dtype) in objects.items():
        now = optimizer.state[a][key]
        assert now is value
        assert (now.data_ptr(), now.device, now.dtype) == (pointer, device, dtype)


def test_fused_sgd_with_dampening_is_refused_in_part_and_done_as_a_whole() -> None:
    options = {"momentum": 0.9, "dampening": 0.4, "fused": True}
    optimizer, a, b, generator = trained(optim.SGD, options)
    with pytest.raises(ValueError, match="group of their own"):
        reset(optimizer, {"a": a})
    assert "momentum_buffer" in optimizer.state[a]
    reset(optimizer, {"a": a, "b": b})
    fresh = [Parameter(p.detach().clone()) for p in (a, b)]
    gradients = [torch.randn(4, 3, generator=generator) for _ in range(2)]
    step(optimizer, dict(zip((a, b), gradients, strict=True)))
    step(optim.SGD(fresh, **options), dict(zip(fresh, gradients, strict=True)))
    assert torch.equal(a, fresh[0])
    assert torch.equal(b, fresh[1])


@pytest.mark.parametrize("policy", ["fresh", "moments", "step"])
def test_lbfgs_drops_its_one_history(policy: str) -> None:
    def closure_of(optimizer: Any, parameters: list[Parameter]) -> Any:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = sum(((p - 1) ** 4).sum() for p in parameters)  # type: ignore[assignment]
            loss.backward()
            return loss

        return closure

    parameters = [Parameter(torch.full((3, 2), float(i + 2))) for i in range(2)]
    optimizer = optim.LBFGS(parameters, max_iter=3)
    optimizer.step(closure_of(optimizer, parameters))
    assert len(optimizer.state[parameters[0]]["old_dirs"]) > 0
    with torch.no_grad():
        parameters[1].mul_(2)
    restore = snapshot_of([parameters[1]], optimizer)
    before = dict(optimizer.state[parameters[0]])
    assert reset(optimizer, {"second": parameters[1]}, policy=policy).dropped == ("LBFGS",)
    restore()
    assert dict(optimizer.state[parameters[0]]) == before
    reset(optimizer, {"second": parameters[1]}, policy=policy)
    copies = [Parameter(p.detach().clone()) for p in parameters]
    new = optim.LBFGS(copies, max_iter=3)
    optimizer.step(closure_of(optimizer, parameters))
    new.step(closure_of(new, copies))
    assert all(torch.equal(p, c) for p, c in zip(parameters, copies, strict=True))


def test_none_and_parameters_without_state_are_left_alone() -> None:
    optimizer, a, b, _ = trained(optim.Adam, {})
    before = copy.deepcopy(dict(optimizer.state[a]))
    assert reset(optimizer, {"a": a}, policy="none").reset == 0
    assert all(torch.equal(optimizer.state[a][key], value) for key, value in before.items())
    fresh = optim.Adam([a, b])
    counted = reset(fresh, {"a": a})
    assert (counted.without_state, counted.matched) == (1, 0)
    assert len(fresh.state) == 0
    assert reset(None, {"a": a}).optimizers == ()


def test_a_parameter_in_no_optimizer_is_an_error_unless_frozen() -> None:
    optimizer, a, _, _ = trained(optim.Adam, {})
    stray = Parameter(torch.ones(2, 2))
    with pytest.raises(ValueError, match=r"'stray'.*none of the given optimizers"):
        reset(optimizer, {"a": a, "stray": stray})
    assert optimizer.state[a]["step"] == 6
    reset(optimizer, {"a": a, "stray": stray.requires_grad_(False)})
    assert optimizer.state[a]["step"] == 0


def test_a_list_of_optimizers_counts_all() -> None:
    adam, a, _, _ = trained(optim.Adam, {})
    sgd, c, _, _ = trained(optim.SGD, {"momentum": 0.9})
    counted = reset([adam, sgd], {"a": a, "c": c})
    assert (counted.optimizers, counted.parameters, counted.reset) == (("Adam", "SGD"), 2, 4)


class Homemade(optim.Optimizer):
    """Keeps a trace of gradients and a float32 copy of each weight."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(step=0, trace=torch.zeros(p.shape), master_param=p.detach().float().clone())
                state["step"] += 1
                state["trace"].add_(p.grad.float())
                state["master_param"].sub_(group["lr"] * state["trace"])
                p.copy_(state["master_param"])


def test_an_unknown_optimizer_is_an_error_that_says_how_to_register_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_slots, "SLOTS", dict(optimizer_slots.SLOTS))
    monkeypatch.setattr(live_slots, "SLOTS", optimizer_slots.SLOTS)
    weight = Parameter(torch.ones(3, 2, dtype=torch.bfloat16))
    optimizer = Homemade([weight])
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    with pytest.raises(ValueError, match=r"Homemade.*'w'.*register\(Homemade, fresh"):
        check(optimizer, {"w": weight})
    with torch.no_grad():
        weight.fill_(0.5)
    register(Homemade, {"step": 0, "trace": 0.0, "master_param": "weight"})
    counted = reset(optimizer, {"w": weight})
    assert (counted.reset, counted.masters) == (2, 1)
    assert optimizer.state[weight]["step"] == 0
    assert optimizer.state[weight]["trace"].abs().sum() == 0
    assert torch.equal(optimizer.state[weight]["master_param"], torch.full((3, 2), 0.5))


class MasterAdam(optim.Adam):
    pass


@pytest.mark.parametrize("policy", ["fresh", "moments", "step", "none"])
def test_a_subclass_with_a_master_copy_gets_the_weight_under_every_policy(policy: str) -> None:
    optimizer, a, _, _ = trained(MasterAdam, {})
    optimizer.state[a]["master_param"] = a.detach().double().clone()
    with torch.no_grad():
        a.fill_(0.25)
    assert reset(optimizer, {"a": a}, policy=policy).masters == 1
    assert torch.equal(optimizer.state[a]["master_param"], torch.full((4, 3), 0.25, dtype=torch.float64))
    optimizer.state[a]["surprise"] = torch.ones(4, 3)
    if policy != "none":
        with pytest.raises(ValueError, match="unknown slot 'surprise'"):
            check(optimizer, {"a": a}, policy)


def test_an_unknown_policy_and_a_thing_that_is_no_optimizer() -> None:
    with pytest.raises(ValueError, match="optimizer_state='all'"):
        check(None, {}, "all")
    with pytest.raises(TypeError, match="got int"):
        unwrap(3)


def test_the_wrappers_of_accelerate_and_lightning_are_seen_through() -> None:
    accelerate = pytest.importorskip("accelerate")
    from lightning.fabric.wrappers import _FabricOptimizer
    from lightning.pytorch.core.optimizer import LightningOptimizer

    adam, a, _, _ = trained(optim.Adam, {})
    accelerate.Accelerator(cpu=True)
    wrapped = accelerate.optimizer.AcceleratedOptimizer(adam)
    objects = (wrapped, LightningOptimizer(adam), LightningOptimizer(wrapped))
    assert all(unwrap(one) == (adam,) for one in objects)
    strategy = pytest.importorskip("lightning.fabric.strategies").SingleDeviceStrategy()
    assert unwrap([_FabricOptimizer(adam, strategy), *objects]) == (adam,)
    assert reset(objects[1], {"a": a}).reset == 3


def test_snapshot_puts_values_and_dropped_slots_back_into_the_same_tensors() -> None:
    optimizer, a, _, _ = trained(optim.SGD, {"momentum": 0.9, "dampening": 0.4, "foreach": False})
    buffer = optimizer.state[a]["momentum_buffer"]
    value = buffer.clone()
    restore = snapshot_of([a], optimizer)
    reset(optimizer, {"a": a})
    assert "momentum_buffer" not in optimizer.state[a]
    buffer.zero_()
    restore()
    assert optimizer.state[a]["momentum_buffer"] is buffer
    assert torch.equal(buffer, value)


ROW_CASES = [case for case in VARIANTS if case[0] is not optim.SparseAdam]


@pytest.mark.parametrize("case", ROW_CASES, ids=name_of)
def test_rows_and_columns(case: tuple[Any, dict[str, Any]]) -> None:
    cls, options = case
    optimizer, a, b, _ = trained(cls, options)
    before = {key: torch.as_tensor(value).clone() for key, value in optimizer.state[a].items()}
    other = copy.deepcopy(dict(optimizer.state[b]))
    reset_rows(optimizer, a, rows=[1, 3])
    for key, slot in live_slots.slots(optimizer, a).items():
        value, old = optimizer.state[a][key], before[key]
        if slot.kind == "count" or value.shape[0] == 1:
            assert torch.equal(value, old)
            continue
        assert torch.equal(value[[0, 2]], old[[0, 2]])
        if slot.kind == "second":
            torch.testing.assert_close(value[1], (old[0] + old[2]) / 2)
            torch.testing.assert_close(value[3], (old[0] + old[2]) / 2)
        elif slot.kind == "average":
            assert torch.equal(value[[1, 3]], a[[1, 3]])
        else:
            rate = optimizer.param_groups[0]["lr"]
            assert torch.equal(value[[1, 3]], torch.full((2, 3), rate if key == "step_size" else 0.0))
    assert all(torch.equal(optimizer.state[b][key], value) for key, value in other.items())


def test_columns_masks_zero_and_errors() -> None:
    optimizer, a, _, _ = trained(optim.Adam, {})
    before = optimizer.state[a]["exp_avg_sq"].clone()
    reset_rows(optimizer, a, columns=torch.tensor([False, True, False]))
    torch.testing.assert_close(optimizer.state[a]["exp_avg_sq"][:, 1], before[:, [0, 2]].mean(1))
    assert optimizer.state[a]["exp_avg"][:, 1].abs().sum() == 0
    counted = reset_rows(optimizer, a, rows=[0], columns=[2], second_moment="zero")
    assert counted.reset == 2
    assert optimizer.state[a]["exp_avg_sq"][0].abs().sum() == 0
    assert optimizer.state[a]["exp_avg_sq"][:, 2].abs().sum() == 0
    reset_rows(optimizer, a, rows=range(4))  # nothing lives on to take a mean of
    assert optimizer.state[a]["exp_avg_sq"].abs().sum() == 0
    assert reset_rows(optimizer, a, rows=[]).reset == 0
    with pytest.raises(IndexError, match="'w' has 4 entries"):
        reset_rows(optimizer, a, rows=[4], name="w")
    with pytest.raises(ValueError, match="mask"):
        reset_rows(optimizer, a, rows=torch.ones(3, dtype=torch.bool))


def test_rows_of_a_bias() -> None:
    bias = Parameter(torch.arange(3.0))
    optimizer = optim.Adam([bias])
    step(optimizer, {bias: torch.tensor([1.0, 2.0, 3.0])})
    reset_rows(optimizer, bias, rows=[0])
    second = optimizer.state[bias]["exp_avg_sq"]
    torch.testing.assert_close(second[0], second[1:].mean())
