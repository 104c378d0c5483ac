"""The polar engine beside other methods: ratios of process time in one run, on one thread.

    OMP_NUM_THREADS=1 python benchmarks/polar.py                    # everything, about 8 minutes
    OMP_NUM_THREADS=1 python benchmarks/polar.py --only 1024 gpt2   # lines whose name contains a word

`lean` is a rival for batches of one shape: ten cubic steps on the whole batch, in place; both get one tensor there
(`as a list` is the same matrices one by one, which costs Python for each). `recipe@10` is the paper's loop, plainly:
one matrix after the other (each tap of a convolution is a matrix), ten cubic steps. `linalg.polar` is torch's own,
which is an SVD on a CPU, on the whole batch; where this torch has none, that SVD and the product. A ratio above 1 means
that rekindle is faster. DfI/k is the worst of the set; `floor` is the time as a multiple of one product n×n·n×m per
matrix; memory is anonymous memory beyond the result, each measured in a process of its own.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from measuring import growth, interleaved, processor
from rekindle import polar
from rekindle.engine import arithmetic, bulk, schedules
from rekindle.engine import routes as solvers
from rekindle.engine.operator import kernel

sys.path.insert(0, str(Path(__file__).parent.parent / "tests/support"))
from matrices import ZOO, build

Matrices = list[Tensor]


def resnet18() -> Matrices:
    """Every tap of every convolution of ResNet-18 as the paper uses it (3×3 stem), and the head."""
    taps = [(64, 3)] * 9 + [(64, 64)] * 36
    for into, out in ((64, 128), (128, 256), (256, 512)):
        taps += [(out, into)] * 10 + [(out, out)] * 27
    return [build("kaiming", *shape, seed) for seed, shape in enumerate([*taps, (100, 512)])]


def gpt2(layers: int = 12) -> Matrices:
    """Query, key, value, output and both MLP weights of each layer."""
    shapes = ([(768, 768)] * 4 + [(3072, 768), (768, 3072)]) * layers
    return [build("gaussian", *shape, seed) for seed, shape in enumerate(shapes)]


def some(name: str, count: int, out: int, in_: int) -> Callable[[], Matrices]:
    return lambda: [build(name, out, in_, seed) for seed in range(count)]


# By rows. Below 64 a batch is a matter of milliseconds, and some hundred calls of torch are a part of it; so a larger
# one too, which shows the arithmetic.
BATCHES = {
    256: [36],
    128: [72],
    96: [96],
    64: [144],
    48: [256, 2048],
    32: [512, 4096],
    24: [900, 7200],
    16: [1024, 8192],
}
SETS: dict[str, tuple[Callable[[], Matrices], dict[str, float]]] = {
    "resnet18": (resnet18, {"recipe@10": 2.5}),
    "gpt2-small": (gpt2, {"recipe@10": 4.5}),
    "1024² gaussian": (some("gaussian", 1, 1024, 1024), {"recipe@10": 2.7, "linalg.polar": 2.3}),
    "1024² trained": (some("trained", 1, 1024, 1024), {"recipe@10": 2.7, "linalg.polar": 2.3}),
    "768×3072 gaussian": (some("gaussian", 1, 768, 3072), {"recipe@10": 6, "linalg.polar": 5}),
    "768×3072 trained": (some("trained", 1, 768, 3072), {"recipe@10": 6, "linalg.polar": 5}),
    "512² gaussian": (some("gaussian", 9, 512, 512), {"lean": 1.0, "linalg.polar": 2.0}),
    **{
        f"{count} × {n}² batch": (
            some("kaiming", count, n, n),
            {"recipe@10": 1.0, "lean": 1.0} | ({"linalg.polar": 2.0} if n >= 64 else {}),
        )
        for n, counts in BATCHES.items()
        for count in counts
    },
    # One call for one matrix: below 256² the calls of torch take longer than the products (docs/engine.md).
    **{f"single {n}²": (some("gaussian", 1, n, n), {"linalg.polar": 2.0}) for n in (64, 128, 256, 512)},
}
FAST = {"512² gaussian": 5.0, "1024² gaussian": 5.0, "1024² trained": 5.0}
LARGE = ("resnet18", "gpt2-small")  # too many for the slow ones


def recipe(w: Tensor, steps: int | None = 10, tol: float = 1e-6) -> Tensor:
    """The released loop; with `steps=None` until DfI/k is at most `tol`."""
    x = w.T if w.shape[0] < w.shape[1] else w
    x = x / x.norm()
    k, eye = x.shape[1], torch.eye(x.shape[1])
    for _ in range(steps or 100):
        gram = x.T @ x
        if steps is None and float((gram - eye).square().sum()) / k <= tol:
            break
        x = 1.5 * x - 0.5 * x @ gram
    return x.T if w.shape[0] < w.shape[1] else x


def lean(w: Tensor, steps: int = 10) -> Tensor:
    """The recipe on a whole batch (batch, out, in): two products per step on the smaller side."""
    x = w if w.shape[1] <= w.shape[2] else w.mT
    x = x / torch.linalg.matrix_norm(x, keepdim=True)
    a, y = x.new_empty(len(x), x.shape[1], x.shape[1]), torch.empty_like(x)
    for _ in range(steps):
        torch.bmm(x, x.mT, out=a)
        torch.baddbmm(x, a, x, beta=1.5, alpha=-0.5, out=y)
        x, y = y, x
    return x if w.shape[1] <= w.shape[2] else x.mT


def bulk_products(w: Tensor) -> None:
    """The floor of the route for small matrices: the products of its schedule and nothing else, in parts as it does."""
    count, n, m = w.shape
    size = -(-count // max(1, round(count * n * m / bulk.PART)))
    a, p, y = (torch.empty_like(w[:size]) for _ in range(3))
    for x in w.split(size):
        k = len(x)
        for step in (*bulk.schedule(n), schedules.cubic(0.9)):
            torch.bmm(x, x.mT, out=a[:k])
            if step.c:
                torch.bmm(a[:k], a[:k], out=p[:k])
            torch.bmm(a[:k], x, out=y[:k])


class _Calls(TorchDispatchMode):
    """Counts the calls of torch that do something."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def calls(w: Tensor) -> int:
    """How many calls of torch `polar` makes for this batch: the part of its time that does not grow with the batch."""
    with _Calls() as counted:  # below the operator, which would count as one
        kernel([w], "auto", 1e-6, 10, True, 0, False)
    return counted.count


def muon(w: Tensor) -> Tensor:
    """Muon's five quintic steps with torch's coefficients, in float32: bf16 takes minutes on CPUs without it."""
    from torch.optim._muon import DEFAULT_A, DEFAULT_B, DEFAULT_C

    step = schedules.Polynomial(DEFAULT_A, DEFAULT_B, DEFAULT_C, 0.0)
    return _wide_side(w, lambda x: solvers.by_schedule(x[None] / x.norm(), (step,) * 5)[0])


def polar_express(steps: int) -> Callable[[Tensor], Tensor]:
    """Minimax quintics from a floor of 1e-3, normalized by the Frobenius norm as published."""
    low, coefficients = 1e-3, []
    for _ in range(steps):
        coefficients.append(schedules.quintic(round(low, 12)))
        low = coefficients[-1].reached

    return lambda w: _wide_side(w, lambda x: solvers.by_schedule(x[None] / x.norm(), tuple(coefficients))[0])


def _wide_side(w: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
    return run(w) if w.shape[0] <= w.shape[1] else run(w.T).T


def linalg_polar(w: Tensor) -> Tensor:
    """The factor of (…, out, in); torch's own wants the tall side first."""
    tall = w if w.shape[-2] >= w.shape[-1] else w.mT
    if hasattr(torch.linalg, "polar"):
        q: Tensor = torch.linalg.polar(tall)[0]
    else:
        u, _, vh = torch.linalg.svd(tall, full_matrices=False)
        q = u @ vh
    return q if tall is w else q.mT


def scipy_polar(w: Tensor) -> Tensor:
    import scipy.linalg

    return torch.from_numpy(scipy.linalg.polar(w.numpy())[0])


RIVALS: dict[str, Callable[[Tensor], Tensor]] = {
    "recipe@10": recipe,
    "cubic to 1e-6": lambda w: recipe(w, None),
    "scipy.polar": scipy_polar,
    "muon (float32)": muon,
    "polar express 8": polar_express(8),
    "polar express 12": polar_express(12),
}


def worst(factors: list[Tensor]) -> float:
    """The largest DfI/k of a set, in float64."""

    def dfi(q: Tensor) -> float:
        q = q.double() if q.shape[0] <= q.shape[1] else q.double().T
        return float((q @ q.T - torch.eye(len(q), dtype=torch.float64)).square().sum() / len(q))

    return max(map(dfi, factors))


def products(matrices: Matrices) -> None:
    """One product n×n·n×m for each matrix: the unit of the last column."""
    for w in matrices:
        x = w if w.shape[0] <= w.shape[1] else w.T
        torch.mm(UNIT[: len(x), : len(x)], x)


UNIT = torch.randn(1024, 1024)


def runners(matrices: Matrices, large: bool) -> dict[str, Callable[[], list[Tensor]]]:
    chosen = {"recipe@10": recipe} if large else RIVALS
    batched = len(matrices) > 1 and len({w.shape for w in matrices}) == 1
    given: Any = torch.stack(matrices) if batched else matrices
    run: dict[str, Callable[[], list[Tensor]]] = {
        "auto": lambda: list(polar(given)),
        "auto, certified": lambda: list(polar(given, certificate=True)[0]),
        "fast": lambda: list(polar(given, solver="fast")),
    }
    if not large:
        run["linalg.polar"] = lambda: list(linalg_polar(given)) if batched else list(map(linalg_polar, matrices))
    if batched:
        run["auto, as a list"] = lambda: polar(matrices)
        run["lean"] = lambda: list(lean(given))
    for name, rival in chosen.items():
        run[name] = lambda rival=rival: [rival(w) for w in matrices]  # type: ignore[misc]
    return run


def memory(label: str, who: str) -> None:
    """In a process of its own: print the growth of anonymous memory beyond the result, in MB."""
    torch.set_num_threads(1)
    matrices = SETS[label][0]()
    run = runners(matrices, large=False)[who]
    polar([w[:64, :64] for w in matrices[:2]])  # what libraries allocate once for themselves
    kept: list[Tensor] = []
    grown = growth(lambda: kept.extend(run()))
    print((grown - sum(q.numel() * q.element_size() for q in kept)) / 1e6)


def measure(label: str, rounds: int, quick: bool) -> list[str]:
    make, bars = SETS[label]
    matrices = make()
    run = runners(matrices, label in LARGE)
    if quick:
        run = {name: each for name, each in run.items() if name.startswith("auto") or name in bars}
    floor: dict[str, Callable[[], Any]] = {}
    if "lean" in run and len(matrices[0]) <= bulk.MOST:
        stacked, one = torch.stack(matrices), torch.zeros(1)
        number = calls(stacked)
        floor = {
            "floor": lambda: bulk_products(stacked),
            "calls": lambda: [one.add_(1) for _ in range(number)],
            "uncorrected": lambda: list(bulk.by_bulk(stacked, arithmetic.norms(stacked), tol=0.5).x),
        }
    times = interleaved({"product": lambda: products(matrices), **floor, **run}, rounds)
    print(f"\n{label}: {len(matrices)} matrices")
    missed = []
    for name in run:
        spent = (
            ""
            if quick
            else f"{float(subprocess.check_output([sys.executable, __file__, '--memory', label, name])):6.0f} MB"
        )
        ratio = times[name] / times["auto"]
        bar = bars.get(name) if name in bars else None
        says = f"ratio {ratio:6.2f}" if name != "auto" else "ratio   1.00"
        if name == "fast":
            says = f"recipe/fast {times['recipe@10'] / times['fast']:.2f}"
            bar = FAST.get(label)
            ratio = times["recipe@10"] / times["fast"]
        text = f"  {name:<17} {says:<18} DfI/k {worst(run[name]()):8.1e}"
        text += f"  floor {times[name] / times['product']:6.2f}  {spent}"
        if bar is not None:
            text += f"  bar {bar} {'met' if ratio >= bar else 'MISSED'}"
            missed += [] if ratio >= bar else [f"{label}: {name} {ratio:.2f} < {bar}"]
        print(text, flush=True)
    if floor:
        least = times["floor"] + times["calls"]
        print(
            f"  lean against the products of the small route's schedule alone: {times['lean'] / times['floor']:.2f}; "
            f"with {number} calls of torch on one number each: {times['lean'] / least:.2f} (no ratio can be above it); "
            f"the route where no matrix lacks a direction: {times['lean'] / times['uncorrected']:.2f}"
        )
    if label == "1024² gaussian":
        over = times["auto"] / times["product"] / 5.5
        print(f"  over the flop floor of two Halley steps and a cubic (5.5 products): {over:.2f}  bar 1.25")
        missed += [] if over <= 1.25 else [f"{label}: {over:.2f} over the flop floor > 1.25"]
    return missed


def zoo() -> list[str]:
    found = {(name, shape): worst([polar(build(name, *shape))]) for name in ZOO for shape in ((512, 512), (256, 640))}
    (name, shape), residual = max(found.items(), key=lambda item: item[1])
    print(f"\nzoo of {len(ZOO)} kinds at 512² and 256×640: worst DfI/k {residual:.1e} ({name}, {shape})  bar 1e-6")
    return [] if residual <= 1e-6 else [f"zoo: {residual:.1e} > 1e-6"]


def import_cost() -> list[str]:
    code = "import time, torch; t = time.process_time(); import rekindle; print((time.process_time() - t) * 1e3)"
    spent = sorted(float(subprocess.check_output([sys.executable, "-c", code])) for _ in range(3))[1]
    print(f"import rekindle after import torch: {spent:.1f} ms  bar 50")
    return [] if spent <= 50 else [f"import: {spent:.0f} ms > 50"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", nargs="*", help="sets whose name contains one of these words")
    parser.add_argument("--quick", action="store_true", help="no memory, and only the methods that have a bar")
    parser.add_argument("--memory", nargs=2, metavar=("SET", "WHO"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.memory:
        memory(*arguments.memory)
        return 0
    torch.set_num_threads(1)
    print(f"on {processor()}, torch {torch.__version__}, one thread")
    missed: list[str] = []
    for label in SETS:
        if not arguments.only or any(word in label for word in arguments.only):
            missed += measure(label, 3 if label in LARGE else arguments.rounds, arguments.quick)
    if not arguments.only:
        missed += zoo() + import_cost()
    print("\n" + ("all bars met" if not missed else "bars missed:\n  " + "\n  ".join(missed)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
