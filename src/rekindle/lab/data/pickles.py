"""Pickles from strangers, read without running them: plain containers and numeric arrays, and nothing else.

CIFAR is published as Python 2 pickles. An ordinary unpickler runs whatever such a file names; this one resolves the few
names that an array needs to stand-ins of its own, so that not even numpy sees a state that was made up.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import numpy as np
from numpy.typing import NDArray


class _Kind:
    """Stands for numpy.dtype while unpickling: only plain numbers are let through."""

    def __init__(self, code: object = b"", *_: object) -> None:
        self.order = "<"
        self.code = code.decode("ascii", "replace") if isinstance(code, bytes) else str(code)

    def __setstate__(self, state: object) -> None:
        order = state[1] if isinstance(state, tuple) and len(state) > 1 else None
        self.order = ">" if order in (b">", ">") else "<"

    def kind(self) -> np.dtype[Any]:
        if self.code not in ("u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f4", "f8"):
            raise pickle.UnpicklingError(f"an array of dtype {self.code[:20]!r} is not let in")
        return np.dtype(self.order + self.code)


class _Array:
    """Stands for numpy.ndarray while unpickling, so that numpy itself never sees a hostile state."""

    value: NDArray[Any] | None = None

    def __init__(self, *_: object) -> None: ...

    def __setstate__(self, state: object) -> None:
        match state:
            case (_, tuple() as shape, _Kind() as kind, order, bytes() as data) if all(type(n) is int for n in shape):
                flat = np.frombuffer(data, kind.kind())
                self.value = flat.reshape(shape, order="F" if order else "C")
            case _:
                raise pickle.UnpicklingError("an array in an unknown form is not let in")


class _Latin1:
    """Stands for _codecs.encode, which is how Python 3 writes bytes in protocol 2."""

    def __new__(cls, text: object, encoding: object) -> bytes:  # type: ignore[misc]
        if not isinstance(text, str) or encoding not in ("latin1", "latin-1"):
            raise pickle.UnpicklingError(f"the encoding {encoding!r} is not let in")
        return text.encode("latin-1")

    def __setstate__(self, state: object) -> None:
        raise pickle.UnpicklingError("a state for an encoding is not let in")


class _Unpickler(pickle.Unpickler):
    """Names resolve to the stand-ins above or not at all, so no code of the pickle's choosing can run.

    The stand-ins are classes with a `__setstate__`, never functions: a pickle may set attributes on a function.
    """

    stand_ins = {  # noqa: RUF012
        ("numpy.core.multiarray", "_reconstruct"): _Array,
        ("numpy._core.multiarray", "_reconstruct"): _Array,
        ("numpy", "ndarray"): _Array,
        ("numpy", "dtype"): _Kind,
        ("_codecs", "encode"): _Latin1,
    }

    def find_class(self, module: str, name: str) -> Any:
        try:
            return self.stand_ins[module, name]
        except KeyError:
            raise pickle.UnpicklingError(
                f"{module}.{name} is not let in: only containers and numeric arrays are"
            ) from None

    def persistent_load(self, pid: object) -> Any:
        raise pickle.UnpicklingError("a persistent id is not let in")


def load_pickle(content: bytes) -> Any:
    """Plain containers, numbers, strings and numeric arrays from a pickle; anything else is an UnpicklingError.

    >>> load_pickle(pickle.dumps({b"data": [1, 2]}))
    {b'data': [1, 2]}
    >>> load_pickle(pickle.dumps(eval))
    Traceback (most recent call last):
        ...
    _pickle.UnpicklingError: builtins.eval is not let in: only containers and numeric arrays are
    """
    try:
        return _settled(_Unpickler(io.BytesIO(content), encoding="bytes").load())
    # A damaged stream makes the unpickler fail in any of these ways.
    except (EOFError, ValueError, TypeError, LookupError, AttributeError, MemoryError, OverflowError) as error:
        raise pickle.UnpicklingError(f"the pickle is damaged ({type(error).__name__}: {error})") from error


def _settled(value: Any, depth: int = 0) -> Any:
    """The value with its stand-ins replaced by the arrays they carry."""
    if depth > 3:  # CIFAR has a dictionary of lists; deeper ones could refer to themselves
        raise pickle.UnpicklingError("containers nested deeper than three levels are not let in")
    match value:
        case _Array(value=np.ndarray() as array):
            return array
        case dict():
            return {_settled(key, depth + 1): _settled(item, depth + 1) for key, item in value.items()}
        case list() | tuple():
            return type(value)(_settled(item, depth + 1) for item in value)
        case None | bool() | int() | float() | str() | bytes():
            return value
    raise pickle.UnpicklingError(f"a bare {type(value).__name__.strip('_')} is not let in")
