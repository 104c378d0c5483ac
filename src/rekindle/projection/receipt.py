"""What a method did to a model.

A method changes weights and returns a `Receipt`: one `BlockRecord` for each thing it changed, what it skipped
and why, which optimizer slots it reset, and what it cost. A receipt prints as a table and converts to a dict, JSON or
a DataFrame.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from rekindle.blocks.finding import Block
from rekindle.engine.devices import to_host
from rekindle.engine.solving import Certificate
from rekindle.extras import install
from rekindle.optimizers.resetting import StateReset
from rekindle.projection import receipt_text
from rekindle.report.showing import Page

if TYPE_CHECKING:
    import pandas

__all__ = ["BlockRecord", "Measuring", "Meter", "PendingRecord", "Receipt", "records"]

Measuring = Literal["cheap", "full", "none"]


@dataclass(frozen=True)
class BlockRecord:
    """One changed block: the matrices of one shape that a parameter holds, or a part of it.

    Sums run over the block's matrices, `spectral_*`, `residual*` and `steps` are the largest, `scale` is the mean
    (it differs between matrices for `nearest`, `norm` and `reference`). Fields that a method does not measure stay
    None. `counts` holds what a method counted (neurons, rows, columns, …), `values` further numbers.

    >>> BlockRecord("fc.weight", out=8, in_=4, dfi_before=3.0, dfi_after=1e-7).dimension
    4
    """

    name: str
    role: str = "other"
    part: str = ""
    count: int = 1
    out: int = 0
    in_: int = 0
    scale: float | None = None
    dfi_before: float | None = None
    dfi_after: float | None = None
    dfi_free_before: float | None = None  # at the scale ‖W‖_F/√k of each matrix
    dfi_free_after: float | None = None
    sfe: float | None = None
    sfe_relative: float | None = None
    norm_before: float | None = None
    norm_after: float | None = None
    spectral_before: float | None = None
    spectral_after: float | None = None
    residual: float | None = None
    residual_stored: float | None = None
    steps: int | None = None
    completed: int | None = None
    converged: bool | None = None
    fallback: int = 0
    counts: Mapping[str, int] = field(default_factory=dict)
    values: Mapping[str, float | list[float]] = field(default_factory=dict)

    @property
    def dimension(self) -> int:
        """k·count, what a DfI is divided by to compare blocks of different size."""
        return min(self.out, self.in_) * self.count

    def to_dict(self) -> dict[str, Any]:
        """Every field, and the DfI per dimension."""
        row = asdict(self)
        for key in ("dfi_before", "dfi_after"):
            value = row[key]
            row[f"{key}_per_dimension"] = value / self.dimension if value is not None and self.dimension else None
        return row


@dataclass(frozen=True)
class Receipt(Page):
    """What one application of a method did.

    >>> records = (BlockRecord("fc.weight", "other", out=8, in_=4, sfe_relative=0.25, norm_before=2.0),)
    >>> receipt = Receipt("fire", records=records, skipped={"fc.bias": "a bias holds no matrix"}, seconds=0.01)
    >>> receipt.totals()["parameters"], receipt.to_dict()["skipped"]
    (1, {'fc.bias': 'a bias holds no matrix'})
    >>> print(receipt)  # doctest: +ELLIPSIS
    fire: 1 parameter, 1 matrix changed ...

    Attributes:
        method: the name of the method.
        records: one per block that was changed, with its measures before and after.
        skipped: why each other parameter was skipped.
        settings: the options that were used.
        optimizer: what was reset in the optimizer's state.
        gradients_cleared: how many gradients of changed weights were dropped.
        biases_zeroed: how many biases were set to zero.
        mirrors: how many networks got the same weights.
        recalibrated: normalization layers with new statistics.
        seconds: the time that it took.
        memory: bytes by which the peak memory of the process (and of its CUDA devices) grew; 0 after a higher peak.
        notes: what else a reader should know.
        outputs_moved: ‖f_after − f_before‖ ÷ ‖f_before‖ on the batches given.
        rolled_back: a guard put everything back; the records say what had been tried.
        loss_before: the loss as a guard measured it.
        loss_after: the same afterwards.
        differs: of a call that failed, what is not as it was: parameters, buffers, "name: slot" of optimizers.
    """

    page = "receipt"
    method: str
    records: tuple[BlockRecord, ...] = ()
    skipped: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    optimizer: StateReset | None = None
    gradients_cleared: int = 0
    biases_zeroed: int = 0
    mirrors: int = 0
    recalibrated: tuple[str, ...] = ()
    seconds: float = 0.0
    memory: int = 0
    notes: tuple[str, ...] = ()
    outputs_moved: float | None = None
    rolled_back: bool = False
    loss_before: float | None = None
    loss_after: float | None = None
    differs: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """What was changed is not skipped, whatever a method's plan said beforehand."""
        changed = set(self.changed)
        if not changed.isdisjoint(self.skipped):
            rest = {name: why for name, why in self.skipped.items() if name not in changed}
            object.__setattr__(self, "skipped", rest)

    @property
    def changed(self) -> tuple[str, ...]:
        """The names of the changed parameters, once each; none after a roll-back."""
        if self.rolled_back:
            return ()
        return tuple(dict.fromkeys(record.name for record in self.records))

    def totals(self) -> dict[str, Any]:
        """Sums and extremes over all records; None where nothing was measured.

        `counts` of the records are added up by name.

        >>> Receipt("redo", (BlockRecord("a", counts={"neurons": 2}), BlockRecord("b", counts={"neurons": 1}))).totals()
        {'parameters': 2, ..., 'counts': {'neurons': 3}}
        """
        energy = _add((r.norm_before or 0.0) ** 2 for r in self.records if r.sfe is not None)
        error = _add(r.sfe for r in self.records)
        counts: dict[str, int] = {}
        for record in self.records:
            for key, amount in record.counts.items():
                counts[key] = counts.get(key, 0) + amount
        return {
            "parameters": len(self.changed),
            "matrices": sum(r.count for r in self.records),
            "dfi_before": _add(r.dfi_before for r in self.records),
            "dfi_after": _add(r.dfi_after for r in self.records),
            "sfe": error,
            "sfe_relative": error / energy if error is not None and energy else None,
            "residual": _most(r.residual for r in self.records),
            "residual_stored": _most(r.residual_stored for r in self.records),
            "steps": _most(r.steps for r in self.records),
            "completed": sum(r.completed or 0 for r in self.records),
            "fallback": sum(r.fallback for r in self.records),
            "counts": counts,
        }

    def to_dict(self) -> dict[str, Any]:
        """Everything, JSON-able: numbers that are not finite become None."""
        whole = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("records", "optimizer")}
        whole["records"] = [record.to_dict() for record in self.records]
        whole["optimizer"] = asdict(self.optimizer) if self.optimizer else None
        whole["totals"] = self.totals()
        plain: dict[str, Any] = _plain(whole)
        return plain

    def to_json(self, indent: int | None = None) -> str:
        """`to_dict()` as JSON text.

        >>> Receipt("fire").to_json()[:17]
        '{"method": "fire"'
        """
        return json.dumps(self.to_dict(), indent=indent, allow_nan=False)

    def to_frame(self) -> pandas.DataFrame:
        """One row per record; `counts` and `values` become columns."""
        try:
            import pandas
        except ImportError as error:
            raise ImportError(f"Receipt.to_frame() needs pandas: {install('report')}") from error
        rows = []
        for record in self.records:
            row = record.to_dict()
            row.update(row.pop("counts"))
            row.update(row.pop("values"))
            rows.append(row)
        return pandas.DataFrame(rows)

    def table(self, width: int | None = None, rows: int = 40) -> str:
        """The receipt as text that fits a terminal of `width` columns; more than `rows` records are cut in the middle.


        >>> text = Receipt("fire", (BlockRecord("encoder.layer.0.attention.query.weight", out=8, in_=4),)).table(60)
        >>> max(len(line) for line in text.splitlines()) <= 60
        True
        """
        return receipt_text.table(self, width, rows)

    def __str__(self) -> str:
        return self.table()


def _add(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) if known else None


def _most(values: Iterable[float | None]) -> float | None:
    # max() would hide a NaN or show it depending on the order.
    known = [value for value in values if value is not None]
    return max(known, key=lambda value: math.inf if math.isnan(value) else value) if known else None


def _plain(value: object) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, Tensor):
        return _plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (str, int, bool)):
        return value
    return str(value)


@dataclass(frozen=True)
class PendingRecord:
    """What is known of a block that was written, until it is a line of the receipt.

    It is not a `BlockRecord` yet because its numbers are tensors, some of them on the device; `records` fetches those
    of all blocks together.

    kept: which matrices were not changed, where there are some; the record is of the others.
    seen: what `measuring.observed` found of those stored. full: what
    `measuring.measured` found, in full measuring.
    """

    name: str
    block: Block
    certificate: Certificate
    scale: Tensor
    kept: Tensor | None = None
    seen: Tensor | None = None
    full: Mapping[str, Any] | None = None
    fallback: int = 0


def records(written: Sequence[PendingRecord], strength: float, measuring: Measuring) -> tuple[BlockRecord, ...]:
    """The lines of the receipt: what was seen of all blocks comes from the device together."""
    asked = [each.seen for each in written if each.seen is not None]
    found = iter(to_host(asked) if asked else ())
    return tuple(_record(each, None if each.seen is None else next(found), strength, measuring) for each in written)


def _record(written: PendingRecord, seen: Tensor | None, strength: float, measuring: Measuring) -> BlockRecord:
    """The record of one block, from the solver's certificate; every tensor is on the host.

    The cheap numbers need no product beyond the solver's own: with k = min(out, in), W before and Q its factor,
    DfI(W, s) = ‖WWᵀ‖²_F/s⁴ − 2‖W‖²_F/s² + k and SFE = ‖W‖²_F − 2s·tr(QᵀW) + s²‖Q‖²_F. A DfI that is lost in the
    rounding of these terms (W was an isometry already) is given as unmeasured.
    """
    block, certificate, scale = written.block, written.certificate, written.scale
    if written.kept is not None:
        changed = ~written.kept
        certificate, scale = certificate[changed], scale[changed]
        seen = None if seen is None else seen[:, changed]
    # Numbers of Python, of double precision: a tensor of one number costs a microsecond with every operation.
    scales, residuals = scale.tolist(), certificate.residual.tolist()
    k = min(block.out, block.in_)
    fields_of: dict[str, Any] = {
        "name": written.name,
        "role": block.role,
        "part": block.part,
        "count": len(scales),
        "out": block.out,
        "in_": block.in_,
        "scale": math.fsum(scales) / len(scales),
        "residual": max(residuals),
        "steps": max(certificate.steps.tolist()),
        "completed": sum(certificate.completed.tolist()),
        "converged": all(certificate.converged.tolist()),
        "fallback": written.fallback,
    }
    if measuring == "none":
        return BlockRecord(**fields_of)
    norms, spectra = certificate.norm.tolist(), certificate.spectral_norm.tolist()
    energies = [value * value for value in certificate.gram_norm.tolist()]
    factors, squares = certificate.factor_norm.tolist(), [norm * norm for norm in norms]
    stored, after = residuals, [factor * s for factor, s in zip(factors, scales, strict=True)]
    if seen is not None:
        stored, after = seen[0].tolist(), seen[1].tolist()
    rounding = torch.finfo(certificate.residual.dtype).eps  # of the products that these numbers come from
    free = [_ratio(k * energy, square * square) - 1 for energy, square in zip(energies, squares, strict=True)]
    fields_of |= {
        "residual_stored": max(stored),
        "dfi_after": finite_sum(k * value for value in stored),
        "norm_before": math.sqrt(math.fsum(squares)),
        "norm_after": math.sqrt(math.fsum(value * value for value in after)),
        "spectral_before": max(spectra),
        "dfi_free_before": finite_mean(math.nan if value < 2 * rounding else value for value in free),
    }
    if written.full is not None:
        fields_of |= written.full
    else:
        deviations, errors = [], []
        nuclear = certificate.nuclear.tolist()
        for square, energy, tr, q, s in zip(squares, energies, nuclear, factors, scales, strict=True):
            terms = _ratio(energy, s * s * s * s), 2 * _ratio(square, s * s)
            deviation = terms[0] - terms[1] + k
            deviations.append(math.nan if deviation < rounding * (terms[0] + terms[1] + k) else deviation)
            errors.append(max(0.0, strength**2 * (square - 2 * s * tr + s * s * q * q)))
        fields_of |= {"dfi_before": finite_sum(deviations), "sfe": math.fsum(errors)}
        if fields_of["converged"]:
            ends = zip(spectra, scales, strict=True)
            fields_of["spectral_after"] = max((1 - strength) * value + strength * s for value, s in ends)
        elif seen is not None:
            fields_of["spectral_after"] = float(seen[2].max())
    total = fields_of["norm_before"] ** 2
    fields_of["sfe_relative"] = fields_of["sfe"] / total if total else None
    return BlockRecord(**fields_of)


def _ratio(value: float, divisor: float) -> float:
    return value / divisor if divisor else math.nan


def finite_sum(values: Iterable[float]) -> float | None:
    """The sum of what is finite, None if nothing is."""
    finite = [value for value in values if math.isfinite(value)]
    return math.fsum(finite) if finite else None


def finite_mean(values: Iterable[float]) -> float | None:
    """The mean of what is finite, None if nothing is."""
    finite = [value for value in values if math.isfinite(value)]
    return math.fsum(finite) / len(finite) if finite else None


class Meter:
    """Time and peak memory from its creation on, for the last two lines of a receipt.

    >>> meter = Meter()
    >>> meter.seconds > 0, meter.memory >= 0
    (True, True)

    memory: False leaves the peak out, for what is called at every step.
    """

    def __init__(self, memory: bool = True) -> None:
        self._start = time.perf_counter()
        self._peak = _peak() if memory else None

    @property
    def seconds(self) -> float:
        """Wall time since the start."""
        return time.perf_counter() - self._start

    @property
    def memory(self) -> int:
        """Bytes by which the peak of the process and its CUDA devices grew since the start."""
        return 0 if self._peak is None else max(0, _peak() - self._peak)

    def stop(self, receipt: Receipt) -> Receipt:
        """Write both into a receipt that was made meanwhile: a copy takes longer than some methods of every step."""
        object.__setattr__(receipt, "seconds", self.seconds)
        object.__setattr__(receipt, "memory", self.memory)
        return receipt

    def cost(self) -> dict[str, Any]:
        """Both, as the fields of a receipt."""
        return {"seconds": self.seconds, "memory": self.memory}


def _peak() -> int:
    # Kernel and allocator keep their own peaks; resetting them would disturb other measurements.
    try:
        import resource
    except ImportError:  # Windows
        resident = 0
    else:
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        resident += sum(torch.cuda.max_memory_allocated(device) for device in range(torch.cuda.device_count()))
    return resident
