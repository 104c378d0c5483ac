"""The command line: `rekindle inspect | plan | fire | compare | probe | advise | rank | polar | report | …`.

Commands are in files of their names (`report` in `page`); `options` has what they share, `terminal` how they print,
`weights` what `inspect` and `compare` measure, `interrupt` what Ctrl-C does, `studies` what the commands of the
laboratory share, `laboratory_names` what completion offers. May import everything up to `lab`, but torch and the
laboratory only when work begins, so that help and completion answer at once. Start reading at `app`.
"""

from __future__ import annotations

import atexit
import io
import os
import signal
import sys

from rekindle.cli.interrupt import press
from rekindle.extras import install


def main() -> None:
    """Run the command line; without typer and rich, say how to get them. Ctrl-C is one line at any moment."""
    heeded = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # not where the shell ignores SIGINT for us
    if heeded:
        signal.signal(signal.SIGINT, press)
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)  # only Python's own clean-up is left then
    for stream in (sys.stdout, sys.stderr):  # Windows' code pages and LC_ALL=C have no σ, ≤ or →
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        try:
            import rich  # noqa: F401
            import typer  # noqa: F401
        except ImportError as error:
            sys.stderr.write(f"the command line needs {error.name}: {install('cli')}\n")
            raise SystemExit(2) from None
        from rekindle.cli.app import app

        app(prog_name="rekindle")
    except KeyboardInterrupt:
        sys.stderr.write("stopped\n")
        raise SystemExit(130) from None
    except SystemExit as left:
        if left.code == 130:  # Ctrl-C between our commands, which typer catches silently
            from rekindle.cli.terminal import stopped

            stopped()
        if left.code == 1 and isinstance(left.__context__, BrokenPipeError):  # help that `… | head` reads
            raise SystemExit(0) from None
        raise
    except BrokenPipeError:
        raise SystemExit(0) from None
    finally:
        # Python remembers an interrupt that left an exec() of text (a dataclass that is being made) as uncaught, and
        # would end by the signal instead of our exit code; another such exec() clears that.
        exec("")
        _flush()
        if heeded:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _flush() -> None:
    """Flush the buffers now; a reader that has closed the pipe (`… | head`) is not an error."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
