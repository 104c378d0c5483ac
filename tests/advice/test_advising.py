"""Advice: the remedy that helps is chosen, and nothing is where nothing helps; the model stays as it is."""

from __future__ import annotations

import copy
import multiprocessing
import random
import threading
from time import perf_counter
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from rekindle import Receipt
from rekindle.advice import advising, racing
from rekindle.advice.advised import Advised
from rekindle.advice.advising import advise
from rekindle.advice.candidates import Candidate, candidates_for, layer_groups
from rekindle.advice.progress import seconds_of
from rekindle.advice.trials import RUNGS, Question, Trace, Trial
from rekindle.methods import FIRE, FullReset, L2Init, ShrinkPerturb, WeightClip


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))


def data(count: int = 4) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(16, 8), torch.randint(4, (16,))) for _ in range(count)]


class Ruin:
    """Makes any network worse at once, and for long."""

    name = "ruin"

    def __call__(self, model: nn.Module, optimizer: Any = None, **_: Any) -> Receipt:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.0) if parameter.dim() > 1 else parameter.fill_(-5.0)
        return Receipt("ruin")


def lost() -> nn.Module:
    """No unit of the second layer fires."""
    model = net()
    with torch.no_grad():
        model[2].bias.fill_(-50.0)
    return model


def test_a_network_that_cannot_learn_is_told_to_start_again() -> None:
    model = lost()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    candidates = {"nothing": None, "full-reset": FullReset(), "ruin": Ruin()}
    advice = advise(model, data(), optimizer=optimizer, candidates=candidates, steps=100, workers=1)
    assert advice.answer == "apply" and advice.chosen == "full-reset"
    assert advice.choice is candidates["full-reset"] and "FullReset" in advice.call
    best = advice.rows[0]
    assert best.name == "full-reset" and best.difference_interval[1] < 0 and 1 < len(best.ranks) <= len(RUNGS)
    receipt = advice.apply(model, optimizer)
    assert receipt.method == "full-reset" and bool((model[2].bias > -1).all())


def test_a_network_that_learns_well_is_left_as_it_is() -> None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    advice = advise(model, data(), optimizer=optimizer, candidates=[Ruin()], steps=60, workers=1)
    assert advice.answer == "do not" and advice.choice is None
    before = copy.deepcopy(model.state_dict())
    assert advice.apply(model, optimizer).changed == ()
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))


def test_too_little_time_cannot_tell() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    advice = advise(model, data(), optimizer=optimizer, candidates=[FIRE()], steps=100_000, budget=1.0, workers=1)
    assert advice.answer == "cannot tell" and advice.choice is None and "budget" in advice.sentence
    assert advice.steps < advice.horizon


def test_the_original_is_untouched_and_seeds_are_common() -> None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    functional.cross_entropy(model(data()[0][0]), data()[0][1]).backward()
    optimizer.step()
    new, old = data(), data(2)
    state, slots, random = (
        copy.deepcopy(model.state_dict()),
        copy.deepcopy(optimizer.state_dict()),
        torch.get_rng_state(),
    )
    advice = advise(model, new, old_batches=old, optimizer=optimizer, steps=20, workers=1, seeds=2)
    assert all(torch.equal(a, b) for a, b in zip(state.values(), model.state_dict().values(), strict=True))
    for before, after in zip(slots["state"].values(), optimizer.state_dict()["state"].values(), strict=True):
        assert all(torch.equal(before[key], after[key]) for key in before)
    assert torch.equal(random, torch.get_rng_state())
    assert {row.name for row in advice.rows} == {one.name for one in candidates_for(model, new)}
    assert str(advice).startswith(advice.sentence) and advice.to_dict()["rows"][0]["name"]


def normalized() -> nn.Module:
    body = [nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2)]
    return nn.Sequential(*body, nn.Linear(8 * 36, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 4))


def test_nothing_of_the_original_is_touched_by_any_candidate() -> None:
    """Weights, buffers, gradients, optimizer, modes, hooks and every random state, with all candidates there are."""
    model = normalized()
    images = [(torch.randn(8, 1, 8, 8), torch.randint(4, (8,))) for _ in range(3)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    functional.cross_entropy(model(images[0][0]), images[0][1]).backward()
    optimizer.step()
    model[1].eval()
    model[5].register_forward_hook(lambda *_: None)

    def everything() -> list[Any]:
        tensors = [*model.state_dict().values(), *(p.grad for p in model.parameters())]
        tensors += [value for slots in optimizer.state.values() for value in slots.values()]
        kept: list[Any] = [tensor.clone() for tensor in tensors] + [torch.get_rng_state()]
        kept += [torch.tensor(numpy.random.get_state()[1].astype("int64"))]
        return [*kept, random.getstate(), *([m.training, len(m._forward_hooks)] for m in model.modules())]

    before, places = everything(), [p.data_ptr() for p in model.parameters()]
    loader = torch.utils.data.DataLoader(images, batch_size=None, shuffle=True)  # draws from the global state
    advice = advise(model, loader, old_batches=images, held_out=images[:1], optimizer=optimizer, steps=20,
                    layers=True, workers=1, seeds=2)  # fmt: skip
    assert {"dash", "fire-conv", "fire-first-third"} <= {row.name for row in advice.rows}
    for a, b in zip(before, everything(), strict=True):
        assert torch.equal(a, b) if isinstance(a, Tensor) else a == b
    assert places == [p.data_ptr() for p in model.parameters()]


def test_doing_nothing_is_plain_training_with_the_optimizers_state() -> None:
    model, batches = net(), data(1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1])

    def train(steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            value = loss(model, batches[0])
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            losses.append(float(value.detach()))
        return losses

    train(3)
    trial = Trial(Question(model, optimizer, batches, [], loss), candidates_for(model)[0], seed=0)
    assert trial.advance(5).losses == pytest.approx(train(5), rel=1e-6)


@pytest.mark.parametrize("workers", [2])
def test_processes_give_the_same_answer(workers: int) -> None:
    model, batches = lost(), data()
    both = [advise(model, batches, candidates=[FullReset()], steps=24, seeds=2, workers=w) for w in (1, workers)]
    assert [row.level for row in both[0].rows] == pytest.approx([row.level for row in both[1].rows], rel=1e-5)


def test_an_error_in_a_process_reaches_the_caller() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        raise KeyError("labels")

    with pytest.raises(KeyError, match="labels"):
        advise(net(), data(), loss=loss, candidates=[FIRE()], steps=20, workers=2)
    assert threading.active_count() < 50


def test_methods_of_every_moment_can_be_candidates() -> None:
    start = net()
    pull, clip = L2Init(1e-2), WeightClip()
    pull.remember(start)
    advice = advise(start, data(), candidates={"nothing": None, "l2": pull, "clip": clip}, steps=20, workers=1)
    assert all(row.error is None for row in advice.rows)


def test_a_candidate_that_does_not_fit_says_why_and_the_others_go_on() -> None:
    advice = advise(net(), data(), candidates=[FIRE(targets="attention.qk"), FIRE()], steps=20, workers=1)
    refused = [row for row in advice.rows if row.error]
    assert len(refused) == 1 and "attention.qk" in str(refused[0].error) and "not tried" in str(advice)


def test_a_model_that_cannot_be_copied_has_a_way_out() -> None:
    model = net()
    model.lock = threading.Lock()  # type: ignore[assignment]
    with pytest.raises(ValueError, match="pass copy="):
        advise(model, data(), candidates=[FullReset()], steps=20, workers=1)

    def again() -> nn.Module:
        other = net()
        other.load_state_dict(model.state_dict())
        return other

    assert advise(model, data(), candidates=[FullReset()], steps=20, workers=1, copy=again).rows


class Block(nn.Module):
    """Attention with its own projections, and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.linear1, self.linear2 = nn.Linear(8, 16), nn.Linear(16, 8)
        self.head = nn.Linear(8, 3)


def test_layers_adds_groups_by_kind_and_by_depth() -> None:
    thirds = ["fire-first-third", "fire-middle-third", "fire-last-third"]
    assert [one.name for one in layer_groups(net())] == thirds
    model = Block()
    changed = {}
    for one in layer_groups(model):
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        assert one.method is not None
        one.method(copied := copy.deepcopy(model))
        changed[one.name] = {n for n, tensor in copied.state_dict().items() if not torch.equal(tensor, before[n])}
    # The packed projection holds queries, keys and values: only a group of the library's own can take a part of it.
    assert changed["fire-attention.qk"] == {"attention.in_proj_weight"}
    assert changed["fire-attention.vo"] == {"attention.out_proj.weight"}
    assert changed["fire-first-third"] == {"attention.in_proj_weight", "attention.out_proj.weight"}
    everything = set.union(*changed.values())
    assert {"linear1.weight", "linear2.weight", "head.weight"} <= everything


class Clock:
    """Each loss takes a tenth of a second, so that no busy machine matters."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def replace(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for module in (advising, racing):
            monkeypatch.setattr(module, "perf_counter", self)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self.now += 0.1
        return functional.cross_entropy(model(batch[0]), batch[1])


@pytest.mark.parametrize("held_out", [0, 2])
def test_the_budget_is_kept_within_a_fifth(monkeypatch: pytest.MonkeyPatch, held_out: int) -> None:
    clock = Clock()
    clock.replace(monkeypatch)
    judged = data(held_out)
    advice = advise(
        net(), data(), loss=clock.loss, held_out=judged, candidates=["lr:1"], epochs=None, budget=100, workers=1
    )
    assert 80 < clock() < 120 and advice.steps == advice.horizon


def test_a_step_that_takes_longer_than_the_budget_ends_with_cannot_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    clock.replace(monkeypatch)
    advice = advise(net(), data(), loss=clock.loss, candidates=[FIRE()], budget=1.0, workers=1)
    assert advice.answer == "cannot tell" and advice.steps == 1


def test_who_is_clearly_behind_is_dropped_but_not_before_the_safe_depth() -> None:
    """The first two are alike, the others learn slowly; what never was behind goes on to the end."""
    names = ["nothing", "fire", "slow", "slower"]

    class Where:
        def __init__(self) -> None:
            self.workers = 1
            self.steps = [0] * 8
            self.gone: dict[int, int] = {}

        def advance(self, numbers: list[int], steps: int, horizon: float) -> dict[int, Trace]:
            for number in numbers:
                self.steps[number] += steps
            slow = {n: max(n % 4 - 1, 0) for n in numbers}
            return {n: Trace(losses=[9.0] + [1.0 + slow[n] + 0.01 * (n // 4)] * (self.steps[n] - 1)) for n in numbers}

        def drop(self, numbers: list[int]) -> None:
            self.gone |= dict.fromkeys(numbers, self.steps[numbers[0]])

    where = Where()
    race = racing.Race(where, [Candidate(n, None) for n in names], [0, 1], (perf_counter(), 1e3), False, 4)  # type: ignore[arg-type]
    assert race.to_the_end(200) == 200 and race.steps == 200
    assert where.gone == dict.fromkeys([2, 3, 6, 7], 50) and race.running == names[:2]


def test_budgets_are_times() -> None:
    assert seconds_of("90s") == 90
    with pytest.raises(ValueError, match="not a time"):
        seconds_of("soon")


def test_what_a_remedy_does_at_once_has_intervals_over_batches() -> None:
    advice = advise(net(), data(), old_batches=data(3), candidates=[FullReset()], steps=20, workers=1)
    found = next(each for each in advice.rows if each.name == "full-reset")
    for name in ("rise", "old_rise", "old_end", "drift"):
        low, high = getattr(found, f"{name}_interval")
        assert low < getattr(found, name) < high, name
    assert "old: at the end" in str(advice) and advice.to_dict()["rows"][0]["curve"]


def test_held_out_batches_decide_where_they_are_given() -> None:
    """A remedy that helps to learn by heart and ruins what generalizes: judged by what it is asked for."""
    torch.manual_seed(0)
    x = torch.randn(128, 8)
    true = (x[:, 0] > 0).long()
    learned, held = [(x[:64], true[:64])], [(x[64:], true[64:])]

    class Memorizes:
        """Scores of the training inputs by their first pixels, at random elsewhere."""

        name = "memorizes"

        def __call__(self, model: nn.Module, optimizer: Any = None, **_: Any) -> Receipt:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0).add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
            return Receipt("memorizes")

    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    advice = advise(model, learned, held_out=held, optimizer=optimizer, candidates=[Memorizes()], steps=60, workers=1)
    assert advice.judged_on == "held-out data" and advice.answer == "do not"


def test_redo_is_tried_only_where_neurons_are_dormant() -> None:
    batches, awake = data(), net()
    for layer in (awake[0], awake[2]):
        nn.init.constant_(layer.bias, 1.0 if layer is awake[0] else 50.0)
    assert "redo" not in [one.name for one in candidates_for(awake, batches)]
    assert "redo" in [one.name for one in candidates_for(lost(), batches)]


def test_an_interrupt_stops_the_processes_and_leaves_no_trace() -> None:
    model, calls = net(), []
    before = copy.deepcopy(model.state_dict())

    def loss(model: nn.Module, batch: Any) -> Tensor:
        calls.append(1)
        if len(calls) > 60:
            raise KeyboardInterrupt
        return functional.cross_entropy(model(batch[0]), batch[1])

    with pytest.raises(KeyboardInterrupt):
        advise(model, data(), loss=loss, candidates=[FIRE()], steps=400, workers=1)
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))
    assert not multiprocessing.active_children()


def test_advised_is_a_method_that_asks_first() -> None:
    model = lost()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    method = Advised(steps=100, candidates={"nothing": None, "full-reset": FullReset()})
    receipt = method(model, optimizer, batches=data())
    assert receipt.method == "full-reset" and receipt.changed and receipt.notes[0].startswith("advised: Apply")
    kept = copy.deepcopy(model.state_dict())
    again = Advised(steps=60, candidates=[Ruin()])(model, optimizer, batches=data())
    assert again.changed == () and all(torch.equal(kept[n], t) for n, t in model.state_dict().items())
    with pytest.raises(ValueError, match="needs batches"):
        method(model, optimizer)


def test_ray_gives_the_same_answer() -> None:
    pytest.importorskip("ray", reason='pip install "torch-rekindle[ray]"')
    model, batches = lost(), data()
    there = advise(model, batches, candidates=[FullReset()], steps=24, seeds=2, workers=1, on="ray")
    here = advise(model, batches, candidates=[FullReset()], steps=24, seeds=2, workers=1)
    assert [row.level for row in there.rows] == pytest.approx([row.level for row in here.rows], rel=1e-5)
    with pytest.raises(ValueError, match="only 'ray'"):
        advise(model, batches, candidates=[FullReset()], steps=24, on="cloud")


def test_trials_follow_the_schedule_of_training_and_its_clipping() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def trial(**training: Any) -> tuple[Trial, list[float]]:
        torch.manual_seed(0)
        made = Trial(
            Question(model, optimizer, data(2), [], advising.default_loss, **training), Candidate("nothing"), 0
        )
        rates = []
        for _ in range(4):
            made.advance(1, 4)
            rates.append(made.optimizers[0].param_groups[0]["lr"])
        return made, rates

    assert trial()[1] == [0.5] * 4
    assert trial(schedule=lambda share: 1 - share)[1] == pytest.approx([0.4375, 0.3125, 0.1875, 0.0625])
    moved = []
    for clip in (None, 1e-3):
        made, _ = trial(clip=clip)
        pairs = zip(model.parameters(), made.model.parameters(), strict=True)
        moved.append(sum(float((a - b).detach().square().sum()) for a, b in pairs) ** 0.5)
    assert moved[1] <= 4 * 0.5 * 1e-3 + 1e-6 < moved[0]
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_held_out_data_are_judged_as_asked_with_statistics_of_the_weights_as_they_are() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
    with torch.no_grad():
        model[1].running_mean.fill_(1e3)  # far from what the weights give, as after a strong remedy
    inputs = torch.randn(256, 8)
    labels = inputs[:, :4].argmax(1)
    batches = list(zip(inputs.split(32), labels.split(32), strict=True))
    wrong = lambda model, batch: (model(batch[0]).argmax(-1) != batch[1]).float().mean()  # noqa: E731
    made = Trial(
        Question(model, None, batches[:4], [], advising.default_loss, held_out=batches[4:], judge=wrong),
        Candidate("nothing"),
        0,
    )
    made.advance(1)
    (_, share), reference = made.trace.looks[0], made.question.losses(made.model, batches[4:], wrong)
    assert 0 <= share <= 1 and share == pytest.approx(sum(reference) / 4)
    assert float(made.model[1].running_mean.abs().max()) < 10
    assert float(model[1].running_mean.min()) == 1e3


def test_advised_remembers_the_start_for_candidates_that_go_back_to_it() -> None:
    model = net()
    asking = Advised(steps=20, candidates=[ShrinkPerturb()], seeds=2)
    asking(model, batches=data())
    assert asking.last is not None and "remember" in str(asking.last.rows[-1].error)
    asking.remember(model)
    asking(model, batches=data())
    assert all(row.error is None for row in asking.last.rows)
