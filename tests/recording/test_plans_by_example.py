"""plan(model, example=batch): what runs decides what is an output, how weights are cut and what selects."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import rekindle
from rekindle.recording import Recorder, RecordingError, facts_of, record


class Net(nn.Module):
    """A first layer `c`, something done to its output, and a last layer `out`."""

    def __init__(self, wide: int = 8, narrow: int = 4) -> None:
        super().__init__()
        self.c, self.out = nn.Linear(6, wide), nn.Linear(narrow, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.middle(self.c(x)))  # type: ignore[no-any-return]

    def middle(self, y: Tensor) -> Tensor:
        return y


def halves(y: Tensor, n: int) -> Tensor:
    return y[:, :n] * y[:, n:].sigmoid()


class Gauss:
    def __init__(self, y: Tensor) -> None:
        self.mean, self.spread = torch.chunk(y, 2, 1)

    def sample(self) -> Tensor:
        return self.mean + self.spread.exp() * torch.ones_like(self.mean)


class Masked(Net):
    def middle(self, y: Tensor) -> Tensor:
        a, b = (y * torch.ones(8)).chunk(2, 1)
        return a * b.sigmoid()


class Helped(Net):
    def middle(self, y: Tensor) -> Tensor:
        return halves(y, 4)


class Held(Net):
    def middle(self, y: Tensor) -> Tensor:
        return Gauss(y).sample()


class Listed(Net):
    def middle(self, y: Tensor) -> Tensor:
        return y[:, [0, 1, 2, 3]] * y[:, [4, 5, 6, 7]].tanh()


class Split(Net):
    def middle(self, y: Tensor) -> Tensor:
        a, b = torch.hsplit(y, 2)
        return a * b.relu()


class Reshaped(Net):
    def middle(self, y: Tensor) -> Tensor:
        a, b = y.reshape(-1, 2, 4).unbind(1)
        return a * F.silu(b)


class Modulated(Net):
    def middle(self, y: Tensor) -> Tensor:
        scale, shift = y.chunk(2, 1)
        return torch.ones(len(y), 4).cumsum(1) * (1 + scale) + shift.exp()


@pytest.mark.parametrize("kind", [Masked, Helped, Held, Listed, Split, Reshaped, Modulated])
def test_a_cut_output_is_two_matrices_however_it_is_cut(kind: type[Net]) -> None:
    plan = rekindle.plan(kind(), example=torch.randn(5, 6), targets="auto")
    (entry,) = plan.selected
    assert entry.name == "c.weight"
    assert entry.evidence == "recorded"
    places = torch.arange(48).view(8, 6)
    assert [block.read(places)[0, :, 0].tolist() for block in entry.blocks] == [[0, 6, 12, 18], [24, 30, 36, 42]]


class Rotated(Net):
    """Both halves go into both halves of the result, by constants: a rotation, no cut."""

    def middle(self, y: Tensor) -> Tensor:
        a, b = y.chunk(2, 1)
        turn = torch.arange(4) * 0.1
        return torch.cat([a * turn.cos() + b * turn.sin(), b * turn.cos() - a * turn.sin()], 1)


def test_a_rotation_is_no_cut() -> None:
    (entry,) = rekindle.plan(Rotated(8, 8), example=torch.randn(5, 6), targets="auto").selected
    assert [block.count for block in entry.blocks] == [1]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n_embd = 8
        self.c_attn, self.c_proj, self.last = nn.Linear(8, 24), nn.Linear(8, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.c_attn(x).split(self.n_embd, dim=2)
        q, k, v = (t.view(len(x), -1, 2, 4).transpose(1, 2) for t in parts)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
        return self.last(x + self.c_proj(y))  # type: ignore[no-any-return]


def test_queries_keys_and_values_of_an_unknown_class() -> None:
    model = Attention()
    plan = rekindle.plan(model, example=torch.randn(2, 5, 8), targets="auto")
    roles = {entry.name: [block.role for block in entry.blocks] for entry in plan.selected}
    assert roles["c_attn.weight"] == ["query", "key", "value"]
    assert plan.reasons()["last.weight"] == "output head"
    chosen = rekindle.plan(model, targets="attention.qk", example=torch.randn(2, 5, 8)).selected
    assert [block.part for block in chosen[0].blocks] == ["query", "key"]


class Written(nn.Module):
    """Attention written out: which factor is which is left to the names."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.last = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        scores = (self.q_proj(x) @ self.k_proj(x).mT).softmax(-1)
        return self.last(scores @ self.v_proj(x))  # type: ignore[no-any-return]


def test_attention_that_is_written_out_keeps_the_roles_of_its_names() -> None:
    plan = rekindle.plan(Written(), example=torch.randn(2, 5, 8), targets="auto")
    assert [entry.role for entry in plan.selected] == ["query", "key", "value"]


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pick = nn.Linear(6, 4)
        self.w1, self.w2 = nn.Parameter(torch.randn(4, 6, 5)), nn.Parameter(torch.randn(4, 5, 6))
        self.out = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.pick(x).softmax(-1).topk(2)
        every = torch.bmm(torch.bmm(x.expand(4, *x.shape), self.w1).relu(), self.w2)
        picked = every.transpose(0, 1).gather(1, chosen[..., None].expand(-1, -1, 6))
        return self.out((picked * weights[..., None]).sum(1))  # type: ignore[no-any-return]


def test_what_chooses_among_stacked_experts_is_a_router() -> None:
    plan = rekindle.plan(Mixture(), example=torch.randn(7, 6), targets="auto")
    assert plan.reasons()["pick.weight"] == "router"
    assert {e.name: (e.blocks[0].count, e.blocks[0].out, e.blocks[0].in_) for e in plan.selected} == {
        "w1": (4, 5, 6),
        "w2": (4, 6, 5),
    }


class Entering(nn.Module):
    """One weight `w` that is no Linear's, used in its own way before a last layer."""

    def __init__(self, use: Any, shape: tuple[int, ...] = (6, 5)) -> None:
        super().__init__()
        self.w, self.out, self.use = nn.Parameter(torch.randn(shape)), nn.Linear(5, 3), use

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.use(x, self.w).relu())  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("use", "shape", "size"),
    [
        (lambda x, w: x @ w, (6, 5), (1, 5, 6)),
        (lambda x, w: F.linear(x, w), (5, 6), (1, 5, 6)),
        (lambda x, w: x @ w.T, (5, 6), (1, 5, 6)),
        (lambda x, w: x @ (w / math.sqrt(6)), (6, 5), (1, 5, 6)),
        (lambda x, w: torch.einsum("bi,inh->bnh", x, w).flatten(1), (6, 1, 5), (1, 5, 6)),
    ],
)
def test_orientation_is_how_the_weight_enters(use: Any, shape: tuple[int, ...], size: tuple[int, int, int]) -> None:
    (entry,) = rekindle.plan(Entering(use, shape), example=torch.randn(4, 6), targets="auto").selected
    assert (entry.blocks[0].count, entry.blocks[0].out, entry.blocks[0].in_) == size


@pytest.mark.parametrize(
    ("use", "why"),
    [
        (lambda x, w: x @ (w * torch.ones(6, 5).tril()), "multiplied by a mask or gain"),
        (lambda x, w: x @ F.normalize(w, dim=0), "normalized"),
        (lambda x, w: x @ w.tanh(), "passed through tanh"),
        (lambda x, w: x[:, :5] + w[:1], "element by element"),
    ],
)
def test_what_is_changed_before_its_use_is_skipped_with_the_reason(use: Any, why: str) -> None:
    plan = rekindle.plan(Entering(use), example=torch.randn(4, 6), allow_empty=True)
    assert why in plan.reasons()["w"]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.enc = nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.enc(self.inner(x).relu()).relu(), self.enc.weight.t())


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.value, self.advantage = nn.Linear(6, 6), nn.Linear(6, 1), nn.Linear(6, 3)
        self.old = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x).relu()
        advantage = self.advantage(h)
        return self.value(h) + advantage - advantage.mean(1, keepdim=True)  # type: ignore[no-any-return]


@pytest.mark.parametrize(("model", "heads"), [(Tied(), {"enc.weight"}), (Both(), {"value.weight", "advantage.weight"})])
def test_every_summand_of_an_output_is_a_head(model: nn.Module, heads: set[str]) -> None:
    reasons = rekindle.plan(model, example=torch.randn(4, 6), targets="auto").reasons()
    assert {name for name, reason in reasons.items() if reason == "output head"} == heads


def test_what_never_runs_is_skipped() -> None:
    assert "did not run" in rekindle.plan(Both(), example=torch.randn(4, 6)).reasons()["old.weight"]


_SOURCE = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.wi, self.value = nn.Linear(6, 8), nn.Linear(4, 4)
        self.value2 = nn.Linear(4, 2)
    def forward(self, x):
        a, b = self.wi(x).chunk(2, -1)
        return self.value2(self.value(a * b.sigmoid()).relu())
"""


class TestWithoutSource:
    def made(self) -> nn.Module:
        space: dict[str, Any] = {"nn": nn, "__name__": "nowhere"}
        exec(_SOURCE, space)
        model: nn.Module = space["Net"]()
        return model

    def test_nothing_is_guessed(self) -> None:
        plan = rekindle.plan(self.made(), allow_empty=True)
        assert not plan.selected
        assert "example=batch" in plan.reasons()["wi.weight"]

    def test_an_example_shows_everything(self) -> None:
        plan = rekindle.plan(self.made(), example=torch.randn(3, 6), targets="auto")
        assert {e.name: e.count for e in plan.selected} == {"wi.weight": 2, "value.weight": 1}
        assert plan.reasons()["value2.weight"] == "output head"


class Writing(nn.Module):
    """Counts, caches, makes buffers and layers when it runs first, and has statistics of several kinds."""

    def __init__(self, fails: bool) -> None:
        super().__init__()
        self.fc, self.bn, self.fails, self.calls = nn.Linear(4, 4), nn.BatchNorm1d(4), fails, 0
        self.cache: list[Tensor] = []
        self.kept: dict[str, Tensor] = {}
        self.bounded = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.cache.append(x)
        self.kept["last"] = x
        if not hasattr(self, "mask"):
            self.register_buffer("mask", torch.ones(4))
            self.extra = nn.Linear(4, 4)
            self.fc.register_forward_hook(lambda *_: None)
        y = self.bn(self.bounded(self.fc(x * self.mask))) + torch.rand(4)
        if self.fails:
            raise KeyError("inner")
        return self.extra(y)  # type: ignore[no-any-return]


class TestRecordings:
    def test_leave_nothing_behind(self) -> None:
        model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 2))
        model[0].weight.grad = torch.ones(4, 6)
        before, state = torch.get_rng_state(), {k: v.clone() for k, v in model.state_dict().items()}
        record(model, torch.randn(5, 6, generator=torch.Generator()))
        assert torch.equal(torch.get_rng_state(), before)
        assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
        assert model.training and model[1].training
        assert torch.equal(model[0].weight.grad, torch.ones(4, 6))
        assert not torch.nn.modules.module._global_forward_hooks

    @pytest.mark.parametrize("training", [False, True])
    @pytest.mark.parametrize("fails", [False, True])
    def test_leave_nothing_behind_in_a_model_that_writes_into_itself(self, training: bool, fails: bool) -> None:
        model = Writing(fails).train()
        model.fc.weight.grad = torch.ones(4, 4)
        state, rng = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
        with pytest.raises(RecordingError, match=r"KeyError: 'inner'") if fails else nullcontext():
            record(model, torch.ones(3, 4), training=training)
        assert model.state_dict().keys() == state.keys()
        assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
        assert torch.equal(torch.get_rng_state(), rng)
        assert (model.calls, model.cache, model.kept, model.training, model.bn.training) == (0, [], {}, True, True)
        assert [len(m._forward_hooks) for m in model.modules()] == [0] * len(list(model.modules()))
        assert model.fc.weight.grad is not None
        assert torch.equal(model.fc.weight.grad, torch.ones(4, 4))
        assert torch.is_grad_enabled()
        assert not torch.is_autocast_enabled("cpu")

    def test_of_a_generator_and_its_discriminator_show_both_outputs(self) -> None:
        net = nn.ModuleDict({"generator": nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6))})
        net["discriminator"] = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))

        def step(model: Any, real: Tensor) -> Tensor:
            fake = model["generator"](torch.ones(len(real), 4))
            wrong = model["discriminator"](real) - model["discriminator"](fake.detach())
            return wrong.mean() + model["discriminator"](fake).mean()  # type: ignore[no-any-return]

        facts = facts_of(record(net, torch.randn(3, 6), step))
        outputs = {name for name, fact in facts.by_name.items() if fact.output and "weight" in name}
        assert outputs == {"generator.2.weight", "discriminator.2.weight"}

    def test_of_a_live_step_show_networks_that_are_called_by_themselves(self) -> None:
        holder = nn.ModuleDict({"actor": nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2))})
        holder["critic"] = nn.Sequential(nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, 1))
        state, action = torch.randn(4, 6), torch.randn(4, 2)
        with Recorder(holder) as recorder:
            wrong = holder["critic"](torch.cat([state, action], 1)).square().mean()
            gain = holder["critic"](torch.cat([state, holder["actor"](state)], 1)).mean()
            (wrong - gain).backward()
        facts = facts_of(recorder.graph)
        assert {name for name, fact in facts.by_name.items() if fact.output and "weight" in name} == {
            "actor.2.weight",
            "critic.2.weight",
        }

    def test_of_a_trunk_and_its_heads_show_the_heads(self) -> None:
        agent = nn.ModuleDict({"body": nn.Linear(6, 5), "pi": nn.Linear(5, 2), "v": nn.Linear(5, 1)})
        with Recorder(agent) as recorder:
            h = agent["body"](torch.randn(4, 6)).relu()
            (agent["pi"](h).sum() + agent["v"](h).sum()).backward()
        facts = facts_of(recorder.graph)
        assert {name for name, fact in facts.by_name.items() if fact.output} >= {"pi.weight", "v.weight"}
        assert not facts["body.weight"].output

    def test_on_the_meta_device(self) -> None:
        with torch.device("meta"):
            model = Masked()
        assert len(rekindle.plan(model, example=torch.zeros(2, 6)).selected[0].blocks) == 2

    def test_on_the_meta_device_a_check_of_values_is_answered_by_no(self) -> None:
        class Checking(Masked):
            def middle(self, y: Tensor) -> Tensor:
                return y[:, :4] if (y > 0).all() else super().middle(y)

        with torch.device("meta"):
            model = Checking()
        assert len(rekindle.plan(model, example=torch.zeros(2, 6)).selected[0].blocks) == 2

    def test_a_batch_that_does_not_fit_is_refused_in_words(self) -> None:
        with pytest.raises(RecordingError, match=r"Net does not run on the example .*give a batch"):
            rekindle.plan(Net(), example=torch.zeros(2, 5))

    def test_lazy_modules_are_refused_in_words(self) -> None:
        with pytest.raises(RecordingError, match="has no shape yet"):
            rekindle.plan(nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 1)), example=torch.zeros(2, 5))

    def test_a_saved_plan_keeps_its_evidence(self, tmp_path: Any) -> None:
        plan = rekindle.plan(Masked(), example=torch.randn(2, 6))
        plan.save(tmp_path / "plan.json")
        assert rekindle.Plan.load(tmp_path / "plan.json") == plan
