"""transformers' Trainer, for real: the order of operations, resumed runs, accumulation, logs and triggers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from callbacks import Recording
from rekindle import methods
from rekindle.triggers import Plateau, VerdictIs
from trained import batches, data, keeper, kept, network, penalized, plain, same

transformers = pytest.importorskip("transformers")
from rekindle.integrations.transformers import RekindleCallback  # noqa: E402


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.net(x)
        return {"logits": logits} if labels is None else {"loss": F.cross_entropy(logits, labels), "logits": logits}


class Killed(Exception):
    pass


class Kill(transformers.TrainerCallback):
    """Ends a run as a crash would, after the step's checkpoint."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if state.global_step == self.step:
            raise Killed


def items() -> list[dict[str, Tensor]]:
    x, y = data()
    return [{"x": a, "labels": b} for a, b in zip(x, y, strict=True)]


def trainer(folder: Path, *callbacks: Any, size: int = 4, lr: float = 1e-2, **options: Any) -> Any:
    model = Classifier()
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=size,
        train_sampling_strategy="sequential",
        num_train_epochs=options.pop("num_train_epochs", 1),
        lr_scheduler_type="constant",
        max_grad_norm=options.pop("max_grad_norm", 0.0),
        use_cpu=True,
        report_to=options.pop("report_to", "none"),
        disable_tqdm=True,
        logging_strategy=options.pop("logging_strategy", "no"),
        save_strategy=options.pop("save_strategy", "no"),
        **options,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    return transformers.Trainer(
        model, arguments, train_dataset=items(), eval_dataset=items()[:8], optimizers=(optimizer, None),
        callbacks=list(callbacks),
    )  # fmt: skip


def test_it_is_the_plain_loop_with_the_same_order_of_operations(tmp_path: Path) -> None:
    callback = RekindleCallback("fire", at=[4, 9])
    run = trainer(tmp_path, callback, max_grad_norm=0.5)
    run.train()
    assert same(run.model.net, plain((4, 9), clip=0.5))
    assert [f.step for f in callback.firings] == [4, 9] and len(callback.receipts) == 2


@pytest.mark.parametrize("kill", [4, 6, 12])
def test_a_resumed_run_ends_like_one_that_was_never_interrupted(tmp_path: Path, kill: int) -> None:
    def callback() -> RekindleCallback:
        return RekindleCallback(
            methods.ShrinkPerturb(0.3, noise="fresh", seed=2), at=[4, 5, 13], every="epoch", rewarm=2
        )

    whole = trainer(tmp_path / "whole", callback(), num_train_epochs=2)
    whole.train()
    with pytest.raises(Killed):
        trainer(
            tmp_path, callback(), Kill(kill), num_train_epochs=2, save_strategy="steps", save_steps=1,
            save_only_model=False, save_total_limit=2,
        ).train()  # fmt: skip
    resumed = callback()
    again = trainer(tmp_path, resumed, num_train_epochs=2)
    again.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{kill}"))
    assert same(again.model, whole.model)
    assert [f.step for f in resumed.firings] == [4, 5, 12, 13]
    done = [each["step"] for each in resumed.earlier]  # a checkpoint is made before a remedy at the same step
    assert done == [step for step in (4, 5, 12, 13) if step < kill] and len(resumed.receipts) == 4 - len(done)
    for summary in resumed.earlier:
        assert "net.0.weight" in summary["changed"] and summary["rekindle/shrink-perturb/sfe_relative"] > 0


def test_a_large_state_has_its_own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rekindle.integrations.transformers._LARGEST", 100)

    def callback() -> RekindleCallback:
        return RekindleCallback(methods.ShrinkPerturb(0.3), at=[3, 8])  # keeps the start of the model

    whole = trainer(tmp_path / "whole", callback())
    whole.train()
    with pytest.raises(Killed):
        trainer(tmp_path, callback(), Kill(6), save_strategy="steps", save_steps=6).train()
    assert (tmp_path / "checkpoint-6" / "rekindle-shrink-perturb.pt").is_file()
    again = trainer(tmp_path, callback())
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert same(again.model, whole.model)
    (tmp_path / "checkpoint-6" / "rekindle-shrink-perturb.pt").unlink()
    with pytest.raises(FileNotFoundError, match="resume_from_checkpoint"):
        trainer(tmp_path, callback()).train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))


def test_four_accumulated_batches_are_one_step(tmp_path: Path) -> None:
    one = trainer(tmp_path, RekindleCallback("fire", at=3), size=8, lr=1e-3)
    one.train()
    callback = RekindleCallback("fire", at=3)
    four = trainer(tmp_path, callback, size=2, gradient_accumulation_steps=4, lr=1e-3)
    four.train()
    assert [f.step for f in callback.firings] == [3]
    for a, b in zip(one.model.parameters(), four.model.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-4)


def test_triggers_see_what_the_trainer_logs_once(tmp_path: Path) -> None:
    trigger = Recording()
    trainer(
        tmp_path, RekindleCallback("fire", when=trigger), logging_strategy="steps", logging_steps=3,
        eval_strategy="steps", eval_steps=6,
    ).train()  # fmt: skip
    assert [metrics["step"] for metrics in trigger.given] == list(range(1, 12))
    assert [m["step"] for m in trigger.given if "loss" in m] == [3, 6, 9]
    assert [m["step"] for m in trigger.given if "eval_loss" in m] == [6]


def test_a_plateau_of_the_logged_loss_fires_and_boundaries_too(tmp_path: Path) -> None:
    callback = RekindleCallback("fire", when=Plateau(1, min_delta=10.0))
    trainer(tmp_path, callback, logging_strategy="steps", logging_steps=2).train()
    assert [f.step for f in callback.firings] == [4, 8]

    marked = RekindleCallback("fire")

    class Switch(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            if state.global_step == 5:
                marked.boundary("new data")

    run = trainer(tmp_path, marked, Switch())
    run.train()
    assert [(f.step, f.reason) for f in marked.firings] == [(5, "new data")]
    assert same(run.model.net, plain((5,)))


def test_receipts_health_and_verdicts_reach_the_trainers_loggers(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    callback = RekindleCallback("fire", when=VerdictIs("healthy"), monitor=6)
    run = trainer(tmp_path, callback, report_to="tensorboard", logging_strategy="steps", logging_steps=4)
    run.train()
    assert [f.step for f in callback.firings] == [6]  # a sample counts once: what it sends to the loggers is no other
    entries = [e for e in run.state.log_history if "rekindle/fire/sfe_relative" in e]
    assert len(entries) == 1 and entries[0]["step"] == 6
    assert any("health/verdict" in entry for entry in run.state.log_history)
    (file,) = tmp_path.rglob("events.out.tfevents*")  # nothing comes after the logger was closed
    events = EventAccumulator(str(file))
    events.Reload()
    steps = {tag: [each.step for each in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert steps["train/rekindle/fire/sfe_relative"] == [6] and steps["train/health/verdict"] == [6, 12]
    assert "train/health/weights/net.0.weight/norm" in steps


@pytest.mark.parametrize("bar", [True, False])
def test_the_console_gets_the_summary_only(tmp_path: Path, capfd: pytest.CaptureFixture[str], bar: bool) -> None:
    run = trainer(tmp_path, RekindleCallback("fire", at=3, monitor=5))
    shown = transformers.trainer_callback.ProgressCallback if bar else transformers.trainer_callback.PrinterCallback
    run.remove_callback(transformers.trainer_callback.PrinterCallback)
    run.add_callback(shown)
    run.train()
    text = "".join(capfd.readouterr())
    assert "health/verdict" in text and "rekindle/fire/sfe_relative" in text and "health/weights/" not in text
    assert not any("health/weights/" in name for entry in run.state.log_history for name in entry)


def test_an_epoch_is_one_pass_over_the_data_also_where_its_length_is_not_known(tmp_path: Path) -> None:
    class Endless(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            return iter(items()[:20])

    callback = RekindleCallback("fire", every="epoch")
    run = trainer(tmp_path, callback, max_steps=12)
    run.train_dataset = Endless()
    run.train()
    assert [(f.step, f.reason) for f in callback.firings] == [(5, "epoch 1"), (10, "epoch 2")]


def test_two_callbacks_keep_their_states_apart(tmp_path: Path) -> None:
    def callbacks() -> list[RekindleCallback]:
        return [
            RekindleCallback(methods.ShrinkPerturb(0.1, noise="fresh"), at=[2, 7], name="small"),
            RekindleCallback(methods.ShrinkPerturb(0.5, noise="fresh", seed=1), at=[3, 9], name="large"),
        ]

    whole = trainer(tmp_path / "whole", *callbacks())
    whole.train()
    with pytest.raises(Killed):
        trainer(tmp_path, *callbacks(), Kill(6), save_strategy="steps", save_steps=3).train()
    made = callbacks()
    again = trainer(tmp_path, *made)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert same(again.model, whole.model)
    assert [[f.step for f in each.firings] for each in made] == [[2, 7], [3, 9]]
    with pytest.raises(ValueError, match="two callbacks are called 'fire'"):
        trainer(tmp_path, RekindleCallback("fire", at=3), RekindleCallback("fire", at=5)).train()


def test_state_is_plain_json_and_rebuilding_a_method_is_refused(tmp_path: Path) -> None:
    json.dumps(RekindleCallback("fire", at=3).state())
    with pytest.raises(ValueError, match="restore_callback_states_from_checkpoint"):
        RekindleCallback(**RekindleCallback(methods.FIRE(), at=3).state()["args"])
    assert RekindleCallback(**RekindleCallback("fire", at=3).state()["args"]).name == "fire"


def test_a_second_run_starts_anew(tmp_path: Path) -> None:
    callback = RekindleCallback("fire", at=4)
    run = trainer(tmp_path, callback)
    run.train()
    run.train()
    assert [f.step for f in callback.firings] == [4, 4]
    assert not any(m._forward_pre_hooks for m in run.model.modules())


@pytest.mark.parametrize("method", [methods.L2Init(0.1), methods.UPGD(), methods.WeightClip(1.0)], ids=lambda m: m.name)
def test_methods_of_every_moment(tmp_path: Path, method: Any) -> None:
    run = trainer(tmp_path, RekindleCallback(method))
    run.train()
    expected = network()
    other: Any = {"loss": methods.L2Init(0.1), "backward": methods.UPGD(), "step": methods.WeightClip(1.0)}[
        method.moment
    ]
    optimizer = torch.optim.AdamW(expected.parameters(), lr=1e-2)
    if hasattr(other, "remember"):
        other.remember(expected)
    for x, y in batches(4):
        optimizer.zero_grad()
        term = other.loss_term(expected) if other.moment == "loss" else 0.0
        (F.cross_entropy(expected(x), y) + term).backward()
        if other.moment == "backward":
            other(expected, optimizer)
        optimizer.step()
        if other.moment == "step":
            other(expected, optimizer)
    for a, b in zip(run.model.net.parameters(), expected.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_loss_term_is_clipped_with_the_rest_as_in_the_loss(tmp_path: Path, accumulate: int) -> None:
    run = trainer(
        tmp_path, RekindleCallback(methods.L2Init(0.5)), size=4 // accumulate, max_grad_norm=0.05,
        gradient_accumulation_steps=accumulate,
    )  # fmt: skip
    run.create_optimizer = lambda *given: run.optimizer
    run.optimizer = torch.optim.SGD(run.model.parameters(), lr=1.0)
    run.train()
    assert "backward" not in run.accelerator.__dict__
    assert within(run.model.net, penalized(0.05), 1e-5)
    assert not within(penalized(0.05), penalized(0.05, late=True), 1e-3)


def within(a: nn.Module, b: nn.Module, atol: float) -> bool:
    return all(torch.allclose(x, y, atol=atol) for x, y in zip(a.parameters(), b.parameters(), strict=True))


def test_wandb_gets_the_receipts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    for key, value in {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true"}.items():
        monkeypatch.setenv(key, value)
    wandb.teardown()  # it reads its settings once per process, and another test may have been first
    try:
        callback = RekindleCallback("fire", at=5, monitor=4)
        trainer(tmp_path, callback, report_to="wandb", logging_strategy="steps", logging_steps=4).train()
    finally:
        wandb.finish()
    (record,) = tmp_path.rglob("*.wandb")
    assert b"rekindle/fire/sfe_relative" in record.read_bytes() and b"health/verdict" in record.read_bytes()


def test_mlflow_gets_the_receipts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    store = tmp_path / "mlruns"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store.as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # newer versions ask for it
    try:
        callback = RekindleCallback("fire", at=5, monitor=4)
        trainer(tmp_path, callback, report_to="mlflow", logging_strategy="steps", logging_steps=4).train()
    finally:
        mlflow.end_run()
    metrics = {str(path).partition("/metrics/")[2]: path.read_text("utf-8") for path in store.rglob("*/metrics/**/*")
               if path.is_file()}  # fmt: skip
    assert metrics["rekindle/fire/sfe_relative"].split()[-1] == "5", metrics.keys()  # time, value, step
    assert "health/verdict" in metrics


def test_seq2seq_and_a_language_model(tmp_path: Path) -> None:
    config = transformers.GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2)
    model = transformers.GPT2LMHeadModel(config)
    tokens = torch.randint(0, 32, (16, 8), generator=torch.Generator().manual_seed(0))
    callback = RekindleCallback(methods.FIRE(targets="attention.qk"), every=2)
    transformers.Seq2SeqTrainer(
        model,
        transformers.Seq2SeqTrainingArguments(
            output_dir=str(tmp_path), per_device_train_batch_size=4, use_cpu=True, report_to="none", disable_tqdm=True,
            num_train_epochs=1, save_strategy="no", logging_strategy="no",
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
        callbacks=[callback],
    ).train()  # fmt: skip
    assert [f.step for f in callback.firings] == [2]
    assert "transformer.h.0.attn.c_attn.weight" in callback.receipts[0].changed


def test_a_keeper_is_a_method_like_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keeps = keeper(monkeypatch)
    callback = RekindleCallback(keeps)
    trainer(tmp_path, callback).train()
    assert [firing.step for firing in callback.firings] == [3, 6, 9] and kept(keeps, callback)
