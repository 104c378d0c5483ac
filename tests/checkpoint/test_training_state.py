"""Optimizer states inside a training checkpoint: matched, reset, counted, or refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rekindle
from checkpoints import save_dcp, small_model, stepped
from rekindle.checkpoint import CheckpointError, fire_file, open_checkpoint

OPTIMIZERS: dict[str, Any] = {
    "AdamW": lambda p: torch.optim.AdamW(p),
    "Adam amsgrad": lambda p: torch.optim.Adam(p, amsgrad=True),
    "SGD": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "SGD dampening": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, dampening=0.5),
    "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.5),
    "NAdam": lambda p: torch.optim.NAdam(p),
    "Adagrad": lambda p: torch.optim.Adagrad(p, initial_accumulator_value=0.25),
    "Adafactor": lambda p: torch.optim.Adafactor(p),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "ASGD": lambda p: torch.optim.ASGD(p),
}


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_next_step_from_the_file_is_that_of_the_live_model(kind: str, named: bool, tmp_path: Path) -> None:
    model = small_model()
    optimizer = stepped(model, OPTIMIZERS[kind](model.named_parameters() if named else model.parameters()))
    tree = {"state_dict": model.state_dict(), "optimizer_states": [optimizer.state_dict()], "epoch": 2}
    torch.save(tree, tmp_path / "in.ckpt")
    receipt = fire_file(tmp_path / "in.ckpt", tmp_path / "out.ckpt")
    live = rekindle.fire(model, optimizer)
    assert receipt.optimizer is not None
    assert live.optimizer is not None
    assert (receipt.optimizer.reset, receipt.optimizer.matched) == (live.optimizer.reset, live.optimizer.matched)
    assert receipt.optimizer.optimizers == (kind.split()[0],)

    again = small_model(seed=5)
    other = OPTIMIZERS[kind](again.named_parameters() if named else again.parameters())
    loaded = torch.load(tmp_path / "out.ckpt", weights_only=True)
    assert loaded["epoch"] == 2
    again.load_state_dict(loaded["state_dict"])
    other.load_state_dict(loaded["optimizer_states"][0])
    for each, its in ((model, optimizer), (again, other)):
        stepped(each, its)
    for name, value in model.state_dict().items():
        assert torch.allclose(value, again.state_dict()[name], atol=1e-5), name


def test_an_integer_step_count_is_reset_too(tmp_path: Path) -> None:
    model = small_model()
    state = stepped(model, torch.optim.Adam(model.parameters())).state_dict()
    for slots in state["state"].values():
        slots["step"] = int(slots["step"])  # as torch before 1.12 wrote it
    torch.save({"model": model.state_dict(), "optimizer": state}, tmp_path / "in.pt")
    fire_file(tmp_path / "in.pt", tmp_path / "out.pt", targets="auto")
    new = torch.load(tmp_path / "out.pt", weights_only=True)["optimizer"]["state"]
    assert [slots["step"] for slots in new.values()] == [0, 2, 0, 2, 2, 2]
    assert not new[0]["exp_avg"].any()
    assert torch.equal(new[1]["exp_avg"], state["state"][1]["exp_avg"])


def test_the_one_history_of_lbfgs_is_dropped(tmp_path: Path) -> None:
    model = small_model()
    optimizer = torch.optim.LBFGS(model.parameters())

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 16)).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "in.pt")
    receipt = fire_file(tmp_path / "in.pt", tmp_path / "out.pt", exclude=["0.weight"])
    assert receipt.optimizer is not None
    assert receipt.optimizer.dropped == ("LBFGS",)
    assert not torch.load(tmp_path / "out.pt", weights_only=True)["optimizer"]["state"][0]


def test_param_names_beat_the_order_and_groups(tmp_path: Path) -> None:
    model = small_model()
    named = dict(model.named_parameters())
    groups = [
        {"params": [(n, p) for n, p in reversed(named.items()) if p.ndim > 1]},
        {"params": [(n, p) for n, p in named.items() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = stepped(model, torch.optim.AdamW(groups))
    torch.save({"state_dict": model.state_dict(), "optimizer_states": [optimizer.state_dict()]}, tmp_path / "in.ckpt")
    with open_checkpoint(tmp_path / "in.ckpt") as checkpoint:
        assert checkpoint.optimizer == {
            "optimizers": ["AdamW"],
            "parameters": 6,
            "slots": 18,
            "matched_by": "param_names",
        }
    fire_file(tmp_path / "in.ckpt", tmp_path / "out.ckpt", targets="auto")
    new = torch.load(tmp_path / "out.ckpt", weights_only=True)["optimizer_states"][0]
    names = [name for group in new["param_groups"] for name in group["param_names"]]
    fresh = {names[key] for key, slots in new["state"].items() if not slots["exp_avg"].any()}
    assert fresh == {"0.weight", "2.weight"}


def test_without_names_a_doubtful_order_is_refused_unless_the_state_is_to_stay(tmp_path: Path) -> None:
    model = small_model()
    weights = [p for p in model.parameters() if p.ndim > 1]
    biases = [p for p in model.parameters() if p.ndim == 1]
    optimizer = stepped(model, torch.optim.AdamW([{"params": weights}, {"params": biases}]))
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "in.pt")
    with pytest.raises(CheckpointError, match=r"order differs.*optimizer_state='none'"):
        fire_file(tmp_path / "in.pt", tmp_path / "out.pt")
    assert not (tmp_path / "out.pt").exists()
    fire_file(tmp_path / "in.pt", tmp_path / "out.pt", optimizer_state="none")
    new = torch.load(tmp_path / "out.pt", weights_only=True)["optimizer"]["state"]
    assert all(torch.equal(new[i]["exp_avg"], s["exp_avg"]) for i, s in optimizer.state_dict()["state"].items())

    fewer = stepped(model, torch.optim.AdamW(weights))
    torch.save({"model": model.state_dict(), "optimizer": fewer.state_dict()}, tmp_path / "in2.pt")
    with pytest.raises(CheckpointError, match="3 parameters without names"):
        fire_file(tmp_path / "in2.pt", tmp_path / "out2.pt")

    stranger = copy.deepcopy(optimizer.state_dict())
    stranger["state"] = {key: {"strange": torch.ones(3, 3)} for key in stranger["state"]}
    torch.save({"model": model.state_dict(), "optimizer": stranger}, tmp_path / "in3.pt")
    with pytest.raises(CheckpointError):
        fire_file(tmp_path / "in3.pt", tmp_path / "out3.pt")


def test_two_optimizers_of_two_networks_and_buffers_between(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {
            "g": nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)),
            "d": nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)),
        }
    )
    states = [stepped(net, torch.optim.Adam(net.parameters())).state_dict() for net in model.values()]
    torch.save({"state_dict": model.state_dict(), "optimizer_states": states}, tmp_path / "in.ckpt")
    receipt = fire_file(tmp_path / "in.ckpt", tmp_path / "out.ckpt", targets=["g.0.weight", "d.0.weight"])
    assert receipt.optimizer is not None
    assert receipt.optimizer.reset == 6
    new = torch.load(tmp_path / "out.ckpt", weights_only=True)["optimizer_states"]
    assert [float(s["step"]) for s in new[0]["state"].values()] == [0, 2, 2, 2, 2, 2]
    assert [float(s["step"]) for s in new[1]["state"].values()] == [0, 2, 2, 2]


def test_dcp_states_are_reset_by_name(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model = small_model()
    optimizer = stepped(model, torch.optim.AdamW(model.parameters()))
    weights, states = get_state_dict(model, optimizer)
    save_dcp({"model": weights, "optimizer": states}, tmp_path / "in")
    receipt = fire_file(tmp_path / "in", tmp_path / "out", targets="auto")
    assert receipt.optimizer is not None
    assert receipt.optimizer.reset == 6
    before = copy.deepcopy(states)
    tree = {"model": weights, "optimizer": states}
    dcp.load(tree, checkpoint_id=tmp_path / "out", no_dist=True)
    for name, slots in states["state"].items():
        for slot, value in slots.items():
            expected = torch.zeros_like(value) if name in ("0.weight", "2.weight") else before["state"][name][slot]
            assert torch.equal(value, expected), (name, slot)


def test_the_optimizer_file_of_a_trainer_folder_is_treated_too(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    model = small_model()
    folder = tmp_path / "checkpoint-500"
    folder.mkdir()
    save_file(model.state_dict(), folder / "model.safetensors")
    optimizer = stepped(model, torch.optim.AdamW(model.named_parameters()))
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    (folder / "trainer_state.json").write_text("{}", "utf-8")
    receipt = fire_file(folder, tmp_path / "out", targets="auto")
    assert receipt.optimizer is not None
    assert receipt.optimizer.reset == 6
    assert float(torch.load(tmp_path / "out" / "optimizer.pt", weights_only=True)["state"][0]["step"]) == 0
    assert (tmp_path / "out" / "trainer_state.json").exists()
    # safetensors sorts names, so that without param_names nothing tells which state is whose.
    torch.save(stepped(model, torch.optim.AdamW(model.parameters())).state_dict(), folder / "optimizer.pt")
    with pytest.raises(CheckpointError, match="not in the model's order"):
        fire_file(folder, tmp_path / "out2", targets="auto")


def test_a_real_lightning_checkpoint_goes_through_and_trains_on(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")

    class Task(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = small_model()

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return self.net(batch[0]).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(8, 16)), batch_size=4)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    trainer = lightning.Trainer(max_epochs=1, default_root_dir=tmp_path, enable_checkpointing=False, **quiet)
    trainer.fit(Task(), data)
    trainer.save_checkpoint(tmp_path / "in.ckpt")
    receipt = fire_file(tmp_path / "in.ckpt", tmp_path / "out.ckpt", targets="auto")
    assert receipt.changed == ("net.0.weight", "net.2.weight")
    assert receipt.optimizer is not None
    assert receipt.optimizer.reset == 6
    again = lightning.Trainer(max_epochs=2, default_root_dir=tmp_path, enable_checkpointing=False, **quiet)
    again.fit(Task(), data, ckpt_path=tmp_path / "out.ckpt")
    assert again.global_step == 4


def test_a_zero_weight_is_skipped_and_keeps_its_state(tmp_path: Path) -> None:
    model = small_model()
    optimizer = stepped(model, torch.optim.Adam(model.parameters()))
    with torch.no_grad():
        model[0].weight.zero_()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "in.pt")
    receipt = fire_file(tmp_path / "in.pt", tmp_path / "out.pt", targets="auto")
    state = torch.load(tmp_path / "out.pt")["optimizer"]["state"]
    assert receipt.changed == ("2.weight",)
    assert "min_norm" in receipt.skipped["0.weight"]
    assert torch.equal(state[0]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"])
    assert not state[2]["exp_avg"].any()


@pytest.mark.parametrize("kind", ["torch", "dcp"])
def test_what_is_left_as_it_was_is_named(kind: str, tmp_path: Path) -> None:
    model = small_model()
    tree = {"model": model.state_dict(), "ema": small_model(1).state_dict(), "epoch": 3}
    (save_dcp if kind == "dcp" else torch.save)(tree, tmp_path / "in")
    (note,) = fire_file(tmp_path / "in", tmp_path / "out").notes
    assert note == "left as it was: ['ema'], neither this model's weights nor a torch optimizer's state"
