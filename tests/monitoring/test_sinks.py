"""Sinks, with the real libraries, written to a temporary folder and read back."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rekindle.monitoring.sinks import MlflowSink, TensorBoardSink, WandbSink, send

ROWS = {10: {"health/dormant": 0.25, "health/weights/c_attn.weight[query]/dfi": 3.0}, 20: {"health/dormant": 0.5}}


def test_a_function_is_a_sink_and_gets_finite_numbers_only() -> None:
    got: list[tuple[int, dict[str, float]]] = []
    send([lambda step, row: got.append((step, row))], 7, {"a": 1, "b": math.inf, "c": math.nan})
    assert got == [(7, {"a": 1.0})]


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    with TensorBoardSink(str(tmp_path)) as sink:
        for step, row in ROWS.items():
            send([sink], step, row)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(e.step, e.value) for e in events.Scalars("health/dormant")] == [(10, 0.25), (20, 0.5)]


def test_tensorboard_leaves_a_given_writer_open() -> None:
    class Writer:
        closed = flushed = False
        rows: list[tuple[str, float, int]] = []  # noqa: RUF012

        def add_scalar(self, name: str, value: float, step: int) -> None:
            self.rows.append((name, value, step))

        def flush(self) -> None:
            self.flushed = True

        def close(self) -> None:
            self.closed = True

    writer = Writer()
    with TensorBoardSink(writer=writer) as sink:
        sink(3, {"x": 1.0})
    assert (writer.rows, writer.flushed, writer.closed) == ([("x", 1.0, 3)], True, False)


def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    settings = wandb.Settings(disable_git=True, console="off", x_disable_stats=True, x_disable_meta=True)
    sink = WandbSink(mode="offline", dir=str(tmp_path), project="rekindle", settings=settings)
    for step, row in ROWS.items():
        send([sink], step, row)
    assert dict(sink.run.summary)["health/dormant"] == 0.5
    assert dict(sink.run.summary)["health_step"] == 20
    sink.close()
    sink.close()
    assert list(tmp_path.rglob("run-*.wandb"))


def test_wandb_leaves_a_given_run_open() -> None:
    class Run:
        finished = False

        def __init__(self) -> None:
            self.rows: list[dict[str, Any]] = []

        def log(self, row: dict[str, Any]) -> None:
            self.rows.append(row)

        def finish(self) -> None:
            self.finished = True

    run = Run()
    with WandbSink(run) as sink:
        sink(4, {"x": 2.0})
    assert (run.rows, run.finished) == ([{"x": 2.0, "health_step": 4}], False)


def test_mlflow_in_a_local_file(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    uri = _local_store(tmp_path)
    with MlflowSink(uri, experiment="streams") as sink:
        for step, row in ROWS.items():
            send([sink], step, row)
    history = sink.client.get_metric_history(sink.run_id, "health/dormant")
    assert [(m.step, m.value) for m in history] == [(10, 0.25), (20, 0.5)]
    assert sink.client.get_run(sink.run_id).data.metrics["health/weights/c_attn.weight_query_/dfi"] == 3.0
    assert sink.client.get_run(sink.run_id).info.status == "FINISHED"
    # A second sink goes on in the same run and leaves it as it is.
    with MlflowSink(uri, run_id=sink.run_id) as again:
        send([again], 30, {"health/dormant": 0.75})
    assert len(sink.client.get_metric_history(sink.run_id, "health/dormant")) == 3


def _local_store(folder: Path) -> str:
    """The skinny mlflow has a file store only; the whole one may insist on a database."""
    try:
        import sqlalchemy  # noqa: F401
    except ImportError:
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        return (folder / "mlruns").as_uri()
    return f"sqlite:///{folder / 'mlflow.db'}"


def test_nothing_is_imported_before_it_is_used() -> None:
    libraries = "{'wandb', 'mlflow', 'tensorboard'}"
    code = f"import sys, json, rekindle.monitoring.sinks; print(json.dumps(sorted({libraries} & sys.modules.keys())))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(out.stdout) == []


@pytest.mark.parametrize(
    ("sink", "module"),
    [(TensorBoardSink, "torch.utils.tensorboard"), (WandbSink, "wandb"), (MlflowSink, "mlflow.tracking")],
)
def test_a_missing_library_says_what_to_install(sink: type[Any], module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=r'pip install "torch-rekindle\[sinks\]"'):
        sink()
