"""Revive: what is dead starts again, in every kind and every client; all else stays bit for bit."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import rekindle
from known_units import draw
from rekindle.diagnosis.usage import Usage
from rekindle.methods import Revive
from rekindle.optimizers import StateReset, reset_rows
from stacked_models import CASES, Adapted, Autoencoder, Case, Quantizer, Switch


def tensors(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def dead(case: Case) -> list[float]:
    found = rekindle.health(case.model, [case.batch] * 2)
    return [n["dead"] for name, n in found.stacks.items() if found.about[name]["kind"] == case.kind and "dead" in n]


@pytest.mark.parametrize("name", CASES)
def test_dead_units_live_again_and_the_others_stay(name: str) -> None:
    case = CASES[name]()
    case.kill(case.model)
    assert min(dead(case)) >= 0.5
    usage = Usage.of(case.model, [case.batch])
    before = tensors(case.model)
    trained = [p for p in case.model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(trained) if trained else None
    receipt = Revive(tau=None)(case.model, optimizer, batches=[case.batch] * 2)
    after = tensors(case.model)
    assert {n for n in after if not torch.equal(after[n], before[n])} == set(receipt.changed)
    for stack in (s for s in usage.found.stacks if s.kind == case.kind):
        for role, member in stack.holds.items():
            if role in ("modules", "base", "router") or stack.books > 1:  # rows of copies move apart
                continue
            old, new = (state[member.tensor].movedim(member.axis, 0) for state in (before, after))
            same = (old == new).flatten(1).all(1) if old.ndim > 1 else old == new
            assert int(same.sum()) >= 1, member
            assert bool(same[0]), member  # the first unit was alive
    if case.kind == "ranks":
        assert receipt.totals()["counts"]["ranks"] == 3 * case.stacks
    else:
        assert max(dead(case)) <= 0.25  # a second choice may die


def settled(model: nn.Module, batch: Tensor, steps: int = 5) -> torch.optim.Optimizer:
    """An optimizer that has taken some steps."""
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    for _ in range(steps):
        optimizer.zero_grad()
        (model(batch) - batch).square().mean().backward()
        optimizer.step()
    return optimizer


def test_the_optimizer_forgets_the_dead_rows_alone() -> None:
    torch.manual_seed(0)
    model, x = Autoencoder("relu"), draw(512, 16)
    with torch.no_grad():
        model.b_enc[8:] = -1e3
    optimizer = settled(model, x)
    before = {id(p): {k: v.clone() for k, v in s.items()} for p, s in optimizer.state.items()}
    Revive()(model, optimizer, batches=[x])
    for name, axis in (("W_enc", 1), ("W_dec", 0), ("b_enc", 0)):
        parameter = model.get_parameter(name)
        old, new = before[id(parameter)], optimizer.state[parameter]
        for slot in ("exp_avg", "exp_avg_sq"):
            then, now = old[slot].movedim(axis, 0), new[slot].movedim(axis, 0)
            assert torch.equal(then[:8], now[:8])
        assert not new["exp_avg"].movedim(axis, 0)[8:].any()
    for slot in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(before[id(model.b_dec)][slot], optimizer.state[model.b_dec][slot])


def test_averages_of_codes_follow() -> None:
    case = CASES["quantizer ema"]()
    case.kill(case.model)
    book = case.model._codebook
    with torch.no_grad():
        book.cluster_size.fill_(7.0)
        book.embed_avg.copy_(book.embed * 7)
    Revive()(case.model, batches=[case.batch])
    assert torch.equal(book.embed_avg[0, 4:], book.embed[0, 4:])
    assert book.cluster_size[0, :4].tolist() == [7.0] * 4
    assert book.cluster_size[0, 4:].tolist() == [1.0] * 28
    rows = case.batch.reshape(-1, 16)
    assert bool((book.embed[0, 4:, None] == rows).all(-1).any(1).all())  # codes are examples
    case.model.train()
    case.model(case.batch)  # the package goes on with what it finds
    assert book.embed.isfinite().all()


def test_experts_share_the_tokens_of_the_most_loaded() -> None:
    case = CASES["switch"]()
    case.kill(case.model)
    with torch.no_grad():
        then = case.model(case.batch)
    receipt = Revive(tau=None)(case.model, batches=[case.batch])
    found = rekindle.health(case.model, [case.batch])
    (numbers,) = found.stacks.values()
    assert receipt.totals()["counts"]["experts"] == 7
    assert numbers["dead"] == 0 and numbers["perplexity"] > 4
    with torch.no_grad():
        now = case.model(case.batch)
    assert float((now - then).norm() / (then - case.batch).norm()) < 0.6


def test_a_router_that_collapsed_by_its_bias() -> None:
    """Rows of copies are no help while the bias still sends everything to the first."""
    torch.manual_seed(0)
    model, x = Switch(), draw(512, 16)
    model.router = nn.Linear(16, 8)
    with torch.no_grad():
        model.router.bias[0] = 9.0
    (before,) = rekindle.health(model, [x]).stacks.values()
    receipt = Revive(tau=None)(model, torch.optim.Adam(model.parameters()), batches=[x])
    (after,) = rekindle.health(model, [x]).stacks.values()
    assert before["dead"] == 7 / 8 and after["dead"] == 0 and after["perplexity"] > 4
    assert "router.bias" in receipt.changed and model.router.bias.tolist() == [9.0] * 8


def test_dead_ranks_leave_the_function_and_merging_does_too() -> None:
    model, x = Adapted(), draw(6, 12)
    with torch.no_grad():
        model.up.weight[:, :2] = draw(10, 2)
        then = model(x)
        Revive()(model, batches=[x])
        assert torch.equal(model(x), then)
        assert not model.up.weight[:, 2:].any()
        receipt = Revive(merge=True)(model, batches=[x])
        torch.testing.assert_close(model(x), then)
    assert not model.up.weight.any()
    assert "a file of the adapter alone is no longer the model" in receipt.notes[0]


def test_merging_into_a_transposed_base() -> None:
    case = CASES["peft"]()
    case.kill(case.model.eval())
    with torch.no_grad():
        then = case.model(**case.batch).logits
        Revive(merge=True, tau=None)(case.model, batches=[case.batch])
        torch.testing.assert_close(case.model(**case.batch).logits, then)


@pytest.mark.parametrize(
    ("model", "batch", "reason"),
    [
        (lambda: Quantizer(512), draw(40, 8), "too few to tell dead units from rare ones"),
        (lambda: CASES["dictionary AutoEncoder"]().model, draw(0, 16), "did not run"),
    ],
)
def test_what_cannot_be_told_is_left_as_it_is(model: Callable[[], nn.Module], batch: Tensor, reason: str) -> None:
    network = model()
    before = tensors(network)
    receipt = Revive(tau=None)(network, batches=[batch])
    assert any(reason in why for why in receipt.skipped.values()), receipt.skipped
    assert all(torch.equal(before[name], now) for name, now in tensors(network).items())


def test_tied_units_are_refused_by_name() -> None:
    class Tied(Autoencoder):
        def forward(self, x: Tensor) -> Tensor:
            return self.encode(x) @ self.W_enc.T + self.b_dec

    model = Tied("topk")
    with torch.no_grad():
        model.b_enc[8:] = -1e3
    before = tensors(model)
    receipt = Revive(tau=None)(model, batches=[draw(512, 16)])
    assert receipt.skipped["W_enc"] == "encoder and decoder are one weight (W_enc)"
    assert all(torch.equal(before[name], now) for name, now in tensors(model).items())


def test_an_error_puts_everything_back(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, x = Autoencoder("relu"), draw(512, 16)
    with torch.no_grad():
        model.b_enc[8:] = -1e3
    optimizer = settled(model, x)
    before, slots = tensors(model), {id(p): s["exp_avg"].clone() for p, s in optimizer.state.items()}
    calls = []

    def broken(*args: object, **more: object) -> StateReset:
        calls.append(args)
        if len(calls) == 2:
            raise OSError("no luck")
        return reset_rows(*args, **more)

    monkeypatch.setattr("rekindle.methods.changes.optimizers.reset_rows", broken)
    with pytest.raises(Exception, match="no luck"):
        Revive()(model, optimizer, batches=[x])
    assert all(torch.equal(before[name], now) for name, now in tensors(model).items())
    assert torch.equal(optimizer.state[model.W_enc]["exp_avg"], slots[id(model.W_enc)])


def test_neurons_are_recycled_beside_them() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(8, 16), nn.Linear(16, 8)
            self.quantizer = Quantizer()

        def forward(self, x: Tensor) -> Tensor:
            return self.quantizer(self.two(self.one(x).relu()))

    torch.manual_seed(0)
    model = Both()
    with torch.no_grad():
        model.one.bias[:4] = -1e3
        model.quantizer.codes.weight[4:] = 99.0
    receipt = Revive()(model, torch.optim.Adam(model.parameters()), batches=[draw(512, 8)])
    counts = receipt.totals()["counts"]
    assert counts["neurons"] == 4 and counts["codes"] >= 28


def test_without_batches_it_looks_at_what_it_has_observed() -> None:
    torch.manual_seed(0)
    model, x = Switch(), draw(512, 16) + 1
    CASES["switch"]().kill(model)
    method = Revive(tau=None)
    with pytest.raises(ValueError, match="give batches=, or train inside observe"):
        method(model)
    with method.observe(model):
        model(x).sum().backward()
    assert method(model).totals()["counts"]["experts"] == 7
    assert not model._forward_pre_hooks


def test_it_is_drawn_alike_from_one_seed() -> None:
    def run() -> dict[str, Tensor]:
        case = CASES["switch"]()
        case.kill(case.model)
        Revive(seed=3)(case.model, batches=[case.batch])
        return tensors(case.model)

    one, two = run(), run()
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_a_new_latent_gives_back_what_was_left_and_is_silent_elsewhere() -> None:
    model, x = Autoencoder("topk").double(), draw(600, 16).double() + 0.3
    with torch.no_grad():
        model.b_enc[40:] = -1e3
        left = x - model(x)
        lengths = [float((row - left.mean(0)).norm()) for row in left]
        Revive(tau=None)(model, batches=[x])
        for latent in range(40, 64):
            activities = [float((row - model.b_dec) @ model.W_enc[:, latent] + model.b_enc[latent]) for row in x]
            assert sum(each > 1e-9 for each in activities) <= 18
            back = max(activities) * float(model.W_dec[latent].norm())
            assert min(abs(back - each) for each in lengths) < 1e-9
