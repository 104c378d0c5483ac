"""The DAWN network against plain float64 loops; what its analysis says against counting by hand."""

import collections
import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from rekindle.initial import draw
from rekindle.lab.dawn import DAWN, BasisFFN, DAWNConfig, DAWNLoss, Router, diversity_loss
from rekindle.lab.dawn.analysis import analyze
from rekindle.measures.matrices import welch_bound, welch_ratio
from rekindle.projection.planning import plan

SMALL = DAWNConfig(
    vocabulary=256, length=24, width=16, hidden=20, layers=2, heads=2, neurons=30, neuron_rank=4, chosen=5, basis=6,
    basis_rank=3,
)  # fmt: skip


def gen(seed=0):
    return torch.Generator().manual_seed(seed)


def tokens(batch=3, time=10, seed=0):
    return torch.randint(256, (batch, time), generator=gen(seed))


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=gen(seed), dtype=torch.float64)


def text(length=24):
    data = torch.frombuffer(
        bytearray(Path(json.__file__).with_name("decoder.py").read_bytes()), dtype=torch.uint8
    ).long()
    return data[: len(data) // (length + 1) * (length + 1)].view(-1, length + 1)


# --- the parts against the formula -------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [True, False])
def test_the_router_scores_gates_and_chooses_as_written(causal):
    config = replace(SMALL, causal=causal)
    router = Router(config).double()
    x = randn(2, 7, 16)
    found = router(x)
    neurons = router.A @ router.B
    for b in range(2):
        q, k, v = router.attention(x[b]).split(16, dim=-1)
        for t in range(7):
            seen = t + 1 if causal else 7
            context = torch.zeros(16, dtype=torch.float64)
            for head in (slice(0, 8), slice(8, 16)):
                weights = torch.softmax(torch.stack([q[t, head] @ k[s, head] / math.sqrt(8) for s in range(seen)]), 0)
                context[head] = sum(weights[s] * v[s, head] for s in range(seen))
            share = torch.sigmoid(router.gate(torch.cat([x[b, t], context])))
            scores = share * (neurons @ x[b, t]) + (1 - share) * (neurons @ context)
            best = sorted(range(30), key=lambda n: -scores[n].item())[:5]
            assert set(found.neurons[b, t].tolist()) == set(best)
            total = sum(scores[n].exp() for n in best)
            for n, weight in zip(found.neurons[b, t].tolist(), found.weights[b, t], strict=True):
                assert weight.item() == pytest.approx((scores[n].exp() / total).item(), abs=1e-10)


@pytest.mark.parametrize("causal", [True, False])
def test_the_layer_equals_the_matrices_that_its_recipes_stand_for(causal):
    ffn = BasisFFN(replace(SMALL, causal=causal)).double()
    x, mixture = randn(2, 7, 16), randn(2, 7, 30, seed=1).softmax(-1)
    found = ffn(x, mixture)
    for b in range(2):
        for t in range(7):
            seen = range(t + 1) if causal else range(7)
            recipe = [sum(mixture[b, s] @ ffn.coefficients[each] for s in seen) / len(seen) for each in (0, 1)]
            first = sum(recipe[0][i] * ffn.first[i] for i in range(6))
            second = sum(recipe[1][i] * ffn.second[i] for i in range(6))
            torch.testing.assert_close(ffn.compose(*recipe), first @ second)
            torch.testing.assert_close(found[b, t], ffn.down(F.gelu(x[b, t] @ first @ second)))


def test_a_causal_network_does_not_see_ahead_and_the_documents_way_does():
    one, other = tokens(), tokens()
    other[:, 6:] = tokens(seed=1)[:, 6:]
    for causal in (True, False):
        model = DAWN(replace(SMALL, causal=causal)).double()
        same = torch.allclose(model(one)[:, :6], model(other)[:, :6], atol=1e-12)
        assert same is causal


# --- starts ------------------------------------------------------------------------------------------------------


def test_starts_differ_in_the_coefficients_alone_and_have_one_size():
    config = DAWNConfig(layers=1)
    models = {start: DAWN(replace(config, start=start), seed=3) for start in ("gaussian", "qr", "positive")}
    for name, parameter in models["qr"].named_parameters():
        same = torch.equal(parameter, models["gaussian"].get_parameter(name))
        assert same is not name.endswith("coefficients"), name
    for start, model in models.items():
        squares = model.layers[0].ffn.coefficients.square().sum(-1)
        assert squares.mean().item() == pytest.approx(1, abs=0.03), start
    q = models["qr"].layers[0].ffn.coefficients.double()
    torch.testing.assert_close(q.mT @ q, 32 * torch.eye(16).double().expand(2, 16, 16), atol=1e-4, rtol=0)
    ratio = {start: welch_ratio(model.layers[0].ffn.coefficients).mean().item() for start, model in models.items()}
    assert ratio["qr"] < 1.01 < ratio["gaussian"] < 1.05 < 8 < ratio["positive"]


def test_qr_is_the_orthogonal_part_of_the_gaussian_start():
    gaussian, qr = (DAWN(replace(SMALL, start=start)).layers[0].ffn.coefficients for start in ("gaussian", "qr"))
    # The same numbers: both span the same columns, so projecting one on the other loses nothing.
    unit = (qr / math.sqrt(30 / 6)).double()
    torch.testing.assert_close(unit @ (unit.mT @ gaussian.double()), gaussian.double(), atol=1e-5, rtol=0)


def test_a_composed_up_projection_starts_with_lecuns_variance():
    ffn = BasisFFN(DAWNConfig(start="gaussian"))
    picks = torch.rand(400, 512, generator=gen()).topk(16).indices
    a, b = ffn.coefficients[:, picks].mean(2)
    assert ffn.compose(a, b).var().item() * 64 == pytest.approx(1, rel=0.2)


def test_the_seed_alone_decides_and_global_state_stays():
    before = torch.get_rng_state()
    first, again, other = DAWN(SMALL, seed=1), DAWN(SMALL, seed=1), DAWN(SMALL, seed=2)
    assert torch.equal(before, torch.get_rng_state())
    for name, parameter in first.named_parameters():
        assert torch.equal(parameter, again.get_parameter(name))
    assert not torch.equal(first.head.weight, other.head.weight)


def test_it_can_be_redrawn_and_planned_by_the_library():
    model = DAWN(SMALL)
    fresh = draw(model, generator=gen(5))
    assert set(fresh) == {name for name, _ in model.named_parameters()}
    assert fresh["positions.weight"].std().item() == pytest.approx(0.1, rel=0.2)
    assert len(plan(model).entries) == len(list(model.parameters()))


# --- losses ------------------------------------------------------------------------------------------------------


def mean_squared_cosine(rows):
    rows = rows.detach()
    pairs = list(itertools.combinations(range(len(rows)), 2))
    return sum(float(F.cosine_similarity(rows[i], rows[j], dim=0)) ** 2 for i, j in pairs) / len(pairs)


def test_auxiliary_losses_are_the_sums_that_they_say():
    model = DAWN(replace(SMALL, start="gaussian")).double()
    found = model.auxiliary_losses()
    neurons = sum(mean_squared_cosine(layer.router.A @ layer.router.B) for layer in model.layers) / welch_bound(30, 4)
    diverse, short = 0.0, 0.0
    for layer in model.layers:
        for rows in layer.ffn.coefficients.detach():
            diverse += mean_squared_cosine(rows) / welch_bound(30, 6)
            used = [float((row**2).sum() ** 2 / (row**4).sum()) for row in rows]
            short += sum(max(0, 1 - each / 3) for each in used) / len(used)
    assert found["neuron_orthogonality"].item() == pytest.approx(neurons, rel=1e-9)
    assert found["diversity"].item() == pytest.approx(diverse, rel=1e-9)
    assert found["basis_usage"].item() == pytest.approx(short, rel=1e-9)
    assert short > 0

    batch = tokens(), tokens(seed=1)
    plain = F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())
    total = DAWNLoss(neuron_orthogonality=0.5, basis_usage=0.25, diversity=2.0)(model, batch)
    assert total.item() == pytest.approx(plain.item() + 0.5 * neurons + 0.25 * short + 2 * diverse, rel=1e-9)


def test_basis_usage_has_the_gradient_that_a_count_lacks():
    model = DAWN(SMALL)
    coefficients = model.layers[0].ffn.coefficients
    with torch.no_grad():
        coefficients[:, 0] = torch.tensor([1.0, 0.05, 0, 0, 0, 0])
    before = model.auxiliary_losses()["basis_usage"]
    (gradient,) = torch.autograd.grad(before, coefficients)
    assert gradient[:, 0].abs().min(0).values[:2].gt(0).all()
    with torch.no_grad():
        coefficients -= 0.1 * gradient / gradient.norm()
    assert model.auxiliary_losses()["basis_usage"] < before
    assert not (coefficients.abs() > 0.1).sum().float().requires_grad


def test_it_learns_real_text_and_the_diversity_loss_undoes_a_redundant_start():
    windows = text()
    batch = windows[:, :-1], windows[:, 1:]
    for diversity in (0.0, 0.05):
        model = DAWN(replace(SMALL, start="positive"))
        loss = DAWNLoss(neuron_orthogonality=0, basis_usage=0, diversity=diversity)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        first = [float(diversity_loss(layer.ffn.coefficients.detach())) for layer in model.layers]
        for step in range(60):
            rows = torch.randint(len(windows), (16,), generator=gen(step))
            value = loss(model, (batch[0][rows], batch[1][rows]))
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
        with torch.no_grad():
            after = F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())
            last = [float(diversity_loss(layer.ffn.coefficients.detach())) for layer in model.layers]
        assert after < 3.2  # from 5.6 = log 256 + the noise of a random head
        halved = [now < 0.5 * then for now, then in zip(last, first, strict=True)]
        assert halved == [diversity > 0] * 2


# --- analysis ----------------------------------------------------------------------------------------------------


def test_the_analysis_counts_what_a_loop_counts():
    model = DAWN(replace(SMALL, start="positive")).double()
    batches = [tokens(), (tokens(seed=1), None)]
    found = analyze(model, batches, tau=0.7)
    assert found.tokens == 60
    for number, layer in enumerate(found.layers):
        counts = collections.Counter()
        energy = torch.zeros(2, 6, dtype=torch.float64)
        for batch in (tokens(), tokens(seed=1)):
            routing = model.trace(batch)[1][number]
            counts.update(routing.neurons.flatten().tolist())
            for b, t in itertools.product(range(3), range(10)):
                for each in (0, 1):
                    rows = model.layers[number].ffn.coefficients[each]
                    chosen = [routing.weights[b, s] @ rows[routing.neurons[b, s]] for s in range(t + 1)]
                    energy[each] += (sum(chosen) / (t + 1)).detach() ** 2
        shares = [count / (60 * 5) for count in counts.values()]
        assert layer.usage == len(counts) / 30
        assert layer.balance == pytest.approx(math.exp(-sum(p * math.log(p) for p in shares)) / 30)
        assert layer.picks.sum().item() == pytest.approx(1)
        active = energy.sum(1) ** 2 / (energy**2).sum(1) / 6
        assert layer.basis_active == pytest.approx(active.tolist())
        torch.testing.assert_close(layer.basis_shares, energy / energy.sum(1, keepdim=True))
        for each in (0, 1):
            rows = model.layers[number].ffn.coefficients[each].detach()
            pairs = list(itertools.combinations(range(30), 2))
            cosines = [float(F.cosine_similarity(rows[i], rows[j], dim=0)) for i, j in pairs]
            assert layer.similar_pairs[each] == pytest.approx(sum(abs(c) > 0.7 for c in cosines) / len(pairs))
            assert layer.cosines[each, 25:].sum().item() == pytest.approx(sum(c >= 0 for c in cosines) / len(pairs))
            sigma = torch.linalg.svdvals(rows)
            p = sigma / sigma.sum()
            assert layer.effective_rank[each] == pytest.approx(float(torch.exp(-(p * p.log()).sum()) / 6))
            assert layer.welch_ratio[each] == pytest.approx(
                sum(c * c for c in cosines) / len(pairs) / welch_bound(30, 6)
            )
    usage = [layer.usage for layer in found.layers]
    assert found.mean("usage") == pytest.approx(sum(usage) / 2)


def test_collapsed_neurons_are_seen():
    model = DAWN(SMALL)
    with torch.no_grad():
        model.layers[0].ffn.coefficients[0] = torch.arange(1.0, 7)
    layer = analyze(model, [tokens()]).layers[0]
    assert layer.similar_pairs[0] == 1
    assert layer.similar_pairs[1] < 0.2
    assert layer.effective_rank[0] == pytest.approx(1 / 6, abs=1e-3)
    assert layer.welch_ratio[0] == pytest.approx(1 / welch_bound(30, 6), rel=1e-5)


def test_an_analysis_shows_itself():
    found = analyze(DAWN(SMALL), [tokens()])
    lines = str(found).splitlines()
    assert len(lines) == 4
    assert "usage" in lines[0]
    assert f"{found.layers[1].usage:.1%}" in lines[2]
    assert json.loads(json.dumps(found.to_dict()))["layers"][1]["usage"] == found.layers[1].usage


# --- errors and the study's own arithmetic -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"chosen": 0}, "chosen=0"),
        ({"chosen": 31}, "chosen=31"),
        ({"neurons": 6}, "neurons=6 must outnumber"),
        ({"basis": 2}, "basis=2"),
        ({"heads": 3}, "multiple of heads=3"),
        ({"start": "uniform"}, "start='uniform'"),
        ({"layers": 0}, "layers=0"),
    ],
)
def test_impossible_sizes_are_refused_by_name(change, says):
    with pytest.raises(ValueError, match=says):
        replace(SMALL, **change)


def test_wrong_inputs_are_refused():
    model = DAWN(SMALL)
    with pytest.raises(ValueError, match="length=24"):
        model(tokens(time=25))
    with pytest.raises(ValueError, match="not a measure"):
        analyze(model, [tokens()]).mean("picks")
    with pytest.raises(ValueError, match="batches are empty"):
        analyze(model, [])
    with pytest.raises(TypeError, match="needs a DAWN"):
        DAWNLoss()(torch.nn.Linear(2, 2), (tokens(), tokens()))
