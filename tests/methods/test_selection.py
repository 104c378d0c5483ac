"""What `targets` mean is the same for every method as for FIRE, parts of fused weights included."""

import copy

import pytest
import torch
from torch import nn

from rekindle import methods, plan
from rekindle.methods.selection import chosen_biases, chosen_norms, chosen_parameters, chosen_weights

WIDTH = 8
QUERY, KEY, VALUE = (slice(i * WIDTH, (i + 1) * WIDTH) for i in range(3))


class Attention(nn.Module):
    """One fused weight (3·8, 8), an output projection, a norm and a head."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x):
        return self.head(self.norm(self.attention(x, x, x)[0]))


def net():
    torch.manual_seed(0)
    model = Attention().double()
    nn.init.normal_(model.attention.in_proj_bias)
    return model


def data():
    return torch.randn(4, 5, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def loss(model, x):
    return model(x).square().mean()


def parts(targets, **options):
    return {(e.name, b.part) for e in plan(net(), targets=targets, **options).selected for b in e.blocks}


def test_a_role_means_its_part_of_a_fused_weight_alone():
    assert parts("query") == {("attention.in_proj_weight", "query")}
    assert parts(["query", "value"]) == {("attention.in_proj_weight", part) for part in ("query", "value")}
    left = {part for name, part in parts("auto", exclude="query") if name == "attention.in_proj_weight"}
    assert left == {"key", "value"}


def test_the_mask_holds_the_chosen_part_and_its_bias():
    model = net()
    shares, skipped = chosen_parameters(model, "key")
    mask = shares["attention.in_proj_weight"].mask
    assert mask[KEY].all()
    assert mask.sum() == WIDTH * WIDTH
    assert "attention.in_proj_weight[query]" in skipped
    bias = chosen_biases(model, chosen_weights(model, "key")[0])["attention.in_proj_bias"]
    assert bias.mask.nonzero().flatten().tolist() == list(range(WIDTH, 2 * WIDTH))
    whole = chosen_biases(model, chosen_weights(model, "attention")[0])
    assert all(share.mask is None for share in whole.values())


CHANGING = {
    "fire": lambda: methods.FIRE(targets="query"),
    "dash": lambda: methods.DASH(targets="query"),
    "shrink-perturb": lambda: methods.ShrinkPerturb(targets="query"),
    "weight clip": lambda: methods.WeightClip(0.01, targets="query"),
    "nap": lambda: methods.NormalizeAndProject(targets="query"),
    "l2 init": lambda: methods.L2Init(0.1, decoupled=True, targets="query"),
    "weight decay": lambda: methods.WeightDecay(0.1, targets="query"),
    "rescale": lambda: methods.Rescale(targets="query"),
    "spectral": lambda: methods.SpectralRegularizer(0.1, decoupled=True, targets="query"),
    "parseval": lambda: methods.Parseval(0.1, decoupled=True, norms=True, targets="query"),
    "isometry loss": lambda: methods.IsometryLoss(0.1, decoupled=True, targets="query"),
}


@pytest.mark.parametrize("name", CHANGING)
def test_a_method_changes_the_targeted_part_and_nothing_else(name):
    method, model = CHANGING[name](), net()
    if hasattr(method, "remember"):
        method.remember(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.5)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    before = copy.deepcopy(model.state_dict())
    receipt = method(model, sgd, batches=[data()], loss=loss)
    after = model.state_dict()
    assert not torch.equal(after["attention.in_proj_weight"][QUERY], before["attention.in_proj_weight"][QUERY])
    assert torch.equal(after["attention.in_proj_weight"][WIDTH:], before["attention.in_proj_weight"][WIDTH:])
    assert torch.equal(after["attention.in_proj_bias"][WIDTH:], before["attention.in_proj_bias"][WIDTH:])
    others = [n for n in before if not n.startswith("attention.in_proj")]
    assert all(torch.equal(after[n], before[n]) for n in others)
    assert "attention.in_proj_weight" in receipt.changed


def test_nap_restores_the_norm_of_the_part():
    model = net()
    method = methods.NormalizeAndProject(targets="query")
    first = model.attention.in_proj_weight[QUERY].norm().item()
    method.remember(model)
    model.attention.in_proj_weight.data.mul_(3)
    method(model)
    assert model.attention.in_proj_weight[QUERY].norm().item() == pytest.approx(first)
    assert model.attention.in_proj_weight[KEY].norm().item() > first


def test_penalties_of_a_part_are_those_of_its_entries():
    model = net()
    query = model.attention.in_proj_weight[QUERY]
    torch.testing.assert_close(methods.WeightDecay(1.0, targets="query").penalty(model), 0.5 * query.square().sum())
    method = methods.L2Init(1.0, targets="query")
    method.remember(model)
    with torch.no_grad():
        model.attention.in_proj_weight.add_(0.5)
    torch.testing.assert_close(method.penalty(model), torch.tensor(0.25 * WIDTH * WIDTH).double())


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
def test_upgd_gates_the_part_and_leaves_the_rest_to_the_optimizer(make):
    model, plain = net(), net()
    for each, method in ((model, methods.UPGD(targets="query")), (plain, None)):
        optimizer = make(each.parameters(), lr=0.1)
        loss(each, data()).backward()
        if method is not None:
            receipt = method(each, optimizer)
        optimizer.step()
    assert receipt.totals()["counts"]["gated weights"] == WIDTH * WIDTH
    mine, theirs = model.state_dict(), plain.state_dict()
    assert not torch.equal(mine["attention.in_proj_weight"][QUERY], theirs["attention.in_proj_weight"][QUERY])
    torch.testing.assert_close(mine["attention.in_proj_weight"][WIDTH:], theirs["attention.in_proj_weight"][WIDTH:])
    for name in ("attention.in_proj_bias", "head.weight", "norm.weight"):
        torch.testing.assert_close(mine[name], theirs[name])


def test_the_spectral_regularizer_takes_the_biases_and_norms_of_its_targets():
    model = net()
    term = methods.SpectralRegularizer(1.0, targets="head").loss_term(model)
    term.backward()
    assert {n for n, p in model.named_parameters() if p.grad is not None} == {"head.weight", "head.bias"}
    model = net()
    methods.SpectralRegularizer(1.0, targets="query").loss_term(model).backward()
    bias = model.attention.in_proj_bias.grad
    assert bias[:WIDTH].abs().min() > 0
    assert bias[WIDTH:].abs().max() == 0
    model = net()
    methods.SpectralRegularizer(1.0).loss_term(model).backward()
    assert all(p.grad is not None for p in model.parameters())


def test_norms_are_chosen_by_general_words_or_by_their_names():
    model = net()
    assert list(chosen_norms(model, "layers")) == ["norm"]
    assert list(chosen_norms(model, "query")) == []
    assert list(chosen_norms(model, ["query", "nor*"])) == ["norm"]


def test_layers_is_a_word_for_plans_too():
    assert {name for name, _ in parts("layers")} == {name for name, _ in parts(["auto", "head"])}


class Named(nn.Module):
    """The user's own attribute is called module."""

    def __init__(self):
        super().__init__()
        self.module = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.LayerNorm(6), nn.Linear(6, 5), nn.ReLU())
        self.out = nn.Linear(5, 2)

    def forward(self, x):
        return self.out(self.module(x))


def _compiled():
    torch.manual_seed(0)
    model = Named()
    model.module = torch.compile(model.module, backend="eager")
    return model


WRAPPED = {
    "an attribute called module": Named,
    "a compiled part": _compiled,
    "compiled": lambda: torch.compile(Named(), backend="eager"),
    "data parallel": lambda: nn.DataParallel(Named()),
}
EVERY = {
    "fire": methods.FIRE,
    "dash": methods.DASH,
    "shrink-perturb": methods.ShrinkPerturb,
    "shrink-perturb fresh": lambda: methods.ShrinkPerturb(noise="fresh"),
    "random isometry": methods.RandomIsometry,
    "rescale": methods.Rescale,
    "fresh at norm": methods.FreshAtNorm,
    "singular clip": lambda: methods.SingularClip(high=0.1),
    "full reset": methods.FullReset,
    "full reset init": lambda: methods.FullReset("init"),
    "head reset": methods.HeadReset,
    "layer reset": lambda: methods.LayerReset(last=2),
    "layer reset by name": lambda: methods.LayerReset("module.0"),
    "norm reset": methods.LayerNormReset,
    "redo": lambda: methods.ReDo(tau=0.9),
    "regrama": lambda: methods.ReGraMa(tau=0.7),
    "cbp": lambda: methods.ContinualBackprop(replacement_rate=0.5, maturity_threshold=0),
    "snr": lambda: methods.SelfNormalizedReset(first_threshold=1),
    "l2 init": lambda: methods.L2Init(decoupled=True),
    "parseval": lambda: methods.Parseval(decoupled=True),
    "spectral": lambda: methods.SpectralRegularizer(decoupled=True),
    "weight decay": methods.WeightDecay,
    "isometry loss": lambda: methods.IsometryLoss(decoupled=True),
    "weight clip": lambda: methods.WeightClip(0.1),
    "nap": methods.NormalizeAndProject,
    "optimizer reset": methods.OptimizerReset,
    "upgd": methods.UPGD,
    "hare": methods.HareTortoise,
    "injection": methods.PlasticityInjection,
}


@pytest.mark.parametrize("wrapper", WRAPPED)
@pytest.mark.parametrize("name", EVERY)
def test_names_are_seen_through_wrappers_and_only_through_those(name, wrapper):
    model, method = WRAPPED[wrapper](), EVERY[name]()
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
    if hasattr(method, "remember"):
        method.remember(model)
    adam = torch.optim.Adam(model.parameters(), lr=0.05)
    loss(model, x).backward()
    adam.step()
    if name == "hare":
        method.update(model)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    receipt = method(model, adam, batches=[x], loss=loss)
    known = {"module.0.weight", "module.0.bias", "module.2.weight", "module.2.bias", "module.3.weight", "module.3.bias"}
    known |= {"out.weight", "out.bias", "out.new.weight", "out.new.bias"}
    assert set(receipt.changed) <= known
    if name not in ("hare", "upgd", "optimizer reset", "injection", "snr"):
        assert any(not torch.equal(p, before[n]) for n, p in model.named_parameters())
