"""Files as people have them: nested state dicts, a Trainer's folder, plans of parametrized models."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rekindle.checkpoint import CheckpointError, fire_file, open_checkpoint
from rekindle.projection.planning import Plan, plan
from small_networks import polar_reference


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_a_state_dict_inside_a_model_entry(tmp_path: Path, dtype: str | None) -> None:
    state = OrderedDict(net().state_dict())
    tree = {"model": {"model_args": {"dim": 8}, "state_dict": state}, "training_history": {"e": {"train": [0.5]}}}
    torch.save(tree, tmp_path / "in.pth.tar")
    receipt = fire_file(tmp_path / "in.pth.tar", tmp_path / "out.pth.tar", dtype=dtype, targets="auto", scale="paper")
    assert receipt.changed == ("0.weight", "2.weight")
    out = torch.load(tmp_path / "out.pth.tar", weights_only=True)
    assert out["model"]["model_args"] == {"dim": 8}
    assert out["training_history"] == tree["training_history"]
    found = out["model"]["state_dict"]["2.weight"]
    assert found.dtype == (torch.bfloat16 if dtype else torch.float32)
    torch.testing.assert_close(found.double(), polar_reference(state["2.weight"]), rtol=1e-2, atol=1e-2)


def test_an_optimizer_is_not_taken_for_the_model(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 6)).sum().backward()
    optimizer.step()
    torch.save({"net": {"optimizer": optimizer.state_dict(), "params": model.state_dict()}}, tmp_path / "a.pt")
    with open_checkpoint(tmp_path / "a.pt") as checkpoint:
        assert checkpoint.names == tuple(model.state_dict())


class TestPlansOfParametrizedModels:
    @pytest.mark.parametrize("wrap", [nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.spectral_norm])
    def test_originals_in_a_file_are_not_taken_for_the_weight(self, tmp_path: Path, wrap: Any) -> None:
        model = net()
        wrap(model[0])
        drawn = plan(model, scale=1.0, targets="auto")
        assert "0.weight" in [entry.name for entry in drawn.selected]
        drawn.save(tmp_path / "plan.json")
        torch.save(model.state_dict(), tmp_path / "in.pt")
        receipt = fire_file(tmp_path / "in.pt", tmp_path / "out.pt", plan=tmp_path / "plan.json")
        assert receipt.changed == ("2.weight",)
        assert "parametrized" in receipt.skipped["0.weight"]
        before, after = (torch.load(tmp_path / name, weights_only=True) for name in ("in.pt", "out.pt"))
        assert [name for name in before if not torch.equal(before[name], after[name])] == ["2.weight"]

    def test_a_file_with_the_plain_weights_is_projected(self, tmp_path: Path) -> None:
        model = net()
        nn.utils.parametrizations.weight_norm(model[0])
        drawn = Plan.from_dict(plan(model, targets="auto").to_dict())
        torch.save({f"model.{k}": v for k, v in net().state_dict().items()}, tmp_path / "in.pt")
        assert fire_file(tmp_path / "in.pt", tmp_path / "out.pt", plan=drawn).changed == ("0.weight", "2.weight")

    def test_nothing_left_is_an_error_that_says_why(self, tmp_path: Path) -> None:
        model = net()
        nn.utils.parametrizations.weight_norm(model[0])
        torch.save(model.state_dict(), tmp_path / "in.pt")
        with pytest.raises(CheckpointError, match=r"projects nothing.*parametrized.*rekindle\.fire"):
            fire_file(tmp_path / "in.pt", tmp_path / "out.pt", plan=plan(model, targets="0.weight"))


class TestTrainerFolders:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        transformers = pytest.importorskip("transformers", reason='pip install "torch-rekindle[transformers]"')
        pytest.importorskip("accelerate", reason='pip install "torch-rekindle[transformers]"')
        torch.manual_seed(0)
        config = transformers.GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=31, n_positions=8)
        rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)} for _ in range(4)]
        options = {"max_steps": 2, "save_steps": 2, "report_to": [], "use_cpu": True, "disable_tqdm": True}
        arguments = transformers.TrainingArguments(output_dir=str(tmp_path / "run"), **options)
        transformers.Trainer(transformers.GPT2LMHeadModel(config), arguments, train_dataset=rows).train()
        return tmp_path / "run" / "checkpoint-2"

    def test_the_slots_of_the_changed_weights_are_reset_and_no_other(self, folder: Path, tmp_path: Path) -> None:
        transformers = pytest.importorskip("transformers")
        receipt = fire_file(folder, tmp_path / "out")
        assert receipt.optimizer is not None
        assert receipt.optimizer.parameters == len(receipt.changed)
        model = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "out")
        named = dict(model.named_parameters())
        decay = [n for n in named if "bias" not in n and "ln_" not in n]
        order = [*decay, *(n for n in named if n not in decay)]  # as the Trainer has it
        before, after = (
            torch.load(path / "optimizer.pt", weights_only=True)["state"] for path in (folder, tmp_path / "out")
        )
        for number, name in enumerate(order):
            reset = name in receipt.changed
            assert (float(after[number]["step"]) == 0) is reset, name
            assert torch.equal(before[number]["exp_avg"], after[number]["exp_avg"]) is not reset, name
            assert before[number]["exp_avg"].shape == named[name].shape

    def test_states_of_another_model_are_refused_with_the_way_out(self, folder: Path, tmp_path: Path) -> None:
        table = torch.load(folder / "optimizer.pt", weights_only=True)
        table["param_groups"][0]["params"] = table["param_groups"][0]["params"][1:]  # one parameter was frozen
        torch.save(table, folder / "optimizer.pt")
        with pytest.raises(CheckpointError, match=r"do not fit.*named_parameters.*optimizer_state='none'"):
            fire_file(folder, tmp_path / "out")
        assert fire_file(folder, tmp_path / "out", optimizer_state="none").changed
