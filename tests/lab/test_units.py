"""Settings whose latents, codes, experts and ranks may die: what they learn, what dies, and what `Revive` does."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from rekindle.lab import Arm, Run, Setting, execute
from rekindle.lab.evaluation import evaluate, score
from rekindle.lab.networks import network
from rekindle.lab.settings import SETTINGS
from rekindle.lab.sources import Examples
from rekindle.lab.together import execute as execute_together

REVIVE = Arm("revive", "Revive", {"tau": None})
TEXT = {"length": 20_000, "context": 16, "rounds": 2, "steps": 4}
TINY: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "latents": ({"data": "digits", "count": 120, "steps": 12}, {"latents": 64, "k": 2, "auxiliary": 0.03}),
    "codes": ({"data": "digits", "count": 120, "steps": 4}, {"codes": 64, "width": 4}),
    "experts": (TEXT, {"layers": 1, "width": 16, "collapsed": 8.0, "balance": 0.01}),
    "ranks": (TEXT, {"layers": 1, "width": 16, "rank": 2, "steps": 3}),
}


def tiny(kind: str) -> Setting:
    stream, options = TINY[kind]
    setting = SETTINGS[kind]
    if kind in ("latents", "codes"):
        stream = {"tasks": 2, **stream}
    return replace(setting, stream_options={**setting.stream_options, **stream}, network_options=options, evaluate=64)


@pytest.mark.parametrize("kind", TINY)
def test_a_run_says_how_many_units_are_used(kind: str) -> None:
    pytest.importorskip({"codes": "vector_quantize_pytorch", "ranks": "peft"}.get(kind, "torch"))
    rows = list(execute(Run(tiny(kind), REVIVE, 0)))
    assert [row["kind"] for row in rows] == ["start", "task", "task", "end"], rows[-1]
    for row in rows[1:3]:
        assert row["health"]["units"][kind]["units"] > 1
        assert row["test_loss"] > 0 and (row["test_accuracy"] is None) == (kind in ("latents", "codes"))
    assert rows[2]["remedy"]["failed"] is None
    if kind == "experts":
        assert rows[1]["health"]["units"][kind]["perplexity"] < 1.1 < rows[2]["health"]["units"][kind]["perplexity"]


def test_a_network_with_a_loss_of_its_own_is_not_stacked() -> None:
    runs = [Run(tiny("latents"), Arm("nothing"), seed) for seed in (0, 1)]
    rows = {key: row for key, row in execute_together(runs) if row.get("task") == 1}
    for run in runs:
        (alone,) = (row for row in execute(run) if row.get("task") == 1)
        assert rows[run.identity]["test_loss"] == alone["test_loss"]


def test_what_is_no_class_is_not_right_or_wrong() -> None:
    model = network("autoencoder", shape=(6,), classes=1, seed=0, latents=12, k=2)
    x = torch.randn(40, 6)
    made, loss, right = score(model, x, x)
    assert right.isnan()
    assert loss.item() == pytest.approx(float((made - x).square().sum() / (x - x.mean(0)).square().sum()), rel=1e-5)
    assert evaluate(model, Examples(x, x)).accuracy is None
