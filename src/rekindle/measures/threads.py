"""Several matrices at once, each on a core of its own.

LAPACK's eigenvalue routines move more memory than they multiply, and a second thread hardly helps them; two matrices
side by side on two cores take half the time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch

WORTH = 4_000_000  # numbers in all; for fewer the threads cost more than they save

T = TypeVar("T")
R = TypeVar("R")


def side_by_side(work: Callable[[T], R], items: Iterable[T], *, workers: int) -> Iterator[R]:
    """work(item) for every item, in their order, `workers` at a time; at most twice as many are drawn ahead.

    >>> list(side_by_side(abs, [-3, 1, -2], workers=2))
    [3, 1, 2]
    """
    if workers < 2:
        yield from map(work, items)
        return
    with one_blas_thread(), ThreadPoolExecutor(workers, thread_name_prefix="rekindle") as pool:
        waiting: deque[Future[R]] = deque()
        for item in items:
            if len(waiting) == 2 * workers:  # so that none waits for the first, if that takes long
                yield waiting.popleft().result()
            waiting.append(pool.submit(work, item))
        while waiting:
            yield waiting.popleft().result()


def workers_for(numbers: int) -> int:
    """How many matrices to look at side by side if there are this many numbers in all: 1, or torch's threads.

    >>> workers_for(1000)
    1
    """
    return torch.get_num_threads() if numbers >= WORTH else 1


def one_blas_thread() -> AbstractContextManager[object]:
    """A context in which numpy's BLAS uses one thread per call, if threadpoolctl is there to say so.

    Without it the threads of one call take turns with those of the other: slower, and as right.
    """
    try:
        from threadpoolctl import threadpool_limits
    except ImportError:
        return nullcontext()
    limits: AbstractContextManager[object] = threadpool_limits(1, user_api="blas")
    return limits
