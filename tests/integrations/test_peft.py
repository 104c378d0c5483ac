"""LoRA: A and B as targets, the merged weight re-split, and an adapter in a Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rekindle
from rekindle import methods

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
from rekindle.integrations.peft import MergedAdapter, lora_layers  # noqa: E402
from rekindle.integrations.transformers import RekindleCallback  # noqa: E402


def adapted(rank: int = 4, trained: bool = True, **options: Any) -> Any:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))
    model = peft.get_peft_model(net, peft.LoraConfig(target_modules=["0", "2"], r=rank, lora_alpha=8, **options))
    if trained:
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.1)
    return model


def merged(model: Any) -> dict[str, Tensor]:
    return {each.name: each.base.detach() + each.delta() for each in lora_layers(model)}


def test_a_and_b_are_targets_of_their_own_and_a_zero_b_stays() -> None:
    fresh = rekindle.fire(adapted(trained=False), targets="adapter")
    assert len(fresh.changed) == 2 and all("lora_A" in name for name in fresh.changed)
    assert "zero" in next(reason for name, reason in fresh.skipped.items() if "lora_B" in name)
    model = adapted()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    receipt = rekindle.fire(model, optimizer, targets="adapter", scale="nearest")
    assert len(receipt.changed) == 4
    a = model.base_model.model[0].lora_A.default.weight
    gram = a @ a.T
    assert torch.allclose(gram, gram[0, 0] * torch.eye(4), atol=1e-4)


@pytest.mark.parametrize("rank", [1, 4, 12])
def test_the_adapter_becomes_the_best_approximation_of_its_rank(rank: int) -> None:
    model = adapted(rank)
    before, bases = merged(model), {each.name: each.base.detach().clone() for each in lora_layers(model)}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    receipt = MergedAdapter(scale="nearest")(model, optimizer)
    after = merged(model)
    for each in lora_layers(model):
        weight = before[each.name].double()
        u, sigma, vh = torch.linalg.svd(weight, full_matrices=False)
        goal = sigma.mean() * (u @ vh)
        difference = goal - bases[each.name].double()
        x, y, z = torch.linalg.svd(difference, full_matrices=False)
        expected = bases[each.name].double() + (x[:, :rank] * y[:rank]) @ z[:rank]
        assert torch.allclose(after[each.name].double(), expected, atol=1e-4)
        assert torch.equal(each.base, bases[each.name]) and not each.base.requires_grad
        record = next(r for r in receipt.records if r.name == f"{each.name}.lora_A.default.weight")
        held = float((y[:rank] ** 2).sum() / (y**2).sum())
        assert record.values["held"] == pytest.approx(held, abs=1e-3)
    assert all("lora_" in name for name in receipt.changed) and len(receipt.changed) == 4


def test_into_the_base_the_layer_computes_with_the_isometry_and_the_adapter_starts_again() -> None:
    model = adapted()
    receipt = MergedAdapter(into="base")(model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad]))
    for each in lora_layers(model):
        weight = each.base.detach() + each.delta()
        small = weight @ weight.T if weight.shape[0] <= weight.shape[1] else weight.T @ weight
        assert torch.allclose(small, small[0, 0] * torch.eye(len(small)), atol=1e-3)
        assert float(each.b.detach().abs().sum()) == 0 and float(each.a.detach().abs().sum()) > 0
    assert sum("base_layer" in name for name in receipt.changed) == 2


def test_a_transposed_base_and_fused_parts() -> None:
    config = transformers.GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2)
    lora = peft.LoraConfig(target_modules=["c_attn"], r=4, fan_in_fan_out=True)
    model = peft.get_peft_model(transformers.GPT2LMHeadModel(config), lora)
    MergedAdapter(into="base", targets="attention.qk")(model)
    weight = next(iter(lora_layers(model))).base.detach()  # (in, q | k | v)
    query, value = weight[:, :16], weight[:, 32:]
    assert torch.allclose(query @ query.T, torch.eye(16), atol=1e-3)
    assert not torch.allclose(value @ value.T, torch.eye(16), atol=1e-1)


def test_what_cannot_be_split_is_refused_before_anything_is_written() -> None:
    model = adapted(use_dora=True)
    with pytest.raises(ValueError, match="DoRA"):
        MergedAdapter()(model)
    with pytest.raises(ValueError, match="no LoRA layer"):
        MergedAdapter()(nn.Linear(2, 2))
    model = adapted()
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match="none of the given optimizers"):
        MergedAdapter()(model, torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1))
    with pytest.raises(ValueError, match="strength"):
        MergedAdapter(strength=3.0)(model)
    assert all(torch.equal(value, kept[name]) for name, value in model.state_dict().items())
    assert not next(iter(lora_layers(model))).base.requires_grad


@pytest.mark.parametrize(
    "make",
    [lambda: methods.FIRE(targets="adapter"), MergedAdapter, lambda: methods.Compose([MergedAdapter(into="base")])],
    ids=["adapter", "merged", "base"],
)
def test_adapters_in_a_trainer_that_saves_adapters_only(tmp_path: Path, make: Any) -> None:
    tokens = torch.randint(0, 32, (24, 8), generator=torch.Generator().manual_seed(0))

    def run(resume: str | None = None) -> tuple[dict[str, Tensor], RekindleCallback]:
        torch.manual_seed(0)
        config = transformers.GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2)
        lora = peft.LoraConfig(target_modules=["c_attn"], r=4, fan_in_fan_out=True, task_type="CAUSAL_LM")
        model = peft.get_peft_model(transformers.GPT2LMHeadModel(config), lora)
        callback = RekindleCallback(make(), at=[2, 4])
        transformers.Trainer(
            model,
            transformers.TrainingArguments(
                output_dir=str(tmp_path), per_device_train_batch_size=4, use_cpu=True, report_to="none",
                disable_tqdm=True, num_train_epochs=1, save_strategy="steps", save_steps=3, logging_strategy="no",
            ),
            train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
            callbacks=[callback],
        ).train(resume_from_checkpoint=resume)  # fmt: skip
        return model.state_dict(), callback

    whole, callback = run()
    assert [f.step for f in callback.firings] == [2, 4]
    assert {n.split(".")[-3] for n in callback.receipts[0].changed} >= {"lora_A", "lora_B"}
    resumed, callback = run(str(tmp_path / "checkpoint-3"))
    assert [f.step for f in callback.firings] == [2, 4] and len(callback.receipts) == 1
    assert all(torch.equal(value, resumed[name]) for name, value in whole.items())


def test_a_state_with_bases_needs_their_layers() -> None:
    method = MergedAdapter(into="base")
    method(adapted())
    other = MergedAdapter(into="base")
    other.load_state_dict(method.state_dict())  # the model is gone, and with it what was changed
    other.resume(adapted())
    method(model := adapted())
    other.load_state_dict(method.state_dict())
    assert other.state_dict()["bases"].keys() == {f"{each.name}.base_layer.weight" for each in lora_layers(model)}
    with pytest.raises(ValueError, match="in no LoRA layer"):
        other.resume(nn.Linear(2, 2))
