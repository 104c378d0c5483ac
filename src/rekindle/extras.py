"""How to install what an optional part needs: the one place that knows the name of the distribution.

The name `rekindle` belongs to another project on PyPI, so the distribution is `torch-rekindle`; the import and the
command are `rekindle`.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

DISTRIBUTION = "torch-rekindle"


def install(extra: str = "") -> str:
    """The command that installs rekindle with an extra.

    >>> install("lab")
    'pip install "torch-rekindle[lab]"'
    """
    return f'pip install "{DISTRIBUTION}[{extra}]"' if extra else f"pip install {DISTRIBUTION}"


def require(module: str, extra: str, purpose: str) -> Any:
    """Import an optional module, or say what needs it and how to get it.

    >>> require("json", "lab", "a study").__name__
    'json'
    >>> require("no_such_module", "lab", "a study")
    Traceback (most recent call last):
    ImportError: a study needs no_such_module: pip install "torch-rekindle[lab]"
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or module.split(".")[0] != error.name.split(".")[0]:
            raise  # one of its own dependencies is missing: let its error through
        raise ImportError(f"{purpose} needs {error.name}: {install(extra)}", name=error.name) from error
