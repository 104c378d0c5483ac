"""Ignite's Engine, for real."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import rekindle
from rekindle import methods
from rekindle.triggers import Plateau
from trained import adam, batches, keeper, kept, loop, network, same

pytest.importorskip("ignite")
from ignite.engine import Engine, Events, create_supervised_trainer
from ignite.handlers import Checkpoint, DiskSaver

from rekindle.integrations.ignite import RekindleHandler


def engine(model: nn.Module, optimizer: Any, accumulate: int = 1) -> Any:
    return create_supervised_trainer(model, optimizer, F.cross_entropy, gradient_accumulation_steps=accumulate)


def test_it_is_the_plain_loop_with_the_same_order_of_operations() -> None:
    model = network()
    optimizer = adam(model)
    trainer = engine(model, optimizer)
    handler = RekindleHandler("fire", at=5, every="epoch").attach(trainer, model, optimizer)
    trainer.run(batches(4), max_epochs=2)
    expected = network()
    own = adam(expected)
    loop(expected, own, batches(4) * 2, lambda s: rekindle.fire(expected, own) if s in (5, 12) else None)
    assert same(model, expected) and [f.step for f in handler.firings] == [5, 12]


def test_a_keeper_is_a_method_like_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside a real engine: it asks after three steps, and what it was told is applied and logged."""
    model, keeps = network(), keeper(monkeypatch)
    optimizer = adam(model)
    trainer = engine(model, optimizer)
    handler = RekindleHandler(keeps).attach(trainer, model, optimizer)
    trainer.run(batches(5))
    assert [firing.step for firing in handler.firings] == [3, 6, 9] and kept(keeps, handler)


def test_four_accumulated_batches_are_one_step() -> None:
    def run(size: int, accumulate: int) -> nn.Module:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = engine(model, optimizer, accumulate)
        handler = RekindleHandler("fire", at=3).attach(trainer, model, optimizer)
        trainer.run(batches(size))
        assert [f.step for f in handler.firings] == [3]
        return model

    for a, b in zip(run(8, 1).parameters(), run(2, 4).parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-5)


def test_a_resumed_run_ends_like_one_that_was_never_interrupted(tmp_path: Path) -> None:
    def make() -> tuple[nn.Module, dict[str, Any]]:
        model = network()
        optimizer = adam(model)
        trainer = engine(model, optimizer)
        method = methods.ShrinkPerturb(0.3, noise="fresh", seed=2)
        handler = RekindleHandler(method, at=[4, 5], every="epoch", rewarm=2).attach(trainer, model, optimizer)
        return model, {"model": model, "optimizer": optimizer, "trainer": trainer, "rekindle": handler}

    whole, parts = make()
    parts["trainer"].run(batches(4), max_epochs=3)
    _, parts = make()
    checkpoint = Checkpoint(parts, DiskSaver(tmp_path), n_saved=None)
    parts["trainer"].add_event_handler(Events.EPOCH_COMPLETED, checkpoint)

    def kill(engine: Any) -> None:
        raise RuntimeError("killed")

    parts["trainer"].add_event_handler(Events.EPOCH_STARTED(once=2), kill)
    with pytest.raises(RuntimeError, match="killed"):
        parts["trainer"].run(batches(4), max_epochs=3)
    again, parts = make()
    Checkpoint.load_objects(parts, torch.load(checkpoint.last_checkpoint or "", weights_only=False))
    parts["trainer"].run(batches(4), max_epochs=3)
    assert same(again, whole) and [f.step for f in parts["rekindle"].firings] == [4, 5, 12, 24]


def test_triggers_see_outputs_and_the_metrics_of_an_evaluator() -> None:
    model = network()
    optimizer = adam(model)
    trainer = engine(model, optimizer)
    evaluator = Engine(lambda engine, batch: None)

    @evaluator.on(Events.COMPLETED)
    def measure(engine: Any) -> None:
        engine.state.metrics["accuracy"] = 0.5

    rows: list[dict[str, float]] = []
    handler = RekindleHandler("fire", when=Plateau(2, key="accuracy", higher_is_better=True))
    handler.attach(trainer, model, optimizer, evaluator=evaluator, log=lambda step, row: rows.append(row))
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda engine: evaluator.run([0]))
    trainer.run(batches(4), max_epochs=4)
    assert [f.step for f in handler.firings] == [36]
    assert "rekindle/fire/dfi_after" in rows[0]


def test_a_trainer_that_runs_on_counts_on() -> None:
    model = network()
    optimizer = adam(model)
    trainer = engine(model, optimizer)
    handler = RekindleHandler("fire", at=[5, 15]).attach(trainer, model, optimizer)
    with pytest.warns(UserWarning, match="15 was not applied"):
        trainer.run(batches(4), max_epochs=1)
    trainer.run(batches(4), max_epochs=2)
    assert [f.step for f in handler.firings] == [5, 15]


def test_a_state_that_is_loaded_after_a_run_counts_from_there() -> None:
    model = network()
    optimizer = adam(model)
    trainer = engine(model, optimizer)
    handler = RekindleHandler("fire", at=[3, 9]).attach(trainer, model, optimizer)
    saved: list[Any] = []
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=6), lambda engine: saved.append(handler.state_dict()))
    trainer.run(batches(4))
    handler.load_state_dict(saved[0])
    trainer.run(batches(4)[6:], max_epochs=2)
    assert [f.step for f in handler.firings] == [3, 9]
