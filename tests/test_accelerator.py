"""Every verb and method on a pretended accelerator, in a process of its own: registering a device cannot be undone."""

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent


def test_verbs_methods_and_waits_on_an_accelerator() -> None:
    paths = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", TESTS / "accelerator/cases.py"],
        env={**os.environ, "PYTHONPATH": paths},
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
