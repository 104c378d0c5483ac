"""What an idle callback costs: processor time of a training step with and without it, alternating in one run.

    python benchmarks/integrations.py            all trainers
    python benchmarks/integrations.py lightning  one of them

Idle means: at= a step that never comes. A run trains the same network on the same data for the same number of steps;
runs with and without the callback alternate, and the median of the differences of neighbours is reported, in percent of
a step. Processor time is counted, so other work on the machine disturbs little.
"""

from __future__ import annotations

import argparse
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

NEVER = 10**9
WIDTH, BATCH, STEPS, PAIRS = 512, 128, 60, 15


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
    callbacks = [clock, *([RekindleCallback("fire", at=NEVER)] if with_callback else [])]
    data = [{"x": a, "labels": b} for a, b in zip(x, y, strict=True)]
    Trainer(Net(), arguments, train_dataset=data, callbacks=callbacks).train()
    return clock.spent / STEPS


def lightning(with_callback: bool) -> float:
    import lightning.pytorch as pl

    from rekindle.integrations.lightning import RekindleCallback

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
        callbacks=[clock, *([RekindleCallback("fire", at=NEVER)] if with_callback else [])],
    ).fit(Module(), loader)  # fmt: skip
    return clock.spent / STEPS


def ignite(with_callback: bool) -> float:
    from ignite.engine import Engine

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
    began = time.process_time()
    trainer.run(batches)
    return (time.process_time() - began) / STEPS


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
    print(f"{processor()}, torch {torch.__version__}, one thread; {PAIRS} pairs of {STEPS} steps, bar 1 %")
    failed = False
    for name in chosen:
        run = TRAINERS[name]
        run(True), run(False)
        pairs = []
        for number in range(PAIRS):
            first = number % 2 == 0
            a, b = run(first), run(not first)
            pairs.append((a, b) if first else (b, a))
        step = statistics.median(without for _, without in pairs)
        shares = sorted(100 * (with_ - without) / step for with_, without in pairs)
        middle = statistics.median(shares)
        low, high = shares[len(shares) // 4], shares[-len(shares) // 4]
        failed |= middle > 1
        print(
            f"{name:13} {step * 1e3:6.2f} ms a step, idle callback {middle:+.2f} % (quartiles {low:+.2f} … {high:+.2f})"
        )
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
