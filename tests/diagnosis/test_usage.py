"""How many experts, codes, latents and ranks are used: counts, what a few tokens can say, and the verdict."""

import math

import pytest
import torch
from torch import Tensor, nn

import rekindle
from known_units import draw
from rekindle.diagnosis.results import Health
from rekindle.diagnosis.usage import COVERED, coverage, dead_share, perplexity
from rekindle.triggers import DeadAbove
from stacked_models import CASES, Autoencoder, Quantizer, Switch, trained


def only(health: Health) -> dict[str, float]:
    (numbers,) = (n for name, n in health.stacks.items() if health.about[name]["kind"] != "rows")
    return dict(numbers)


def test_experts_against_a_plain_count() -> None:
    torch.manual_seed(0)
    model, x = Switch(), draw(400, 16)
    numbers = only(rekindle.health(model, [x[:300], x[300:]]))
    shares = model.router(x).softmax(-1)
    counts = torch.bincount(shares.argmax(-1), minlength=8).double()
    assert (numbers["units"], numbers["tokens"]) == (8, 400)
    assert numbers["load"] == pytest.approx(float(counts.max()) / 400)
    entropy = -sum(float(c) / 400 * math.log(float(c) / 400) for c in counts if c)
    assert numbers["perplexity"] == pytest.approx(math.exp(entropy))
    model.experts[1].load_state_dict(model.experts[0].state_dict())
    assert only(rekindle.health(model, [x]))["similar_pairs"] == pytest.approx(1 / 28)


def test_codes_against_a_plain_count() -> None:
    torch.manual_seed(0)
    model, x = Quantizer(), draw(640, 8)
    nearest = torch.cdist(x, model.codes.weight).argmin(-1)
    counts = torch.bincount(nearest, minlength=32).double()
    numbers = only(rekindle.health(model, [x]))
    assert numbers["perplexity"] == pytest.approx(perplexity(counts))
    assert numbers["dead"] == pytest.approx(dead_share(counts))


def test_latents_against_a_plain_count() -> None:
    model, x = Autoencoder("topk"), draw(600, 16) + 0.3
    with torch.no_grad():
        model.b_enc[40:] = -1e3
        active = model.encode(x) != 0
    numbers = only(rekindle.health(model, [x]))
    assert numbers["dead"] == pytest.approx(24 / 64)
    assert numbers["active"] == pytest.approx(float(active.double().sum(-1).mean()))
    spread = (x - x.mean(0)).square().sum(-1).mean().sqrt()
    assert numbers["gamma"] == pytest.approx(float(x.mean(0).norm() / spread), rel=1e-4)


def test_latents_are_no_dormant_neurons() -> None:
    model = CASES["dictionary AutoEncoder"]()
    found = rekindle.health(model.model, [model.batch])
    assert not found.units
    assert "dormant" not in found.whole


def test_padding_does_not_count() -> None:
    case = CASES["Mixtral"]()
    ids = case.batch["input_ids"]
    mask = torch.ones_like(ids)
    mask[:, 10:] = 0
    found = rekindle.health(case.model, [{"input_ids": ids, "attention_mask": mask}])
    experts = [numbers for name, numbers in found.stacks.items() if found.about[name]["kind"] == "experts"]
    assert [numbers["tokens"] for numbers in experts] == [160, 160]


@pytest.mark.parametrize("seed", range(5))
def test_the_estimates_tell_rare_from_dead(seed: int) -> None:
    """Units drawn with long-tailed chances: hardly any is called dead, however few tokens there are."""
    generator = torch.Generator().manual_seed(seed)
    chances = torch.arange(1, 513, dtype=torch.float64) ** -1.0
    for tokens in (64, 512, 1024, 2048, 4096, 8192):
        counts = torch.bincount(torch.multinomial(chances, tokens, True, generator=generator), minlength=512).double()
        assert coverage(counts) < COVERED or dead_share(counts) < 0.2
    assert coverage(counts) > COVERED
    half = torch.cat([counts, torch.zeros(512, dtype=torch.float64)])
    assert dead_share(half) == pytest.approx(0.5, abs=0.06)


def test_too_few_tokens_are_unknown_and_never_healthy() -> None:
    model = Quantizer(512)
    found = rekindle.health(model, [draw(40, 8)])
    assert found.verdict == "unknown"
    assert "codes.weight was not judged" in found.verdict.rule
    assert any("40 tokens are too few for 512 units" in each.reason for each in found.unmeasured)


def test_what_did_not_run_is_listed() -> None:
    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.quantizer = nn.Linear(8, 8), Quantizer()

        def forward(self, x: Tensor) -> Tensor:
            x = self.body(x)
            return self.quantizer(x) if len(x) > 2 else x

    found = rekindle.health(Sometimes(), [draw(9, 8)], units={"quantizer.other": "codes"})
    assert any(each.name == "quantizer.other" and "does not use it" in each.reason for each in found.unmeasured)
    usage = rekindle.health(Sometimes(), [draw(2, 8)])
    assert not usage.stacks and usage.verdict != "healthy"


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("FSQ", {"levels": [4, 4, 4]}),
        ("ResidualFSQ", {"levels": [4, 4], "num_quantizers": 2}),
        ("LFQ", {"codebook_size": 64}),
        ("LFQ", {"codebook_size": 64, "spherical": True}),
        ("ResidualLFQ", {"codebook_size": 64, "num_quantizers": 2}),
        ("LatentQuantize", {"levels": [5, 5, 8]}),
        ("LatentQuantize", {"levels": [5, 5, 8], "optimize_values": False}),
    ],
)
def test_quantizers_without_a_table_are_listed(name: str, options: dict[str, object]) -> None:
    """Their codes are no units that could die: named with the reason, neither healthy nor dead."""
    package = pytest.importorskip("vector_quantize_pytorch")

    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into, self.out = nn.Conv1d(16, 16, 1), nn.Conv1d(16, 16, 1)
            self.quantizer = getattr(package, name)(dim=16, **options)

        def forward(self, x: Tensor) -> Tensor:
            x = self.into(x)
            first = self.quantizer(x if name == "LatentQuantize" else x.mT)[0]
            return self.out(first if name == "LatentQuantize" else first.mT)

    found = rekindle.health(Inside(), [draw(2, 16, 64)])
    assert not found.stacks
    listed = {each.name: each.reason for each in found.unmeasured if "no table" in each.reason}
    assert listed
    assert all(each.startswith("quantizer") for each in listed)


@pytest.mark.parametrize("name", CASES)
def test_collapsed_is_act_and_sound_is_not(name: str) -> None:
    case = CASES[name]()
    if case.kind == "ranks":
        untrained = rekindle.health(case.model, [case.batch])
        assert "ranks" not in {about.get("kind") for about in untrained.about.values()}
        trained("up" if name == "adapter" else "lora_B")(case.model)
    sound = rekindle.health(case.model, [case.batch] * 2)
    assert sound.verdict != "act", sound.verdict.lines()
    assert case.kind in {about.get("kind") for about in sound.about.values()}
    case.kill(case.model)
    found = rekindle.health(case.model, [case.batch] * 2)
    assert found.verdict == "act"
    assert any(f"{case.kind} dead" in finding.text for finding in found.verdict.findings)
    assert DeadAbove(0.1)(found) is not None
    printed = str(found)
    assert f"\n{case.kind} " in printed  # "experts  …", or "experts (model.layers.…)  …" where names share a prefix
    assert Health.from_dict(found.to_dict()).verdict.lines() == found.verdict.lines()


def test_health_leaves_no_trace() -> None:
    case = CASES["quantizer ema"]()
    case.model.train()
    before = {name: tensor.clone() for name, tensor in case.model.state_dict().items()}
    rekindle.health(case.model, [case.batch])
    for name, tensor in case.model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert not torch.nn.modules.module._global_forward_hooks
