"""One training run in each trainer: two epochs of twelve steps, a task boundary of the user's after 4 and 15 steps.

`run` is called by `test_killed`, also in a process that kills itself in the middle of step 19.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trained import adam, batches, network

BOUNDARIES, CHECKPOINT, KILLED = (4, 15), 12, 18


def run(kind: str, folder: Path, *, kill: bool = False, resume: bool = False) -> tuple[nn.Module, Any]:
    """Train with checkpoints in `folder`; the network and the callback afterwards."""
    return {"transformers": _transformers, "lightning": _lightning, "ignite": _ignite}[kind](folder, kill, resume)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _transformers(folder: Path, kill: bool, resume: bool) -> tuple[nn.Module, Any]:
    from integrations.test_transformers import RekindleCallback, trainer, transformers

    callback = RekindleCallback("fire")

    class User(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            if state.global_step in BOUNDARIES:
                callback.boundary()
            if kill and state.global_step == KILLED:
                _die()

    made = trainer(folder, callback, User(), num_train_epochs=2, save_strategy="steps", save_steps=CHECKPOINT)
    made.train(resume_from_checkpoint=resume)
    return made.model.net, callback


def _lightning(folder: Path, kill: bool, resume: bool) -> tuple[nn.Module, Any]:
    from integrations.test_lightning import Classifier, ModelCheckpoint, RekindleCallback, lightning, loader, trainer

    callback, module = RekindleCallback("fire"), Classifier()

    class User(lightning.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
            if trainer.global_step in BOUNDARIES:
                callback.boundary()
            if kill and trainer.global_step == KILLED:
                _die()

    saving = ModelCheckpoint(folder, "first", every_n_epochs=1, save_top_k=-1)
    path = str(folder / "first.ckpt") if resume else None
    trainer(folder, callback, saving, User(), max_epochs=2).fit(module, loader(), ckpt_path=path)
    return module.net, callback


def _ignite(folder: Path, kill: bool, resume: bool) -> tuple[nn.Module, Any]:
    from ignite.engine import Events
    from ignite.handlers import Checkpoint, DiskSaver

    from integrations.test_ignite import RekindleHandler, engine

    model = network()
    optimizer = adam(model)
    trainer = engine(model, optimizer)
    handler = RekindleHandler("fire").attach(trainer, model, optimizer)
    parts = {"model": model, "optimizer": optimizer, "trainer": trainer, "rekindle": handler}

    def user(engine: Any) -> None:
        if engine.state.iteration in BOUNDARIES:
            handler.boundary()
        if kill and engine.state.iteration == KILLED:
            _die()

    trainer.add_event_handler(Events.ITERATION_COMPLETED, user)
    saver = DiskSaver(folder, require_empty=False)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, Checkpoint(parts, saver, n_saved=None))
    if resume:
        Checkpoint.load_objects(parts, torch.load(folder / f"checkpoint_{CHECKPOINT}.pt", weights_only=False))
    trainer.run(batches(4), max_epochs=2)
    return model, handler
