"""Two real processes with DDP: whatever a method saw or drew, the replicas stay equal and training goes on."""

import copy
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rekindle import methods
from rekindle.methods.call import Call
from rekindle.sharding.replicas import replicated
from stacked_models import CASES


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 12), nn.ReLU(), nn.Linear(12, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 2))


def loss(model, x):
    return model(x).square().mean()


def data(rank, seed=0):
    """Each rank sees data of its own, at a scale of its own."""
    drawn = torch.randn(16, 4, generator=torch.Generator().manual_seed(10 * seed + rank))
    return drawn * (1 + 3 * rank) + rank


# Own generators differ from rank to rank on purpose.
METHODS = {
    "fire": lambda rank: methods.FIRE(),
    "shrink-perturb init": lambda rank: methods.ShrinkPerturb(seed=rank),
    "shrink-perturb fresh": lambda rank: methods.ShrinkPerturb(noise="fresh", seed=rank),
    "random isometry": lambda rank: methods.RandomIsometry(seed=rank),
    "fresh at norm": lambda rank: methods.FreshAtNorm(seed=rank),
    "full reset": lambda rank: methods.FullReset(seed=rank),
    "dash": lambda rank: methods.DASH(seed=rank),
    "redo": lambda rank: methods.ReDo(tau=0.6, seed=rank),
    "regrama": lambda rank: methods.ReGraMa(tau=0.6, seed=rank),
    "cbp": lambda rank: methods.ContinualBackprop(replacement_rate=0.2, maturity_threshold=0, seed=rank),
    "snr": lambda rank: methods.SelfNormalizedReset(first_threshold=1, seed=rank),
    "upgd": lambda rank: methods.UPGD(seed=rank),
    "hare": lambda rank: methods.HareTortoise(momentum=0.5),
    "l2 init": lambda rank: methods.L2Init(0.1, decoupled=True),
    "spectral": lambda rank: methods.SpectralRegularizer(0.1, decoupled=True),
    "nap": lambda rank: methods.NormalizeAndProject(),
    "head reset": lambda rank: methods.HeadReset(seed=rank),
    "revive": lambda rank: methods.Revive(tau=0.6, seed=rank),
}


def difference(model):
    """The largest difference between this rank's parameters and the first rank's."""
    mine = torch.cat([p.detach().flatten() for p in model.parameters()])
    first = mine.clone()
    dist.broadcast(first, src=0)
    worst = (mine - first).abs().max()
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return worst.item()


def step(model, optimizer, rank, seed, method=None):
    optimizer.zero_grad()
    loss(model, data(rank, seed)).backward()
    if method is not None and method.moment == "backward":
        method(model, optimizer)
    optimizer.step()


def one(name, rank, by_batches):
    method = METHODS[name](rank)
    inner = net()
    if hasattr(method, "remember"):
        torch.manual_seed(rank)  # each rank remembers a start of its own, from before the wrapping
        method.remember(nn.Sequential(*(copy.deepcopy(m) for m in inner)))
    model = DistributedDataParallel(inner)
    adam = torch.optim.Adam(model.parameters(), lr=0.05)
    before = copy.deepcopy(inner.state_dict())
    watching = method.observe(model) if hasattr(method, "observe") and not by_batches else None
    for seed in range(3):
        step(model, adam, rank, seed, method)
        if method.moment == "step":
            method(model, adam, batches=[data(rank, seed)] if by_batches else None, loss=loss)
    if method.moment == "event":
        method(model, adam, batches=[data(rank, 7)] if by_batches or not watching else None, loss=loss)
    if watching:
        watching.remove()
    for seed in range(3, 5):
        step(model, adam, rank, seed)
    moved = any(not torch.equal(value, before[key]) for key, value in inner.state_dict().items())
    return difference(model) if moved else float("inf")


def bare(name, rank):
    """The same for a trainer that hands over the module inside its wrapper."""
    method, inner = METHODS[name](rank), net()
    model = DistributedDataParallel(inner)
    adam = torch.optim.Adam(inner.parameters(), lr=0.05)
    with replicated(), method.observe(inner):
        for seed in range(4):
            step(model, adam, rank, seed)
            method(inner, adam)
    return difference(inner)


def together(rank):
    """ReDo over two ranks judges as one process with all the data does."""
    model = DistributedDataParallel(net())
    receipt = methods.ReDo(tau=0.7)(model, batches=[data(rank)])
    alone = net()
    expected = methods.ReDo(tau=0.7)(alone, batches=[data(0), data(1)])
    same = [r.counts for r in receipt.records] == [r.counts for r in expected.records]
    close = all(torch.allclose(a, b) for a, b in zip(model.module.parameters(), alone.parameters(), strict=True))
    return same and close and bool(receipt.records)


def revived(name, rank):
    """Experts and codes that no rank uses, each rank with examples of its own: replicas and their buffers are equal."""
    case = CASES[name]()
    case.kill(case.model)
    trained = [p for p in case.model.parameters() if p.requires_grad]
    model = DistributedDataParallel(case.model) if trained else case.model
    adam = torch.optim.Adam(trained) if trained else None
    batch = case.batch + rank
    with replicated():
        receipt = methods.Revive(tau=None, seed=rank)(model, adam, batches=[batch])
    tensors = torch.cat([t.detach().double().flatten() for t in case.model.state_dict().values()])
    first = tensors.clone()
    dist.broadcast(first, src=0)
    worst = (tensors - first).abs().max()
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return worst.item() if receipt.records else float("inf")


def injection():
    model = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        methods.PlasticityInjection()(model, optimizer)
    except ValueError as error:
        return str(error)
    return "injected"


def rewrapped(rank):
    """The way out that the refusal names."""
    model = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(model, optimizer, rank, 0)
    methods.PlasticityInjection()(model.module, optimizer)
    model = DistributedDataParallel(model.module)
    for seed in range(3):
        step(model, optimizer, rank, seed)
    return difference(model)


def worker(rank, results):
    torch.set_num_threads(1)
    meeting = f"file://{results}/store"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    found = {}
    for name, make in METHODS.items():
        ways = (False, True) if hasattr(make(0), "observe") and name != "hare" else (False,)
        for by_batches in ways:
            found[f"{name} {'batches' if by_batches else 'observed'}"] = one(name, rank, by_batches)
    for name in ("cbp", "snr"):
        found[f"{name} bare"] = bare(name, rank)
    found["as one"] = together(rank)
    found["revived experts"], found["revived codes"] = revived("switch", rank), revived("quantizer ema", rank)
    found["injection"] = injection()
    found["rewrapped"] = rewrapped(rank)
    torch.save(found, f"{results}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    results = tmp_path_factory.mktemp("replicas")
    command = [sys.executable, __file__, str(results)]
    tests = Path(__file__).parents[1]
    paths = os.pathsep.join([str(tests / "support"), os.environ.get("PYTHONPATH", "")])
    place = {**os.environ, "PYTHONPATH": paths}
    ranks = [subprocess.Popen([*command, str(rank)], stderr=subprocess.PIPE, text=True, env=place) for rank in range(2)]
    errors = [rank.communicate(timeout=240)[1] for rank in ranks]
    # Not by exit codes: torch 2.13 sometimes aborts while it takes down gloo's threads, after all work (docs/LOG.md).
    assert all((results / f"{rank}.pt").exists() for rank in range(2)), "\n".join(errors)
    return [torch.load(results / f"{rank}.pt") for rank in range(2)]


def test_replicas_stay_equal_whatever_each_saw_and_drew(found):
    differing = {k: v for k, v in found[0].items() if isinstance(v, float) and not v < 1e-6}
    assert not differing
    assert len([v for v in found[0].values() if isinstance(v, float)]) >= len(METHODS) + 4


def test_statistics_are_those_of_all_ranks(found):
    assert all(each["as one"] for each in found)


def test_injection_refuses_inside_the_wrapper_and_names_the_way_out(found):
    for each in found:
        assert "DistributedDataParallel" in each["injection"]
        assert "then wrap it again" in each["injection"]
        assert each["rewrapped"] < 1e-6


def test_without_replicas_everything_is_local():
    call = Call(net())
    values = [torch.ones(2), torch.zeros(1)]
    assert call.replicas.size == 1
    assert all(a is b for a, b in zip(call.total(values), values, strict=True))
    assert all(a is b for a, b in zip(call.mean(values), values, strict=True))


if __name__ == "__main__":
    worker(int(sys.argv[2]), sys.argv[1])
