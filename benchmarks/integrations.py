"""What an idle callback costs: processor time of a training step with and without it, alternating in one run.

    python benchmarks/integrations.py            all trainers
    python benchmarks/integrations.py lightning  one of them

Idle means: at= a step that never comes. The figure is the processor time that is spent inside the callback's hooks and
the optimizer hooks (timers included), in percent of the processor time of a step without it. Beside it stands the
median difference of whole runs with and without the callback, alternating, from the moment when training starts and
everything was checked: it shows what the hooks cannot (dispatch), but its noise is larger than the bar.
"""

from __future__ import annotations

import argparse
import functools
import logging
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rekindle
from measuring import processor
from rekindle.integrations.application import Application
from rekindle.integrations.attaching import Attachment
from rekindle.integrations.clock import Clock

NEVER = 10**9
WIDTH, BATCH, STEPS, PAIRS = 512, 128, 60, 7


class Inside:
    """Processor time within wrapped functions; what they call of each other counts once."""

    spent = depth = 0

    @classmethod
    def wrap(cls, owner: type, *names: str) -> None:
        """Time these methods of a class from now on."""
        for name in names:
            function = getattr(owner, name)
            if hasattr(function, "__wrapped__"):
                continue

            @functools.wraps(function)
            def timed(*args: Any, _function: Any = function, **given: Any) -> Any:
                if cls.depth:  # a clock inside would be measured too, and costs more than what it measures
                    return _function(*args, **given)
                cls.depth = 1
                began = time.thread_time_ns()
                try:
                    return _function(*args, **given)
                finally:
                    cls.spent += time.thread_time_ns() - began
                    cls.depth = 0

            setattr(owner, name, timed)


class Net(nn.Module):
    """A small network whose forward pass gives the loss, as transformers wants it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10)
        )

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Loss and logits."""
        logits = self.net(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def rows() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(BATCH * STEPS, WIDTH, generator=generator)
    return x, torch.randint(0, 10, (len(x),), generator=generator)


def plain(with_callback: bool) -> float:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    x, y = rows()
    remedy = rekindle.attach(model, optimizer, "fire", at=NEVER) if with_callback else None
    began = time.process_time()
    for start in range(0, len(x), BATCH):
        optimizer.zero_grad()
        model(x[start : start + BATCH], y[start : start + BATCH])["loss"].backward()
        optimizer.step()
        if remedy is not None:
            remedy.step()
    spent = time.process_time() - began
    if remedy is not None:
        remedy.finish()
    return spent / STEPS


def transformers(with_callback: bool) -> float:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from rekindle.integrations.transformers import RekindleCallback

    Inside.wrap(RekindleCallback, "on_step_begin")

    class Clock(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            self.began = time.process_time()

        def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            self.spent = time.process_time() - self.began

    x, y = rows()
    clock = Clock()
    arguments = TrainingArguments(
        "/tmp/rekindle-benchmark", per_device_train_batch_size=BATCH, num_train_epochs=1, use_cpu=True,
        report_to="none", disable_tqdm=True, save_strategy="no", logging_strategy="no",
    )  # fmt: skip
    callbacks = [
        *([RekindleCallback("fire", at=NEVER)] if with_callback else []),
        clock,
    ]  # it starts when all are ready
    data = [{"x": a, "labels": b} for a, b in zip(x, y, strict=True)]
    Trainer(Net(), arguments, train_dataset=data, callbacks=callbacks).train()
    return clock.spent / STEPS


def lightning(with_callback: bool) -> float:
    import lightning.pytorch as pl

    from rekindle.integrations.lightning import RekindleCallback

    Inside.wrap(RekindleCallback, "on_train_batch_start", "on_before_optimizer_step", "on_train_batch_end")

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: Any, index: int) -> Tensor:
            return self.net(*batch)["loss"]

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    class Clock(pl.Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            self.began = time.process_time()

        def on_train_end(self, trainer: Any, module: Any) -> None:
            self.spent = time.process_time() - self.began

    clock = Clock()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*rows()), batch_size=BATCH)
    pl.Trainer(
        max_epochs=1, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[*([RekindleCallback("fire", at=NEVER)] if with_callback else []), clock],
    ).fit(Module(), loader)  # fmt: skip
    return clock.spent / STEPS


def ignite(with_callback: bool) -> float:
    from ignite.engine import Engine, Events

    from rekindle.integrations.ignite import RekindleHandler

    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())

    def update(engine: Any, batch: Any) -> Tensor:
        optimizer.zero_grad()
        loss = model(*batch)["loss"]
        loss.backward()
        optimizer.step()
        return loss.detach()

    trainer = Engine(update)
    if with_callback:
        RekindleHandler("fire", at=NEVER).attach(trainer, model, optimizer)
    x, y = rows()
    batches = list(zip(x.split(BATCH), y.split(BATCH), strict=True))
    began: list[float] = []
    trainer.add_event_handler(Events.STARTED, lambda: began.append(time.process_time()))
    trainer.run(batches)
    return (time.process_time() - began[0]) / STEPS


TRAINERS: dict[str, Callable[[bool], float]] = {
    "plain": plain,
    "transformers": transformers,
    "lightning": lightning,
    "ignite": ignite,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trainers", nargs="*", default=list(TRAINERS), metavar="TRAINER")
    chosen = parser.parse_args().trainers
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    clocks = time.thread_time_ns()
    for _ in range(1000):
        time.thread_time_ns()
    clock = (time.thread_time_ns() - clocks) / 1e6  # µs for one of a thousand
    print(f"{processor()}, torch {torch.__version__}, one thread; {PAIRS} pairs of {STEPS} steps, bar 1 %")
    print(f"reading the clock takes {clock:.2f} µs")
    failed = False
    Inside.wrap(Application, "begin", "note", "before_step")
    Inside.wrap(Attachment, "step")
    Inside.wrap(Clock, "_pre", "_post", "close")
    for name in chosen:
        run = TRAINERS[name]
        run(True), run(False)
        pairs, inside = [], []
        for number in range(PAIRS):
            first = number % 2 == 0
            Inside.spent = 0
            a, b = run(first), run(not first)
            inside.append(Inside.spent * 1e-9 / STEPS)
            pairs.append((a, b) if first else (b, a))
        step = statistics.median(without for _, without in pairs)
        share = 100 * statistics.median(inside) / step
        whole = 100 * statistics.median((with_ - without) / step for with_, without in pairs)
        failed |= share > 1
        print(f"{name:13} {step * 1e3:6.2f} ms a step, in its hooks {share:.2f} %, whole runs {whole:+.1f} %")
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
