"""Lightning's Trainer, for real: the order of operations, resumed runs, accumulation, precision, logs and triggers."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rekindle
from callbacks import Recording
from rekindle import methods
from rekindle.triggers import Every, VerdictIs
from trained import batches, keeper, kept, loop, network, penalized, plain, same

lightning = pytest.importorskip("lightning.pytorch")
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint  # noqa: E402
from lightning.pytorch.loggers import CSVLogger  # noqa: E402

from rekindle.integrations.lightning import RekindleCallback  # noqa: E402

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class Classifier(lightning.LightningModule):
    def __init__(self, net: nn.Module | None = None) -> None:
        super().__init__()
        self.net = network() if net is None else net

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        self.log("val_loss", F.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def loader(size: int = 4) -> Any:
    x = torch.cat([x for x, _ in batches(size)])
    y = torch.cat([y for _, y in batches(size)])
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=size)


def trainer(folder: Path, *callbacks: Any, **options: Any) -> Any:
    return lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=options.pop("max_epochs", 1),
        logger=options.pop("logger", False),
        callbacks=list(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=any(isinstance(c, ModelCheckpoint) for c in callbacks),
        default_root_dir=str(folder),
        **options,
    )


def test_it_is_the_plain_loop_with_the_same_order_of_operations(tmp_path: Path) -> None:
    module, callback = Classifier(), RekindleCallback("fire", at=5, every="epoch")
    trainer(tmp_path, callback, max_epochs=2, gradient_clip_val=0.5).fit(module, loader())
    assert same(module.net, plain((5, 12), 2, clip=0.5))
    assert [f.step for f in callback.firings] == [5, 12]


class Stream:
    """Batches that know where they are: any other loader starts anew when Lightning resumes inside an epoch."""

    def __init__(self) -> None:
        self.position = 0

    def __len__(self) -> int:
        return 12

    def __iter__(self) -> Any:
        self.position %= 12
        for batch in batches(4)[self.position :]:
            self.position += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position % 12}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Killed(Exception):
    pass


class Kill(lightning.Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        if trainer.global_step == self.step:
            raise Killed


@pytest.mark.parametrize("kill", [4, 6, 12])
def test_a_resumed_run_ends_like_one_that_was_never_interrupted(tmp_path: Path, kill: int) -> None:
    def callback() -> RekindleCallback:
        method = methods.ShrinkPerturb(0.3, noise="fresh", seed=2)
        return RekindleCallback(method, at=[4, 5, 13], every="epoch", rewarm=2, monitor=3)

    whole = Classifier()
    trainer(tmp_path, callback(), max_epochs=2).fit(whole, Stream())
    saving = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
    with pytest.raises(Killed):
        trainer(tmp_path, callback(), saving, Kill(kill), max_epochs=2).fit(Classifier(), Stream())
    resumed, again = callback(), Classifier()
    trainer(tmp_path, resumed, max_epochs=2).fit(again, Stream(), ckpt_path=str(tmp_path / f"step={kill}.ckpt"))
    assert same(again, whole)
    assert [f.step for f in resumed.firings] == [4, 5, 12, 13]


def test_four_accumulated_batches_are_one_step(tmp_path: Path) -> None:
    def run(size: int, accumulate: int) -> tuple[nn.Module, list[int]]:
        torch.manual_seed(0)
        module, callback = Classifier(), RekindleCallback("fire", at=3)
        module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=0.1)  # type: ignore[method-assign]
        trainer(tmp_path, callback, accumulate_grad_batches=accumulate).fit(module, loader(size))
        return module, [f.step for f in callback.firings]

    (one, at_one), (four, at_four) = run(8, 1), run(2, 4)
    assert at_one == at_four == [3]
    for a, b in zip(one.parameters(), four.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("method", [methods.L2Init(0.1), methods.UPGD(), methods.WeightClip(1.0)], ids=lambda m: m.name)
def test_methods_of_every_moment_inside_a_closure(tmp_path: Path, method: Any) -> None:
    module = Classifier()
    trainer(tmp_path, RekindleCallback(method)).fit(module, loader())
    expected = network()
    other = (
        methods.L2Init(0.1) if method.moment == "loss" else type(method)(*(() if method.moment != "step" else (1.0,)))
    )
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
    for a, b in zip(module.net.parameters(), expected.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-5)


def test_a_loss_term_after_a_step_that_the_scaler_skipped(tmp_path: Path) -> None:
    from lightning.pytorch.plugins.precision import MixedPrecision

    class Overflowing(Classifier):
        def training_step(self, batch: Any, index: int) -> Tensor:
            with torch.autocast("cpu", enabled=False):
                return F.cross_entropy(self.net(batch[0]), batch[1]) * (float("inf") if index == 3 else 1.0)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    plugin = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=8.0))
    module, expected, term = Overflowing(), network(), methods.L2Init(0.5)
    trainer(tmp_path, RekindleCallback(methods.L2Init(0.5)), plugins=[plugin]).fit(module, loader())
    term.remember(expected)
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    for index, (x, y) in enumerate(batches(4)):
        optimizer.zero_grad()
        (F.cross_entropy(expected(x), y) + term.loss_term(expected)).backward()
        if index != 3:
            optimizer.step()
    for a, b in zip(module.net.parameters(), expected.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-5)


def test_a_step_of_the_bare_optimizer_is_no_step_for_lightning(tmp_path: Path) -> None:
    class Bare(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, index: int) -> None:
            self.manual_backward(F.cross_entropy(self.net(batch[0]), batch[1]))
            self.optimizers(use_pl_optimizer=False).step()

    with pytest.raises(RuntimeError, match="without the trainer's hook"):
        trainer(tmp_path, RekindleCallback(methods.L2Init(0.5))).fit(Bare(), loader())


def test_the_module_sees_its_own_learning_rate_while_it_warms_up(tmp_path: Path) -> None:
    class Looking(Classifier):
        seen: ClassVar[set[float]] = set()

        def training_step(self, batch: Any, index: int) -> Tensor:
            self.seen.add(self.trainer.optimizers[0].param_groups[0]["lr"])
            return super().training_step(batch, index)

    module, callback = Looking(), RekindleCallback("fire", when=Every(5), rewarm=3)
    trainer(tmp_path, callback).fit(module, loader())
    assert [f.step for f in callback.firings] == [5, 10] and module.seen == {1e-2}
    expected = network()
    optimizer = torch.optim.AdamW(expected.parameters(), lr=1e-2)
    rates = [1.0] * 5 + [0.25, 0.5, 0.75, 1.0, 1.0, 0.25, 0.5]

    def between(step: int) -> None:
        if step in (5, 10):
            rekindle.fire(expected, optimizer)
        optimizer.param_groups[0]["lr"] = 1e-2 * rates[step]

    assert same(module.net, loop(expected, optimizer, batches(4), between))


def test_a_loss_term_is_clipped_with_the_rest_as_in_the_loss(tmp_path: Path) -> None:
    module = Classifier()
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=1.0)  # type: ignore[method-assign]
    trainer(tmp_path, RekindleCallback(methods.L2Init(0.5)), gradient_clip_val=0.05).fit(module, loader())
    for a, b in zip(module.net.parameters(), penalized(0.05).parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-5)


def test_triggers_see_each_logged_value_once(tmp_path: Path) -> None:
    trigger = Recording()
    options = {"max_epochs": 3, "val_check_interval": 1.0}
    trainer(tmp_path, RekindleCallback("fire", when=trigger), **options).fit(Classifier(), loader(), loader())
    assert [m["step"] for m in trigger.given if "train_loss" in m] == list(range(1, 36))
    assert [m["step"] for m in trigger.given if "val_loss" in m] == [12, 24]


def test_several_optimizers_under_manual_optimization(tmp_path: Path) -> None:
    class Two(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, index: int) -> None:
            for optimizer in self.optimizers():
                optimizer.zero_grad()
            self.manual_backward(F.cross_entropy(self.net(batch[0]), batch[1]))
            for optimizer in self.optimizers():
                optimizer.step()

        def configure_optimizers(self) -> Any:
            first, rest = self.net[0].parameters(), [p for layer in self.net[1:] for p in layer.parameters()]
            return torch.optim.SGD(first, lr=0.1), torch.optim.Adam(rest)

    module, callback = Two(), RekindleCallback("fire", at=6)  # Lightning counts both optimizers: the third batch
    trainer(tmp_path, callback).fit(module, loader())
    assert [f.step for f in callback.firings] == [6]
    assert callback.receipts[0].optimizer is not None
    assert set(callback.receipts[0].optimizer.optimizers) == {"SGD", "Adam"}


def test_an_average_of_weights_follows(tmp_path: Path) -> None:
    averaging = EMAWeightAveraging(decay=0.5)
    callback = RekindleCallback("fire-body", at=11, mirrors=(lambda: averaging._average_model.module,))
    seen = {}

    class Look(lightning.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
            if trainer.global_step == 11:
                average = averaging._average_model.module.net
                seen["equal"] = [torch.equal(average[i].weight, module.net[i].weight) for i in (0, 2, 4)]

    module = Classifier()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*averages the weights")
        trainer(tmp_path, averaging, callback, Look()).fit(module, loader())
    assert seen["equal"] == [True, True, False]


def test_bfloat16_and_compiled_modules(tmp_path: Path) -> None:
    callback = RekindleCallback("fire", at=3)
    trainer(tmp_path, callback, precision="bf16-mixed").fit(Classifier(), loader())
    assert [f.step for f in callback.firings] == [3]
    net, callback = network(), RekindleCallback("fire", at=3)
    trainer(tmp_path, callback).fit(Classifier(torch.compile(net, backend="eager")), loader())
    assert same(net, plain((3,)))


def test_receipts_and_health_reach_the_logger(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    callback = RekindleCallback("fire", when=VerdictIs("healthy", most=1), monitor=5)
    trainer(tmp_path, callback, logger=logger, log_every_n_steps=1).fit(Classifier(), loader())
    assert [f.step for f in callback.firings] == [5]
    header = (Path(logger.log_dir) / "metrics.csv").read_text("utf-8").splitlines()[0].split(",")
    assert {"rekindle/fire/sfe_relative", "health/verdict", "train_loss"} <= set(header)


def test_boundaries_come_from_the_users_code(tmp_path: Path) -> None:
    callback = RekindleCallback("fire")

    class Switch(Classifier):
        def on_validation_end(self) -> None:  # averaged weights may be swapped in here: it must wait
            if self.global_step:
                callback.boundary("new data")

    module = Switch()
    trainer(tmp_path, callback, max_epochs=2, num_sanity_val_steps=0).fit(module, loader(), loader())
    assert [(f.step, f.reason) for f in callback.firings] == [(12, "new data")]
    assert same(module.net, plain((12,), 2))


def test_a_keeper_is_a_method_like_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keeps = keeper(monkeypatch)
    callback = RekindleCallback(keeps)
    trainer(tmp_path, callback).fit(Classifier(), loader())
    assert [firing.step for firing in callback.firings] == [3, 6, 9] and kept(keeps, callback)
