"""What the tests of all trainers train: a small network on fixed data, and the same by a plain loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rekindle
from rekindle import methods
from rekindle.advice import keeping


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 3))


def data(count: int = 48) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(count, 6, generator=generator), torch.randint(0, 3, (count,), generator=generator)


def batches(size: int, count: int = 48) -> list[tuple[Tensor, Tensor]]:
    x, y = data(count)
    return list(zip(x.split(size), y.split(size), strict=True))


def adam(model: nn.Module, lr: float = 1e-2) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr)


def loop(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    stream: Iterable[tuple[Tensor, Tensor]],
    between: Callable[[int], Any] = lambda step: None,
    clip: float | None = None,
) -> nn.Module:
    """A plain loop; `between(step)` is called before each step, with the number of steps done."""
    for step, (x, y) in enumerate(stream):
        between(step)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return model


def plain(fire_at: tuple[int, ...], epochs: int = 1, clip: float | None = None) -> nn.Module:
    """The plain loop with `fire` before these steps."""
    model = network()
    optimizer = adam(model)

    def between(step: int) -> None:
        if step in fire_at:
            rekindle.fire(model, optimizer)

    return loop(model, optimizer, batches(4) * epochs, between, clip)


def same(a: nn.Module, b: nn.Module) -> bool:
    """Equal bit for bit."""
    ours, theirs = a.state_dict(), b.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)


def penalized(clip: float, late: bool = False) -> nn.Module:
    """A plain loop with L2Init in the loss, gradients clipped; or (late) the term's gradient added after clipping."""
    model, method = network(), methods.L2Init(0.5)
    method.remember(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for x, y in batches(4):
        optimizer.zero_grad()
        loss, term = F.cross_entropy(model(x), y), method.loss_term(model)
        (loss if late else loss + term).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        if late:
            term.backward()
        optimizer.step()
    return model


def keeper(monkeypatch: pytest.MonkeyPatch) -> rekindle.Keeper:
    """A keeper that asks every three steps of a long run, and is always told to start again."""
    reply = keeping.Reply(0.1, "lost", "plasticity is lost; Apply full-reset", "full-reset", 0.0)
    monkeypatch.setattr(keeping.Inquiry, "ask", lambda *_: reply)
    made = rekindle.Keeper(batches(2), every=3, share=0.9, candidates=[methods.FullReset()], background=False)
    made.trigger.elapsed = 1e6
    return made


def kept(keeper: rekindle.Keeper, callback: Any) -> bool:
    """Whether it acted as it was told to, and logged why."""
    told = [note.what for note in keeper.log] == ["ask", "act"] * len(callback.firings)
    reasons = all("Apply full-reset" in firing.reason for firing in callback.firings)
    return told and reasons and {receipt.method for receipt in callback.receipts} == {"full-reset"}


def train(model: nn.Module, optimizer: Any, stream: Any, remedy: Any = None, scheduler: Any = None) -> nn.Module:
    for x, y in stream:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad()
        if remedy is not None:
            remedy.step(loss=loss)
    return model
