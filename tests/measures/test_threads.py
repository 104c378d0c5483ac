"""Matrices side by side: the same numbers in the same order, few of them ahead, errors where they belong."""

import threading
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from rekindle import health
from rekindle.measures import spectra
from rekindle.measures.spectra import one_blas_thread, side_by_side, workers_for


@pytest.fixture
def two_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two threads, and every model large enough for them."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    monkeypatch.setattr(spectra, "WORTH", 0)
    yield
    torch.set_num_threads(before)


def test_order_is_kept_and_little_is_drawn_ahead() -> None:
    drawn: list[int] = []

    def items() -> Iterator[int]:
        for item in range(10):
            drawn.append(item)
            yield item

    done = []
    for result in side_by_side(lambda item: item * item, items(), workers=3):
        done.append(result)
        assert len(drawn) <= len(done) + 6, "a checkpoint's weights must not all be read at once"
    assert done == [item * item for item in range(10)]


def test_two_are_at_work_at_once() -> None:
    both = threading.Barrier(2, timeout=30)  # passes only if both are inside
    assert len(list(side_by_side(lambda _: both.wait(), range(4), workers=2))) == 4


def test_an_error_is_raised_where_its_result_is_asked_for() -> None:
    def work(item: int) -> int:
        if item == 2:
            raise ValueError("two")
        return item

    results = side_by_side(work, range(5), workers=2)
    assert [next(results), next(results)] == [0, 1]
    with pytest.raises(ValueError, match="two"):
        next(results)


def test_small_models_get_no_threads(two_threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert workers_for(1) == 2
    monkeypatch.setattr(spectra, "WORTH", 100)
    assert workers_for(99) == 1


@pytest.mark.parametrize("mode", ["cheap", "full"])
def test_health_is_the_same_side_by_side(two_threads: None, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Linear(20, 30), nn.Linear(30, 10), nn.LSTM(6, 5))
    with torch.no_grad():
        model[1].weight[0, 0] = torch.nan
    many = health(model, mode=mode).to_dict()  # type: ignore[arg-type]
    monkeypatch.setattr(spectra, "WORTH", 10**9)
    alone = health(model, mode=mode).to_dict()  # type: ignore[arg-type]
    assert many["broken"] == alone["broken"] == {"1.weight": "the weight holds NaN or Inf"}
    assert list(many["weights"]) == list(alone["weights"])
    for name, numbers in alone["weights"].items():
        assert many["weights"][name] == pytest.approx(numbers, rel=1e-6, nan_ok=True), name
    assert many["about"] == alone["about"] and many["whole"] == pytest.approx(alone["whole"], rel=1e-6)


def test_blas_has_one_thread_inside_and_its_own_again_outside() -> None:
    threadpoolctl = pytest.importorskip("threadpoolctl")

    def threads() -> list[int]:
        return [each["num_threads"] for each in threadpoolctl.threadpool_info() if each["user_api"] == "blas"]

    before = threads()
    with one_blas_thread():
        assert set(threads()) <= {1}
    assert threads() == before
