"""The command line: `rekindle inspect | plan | fire | compare | polar | report | doctor | demo | lab`."""

from __future__ import annotations

import sys

from rekindle.extras import install


def main() -> None:
    """Run the command line; without typer and rich, say how to get them."""
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ImportError as error:
        sys.stderr.write(f"the command line needs {error.name}: {install('cli')}\n")
        raise SystemExit(2) from None
    from rekindle.cli.app import app

    app(prog_name="rekindle")
