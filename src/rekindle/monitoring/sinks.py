"""Where numbers go: a sink is anything that is called with (step, flat dict of floats).

A plain function is a sink. The classes here write to TensorBoard, Weights & Biases or MLflow; each library is
imported only when its sink is made. Values that are not finite cannot be drawn and are left out.

>>> rows = []
>>> send([lambda step, numbers: rows.append((step, numbers))], 3, {"loss": 0.5, "bad": float("nan")})
>>> rows
[(3, {'loss': 0.5})]
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, TypeAlias

from rekindle.extras import install
from rekindle.projection.receipt import Receipt

Sink: TypeAlias = "Callable[[int, dict[str, float]], object]"


def send(sinks: Iterable[Sink], step: int, numbers: Mapping[str, float]) -> None:
    """Give the finite numbers to every sink.

    >>> send([], 0, {})
    """
    finite = {name: float(value) for name, value in numbers.items() if math.isfinite(value)}
    for sink in sinks:
        sink(step, finite)


class _Closing:
    """A sink that holds something open; `close` is safe to call twice, and a `with` block calls it."""

    def close(self) -> None:
        """Flush and release it."""

    def __enter__(self) -> object:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class TensorBoardSink(_Closing):
    """Scalars in a TensorBoard log directory, or in a SummaryWriter of yours, which then stays open.

    >>> TensorBoardSink.needs
    'pip install "torch-rekindle[sinks]"'
    """

    needs = install("sinks")

    def __init__(self, log_dir: str | None = None, *, writer: Any = None) -> None:
        self._own = writer is None
        if writer is None:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                raise ImportError(f"TensorBoardSink needs tensorboard: {self.needs}") from error
            writer = SummaryWriter(log_dir)
        self.writer = writer

    def __call__(self, step: int, numbers: dict[str, float]) -> None:
        """Write one step."""
        for name, value in numbers.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Close the writer if it was made here, else flush it."""
        if self._own:
            self.writer.close()
        else:
            self.writer.flush()


class WandbSink(_Closing):
    """A Weights & Biases run: yours, or one made with `wandb.init(**options)` (mode="offline" needs no network).

    >>> WandbSink.needs
    'pip install "torch-rekindle[sinks]"'
    """

    needs = install("sinks")

    def __init__(self, run: Any = None, **options: Any) -> None:
        self._own = run is None
        if run is None:
            try:
                import wandb
            except ImportError as error:
                raise ImportError(f"WandbSink needs wandb: {self.needs}") from error
            run = wandb.init(**options)
        self.run = run

    def __call__(self, step: int, numbers: dict[str, float]) -> None:
        """Write one step; the step is a number of its own, so that a training loop's own count is not disturbed."""
        self.run.log({**numbers, "health_step": step})

    def close(self) -> None:
        """Finish the run if it was made here."""
        if self._own and self.run is not None:
            self.run.finish()
            self.run = None


class MlflowSink(_Closing):
    """An MLflow run: `run_id` of yours, or a new one in `experiment` at `tracking_uri` (a local sqlite file works).

    >>> MlflowSink.key("weights/c_attn.weight[query]/dfi")
    'weights/c_attn.weight_query_/dfi'
    """

    needs = install("sinks")

    def __init__(
        self, tracking_uri: str | None = None, *, experiment: str = "rekindle", run_id: str | None = None
    ) -> None:
        try:
            from mlflow.entities import Metric
            from mlflow.tracking import MlflowClient
        except ImportError as error:
            raise ImportError(f"MlflowSink needs mlflow: {self.needs}") from error
        self._metric = Metric
        self.client = MlflowClient(tracking_uri)
        self._own = run_id is None
        if run_id is None:
            known = self.client.get_experiment_by_name(experiment)
            experiment_id = known.experiment_id if known else self.client.create_experiment(experiment)
            run_id = self.client.create_run(experiment_id).info.run_id
        self.run_id = run_id
        self._open = True

    @staticmethod
    def key(name: str) -> str:
        """A name that MLflow accepts: brackets and other signs become underscores."""
        return re.sub(r"[^\w\-./ ]", "_", name)

    def __call__(self, step: int, numbers: dict[str, float]) -> None:
        """Write one step, in batches that fit into one request."""
        import time

        now = int(time.time() * 1000)
        metrics = [self._metric(self.key(name), value, now, step) for name, value in numbers.items()]
        for start in range(0, len(metrics), 1000):
            self.client.log_batch(self.run_id, metrics=metrics[start : start + 1000])

    def close(self) -> None:
        """End the run if it was made here."""
        if self._own and self._open:
            self.client.set_terminated(self.run_id)
        self._open = False


def receipt_numbers(receipt: Receipt, prefix: str = "rekindle/") -> dict[str, float]:
    """A receipt as flat names and numbers for a logger.

    >>> receipt_numbers(Receipt("fire", seconds=0.5))["rekindle/seconds"]
    0.5
    """
    totals = receipt.totals()
    numbers: dict[str, Any] = {key: value for key, value in totals.items() if key != "counts"}
    numbers |= {key.replace(" ", "_"): value for key, value in totals["counts"].items()}
    numbers |= {"seconds": receipt.seconds, "rolled_back": float(receipt.rolled_back)}
    numbers |= {"loss_before": receipt.loss_before, "loss_after": receipt.loss_after}
    if receipt.optimizer is not None:
        numbers["slots_reset"] = receipt.optimizer.reset
    return {prefix + key: float(value) for key, value in numbers.items() if value is not None}
