"""Errors inside a trainer's callback: a real, short training is brought to the call that acts, and that call fails."""

from __future__ import annotations

import contextlib
import logging
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import faults
from rekindle import methods
from rekindle.advice import keeping
from rekindle.monitoring.guard import Guard
from rekindle.monitoring.schedules import Schedule
from rekindle.monitoring.triggers import Every, Trigger

Options = Callable[[], dict[str, Any]]  # of a callback: its method and when it acts
Training = tuple[Any, str, Callable[[], Any]]  # the callback, its function that may act, and what runs the training
DATA = [(torch.randn(4, 6, generator=torch.Generator().manual_seed(i)), torch.arange(4) % 3) for i in range(6)]


class Ended(Exception):
    """The callback has acted: the training ends."""


class Recording(Trigger):
    """Never fires, and keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[dict[str, Any]] = []

    def look(self, metrics: Any) -> str | None:
        self.given.append(dict(metrics))
        return None


class Net(nn.Module):
    """A network as each trainer wants it: on a batch, or on named inputs with labels."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU())
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.head(self.body(x))
        return logits if labels is None else {"loss": F.cross_entropy(logits, labels), "logits": logits}


def loss(model: nn.Module, batch: Any) -> Tensor:
    net: Any = model.net if hasattr(model, "net") else model
    return F.cross_entropy(net(batch[0]), batch[1])


def of_weights(model: nn.Module, batch: Any) -> Tensor:
    """A loss of any model, whatever it is run on."""
    return torch.stack([parameter.square().mean() for parameter in model.parameters()]).mean()


def guard(of: Any = loss) -> Guard:
    return Guard(DATA, of, max_rise=1e9)


def keeper() -> keeping.Keeper:
    """One whose advice is to apply FIRE; `keeping.Inquiry.ask` must be replaced by `advice`."""
    seconds = iter(range(0, 10**6, 1000))
    candidates = {"fire": methods.FIRE(), "nothing": None}
    return keeping.Keeper(DATA, loss, every=2, candidates=candidates, background=False, clock=lambda: next(seconds))


def advice(*_: Any) -> keeping.Reply:
    return keeping.Reply(0.5, "lost", "lost: fire", "fire", 1.0)


# What is done, and whether an error must leave everything as it was.
WAYS: dict[str, tuple[Options, bool]] = {
    "fire": (lambda: {"method": "fire", "at": 3, "rewarm": 2}, False),
    "guarded": (lambda: {"method": "fire", "at": 3, "guard": guard()}, True),
    "schedule": (lambda: {"method": Schedule(methods.FIRE(biases="zero"), Every(2))}, False),
    "schedule guarded": (lambda: {"method": Schedule(methods.ShrinkPerturb(), Every(2), guard=guard())}, True),
    "keeper": (lambda: {"method": keeper()}, False),
    "redo": (lambda: {"method": "redo", "at": 3}, False),
    "atomic": (lambda: {"method": methods.FIRE(atomic=True), "at": 3}, False),  # what follows the model is not its own
    "clip": (lambda: {"method": methods.WeightClip(0.1)}, False),
}


def transformers(options: dict[str, Any], folder: Path) -> Training:
    from transformers import PrinterCallback, Trainer, TrainingArguments

    from rekindle.integrations.transformers import RekindleCallback

    model, callback = Net(), RekindleCallback(**options)
    arguments = TrainingArguments(
        str(folder), max_steps=6, use_cpu=True, report_to="none", disable_tqdm=True, logging_strategy="no",
        save_strategy="no", per_device_train_batch_size=4,
    )  # fmt: skip
    items = [{"x": x, "labels": y} for batch in DATA for x, y in zip(*batch, strict=True)]
    adam = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run = Trainer(model, arguments, train_dataset=items, optimizers=(adam, None), callbacks=[callback])
    run.remove_callback(PrinterCallback)
    return callback, "on_step_begin", run.train


def lightning(options: dict[str, Any], folder: Path) -> Training:
    import lightning.pytorch as pl

    from rekindle.integrations.lightning import RekindleCallback

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: Any, index: int) -> Tensor:
            return F.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    callback, module = RekindleCallback(**options), Module()
    run = pl.Trainer(
        max_steps=6, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[callback], default_root_dir=folder,
    )  # fmt: skip
    return callback, "on_train_batch_start", lambda: run.fit(module, torch.utils.data.DataLoader(DATA, batch_size=None))


def ignite(options: dict[str, Any], folder: Path) -> Training:
    from ignite.engine import create_supervised_trainer

    from rekindle.integrations.ignite import RekindleHandler

    model, mirror = Net(), Net()
    adam = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = create_supervised_trainer(model, adam, F.cross_entropy)
    handler = RekindleHandler(**options, mirrors=mirror).attach(engine, model, adam)
    return handler, "begin", lambda: engine.run(DATA)


def sb3(kind: str) -> Callable[[dict[str, Any], Path], Training]:
    def make(options: dict[str, Any], folder: Path) -> Training:
        import stable_baselines3

        from rekindle.integrations.sb3 import RekindleCallback

        sizes: dict[str, Any] = {"n_steps": 8, "batch_size": 8, "n_epochs": 1}
        if kind != "PPO":
            sizes = {"learning_starts": 4, "batch_size": 4, "buffer_size": 50, "train_freq": 4}
            options |= {"temperature": "reset", "replay": "empty" if "atomic" in str(options) else "keep"}
        if "guard" in options:
            options["guard"] = guard(of_weights)
        if isinstance(options["method"], Schedule) and options["method"].guard is not None:
            options["method"].guard = guard(of_weights)
        options |= {"at": 8} if "at" in options else {}
        world = "Pendulum-v1" if kind == "SAC" else "CartPole-v1"
        made = getattr(stable_baselines3, kind)("MlpPolicy", world, policy_kwargs={"net_arch": [8, 8]}, seed=0, **sizes)
        callback = RekindleCallback(**options)
        return callback, "_look", lambda: made.learn(40, callback)

    return make


TRAINERS: dict[str, Callable[[dict[str, Any], Path], Training]] = {
    "transformers": transformers,
    "lightning": lightning,
    "ignite": ignite,
    "sb3 ppo": sb3("PPO"),
    "sb3 dqn": sb3("DQN"),
    "sb3 sac": sb3("SAC"),
}


def of_agent(agent: Any) -> dict[str, Any]:
    """What belongs to an agent beside its networks: the temperature with its optimizer, and where its replay is."""
    held: dict[str, Any] = {}
    if isinstance(getattr(agent, "log_ent_coef", None), Tensor):
        held["temperature"] = agent.log_ent_coef.detach().clone()
        held |= {f"temperature: {k}": v for s in agent.ent_coef_optimizer.state.values() for k, v in s.items()}
    if getattr(agent, "replay_buffer", None) is not None:
        held["replay"] = agent.replay_buffer.pos, agent.replay_buffer.full
    return held


class CallbackCase:
    """One trainer with one way to act."""

    def __init__(self, trainer: str, way: str) -> None:
        self.trainer, (self.options, self.whole), self.way = TRAINERS[trainer], WAYS[way], way
        self._due = 0
        self.lines = self._measured()

    def failed(self, at: int, kind: type[BaseException]) -> tuple[BaseException | None, str | None]:
        """What the callback raises if it fails at this line, and what is wrong with how that ends."""
        found: list[tuple[BaseException | None, str | None]] = []

        def fail(callback: Any, act: Callable[[], Any]) -> None:
            model, *mirrors = callback.what.written()
            agent = getattr(callback, "model", None)
            before = faults.Before(model, *callback.clock.optimizers, mirrors=mirrors, others=lambda: of_agent(agent))
            error = faults.interrupted(act, at, kind)
            found.append((error, faults.judged(error, before, whole=self.whole)))

        self._run(fail)
        return found[0]

    def _measured(self) -> int:
        count: list[int] = []
        self._run(lambda _, act: count.append(faults.lines(act)))
        return count[0]

    def _run(self, inside: Callable[[Any, Callable[[], Any]], Any]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            callback, hook, run = self.trainer(self.options(), Path(folder))
            hook = "_after" if self.way == "clip" else hook
            real, calls = getattr(callback, hook), 0

            def called(*args: Any, **given: Any) -> Any:
                nonlocal calls
                calls += 1
                if calls == self._due:
                    inside(callback, lambda: real(*args, **given))
                    raise Ended
                real(*args, **given)
                if not self._due and (callback.receipts or self.way == "clip"):
                    self._due = calls
                    raise Ended

            setattr(callback, hook, called)
            first = not self._due
            with contextlib.suppress(Ended):
                run()
            if first:
                assert self._due, f"{self.way}: never acted"
                self._run(inside)
