"""One rank under torchrun: shards, Lightning's DDP and transformers' DDP in one launch, because starting takes seconds.

`torchrun --nproc-per-node=2 launched_worker.py FOLDER`; each rank writes what it found as FOLDER/RANK.pt.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import rekindle
from rekindle import methods
from rekindle.triggers import DormancyAbove
from trained import batches, network

FOLDER = Path(sys.argv[1] if len(sys.argv) > 1 else ".")


def whole(tensors: Iterable[Tensor]) -> list[Tensor]:
    def full(tensor: Any) -> Tensor:
        found: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        return found.detach().clone()

    return [full(tensor) for tensor in tensors]


def trained(make: Callable[[Any, Any], Any], average: nn.Module | None = None) -> tuple[Any, Any]:
    """All ranks see the same data: then the mean of the gradients is that of one process."""
    from torch.distributed.fsdp import fully_shard

    model = network()
    for part in (model, *([average] if average is not None else [])):
        for layer in (*[m for m in part if isinstance(m, nn.Linear)], part):
            fully_shard(layer)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with make(model, optimizer) as remedy:
        for x, y in batches(8):
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            remedy.step(dormant=0.9 if dist.get_rank() == 0 else 0.1)  # rank 0 decides for all
    slots = [optimizer.state[p]["momentum_buffer"] for p in model.parameters()]
    return whole(model.parameters()) + whole(slots), remedy


def shards() -> dict[str, Any]:
    found: dict[str, Any] = {}
    data = [batches(4)[dist.get_rank()]]
    guard = rekindle.Guard(data, lambda m, b: F.cross_entropy(m(b[0]), b[1]), max_rise=-9.0)
    runs: dict[str, Callable[[Any, Any], Any]] = {
        "fire": lambda m, o: rekindle.attach(m, o, "fire", at=3, monitor=2),
        "trigger": lambda m, o: rekindle.attach(m, o, "fire", when=DormancyAbove(0.5, most=1)),
        "guard": lambda m, o: rekindle.attach(m, o, "fire", at=3, guard=guard),
        "joined": lambda m, o: rekindle.attach(m, o, methods.Compose([methods.FIRE(), methods.OptimizerReset()]), at=3),
        "plain": lambda m, o: rekindle.attach(m, o, "fire"),
    }
    for name, make in runs.items():
        found[name], remedy = trained(make)
        found[f"{name} firings"] = [f.step for f in remedy.firings]
        found[f"{name} rolled back"] = [r.rolled_back for r in remedy.receipts]
        found[f"{name} changed"] = [list(r.changed) for r in remedy.receipts]
    average = network()
    with torch.no_grad():
        for parameter in average.parameters():
            parameter.mul_(0.5)
    trained(lambda m, o: rekindle.attach(m, o, "fire", at=5, mirrors=(average,)), average)
    found["mirror"] = whole(average.parameters())
    for method in (methods.ReDo(), methods.L2Init(0.1), methods.Compose([methods.FIRE(), methods.ShrinkPerturb(0.3)])):
        try:
            trained(lambda m, o, method=method: rekindle.attach(m, o, method))  # type: ignore[misc]
        except Exception as error:
            found[f"refused {method.name}"] = f"{type(error).__name__}: {error}"
    return found


def lightning(folder: Path) -> dict[str, Any]:
    import lightning.pytorch as pl

    from integrations.test_lightning import Classifier, loader
    from rekindle.integrations.lightning import RekindleCallback

    callback, module = RekindleCallback("fire", at=3, every="epoch"), Classifier()
    trainer = pl.Trainer(
        strategy="ddp", devices=2, accelerator="cpu", max_epochs=2, callbacks=[callback], logger=False,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False, default_root_dir=str(folder),
        use_distributed_sampler=False,  # Lightning's own would shuffle
    )  # fmt: skip
    dataset = loader(4).dataset
    sampler = torch.utils.data.DistributedSampler(dataset, shuffle=False)
    trainer.fit(module, torch.utils.data.DataLoader(dataset, batch_size=4, sampler=sampler))
    return {
        "weights": whole(module.parameters()),
        "firings": [f.step for f in callback.firings],
        "strategy": type(trainer.strategy).__name__,
    }


def transformers(folder: Path) -> dict[str, Any]:
    from integrations.test_transformers import trainer
    from rekindle.integrations.transformers import RekindleCallback

    callback = RekindleCallback(methods.ShrinkPerturb(0.3, noise="fresh", seed=dist.get_rank()), at=3, every="epoch")
    run = trainer(folder, callback, num_train_epochs=2, ddp_backend="gloo")
    run.train()
    return {
        "weights": whole(run.model.parameters()),
        "firings": [f.step for f in callback.firings],
        "wrapper": type(run.model_wrapped).__name__,
    }


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    found: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        runs: dict[str, Callable[[], Any]] = {"shards": shards}
        if importlib.util.find_spec("transformers") is not None:
            runs["transformers"] = lambda: transformers(FOLDER / "transformers")
        if importlib.util.find_spec("lightning") is not None:
            runs["lightning"] = lambda: lightning(FOLDER / "lightning")
        for name, run in runs.items():
            try:
                found[name] = run()
            except Exception:
                found[name] = traceback.format_exc()
            torch.save(found, FOLDER / f"{rank}.pt")
    dist.barrier()
    os._exit(0)  # trainers leave groups and threads behind whose tidying at exit is not the matter here


if __name__ == "__main__":
    main()
