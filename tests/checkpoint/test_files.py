"""Looking at checkpoints and projecting them, in every format."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file, save_model
from torch import Tensor, nn

import rekindle
from checkpoints import isometry, leftovers, save_dcp, save_sharded, small_model
from rekindle.checkpoint import CheckpointError, fire_file, open_checkpoint

CHANGED = ("0.weight", "2.weight")


def write(tensors: dict[str, Tensor], kind: str, folder: Path) -> Path:
    if kind == "safetensors":
        save_file(tensors, folder / "in.safetensors", metadata={"format": "pt", "note": "kept"})
        return folder / "in.safetensors"
    if kind == "sharded":
        save_sharded(tensors, folder / "in")
        return folder / "in"
    if kind == "dcp":
        save_dcp({"model": tensors, "epoch": 7}, folder / "in")
        return folder / "in"
    tree: Any = tensors
    if kind == "lightning":
        tree = {"state_dict": tensors, "epoch": 7, "pytorch-lightning_version": "2.6", "callbacks": {}}
    file = folder / f"in.{'ckpt' if kind == 'lightning' else 'pt'}"
    torch.save(tree, file, _use_new_zipfile_serialization=kind != "legacy")
    return file


KINDS = ["safetensors", "sharded", "torch", "legacy", "lightning", "dcp"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_projects_what_fire_projects_and_leaves_every_other_byte(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    state = {name: value.to(dtype) for name, value in small_model().state_dict().items()}
    state["steps"] = torch.tensor([3, 4])
    source = write(state, kind, tmp_path)
    receipt = fire_file(source, tmp_path / "out", targets="auto", scale="paper")
    assert receipt.changed == CHANGED
    tolerance = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float64: 1e-4}[dtype]  # bf16: 2⁻⁸ of entries up to 2
    with open_checkpoint(source) as old, open_checkpoint(tmp_path / "out") as new:
        assert new.format == old.format
        assert new.names == old.names
        assert new.metadata.get("note") == old.metadata.get("note")
        for name in old.names:
            assert new.meta(name)[:3] == old.meta(name)[:3]
            if name in CHANGED:
                expected = isometry(state[name])
                assert torch.allclose(new.read(name).double(), expected, atol=tolerance)
                assert not torch.equal(old.read(name), new.read(name))
            else:
                assert torch.equal(old.read(name).view(torch.uint8), new.read(name).view(torch.uint8))
                assert torch.equal(old.read(name), state[name])
    assert leftovers(tmp_path) == []


def test_equals_fire_on_the_live_model_with_its_plan(tmp_path: Path) -> None:
    model = small_model()
    plan = rekindle.plan(model, scale="nearest", include=["4.weight"])
    plan.save(tmp_path / "plan.json")
    torch.save(model.state_dict(), tmp_path / "in.pt")
    receipt = fire_file(tmp_path / "in.pt", tmp_path / "out.pt", plan=tmp_path / "plan.json", strength=0.5)
    live = rekindle.fire(model, plan=plan, strength=0.5)
    assert receipt.changed == live.changed == (*CHANGED, "4.weight")
    for name, value in torch.load(tmp_path / "out.pt", weights_only=True).items():
        assert torch.allclose(value, model.state_dict()[name], atol=1e-5), name
    assert receipt.records[0].sfe == pytest.approx(live.records[0].sfe, rel=1e-4)


def test_a_plan_sees_through_one_prefix_on_either_side(tmp_path: Path) -> None:
    model = small_model()
    plan = rekindle.plan(model, targets="auto")
    torch.save({"state_dict": {f"net.{k}": v for k, v in model.state_dict().items()}}, tmp_path / "a.ckpt")
    assert len(fire_file(tmp_path / "a.ckpt", tmp_path / "b.ckpt", plan=plan).changed) == 2
    other = rekindle.plan(nn.ModuleDict({"net": model}), targets="auto")
    torch.save(model.state_dict(), tmp_path / "c.pt")
    assert len(fire_file(tmp_path / "c.pt", tmp_path / "d.pt", plan=other).changed) == 2
    torch.save({"x.weight": torch.randn(3, 3)}, tmp_path / "e.pt")
    with pytest.raises(CheckpointError, match=r"'0\.weight' is not in the checkpoint"):
        fire_file(tmp_path / "e.pt", tmp_path / "f.pt", plan=plan)
    torch.save(small_model(width=8).state_dict(), tmp_path / "g.pt")
    with pytest.raises(CheckpointError, match="has shape"):
        fire_file(tmp_path / "g.pt", tmp_path / "h.pt", plan=plan)


def test_a_hugging_face_folder_is_laid_out_by_its_config_and_loads_again(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=64, n_positions=16)
    model = transformers.GPT2LMHeadModel(config)
    model.save_pretrained(tmp_path / "in", max_shard_size="40KB")
    (tmp_path / "in" / "tokenizer.json").write_text("{}", "utf-8")
    (tmp_path / "in" / "1_Pooling").mkdir()
    (tmp_path / "in" / "1_Pooling" / "config.json").write_text("{}", "utf-8")
    (tmp_path / "in" / "pytorch_model.bin").write_bytes(b"stale")
    receipt = fire_file(tmp_path / "in", tmp_path / "out")
    rekindle.fire(model)
    again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "out")
    for (name, live), stored in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.allclose(live, stored, atol=1e-4), name  # c_attn is transposed and fused: the config told
    assert torch.isfinite(again(torch.arange(8)[None]).logits).all()
    assert again.lm_head.weight is again.transformer.wte.weight
    assert (tmp_path / "out" / "tokenizer.json").exists()
    assert (tmp_path / "out" / "1_Pooling" / "config.json").exists()
    assert not (tmp_path / "out" / "pytorch_model.bin").exists()
    assert any("pytorch_model.bin" in note for note in receipt.notes)


def test_without_config_what_is_unsure_is_skipped_and_said(tmp_path: Path) -> None:
    tensors = {"h.c_attn.weight": torch.randn(8, 24), "h.mlp.weight": torch.randn(8, 8), "x.weight": torch.randn(8, 8)}
    save_file(tensors, tmp_path / "in.safetensors")
    receipt = fire_file(tmp_path / "in.safetensors", tmp_path / "out.safetensors", heads="x")
    assert "how c_attn is fused" in receipt.skipped["h.c_attn.weight"]
    config = {"model_type": "no-such-model", "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(config), "utf-8")
    receipt = fire_file(tmp_path / "in.safetensors", tmp_path / "out2.safetensors", heads="x")
    assert any("config.json was not used" in note for note in receipt.notes)
    with pytest.raises(CheckpointError, match="no-such-model"):
        fire_file(tmp_path / "in.safetensors", tmp_path / "out3.safetensors", config=config)
    config["num_hidden_layers"] = 10**9  # would take forever, even on the meta device
    (tmp_path / "config.json").write_text(json.dumps(config), "utf-8")
    fire_file(tmp_path / "in.safetensors", tmp_path / "out4.safetensors", heads="x")


def test_provenance_goes_into_the_metadata_and_earlier_runs_stay(tmp_path: Path) -> None:
    save_file(small_model().state_dict(), tmp_path / "a.safetensors", metadata={"format": "pt"})
    fire_file(tmp_path / "a.safetensors", tmp_path / "b.safetensors", strength=0.5)
    fire_file(tmp_path / "b.safetensors", tmp_path / "c.safetensors", scale="nearest")
    with safe_open(tmp_path / "c.safetensors", "pt") as file:  # the reference implementation reads it
        metadata = file.metadata()
    first, second = json.loads(metadata["rekindle"])
    assert metadata["format"] == "pt"
    assert first["settings"]["strength"] == 0.5
    assert first["rekindle"] == rekindle.__version__
    assert second["plan"]["scale"] == "nearest"
    assert second["converged"] is True
    assert second["residual"] <= 1e-6


@pytest.mark.parametrize("kind", ["safetensors", "sharded", "torch", "lightning"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_another_dtype_is_given_to_every_floating_tensor(kind: str, dtype: str, tmp_path: Path) -> None:
    state = {**small_model().state_dict(), "steps": torch.tensor([3, 4]), "mask": torch.tensor([True])}
    source = write(state, kind, tmp_path)
    fire_file(source, tmp_path / "out", dtype=dtype, targets="auto", scale="paper")
    with open_checkpoint(tmp_path / "out") as new:
        assert list(new.names) == list(open_checkpoint(source).names)
        for name, value in state.items():
            wanted = getattr(torch, dtype) if value.is_floating_point() else value.dtype
            assert new.meta(name).dtype == wanted
            if name not in CHANGED:
                assert torch.equal(new.read(name), value.to(wanted))
            else:
                assert torch.allclose(new.read(name).double(), isometry(value), atol=2e-2)
    if kind == "sharded":
        index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text("utf-8"))
        files = (tmp_path / "out").glob("*.safetensors")
        assert index["metadata"]["total_size"] == sum(t.nbytes for f in files for t in load_file(f).values())
    assert leftovers(tmp_path) == []


def test_ties_survive_and_are_treated_once(tmp_path: Path) -> None:
    shared = torch.randn(8, 8)
    torch.save({"a.weight": shared, "b.weight": shared, "c.weight": torch.randn(8, 8)}, tmp_path / "in.pt")
    with open_checkpoint(tmp_path / "in.pt") as checkpoint:
        assert checkpoint.tied == {"b.weight": "a.weight"}
        plan = checkpoint.plan(heads="c", targets="auto", scale="paper")
    assert {e.name: e.reason for e in plan.entries}["b.weight"] == "tied to a.weight, treated there"
    fire_file(tmp_path / "in.pt", tmp_path / "out.pt", heads="c", targets="auto", scale="paper")
    new = torch.load(tmp_path / "out.pt", weights_only=True)
    assert new["a.weight"].data_ptr() == new["b.weight"].data_ptr()
    assert torch.allclose(new["a.weight"].double(), isometry(shared), atol=1e-4)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight = model[0].weight
    save_model(model, str(tmp_path / "in.safetensors"))
    with open_checkpoint(tmp_path / "in.safetensors") as checkpoint:
        assert list(checkpoint.tied.items()) in ([("1.weight", "0.weight")], [("0.weight", "1.weight")])


def test_a_torch_file_keeps_strides_order_and_everything_that_is_no_weight(tmp_path: Path) -> None:
    turned = torch.randn(8, 8).T
    tree = {"model": {"z.weight": turned, "a.weight": torch.randn(8, 8), "extra": {"x": 1}}, "rng": [1, (2, "three")]}
    torch.save(tree, tmp_path / "in.pth")
    fire_file(tmp_path / "in.pth", tmp_path / "out.pth", heads="a", targets="auto", scale="paper")
    new = torch.load(tmp_path / "out.pth", weights_only=True)
    assert new["rng"] == tree["rng"]
    assert list(new["model"]) == ["z.weight", "a.weight", "extra"]
    assert new["model"]["z.weight"].stride() == turned.stride()
    assert torch.allclose(new["model"]["z.weight"].double(), isometry(turned), atol=1e-4)
    assert zipfile.ZipFile(tmp_path / "out.pth").testzip() is None  # the checksums fit


def test_a_dcp_folder_written_by_shards_is_put_together_and_taken_apart(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    # One rank's save has one chunk a tensor; two chunks are made by hand, as two ranks would write them.
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

    state = small_model().state_dict()
    whole = state["0.weight"]
    save_dcp({"model": {**state, "top": whole[:10].clone(), "bottom": whole[10:].clone()}}, tmp_path / "in")
    import pickle

    path = tmp_path / "in" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    places = {index.fqn: info for index, info in metadata.storage_data.items()}
    entry = metadata.state_dict_metadata["model.0.weight"]
    entry.chunks = [
        ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([10, 16])),
        ChunkStorageMetadata(torch.Size([10, 0]), torch.Size([22, 16])),
    ]
    for name, offset in (("top", (0, 0)), ("bottom", (10, 0))):
        del metadata.state_dict_metadata[f"model.{name}"]
        del metadata.planner_data[f"model.{name}"]
        metadata.storage_data[MetadataIndex("model.0.weight", offset)] = places[f"model.{name}"]
    path.write_bytes(pickle.dumps(metadata))
    with open_checkpoint(tmp_path / "in") as checkpoint:
        assert torch.equal(checkpoint.read("0.weight"), whole)
    fire_file(tmp_path / "in", tmp_path / "out", targets="auto", scale="paper")
    loaded = {"model": {name: torch.zeros_like(value) for name, value in state.items()}}
    dcp.load(loaded, checkpoint_id=tmp_path / "out", no_dist=True)
    assert torch.allclose(loaded["model"]["0.weight"].double(), isometry(whole), atol=1e-4)
    assert torch.equal(loaded["model"]["4.weight"], state["4.weight"])


def test_what_cannot_be_planned_or_asked_for_is_one_line(tmp_path: Path) -> None:
    file, out = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    save_file({"a.weight": torch.full((4, 4), float("nan")), "b.weight": torch.ones(4, 4)}, file)
    for options, message in (
        ({}, "NaN"),
        ({"strength": 0.0}, "strength"),
        ({"solver": "magic"}, "solver"),
        ({"steps": 3}, "steps"),
        ({"targets": "no.such*"}, "no.such"),
        ({"dtype": "int8"}, "dtype"),
        ({"plan": tmp_path / "no.json"}, "no.json"),
        ({"optimizer_state": "old"}, "optimizer_state"),
    ):
        with pytest.raises(CheckpointError, match=message) as caught:
            fire_file(file, out, heads="b", **options)
        assert "\n" not in str(caught.value)
        assert sorted(p.name for p in tmp_path.iterdir()) == ["in.safetensors"]


def test_meta_tensors_have_no_bytes_and_progress_counts_up(tmp_path: Path) -> None:
    save_file(small_model().state_dict(), tmp_path / "in.safetensors")
    with open_checkpoint(tmp_path / "in.safetensors") as checkpoint:
        meta = checkpoint.meta_tensors()
        assert all(tensor.is_meta for tensor in meta.values())
        assert list(meta) == list(checkpoint.names)
        assert checkpoint.optimizer is None
        assert checkpoint.meta("0.weight") == ((32, 16), torch.float32, 2048, "in.safetensors")
        measured = checkpoint.plan(measure="cheap", targets="auto").selected[0]
        assert measured.dfi_now is not None
    calls: list[tuple[int, int, str]] = []
    fire_file(tmp_path / "in.safetensors", tmp_path / "out", progress=lambda *call: calls.append(call), targets="auto")
    assert calls[0] == (0, 2, "")
    assert calls[-1] == (2, 2, "2.weight")


def test_packed_and_8_bit_tensors_pass_through(tmp_path: Path) -> None:
    tensors = {"q.weight": torch.randn(4, 4).to(torch.float8_e4m3fn), "a.weight": torch.randn(8, 8)}
    tensors["b.weight"] = torch.randn(8, 8)
    save_file(tensors, tmp_path / "in.safetensors")
    receipt = fire_file(tmp_path / "in.safetensors", tmp_path / "out.safetensors", dtype="bfloat16", heads="b")
    assert "quantized" in receipt.skipped["q.weight"]
    new = load_file(tmp_path / "out.safetensors")["q.weight"]
    assert torch.equal(new.view(torch.uint8), tensors["q.weight"].view(torch.uint8))


@pytest.mark.parametrize("kind", ["linear", "attention", "gates"])
def test_biases_are_zeroed_as_in_the_live_model(kind: str, tmp_path: Path) -> None:
    """Also those of a part of a fused weight, and their optimizer state starts again with them."""
    torch.manual_seed(0)
    made: dict[str, Callable[[], nn.Module]] = {
        "linear": lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)),
        "attention": lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
        "gates": lambda: nn.LSTM(4, 6),
    }
    targets = "attention.qk" if kind == "attention" else "auto"
    model = made[kind]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1)
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    torch.save({"state_dict": model.state_dict(), "optimizer_states": [optimizer.state_dict()]}, tmp_path / "in.ckpt")
    planned = rekindle.plan(model, targets=targets)
    told = fire_file(tmp_path / "in.ckpt", tmp_path / "out.ckpt", plan=planned, biases="zero")
    live = rekindle.fire(model, optimizer, targets=targets, biases="zero")
    assert told.biases_zeroed == live.biases_zeroed > 0
    assert told.settings["biases"] == "zero"
    assert told.skipped.keys() == live.skipped.keys()
    out = torch.load(tmp_path / "out.ckpt", weights_only=True)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(out["state_dict"][name], value, rtol=1e-4, atol=1e-5)
    kept = optimizer.state_dict()["state"]
    for number, slots in out["optimizer_states"][0]["state"].items():
        assert {slot: float(value.sum()) for slot, value in slots.items()} == {
            slot: float(value.sum()) for slot, value in kept[number].items()
        }
