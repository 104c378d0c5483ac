"""Every verb and method on a device that is not the CPU; run by `tests/test_accelerator.py` in a process of its own.

The device is pretended (`pretend_device`), its rules are real: tensors of two devices do not mix, and every time the
host waits for the device is counted. With PRETENDED=mps it also has no float64 and no decompositions. Waits are held to
a constant per group of shapes, because one per matrix is what makes a projection slow on a GPU.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import pretend_device
import rekindle
import zoo_models
from methods.test_everywhere import MAKERS, REFUSED, apply, ready
from pretend_device import NAME, OnDevice, waits
from rekindle.advice.probing import probe
from rekindle.blocks import names
from rekindle.checkpoint import fire_file
from rekindle.diagnosis.curvature import hessian_eigenvalue
from rekindle.engine.solving import CONVERGING, Solver
from rekindle.measures import matrices
from rekindle.methods import PlasticityInjection
from rekindle.monitoring.monitor import Monitor
from rekindle.optimizers.resetting import reset
from rekindle.recording.wiring import WiringError

LIKE_MPS = os.environ.get("PRETENDED") == "mps"
MODELS = ("mlp", "resnet", "nanogpt")


@pytest.fixture(scope="session", autouse=True)
def _device() -> None:
    pretend_device.install(like_mps=LIKE_MPS)
    # To the library this is the device's plain tensor, and no subclass that hides its numbers.
    names.type = lambda value: Tensor if isinstance(value, OnDevice) else type(value)  # type: ignore[attr-defined]


def moved(name: str) -> tuple[nn.Module, nn.Module, torch.optim.Optimizer, Any]:
    """A model of the zoo after two steps, its start, its optimizer and a batch, all on the device."""
    model, start, optimizer, batch = ready(name)
    here, start = tied(model.to(NAME), name), tied(start.to(NAME), name)
    made = type(optimizer)(here.parameters(), **{k: v for k, v in optimizer.defaults.items() if k in ("lr", "betas")})
    zoo_models.loss(here, on(batch)).backward()
    made.step()
    return here, start, made, on(batch)


def tied(model: nn.Module, name: str) -> nn.Module:
    """`to` makes new parameters of a tensor subclass, which loosens what is tied."""
    if name == "nanogpt":
        model.lm_head.weight = model.wte.weight
    return model


def on(batch: Any) -> Any:
    """A batch on the device."""
    if isinstance(batch, Tensor):
        return batch.to(NAME)
    if isinstance(batch, dict):
        return {key: on(value) for key, value in batch.items()}
    return type(batch)(map(on, batch))


def stays(model: nn.Module) -> None:
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        assert tensor.device.type == NAME, name


@pytest.mark.parametrize("solver", get_args(Solver))
@pytest.mark.parametrize("shape", [(3, 5, 7), (2, 40, 24), (2, 96, 96), (1, 200, 70)])
def test_polar(solver: Any, shape: tuple[int, ...]) -> None:
    w = torch.randn(shape)
    w[0, 1] = 0  # a direction to complete
    q, proof = rekindle.polar(w.to(NAME), solver=solver, certificate=True)
    assert q.device.type == NAME and proof.residual.device.type == ("cpu" if LIKE_MPS else NAME)
    there = rekindle.polar(w, solver=solver)
    if solver in CONVERGING:
        assert bool(proof.converged.all())
        assert (q.cpu() - there).abs().max() < 2e-2
    assert str(proof)


def test_gradients_of_polar() -> None:
    w = torch.randn(6, 9).to(NAME).requires_grad_()
    rekindle.polar(w).square().sum().backward()
    assert w.grad is not None and w.grad.device.type == NAME


@pytest.mark.parametrize("name", MODELS)
def test_plan_and_health(name: str) -> None:
    model, start, _, batch = moved(name)
    assert str(rekindle.plan(model))
    for data in (None, [batch]):
        found = rekindle.health(model, data, **({"loss": zoo_models.loss} if data else {}), reference=start)
        assert str(found) and found.to_dict()


@pytest.mark.parametrize("name", MODELS)
def test_fire(name: str) -> None:
    model, _, optimizer, batch = moved(name)
    there = tied(copy.deepcopy(model).to("cpu"), name)
    batches = [batch] if name == "resnet" else None
    receipt = rekindle.fire(model, optimizer, atomic=True, biases="zero", recalibrate=batches)
    rekindle.fire(there, biases="zero")
    stays(model)
    assert receipt.changed and str(receipt) and receipt.to_json()
    for (key, here), other in zip(model.named_parameters(), there.parameters(), strict=True):
        assert (here.detach().cpu() - other.detach()).abs().max() < 2e-2, key
    zoo_models.loss(model, batch).backward()
    optimizer.step()
    stays(model)


@pytest.mark.parametrize("scale", ["nearest", "norm", "fan_in", "init:kaiming"])
def test_scales_and_strength(scale: str) -> None:
    model, _, optimizer, _ = moved("mlp")
    rekindle.fire(model, optimizer, scale=scale, strength=0.5, measure="full")
    stays(model)


def test_half_precision_weights() -> None:
    model = nn.Sequential(nn.Linear(40, 80), nn.ReLU(), nn.Linear(80, 8)).to(NAME, torch.bfloat16)
    rekindle.fire(model)
    stays(model)
    assert model[0].weight.dtype == torch.bfloat16


@pytest.mark.parametrize(("method_name", "name"), [(each, MODELS[i % 3]) for i, each in enumerate(MAKERS)])
def test_methods(method_name: str, name: str) -> None:
    model, start, optimizer, batch = moved(name)
    method = MAKERS[method_name]()
    if (method_name, name) in REFUSED:
        with pytest.raises((ValueError, WiringError), match=REFUSED[method_name, name]):
            apply(method, model, start, optimizer, batch)
        return
    apply(method, model, start, optimizer, batch)
    stays(model)
    zoo_models.loss(model, batch).backward()
    optimizer.step()
    assert torch.isfinite(zoo_models.loss(model, batch)).item()


def test_attach() -> None:
    model, _, optimizer, batch = moved("mlp")
    with rekindle.attach(model, optimizer, rekindle.methods.FIRE(), every=2) as attached:
        for _ in range(5):
            zoo_models.loss(model, batch).backward()
            optimizer.step()
            attached.step()
    assert len(attached.receipts) == 2
    stays(model)


def test_a_plan_with_an_example_and_a_curvature() -> None:
    model, _, _, batch = moved("mlp")
    assert str(rekindle.plan(model, example=batch))
    assert hessian_eigenvalue(model, [batch], zoo_models.loss, steps=3).steps


@pytest.mark.parametrize("mode", ["cheap", "full"])
@pytest.mark.parametrize("shape", [(2, 12, 20), (2, 20, 12)])
def test_measures_are_those_of_the_host(mode: Any, shape: tuple[int, ...]) -> None:
    w = torch.randn(shape)
    there, here = (matrices.measure(each, scale=0.5, mode=mode) for each in (w.to(NAME), w))
    for (name, value), (_, expected) in zip(there.items(), here.items(), strict=True):
        torch.testing.assert_close(value.cpu(), expected, equal_nan=True, msg=name)
    singles = ("welch_ratio", "similar_pairs", "mean_squared_cosine", "singular_values", "scale_free_deviation")
    for single in (getattr(matrices, name) for name in singles):
        torch.testing.assert_close(single(w.to(NAME)).cpu(), single(w), equal_nan=True)


def test_monitor() -> None:
    model, _, optimizer, batch = moved("mlp")
    monitor = Monitor(model, optimizer, every=1, batches=[batch], loss=zoo_models.loss)
    for _ in range(2):
        zoo_models.loss(model, batch).backward()
        optimizer.step()
    assert len(monitor.history) == 2
    monitor.detach()


@pytest.mark.parametrize("policy", ["fresh", "moments", "step"])
def test_optimizer_reset(policy: str) -> None:
    model, _, optimizer, batch = moved("mlp")
    reset(optimizer, dict(model.named_parameters()), policy=policy)
    zoo_models.loss(model, batch).backward()
    optimizer.step()
    stays(model)


def test_probe() -> None:
    model, _, _, batch = moved("mlp")
    assert str(probe(model, [batch], loss=zoo_models.loss, steps=3))


def on_cpu(state: Any) -> Any:
    """What `torch.load(…, map_location="cpu")` gives back of a state."""
    return tree_map(lambda leaf: leaf.detach().cpu().clone() if isinstance(leaf, Tensor) else leaf, state)


@pytest.mark.parametrize("method_name", MAKERS)
def test_a_method_goes_on_from_a_state_that_was_mapped_to_the_cpu(method_name: str) -> None:
    name = {"norm reset": "nanogpt", "start norm": "resnet"}.get(method_name, "mlp")
    model, start, optimizer, batch = moved(name)
    method, again = MAKERS[method_name](), MAKERS[method_name]()
    apply(method, model, start, optimizer, batch)
    again.load_state_dict(on_cpu(method.state_dict()))
    method = again
    if isinstance(method, PlasticityInjection):
        model, start, optimizer, batch = moved(name)
    if method.moment == "backward":
        zoo_models.loss(model, batch).backward()
    method(model, optimizer, batches=[batch], loss=zoo_models.loss)
    stays(model)
    zoo_models.loss(model, batch).backward()
    optimizer.step()


def test_a_fired_checkpoint_mapped_to_the_cpu_loads_into_a_model_on_the_device(tmp_path: Path) -> None:
    model, _, optimizer, batch = moved("mlp")
    torch.save({"model": on_cpu(model.state_dict()), "optimizer": on_cpu(optimizer.state_dict())}, tmp_path / "a.pt")
    fire_file(tmp_path / "a.pt", tmp_path / "b.pt")
    loaded = torch.load(tmp_path / "b.pt", map_location="cpu", weights_only=True)
    model.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    reset(optimizer, dict(model.named_parameters()), policy="fresh")
    zoo_models.loss(model, batch).backward()
    optimizer.step()
    stays(model)


class Many(nn.Module):
    """`count` square layers of one shape, whose singular values lie between .2 and 1: nothing has to be repaired."""

    def __init__(self, count: int, width: int = 40) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(count)])
        self.head = nn.Linear(width, 3)
        with torch.no_grad():
            for layer in self.layers:
                u, _, vh = torch.linalg.svd(layer.weight)
                layer.weight.copy_(u @ torch.linspace(1, 0.2, width).diag() @ vh)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.head(x)


def waited(act: Callable[[], object]) -> int:
    with waits() as counted:
        act()
    return counted.total()


@pytest.mark.parametrize("count", [2, 12])
def test_the_waits_of_polar_do_not_grow_with_the_number_of_matrices(count: int) -> None:
    w = torch.stack([layer.weight.detach() for layer in Many(count).layers]).to(NAME)
    assert waited(lambda: rekindle.polar(w)) <= 8
    assert waited(lambda: rekindle.polar(list(w))) <= 8
    assert waited(lambda: rekindle.polar(w, certificate=True)) <= 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_optimizer", [False, True])
def test_the_waits_of_fire_do_not_grow_with_the_number_of_matrices(with_optimizer: bool, dtype: torch.dtype) -> None:
    found = {}
    for count in (2, 12):
        model = Many(count).to(NAME, dtype)
        optimizer = torch.optim.Adam(model.parameters()) if with_optimizer else None
        if optimizer is not None:
            model(torch.randn(4, 40).to(NAME, dtype)).sum().backward()
            optimizer.step()
        found[count] = waited(lambda model=model, optimizer=optimizer: rekindle.fire(model, optimizer, targets="auto"))
    assert found[12] == found[2] <= 12, found


@pytest.mark.parametrize("shape", [(96, 96), (96, 160), (96, 260)])
def test_the_waits_of_repairs_do_not_grow_with_the_number_of_matrices(shape: tuple[int, int]) -> None:
    """A missing direction is rebuilt for all matrices of a shape at once: dead rows, twins, small and no directions."""
    found = {}
    for count in (2, 10):
        w = torch.randn(count, *shape, generator=torch.Generator().manual_seed(0))
        w[0, :40] = 0
        w[1::2, 0] = 0
        w[1::4, 1:3] = w[1::4, 3:5]
        w[2::4, 0] *= 1e-5
        on_host = rekindle.polar(w)
        found[count] = waited(lambda w=w: rekindle.polar(w.to(NAME), certificate=True))
        factors, checked = rekindle.polar(w.to(NAME), certificate=True)
        assert bool(checked.converged.all())
        torch.testing.assert_close(factors.cpu(), on_host, atol=3e-3, rtol=0)
    assert found[10] <= found[2] + 8 and found[10] <= 60, found


def test_a_worn_model_makes_the_host_wait_no_more_often_with_more_layers() -> None:
    found = {}
    for count in (3, 12):
        model = Many(count)
        with torch.no_grad():
            for layer in model.layers:
                layer.weight[:2] = 0
        found[count] = waited(lambda model=model: rekindle.fire(model.to(NAME)))
    assert found[12] == found[3] <= 60, found


def test_advise_and_guard() -> None:
    model, _, optimizer, batch = moved("mlp")
    given = {"nothing": None, "fire": rekindle.methods.FIRE()}
    advice = rekindle.advise(
        model, [batch], loss=zoo_models.loss, optimizer=optimizer, candidates=given, steps=20, seeds=1, workers=1
    )
    assert str(advice) and all(row.error is None for row in advice.rows)
    guard = rekindle.Guard([batch], zoo_models.loss, max_rise=-1e9)  # whatever happens is too much
    before = [p.detach().cpu().clone() for p in model.parameters()]
    assert rekindle.fire(model, optimizer, guard=guard).rolled_back
    stays(model)
    assert all(torch.equal(p.detach().cpu(), old) for p, old in zip(model.parameters(), before, strict=True))
