"""What users try first, and what a review with fresh eyes found: each of these once failed."""

from __future__ import annotations

import copy
import math
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import rekindle
from rekindle import Receipt, methods
from rekindle.advice import Advised, advise, probe
from rekindle.advice.candidates import Candidate, given_candidates
from rekindle.advice.judging import expected
from rekindle.advice.keeping import Keeper
from rekindle.advice.trials import Question, Trace, Trial
from rekindle.methods import DASH, FIRE, FullReset, WeightDecay

SHORT: dict[str, Any] = {"steps": 20, "seeds": 2, "workers": 1}


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def normed() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 4))


def data(count: int = 4) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [(torch.randn(16, 8, generator=draw), torch.randint(4, (16,), generator=draw)) for _ in range(count)]


def loss(model: nn.Module, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


def question(model: nn.Module, **more: Any) -> Question:
    return Question(model, None, data(), [], loss, **more)


class Own:
    """A method of the user's."""

    def __init__(self, act: Any, name: str = "l1") -> None:
        self.act, self.name = act, name

    def __call__(self, model: nn.Module, optimizer: Any = None, **more: Any) -> Receipt:
        self.act(model)
        return Receipt(self.name)


def zero(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()


def fail(model: nn.Module) -> None:
    raise ValueError("does not fit")


# What is applied is what was tried, and the printed call does it.


@pytest.mark.parametrize("batches", [None, DataLoader(TensorDataset(*map(torch.cat, zip(*data(), strict=True))), 16)])
def test_advice_applies_with_what_it_was_tried_with(batches: Any) -> None:
    advice = advise(normed(), data(), candidates={"dash": DASH()}, otherwise="dash", steps=20, seeds=1, workers=1)
    assert advice.chosen == "dash"  # one seed cannot tell
    model, tried = normed(), Trial(question(normed()), advice.candidates[1], 0)
    advice.apply(model, **({} if batches is None else {"batches": batches}))
    assert same(model, tried.model)


def test_advised_and_a_keeper_apply_without_a_loss_of_their_own() -> None:
    tried = Trial(question(normed()), Candidate("dash", DASH()), 0).model
    advised, kept = normed(), normed()
    Advised(steps=20, candidates=[DASH()], otherwise="dash", seeds=1, workers=1)(advised, batches=data())
    keeper = Keeper(data(), candidates=[DASH()])
    keeper.trigger.chosen = "dash"
    keeper.trigger._note("act", "told to")
    assert keeper.method(kept).method == "dash"
    assert same(advised, tried) and same(kept, tried)


def test_held_out_batches_are_not_applied_with() -> None:
    seen: list[int] = []
    method = Own(lambda model: None)
    method.__class__ = type(
        "Counting", (Own,), {"__call__": lambda s, m, o=None, **k: seen.append(len(k["batches"])) or Receipt("l1")}
    )
    Advised(steps=20, candidates=[method], otherwise="l1", held_out=0.5, seeds=1, workers=1)(net(), batches=data())
    assert set(seen) == {2}


@pytest.mark.parametrize(
    "method",
    [
        *(FIRE(scale="nearest"), FIRE(targets=["0.weight"]), methods.ReDo(), methods.ReGraMa(), DASH()),
        *(FullReset(), methods.HeadReset(), methods.ShrinkPerturb(0.5, "fresh")),
        methods.RandomIsometry(targets=["0.weight"]),
        *(methods.Compose([FIRE(), methods.HeadReset()]), FullReset(fresh=net), Own(zero)),
    ],
    ids=lambda method: getattr(method, "name", "method"),
)  # fmt: skip
def test_the_printed_call_does_what_was_tried(method: Any) -> None:
    candidate = Candidate("it", method)
    known = {"rekindle": rekindle, "model": net(), "optimizer": None, "batches": data(), "loss": loss, "method": method}
    exec(candidate.call, known)
    if candidate.written == "method":
        assert "your candidate 'it'" in candidate.call
    elif hasattr(method, "settings"):
        assert eval(candidate.written, known).settings() == method.settings()


@pytest.mark.parametrize("method", [WeightDecay(0.5), methods.Parseval(), methods.ContinualBackprop()])
def test_what_acts_while_training_is_attached_not_called(method: Any) -> None:
    assert Candidate("it", method).call.startswith("rekindle.attach(model, optimizer, rekindle.methods.")
    advice = advise(net(), data(), candidates=[method], otherwise=method.name, steps=20, seeds=1, workers=1)
    with pytest.raises(ValueError, match=r"rekindle\.attach"):
        advice.apply(net())


# Every candidate is tried as a trainer would use it, or its row says why not.


def test_one_candidate_that_fails_does_not_end_the_others() -> None:
    found = advise(
        net(), data(), loss=loss, candidates=[FIRE(), methods.L2Init(), methods.HareTortoise(), Own(fail)], **SHORT
    )
    errors = {row.name: row.error for row in found.rows}
    assert errors["fire"] is None and "does not fit" in str(errors["l1"])
    assert "UnknownStart" in str(errors["l2-init"]) and "later events" in str(errors["hare-tortoise"])


def test_where_nothing_could_be_tried_nothing_is_known() -> None:
    found = advise(net(), data(), candidates=[Own(fail)], **SHORT)
    assert found.answer == "cannot tell" and "no candidate could be tried" in found.sentence


def test_all_moments_of_a_method_are_tried() -> None:
    decay = WeightDecay(0.5)
    alone, joined, none = (
        Trial(question(net()), Candidate("it", method), 0).advance(20).losses
        for method in (decay, methods.Compose([methods.OptimizerReset(), decay]), None)
    )
    assert joined == pytest.approx(alone) and joined != pytest.approx(none)


def test_methods_that_watch_are_tried() -> None:
    method = methods.ContinualBackprop(replacement_rate=0.5, maturity_threshold=0)
    trial = Trial(question(net()), Candidate("cbp", method), 0)
    nothing = Trial(question(net()), Candidate("nothing"), 0)
    assert trial.advance(20).error is None and trial.trace.losses != nothing.advance(20).losses


def test_trials_do_not_share_what_a_method_gathers() -> None:
    method = methods.UPGD()
    candidate = Candidate("upgd", method)
    before = copy.deepcopy(method.state_dict())
    alone = Trial(question(net()), candidate, 1).advance(10).losses
    Trial(question(net()), candidate, 0).advance(10)
    assert Trial(question(net()), candidate, 1).advance(10).losses == alone
    assert str(method.state_dict()) == str(before)


def test_what_cannot_be_copied_is_refused_alone() -> None:
    method = Own(zero)
    method.lock = threading.Lock()  # type: ignore[attr-defined]

    def clip(model: nn.Module, optimizer: Any) -> None:
        """A function of the user's for every step."""

    clip.moment = "step"  # type: ignore[attr-defined]
    found = advise(net(), data(), candidates={"locked": method, "clip": clip}, **SHORT)  # type: ignore[dict-item]
    errors = {row.name: row.error for row in found.rows}
    assert errors["clip"] is None and "lock" in str(errors["locked"])
    with pytest.raises(ValueError, match="with 2 parameters"):
        advise(net(), data(), copy=lambda: nn.Linear(8, 4), **SHORT)


def test_advice_can_be_kept_in_a_file() -> None:
    advice = advise(net(), data(), loss=lambda m, b: loss(m, b), candidates=[FIRE()], **SHORT)
    again = pickle.loads(pickle.dumps(advice))
    assert again.sentence == advice.sentence and again.tried_with == ((), None)


def test_every_seed_has_its_level_from_the_same_batches() -> None:
    calls: list[int] = []

    def counted(model: nn.Module, batch: Any) -> Tensor:
        calls[-1:] = [calls[-1] + (not torch.is_grad_enabled())] if calls else [1]
        return loss(model, batch)

    probe(net(), data(8), loss=counted, budget=2, seeds=3)
    assert calls == [24]


def test_names_of_candidates() -> None:
    named = given_candidates({"baseline": None, "fire": FIRE()})
    assert [one.name for one in named] == ["nothing", "fire"]
    assert [one.name for one in given_candidates([Own(zero), Own(zero)])] == ["nothing", "l1", "l1-2"]
    for wrong, text in (
        ({"nothing": FIRE()}, "name of doing nothing"),
        ([Own(zero, "a-2"), Own(zero, "a"), Own(zero, "a")], "a-2"),
    ):
        with pytest.raises(ValueError, match=text):
            given_candidates(wrong)  # type: ignore[arg-type]
    for given, text in ((FIRE(), r"put it in \[\]"), ([FIRE], r"FIRE\(\)")):
        with pytest.raises(TypeError, match=text):
            advise(net(), data(), candidates=given, **SHORT)  # type: ignore[arg-type]


# The original stays as it is.


def test_a_loss_that_remembers_its_model_is_told_so() -> None:
    model = net()
    for ask in (lambda: advise(model, data(), loss=lambda _, b: loss(model, b), candidates=[FIRE()], **SHORT),):
        with pytest.raises(ValueError, match="with the model that it is given"):
            ask()
    assert all(p.grad is None for p in model.parameters())
    before = copy.deepcopy(model)
    with pytest.raises(ValueError, match="must copy"):
        advise(model, data(), copy=lambda: model, candidates=[FIRE()], **SHORT)
    assert same(model, before)


def test_modules_in_evaluation_mode_stay_in_it() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    model[1].eval()
    seen = set()
    model[1].register_forward_hook(lambda module, *_: seen.add(module.training))
    probe(model, data(), steps=3, seeds=2)
    advise(model, data(), candidates=[FIRE()], **SHORT)
    assert seen == {False}


def test_what_forward_writes_is_undone() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.calls, self.state, self._built = net(), 0, torch.zeros(4), False

        def forward(self, x: Tensor) -> Tensor:
            self.calls, self._built = self.calls + 1, True
            out: Tensor = self.inner(x)
            self.state += out.detach().mean(0)
            self.last = out.detach()
            return out

    model = Counting()
    state = model.state
    probe(model, data(), steps=3, seeds=2)
    assert model.calls == 0 and model.state is state and not state.any() and not hasattr(model, "last")
    assert model._built is False


def test_sparse_buffers() -> None:
    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = net()
            self.register_buffer("adjacent", torch.eye(16).to_sparse())

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.inner(torch.sparse.mm(self.adjacent, x))
            return out

    model = Graph()
    assert probe(model, data(), steps=3, seeds=2).steps == 3
    assert rekindle.fire(model, guard=rekindle.Guard(data(), loss, max_rise=-9.0)).rolled_back


def test_the_random_state_does_not_change_a_score() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.ReLU(), nn.Linear(16, 4))
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        found.append(probe(model, data(), steps=5, seeds=2))
    assert found[0].score == found[1].score and found[0].level == found[1].level


# Models, losses, batches and optimizers as people have them.


def test_a_loss_may_call_the_model_in_its_own_way() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = net()

        def forward(self, both: Any) -> Tensor:
            out: Tensor = self.inner(torch.cat(both, 1))
            return out

    split = [(x[:, :4], x[:, 4:], y) for x, y in data()]
    found = advise(Two(), split, loss=lambda m, b: functional.cross_entropy(m((b[0], b[1])), b[2]), **SHORT)
    assert all(math.isnan(row.drift) for row in found.rows)


def test_generators_nothing_and_optimizers_that_hold_more() -> None:
    model, other = net(), nn.Linear(2, 2)
    optimizer = torch.optim.Adam([*other.parameters(), *model.parameters()], lr=1e-2)
    loss(model, data()[0]).backward()
    optimizer.step()
    assert probe(model, iter(data()), optimizer=optimizer, steps=3, seeds=2).steps == 3
    found = advise(model, data(), old_batches=None, held_out=None, optimizer=optimizer, candidates=[FIRE()], **SHORT)
    assert found.rows[0].error is None
    twin = Trial(Question(model, optimizer, data(), [], loss), Candidate("nothing"), 0).optimizers[0]
    (own,) = [optimizer.state[p]["exp_avg"] for p in [model[0].weight]]
    assert torch.equal(twin.state[twin.param_groups[0]["params"][0]]["exp_avg"], own)
    for verb in (probe, advise):
        with pytest.raises(ValueError, match="LBFGS"):
            verb(model, data(), optimizer=torch.optim.LBFGS(model.parameters()), steps=20)
        with pytest.raises(TypeError, match="CrossEntropyLoss compares"):
            verb(model, data(), loss=nn.CrossEntropyLoss())  # type: ignore[operator]
        with pytest.raises(ValueError, match="lazy"):
            verb(nn.Sequential(nn.LazyLinear(4)), data())
        with pytest.raises(ValueError, match="meta"):
            verb(net().to("meta"), data())
    with pytest.raises(TypeError, match="CrossEntropyLoss compares"):
        rekindle.Guard(data(), nn.CrossEntropyLoss(), max_rise=1.0)


def test_negative_losses_can_be_probed() -> None:
    found = probe(net(), data(), loss=lambda m, b: loss(m, b) - 5, gain=0.01, steps=200, seeds=2)
    assert found.enough and found.gained > 0


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: advise(net(), data(), steps=0), "steps=0"),
        (lambda: advise(net(), data(), budget="1.2.3"), "not a time"),
        (lambda: advise(net(), data(), judge=loss), "held_out="),
        (lambda: probe(net(), data(), budget=0), "budget=0"),
        (lambda: probe(net(), data(), budget=math.nan), "budget=nan"),
        (lambda: Keeper(data(), candidates=[WeightDecay(0.1)]), "every step"),
        (lambda: Advised(candidates=[WeightDecay(0.1)]), "every step"),
    ],
)
def test_wrong_arguments_are_named_before_work(call: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        call()


# What was not measured is not shown as fine.


def test_one_seed_says_nothing() -> None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    found = probe(model, data(), steps=60, seeds=1, gain=0.01, optimizer=optimizer)
    assert found.enough and found.verdict == "unknown" and "one seed gives no interval" in str(found)


def test_a_function_that_is_gone_has_no_small_drift() -> None:
    def spoil(model: nn.Module) -> None:
        nn.init.constant_(model[0].weight, math.nan)  # type: ignore[index]

    row = next(row for row in advise(net(), data(), candidates=[Own(spoil)], **SHORT).rows if row.name == "l1")
    assert not row.drift <= 0


def test_an_expectation_without_a_fit_has_no_error_of_zero() -> None:
    looks = [(step, 3 / step**0.3) for step in (1, 5, 17, 29, 41, 50)]
    assert math.isnan(expected([Trace(losses=[1.0] * 50, looks=looks)] * 2, 200)[1])


def test_what_candidates_are_judged_by_is_named() -> None:
    wrong = lambda model, batch: (model(batch[0]).argmax(1) != batch[1]).float().mean()  # noqa: E731
    found = advise(net(), data(), held_out=data(9), judge=wrong, candidates=[FIRE()], **SHORT)
    assert found.measure == "judged" and "4 of 9 held-out batches" in str(found)
    assert "judged" in str(found).splitlines()[3]


def test_a_budget_below_one_round_is_kept() -> None:
    def slow(model: nn.Module, batch: Any) -> Tensor:
        time.sleep(0.01)
        return loss(model, batch)

    found = advise(net(), data(), loss=slow, budget=0.5, seeds=3, workers=1)
    assert found.answer == "cannot tell" and found.seconds < 2
    assert any("before its turn" in str(row.error) for row in found.rows)
    again = advise(net(), data(), loss=slow, budget=0.01, seeds=1, steps=1000, otherwise="he-reset", workers=1)
    assert again.chosen == "he-reset"  # it begins in any case


# Guards and keepers.


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_guard_restores_whatever_happens(error: type[BaseException]) -> None:
    model, calls = net(), []
    before = copy.deepcopy(model)

    def interrupted(m: nn.Module, batch: Any) -> Tensor:
        calls.append(1)
        if len(calls) > 1:
            raise error("now")
        return loss(m, batch)

    def half(m: nn.Module) -> None:
        zero(m)
        raise error("half-way")

    guard = rekindle.Guard(data(1), interrupted, max_rise=9.0)
    for act in (
        lambda: guard(FullReset(), model),
        lambda: rekindle.fire(model, guard=guard),
        lambda: rekindle.Guard(data(1), loss, max_rise=9.0)(Own(half), model),
    ):
        calls.clear()
        with pytest.raises(error):
            act()
        assert same(model, before)


def test_a_guard_keeps_a_cure() -> None:
    model = net()
    nn.init.constant_(model[0].weight, math.nan)  # type: ignore[index]
    receipt = rekindle.Guard(data(), loss, max_rise=0.0)(FullReset(), model)
    assert not receipt.rolled_back and bool(loss(model, data()[0]).isfinite())


def test_a_keeper_notes_what_its_guard_took_back() -> None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    keeper = Keeper(data(), loss, candidates=[FullReset()], guard=rekindle.Guard(data(), loss, max_rise=-9.0))
    keeper.trigger.look = lambda metrics: keeper.trigger._answered(  # type: ignore[method-assign]
        rekindle.advice.keeping.Reply(0.1, "lost", "told to", "full-reset", 0.0)
    )
    assert keeper.step(model, optimizer, {}).rolled_back  # type: ignore[union-attr]
    assert [note.what for note in keeper.log] == ["act", "rolled back"]


def until_failed(keeper: Keeper, model: nn.Module) -> None:
    for _ in range(200):
        keeper.step(model, torch.optim.SGD(model.parameters(), lr=0.1), {})
        if keeper.log[-1].what == "failed":
            return
        time.sleep(0.05)


def test_no_failed_probe_stops_training_or_is_free() -> None:
    def breaks(model: nn.Module, batch: Any) -> Tensor:
        time.sleep(0.05)
        raise LookupError("not there")

    for background in (False, True):
        model = net()
        keeper = Keeper(data(), breaks, every=1, share=0.9, background=background)
        keeper.trigger.elapsed = 100.0
        with pytest.warns(RuntimeWarning, match="not there"):
            until_failed(keeper, model)
        assert keeper.trigger.spent >= 0.05
        keeper.close()


def test_failures_that_cost_nothing_do_not_put_off_the_next_probe() -> None:
    now = [0.0]
    keeper = Keeper(lambda: [], every=1, share=0.5, background=False, clock=lambda: now[0])  # nothing is stored yet
    model = net()
    for _ in range(20):
        now[0] += 10.0
        with warnings.catch_warnings(action="ignore"):
            keeper.step(model, torch.optim.SGD(model.parameters(), lr=0.1), {})
    assert keeper.trigger.least == 1.0 and [note.what for note in keeper.log].count("failed") > 10


def test_reading_in_front_of_a_background_probe_counts() -> None:
    def reading() -> Any:
        time.sleep(0.2)
        return data()

    model = net()
    keeper = Keeper(reading, loss, every=1, share=0.9, background=True, seeds=2)
    keeper.trigger.elapsed = 100.0
    keeper.step(model, torch.optim.SGD(model.parameters(), lr=0.1), {})
    assert keeper.trigger.spent >= 0.2
    keeper.close()


def test_a_keeper_reads_loaders_without_touching_training() -> None:
    loader = DataLoader(TensorDataset(*data(1)[0]), 4, shuffle=True)
    model = net()
    first, second = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    keeper = Keeper(loader, loss, every=1, share=0.9, seeds=2, background=False)
    keeper.trigger.elapsed = 10.0
    before = torch.get_rng_state()
    keeper.step(model, first, {})
    assert torch.equal(before, torch.get_rng_state()) and len(keeper.log) == 2
    Advised(steps=20, candidates=[FIRE()], seeds=2, workers=1)(model, batches=loader, loss=loss)
    assert torch.equal(before, torch.get_rng_state())
    keeper.bind(model, second)
    assert keeper.trigger._optimizer is second


def test_replicas_are_sent_to_the_callbacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rekindle.advice.keeping.replicas", lambda model: SimpleNamespace(size=2))
    with pytest.raises(ValueError, match=r"rekindle\.attach"):
        Keeper(data()).bind(net(), None)


@pytest.mark.skipif(not os.path.isdir("/proc"), reason="needs /proc to look for processes")
def test_no_process_is_left_when_the_parent_is_killed() -> None:
    program = (
        "import torch, rekindle, sys; from torch import nn; from rekindle.methods import FIRE\n"
        "def loss(m, b):\n"
        "    print('working', flush=True); return m(b).square().mean()\n"
        "rekindle.advise(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), [torch.ones(2, 4)], loss=loss,\n"
        "                candidates=[FIRE()], steps=10**7, budget='5m', workers=2)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, env={**os.environ, "ORPHAN": "rekindle"}
    )
    assert parent.stdout is not None
    parent.stdout.readline()

    def children() -> list[str]:
        found = []
        for name in filter(str.isdigit, os.listdir("/proc")):
            try:
                with open(f"/proc/{name}/environ", "rb") as file:
                    if b"ORPHAN=rekindle" in file.read() and int(name) != parent.pid:
                        found.append(name)
            except OSError:
                continue
        return found

    assert children()
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    for _ in range(200):
        if not children():
            break
        time.sleep(0.1)
    assert not children()
