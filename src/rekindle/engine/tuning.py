"""Which route pays for which size, by kind of CPU.

The best route is a fact about a CPU: with AVX-512 a product costs a quarter of what it costs with AVX2, while
factorizations and passes over memory cost as much as before. So it is looked up here, by the maker of the CPU and by
the instructions that torch uses. It is never timed at run time: the same input has to give the same bits in every
process, on every rank and after a restart. `benchmarks/calibrate.py` prints the row of the machine that it runs on.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from rekindle.engine import cpu


@dataclass(frozen=True)
class Tuning:
    """Up to how many rows which route is taken on a CPU, and where the figures come from.

    svd_up_to: batched float64 SVD. products_up_to: polynomials, above them Halley steps.
    resolve_up_to: a matrix that lacks a direction is solved again by SVD, all of them in one batch; above it the
    direction alone is rebuilt, matrix by matrix. gram_from: from this many rows on, wide matrices are solved on their
    n×n side.
    """

    svd_up_to: int
    products_up_to: int
    resolve_up_to: int
    source: str
    gram_from: int = 49


DEFAULT = Tuning(8, 112, 64, "the row of AMD with AVX2")
TABLE: dict[tuple[str, str], Tuning] = {
    ("AuthenticAMD", "AVX2"): Tuning(8, 112, 64, "measured on EPYC (family 25, model 17), under load"),
    ("AuthenticAMD", "AVX512"): Tuning(8, 80, 64, "measured on EPYC (family 26, model 2), under load"),
    # Derived, not measured: a product costs a quarter, Cholesky 2.0 products at 64² and 3.3 at 128². Ten cubic steps
    # are 20 products there; the Halley route was measured at 1/.91 of that at 64² and 1/1.19 at 128², and polynomials
    # take 22 at any size, so that the two meet just above 64.
    ("GenuineIntel", "AVX512"): Tuning(8, 64, 64, "derived from figures of Sapphire Rapids"),
}


@lru_cache(maxsize=1)
def tuning() -> Tuning:
    """The row of this CPU, or the default for a kind that is not in the table.

    >>> tuning().svd_up_to <= tuning().products_up_to
    True
    """
    return TABLE.get((cpu.vendor(), cpu.capability()), DEFAULT)
