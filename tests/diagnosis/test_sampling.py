"""Looking leaves everything as it was, and what could not be seen is listed."""

import copy
import random
import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from known_units import draw, kill
from rekindle.diagnosis.activity import activity
from rekindle.diagnosis.curvature import hessian_eigenvalue
from rekindle.diagnosis.units import rows_of, scores


def test_what_was_not_seen_is_listed_and_never_zero() -> None:
    class Custom(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clamp(-1, 1) ** 3

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return g

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.unused = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)
            self.frozen = nn.Parameter(torch.zeros(3), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(Custom.apply(self.a(x))) + self.frozen

    found = activity(Net(), [draw(4, 3)], loss=lambda m, x: m(x).sum())
    assert found.layers == ()
    reasons = {(each.name, each.what): each.reason for each in found.unmeasured}
    assert reasons["a", "units"] == "no activation was seen on its output"
    assert reasons["unused", "activity"].startswith("its forward did not run")
    assert reasons["unused.weight", "gradient"] == "no gradient reaches it"
    assert reasons["frozen", "gradient"] == "it is frozen"
    assert "unused.weight" not in found.gradient_norms


def test_torchscript_is_listed_as_unmeasured() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted = torch.jit.trace(nn.Sequential(nn.Linear(3, 3), nn.ReLU()), torch.zeros(1, 3))
    found = activity(nn.Sequential(nn.Linear(3, 3), nn.Tanh(), scripted), [draw(4, 3)])
    assert [layer.name for layer in found.layers] == ["1"]
    assert any(each.name == "2" and "TorchScript" in each.reason for each in found.unmeasured)


def test_a_compiled_model_is_sampled_eagerly() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    kill(net[0], -200.0, [1])
    compiled = torch.compile(net, backend="eager")
    compiled(draw(50, 3))
    found = activity(compiled, [draw(50, 3)])
    assert [(layer.name, layer.dead) for layer in found.layers] == [("1", 1)]
    net.compile(backend="eager")
    net(draw(50, 3))
    assert activity(net, [draw(50, 3)]).layers[0].dead == 1


class Fragile(nn.Module):
    """Draws random numbers, changes buffers, and may raise."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm, self.drop = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout()
        self.register_buffer("calls", torch.zeros(1))
        self.register_buffer("replaced", torch.zeros(1))
        self.fail = False

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.replaced = self.replaced + 1
        random.random()
        np.random.rand()
        x = self.norm(F.relu(self.fc(x))) + torch.rand(4)
        if self.fail:
            raise RuntimeError("on purpose")
        return self.drop(x)


def fingerprint(net: Fragile) -> tuple[Any, ...]:
    return (
        torch.get_rng_state().tolist(),
        random.getstate(),
        np.random.get_state()[1].tolist(),
        [m.training for m in net.modules()],
        [(p.grad is None, None if p.grad is None else (id(p.grad), p.grad.tolist())) for p in net.parameters()],
        [(name, id(b), b.tolist()) for name, b in net.named_buffers()],
        [
            len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._forward_hooks_always_called)
            for m in net.modules()
        ],
        torch.backends.mha.get_fastpath_enabled(),
        torch.is_grad_enabled(),
        {name: p.tolist() for name, p in net.named_parameters()},
    )


@pytest.mark.parametrize("with_loss", [False, True])
@pytest.mark.parametrize("fail", [False, True])
def test_everything_is_as_it_was(fail: bool, with_loss: bool) -> None:
    net = Fragile()
    net.norm.eval()
    net(draw(6, 4)).sum().backward()
    net.fc.bias.grad = None
    before = fingerprint(net)
    net.fail = fail

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        value = model(x).square().mean()
        value.backward(retain_graph=True)  # even this is undone
        return value

    if fail:
        with pytest.raises(RuntimeError, match="on purpose"):
            activity(net, [draw(6, 4)], loss=loss if with_loss else None)
        with pytest.raises(RuntimeError, match="on purpose"):
            hessian_eigenvalue(net, [draw(6, 4)], lambda m, x: m(x).sum())
    else:
        activity(net, [draw(6, 4)], loss=loss if with_loss else None)
    assert fingerprint(net) == before
    # No mode is left active either.
    assert torch.overrides._get_current_function_mode() is None


def test_errors_speak_of_the_argument() -> None:
    net = nn.Linear(2, 2)
    with pytest.raises(TypeError, match="wrap it in a list"):
        activity(net, torch.zeros(2, 2))
    with pytest.raises(ValueError, match="batches is empty"):
        activity(net, [])
    with pytest.raises(TypeError, match="scalar tensor, got a tensor of shape"):
        activity(net, [torch.zeros(2, 2)], loss=lambda m, x: m(x))
    with pytest.raises(TypeError, match="a batch is a tensor"):
        activity(net, ["text"])


def test_a_loss_that_calls_the_model_twice_counts_both() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    found = activity(net, [draw(5, 3)], loss=lambda m, x: m(x).mean() + m(-x).mean())
    assert [(layer.name, layer.rows) for layer in found.layers] == [("1", 10)]
    assert found.layers[0].gradient_scores is not None


def test_rows_and_scores_of_odd_shapes() -> None:
    assert rows_of(torch.zeros(5), -1).shape == (1, 5)
    assert rows_of(torch.tensor(1.0), -1) is None
    assert scores(torch.zeros(3)).tolist() == [0, 0, 0]
    assert activity(nn.ReLU(), [torch.ones(4, 3, dtype=torch.bfloat16)]).layers[0].scores.dtype == torch.float32
    silent = activity(nn.ReLU(), [-torch.ones(4, 3)]).layers[0]
    assert (silent.dead, silent.feature_rank, silent.usage_gini) == (3, 0.0, None)


def test_no_hook_survives_a_deepcopy_or_a_second_run() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    first = activity(net, [draw(4, 3)])
    second = activity(copy.deepcopy(net), [draw(4, 3)])
    assert first.layers[0].scores.tolist() == second.layers[0].scores.tolist()
