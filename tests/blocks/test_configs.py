"""A config is data: no code of its author runs, and what it asks for has a limit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from rekindle.blocks.configs import ConfigError, data_only, meta_model
from rekindle.checkpoint import open_checkpoint

pytest.importorskip("transformers")
BERT: dict[str, Any] = {
    "model_type": "bert",
    "hidden_size": 8,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "intermediate_size": 16,
    "vocab_size": 20,
}


@pytest.mark.parametrize(
    "asked",
    [
        {"num_hidden_layers": 10**9},
        {"text_config": {"num_hidden_layers": 10**9}},
        {"depths": [10**8, 1]},
        {"anything": {"deeper": [{"of_any_name": 10**6}]}},
        {"layer_types": ["full_attention"] * 200_000},
        {"hidden_size": 10**30},
        {"backbone": "somebody/model"},
    ],
)
def test_a_config_out_of_proportion_is_refused_before_anything_is_built(asked: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        meta_model(BERT | asked)


def test_a_model_of_too_many_modules_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rekindle.blocks.configs.MOST_MODULES", 50)
    meta_model(BERT)
    with pytest.raises(ConfigError, match="more than 50 modules"):
        meta_model(BERT | {"num_hidden_layers": 10})


def test_keys_that_name_code_are_removed_at_every_level() -> None:
    evil = {"auto_map": {"AutoModel": "evil.Evil"}, "name_or_path": "x", "_attn_implementation": "a/b", "depth": 2}
    assert data_only({**evil, "text_config": evil, "parts": [evil]}) == {
        "depth": 2,
        "text_config": {"depth": 2},
        "parts": [{"depth": 2}],
    }


@pytest.mark.parametrize("name", ["pipeline", "AutoModel", "Trainer", "GPT2Model", "nothing", 3])
def test_only_classes_listed_for_the_model_type_are_made(name: Any) -> None:
    assert type(meta_model(BERT | {"architectures": [name]})).__name__ == "BertModel"
    assert type(meta_model(BERT | {"architectures": ["BertForMaskedLM"]})).__name__ == "BertForMaskedLM"


def test_code_beside_a_checkpoint_never_runs(tmp_path: Path) -> None:
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'was-here')!r}, 'w')\nclass Evil: pass\n", "utf-8")
    save_file({"a.weight": torch.eye(4), "b.weight": torch.eye(4)}, tmp_path / "model.safetensors")
    evil = {"auto_map": {"AutoModel": "evil.Evil", "AutoConfig": "evil.Evil"}, "name_or_path": str(tmp_path)}
    for config in ({"model_type": "blip_text_model", **evil}, {"model_type": "blip", "text_config": evil, **evil}):
        (tmp_path / "config.json").write_text(json.dumps(config), "utf-8")
        with open_checkpoint(tmp_path) as checkpoint:
            checkpoint.plan(allow_empty=True)
    command = [sys.executable, "-m", "rekindle", "plan", str(tmp_path), "--json"]
    done = subprocess.run(command, input="y\n" * 5, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)
    assert not (tmp_path / "was-here").exists()
