"""Remedies in transformers' Trainer, Seq2SeqTrainer and TRL: `callbacks=[RekindleCallback("fire", at=500)]`.

Before the first batch of each optimizer step (`on_step_begin`) it acts if it is due; log entries are the metrics of
triggers, under the Trainer's names ("loss", "eval_loss", …). Receipts and health go where the Trainer's own logs go.
"""

from __future__ import annotations

import base64
import copy
import io
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from rekindle import files
from rekindle.extras import require
from rekindle.integrations.application import Application
from rekindle.sharding.replicas import everyone

_callbacks = require("transformers.trainer_callback", "transformers", "RekindleCallback for transformers")
_LARGEST = 1 << 18  # bytes of state that are kept in trainer_state.json; more goes to a file of its own
_FILE = "rekindle-{name}.pt"
_PER_LAYER = {"weights", "units", "attention", "gradients", "steps"}  # kinds of numbers in Health.flat
_CONSOLES = (_callbacks.PrinterCallback, _callbacks.ProgressCallback)

_TrainerCallback: Any = _callbacks.TrainerCallback
_ExportableState: Any = _callbacks.ExportableState


class RekindleCallback(Application, _TrainerCallback, _ExportableState):  # type: ignore[misc]
    """A method in a Trainer. The arguments are those of `rekindle.integrations.Application`.

    Its state is in the Trainer's checkpoints and is restored by `train(resume_from_checkpoint=...)`.

    >>> RekindleCallback("fire", every="epoch").name
    'fire'
    """

    def __init__(self, method: Any, **options: Any) -> None:
        if method == _REBUILT:
            raise ValueError(
                "restore_callback_states_from_checkpoint=True builds callbacks anew from plain arguments, which a "
                "method object is not: leave it off, RekindleCallback restores its own state in any case"
            )
        super().__init__(method, **options)
        plain = (str, int, type(None))
        whole = isinstance(method, str) and all(isinstance(value, plain) for value in options.values())
        self._arguments = {"method": method, **options} if whole else {"method": _REBUILT}
        self._passes = 0
        self._unwrap: Callable[[], None] | None = None

    def on_train_begin(self, args: object, state: Any, control: object, **given: Any) -> None:
        """Bind to what is trained, after restoring what a checkpoint holds."""
        if state.global_step:
            self._load(args, state)
        handler = _caller(_callbacks.CallbackHandler, lambda handler: any(c is self for c in handler.callbacks))
        self._passes = 0
        others = [c for c in handler.callbacks if c is not self] if handler is not None else []
        if any(isinstance(other, RekindleCallback) and other.name == self.name for other in others):
            raise ValueError(f"two callbacks are called {self.name!r}: give one of them another name=")
        shown = [c for c in others if isinstance(c, _CONSOLES)]

        def log(step: int, numbers: dict[str, float]) -> None:
            # A sample has numbers for each layer: loggers get them all, the console and trainer_state.json the summary.
            # This callback has seen them already.
            summary = {name: value for name, value in numbers.items() if not _PER_LAYER & {*name.split("/")[1:-1]}}
            state.log_history.append({**summary, "step": step})
            for callbacks, given in (([c for c in others if c not in shown], numbers), (shown, summary)):
                part = copy.copy(handler)
                if part is not None:
                    part.callbacks = callbacks
                    part.on_log(args, state, copy.copy(control), dict(given))

        self.bind(given["model"], given["optimizer"], step=state.global_step, log=log, counting=False)
        if "loss" in self.what.parts:
            trainer = _caller(require("transformers", "transformers", "RekindleCallback").Trainer, lambda trainer: True)
            self._unwrap = _after_backward(trainer.accelerator, self.before_clipping) if trainer is not None else None

    def on_step_begin(self, args: object, state: Any, control: object, **given: object) -> None:
        """The place between two optimizer steps."""
        self.begin(state.global_step, max(int((state.epoch or 0) + 1e-6), self._passes))

    def on_step_end(self, args: object, state: object, control: object, **given: object) -> None:
        """Health of this step, before the loggers are closed after the last one."""
        self.send()

    def on_epoch_end(self, args: object, state: Any, control: object, **given: object) -> None:
        """One pass over the data is over, whatever share of an epoch `state.epoch` calls it (iterable data sets)."""
        self._passes = math.ceil((state.epoch or 0) - 1e-6)

    def on_log(
        self, args: object, state: object, control: object, logs: dict[str, Any] | None = None, **given: object
    ) -> None:
        """Metrics for the trigger."""
        self.note(logs or {})

    def on_evaluate(
        self, args: object, state: object, control: object, metrics: dict[str, Any] | None = None, **given: object
    ) -> None:
        """Metrics of an evaluation."""
        self.note(metrics or {})

    def on_train_end(self, args: object, state: object, control: object, **given: object) -> None:
        """Remove the hooks."""
        self.finish()

    def finish(self) -> None:
        """Training is over: hooks are removed, receipts stay."""
        if self._unwrap is not None:
            self._unwrap()
            self._unwrap = None
        super().finish()

    def state(self) -> dict[str, Any]:
        """What goes into trainer_state.json: everything if it is small, else the name of a file beside it."""
        data = self._packed()
        text = base64.b64encode(data).decode() if len(data) <= _LARGEST else None
        attributes = {"rekindle": {"name": self.name, "state": text}}
        return {"args": self._arguments, "attributes": attributes}

    def on_save(self, args: Any, state: Any, control: object, **given: object) -> None:
        """Write a large state beside the checkpoint's other files."""
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if everyone().leads and folder.is_dir():
            data = self._packed()
            if len(data) > _LARGEST:
                files.write(folder / _FILE.format(name=self.name), data)

    def _packed(self) -> bytes:
        buffer = io.BytesIO()
        torch.save(self.state_dict(), buffer)
        return buffer.getvalue()

    def _load(self, args: object, state: Any) -> None:
        saved = state.stateful_callbacks.get(type(self).__name__) or []
        saved = saved if isinstance(saved, list) else [saved]
        entries = [each.get("attributes", {}).get("rekindle") for each in saved]
        mine = [entry for entry in entries if entry and entry["name"] == self.name]
        if not mine:
            return  # the checkpoint was made without this callback
        if mine[-1]["state"] is not None:
            data = base64.b64decode(mine[-1]["state"])
        else:
            data = _find(args, state, _FILE.format(name=self.name)).read_bytes()
        self.load_state_dict(torch.load(io.BytesIO(data), weights_only=True, map_location="cpu"))


_REBUILT = "rebuilt from a checkpoint"


def _find(args: Any, state: Any, name: str) -> Path:
    given = args.resume_from_checkpoint
    folders = [Path(given)] if isinstance(given, str) and given not in ("True", "true") else []
    folders.append(Path(args.output_dir) / f"checkpoint-{state.global_step}")
    for folder in folders:
        if (folder / name).is_file():
            return folder / name
    looked = " and ".join(map(str, folders))
    raise FileNotFoundError(
        f"the state of RekindleCallback ({name}) is not in {looked}: set TrainingArguments(resume_from_checkpoint=...) "
        "to the folder of the checkpoint"
    )


def _caller(kind: Any, fits: Callable[[Any], bool]) -> Any:
    """The nearest object of this class among the callers: callbacks get no reference to their caller.

    The Trainer's list of callbacks is what reaches its loggers; those of loggers come before a user's in each event, so
    adding to a log entry from `on_log` would be too late. The Trainer's accelerator runs the backward pass.
    """
    frame: Any = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, kind) and fits(owner):
            return owner
        frame = frame.f_back
    return None


def _after_backward(accelerator: Any, complete: Callable[[float], None]) -> Callable[[], None]:
    """Call `complete(scale)` after the last backward pass of each step; the result undoes it.

    The Trainer has no event between backward pass and clipping (`on_pre_optimizer_step` comes after it).
    """
    original = accelerator.backward

    def backward(*args: object, **kwargs: object) -> None:
        original(*args, **kwargs)
        if accelerator.sync_gradients:
            complete(float(accelerator.scaler.get_scale()) if accelerator.scaler is not None else 1.0)

    accelerator.backward = backward

    def undo() -> None:
        if accelerator.__dict__.get("backward") is backward:
            del accelerator.backward

    return undo
