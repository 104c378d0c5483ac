"""Every verb and method on a pretended accelerator, in a process of its own: registering a device cannot be undone.

Once on one like a GPU, once on one that has no float64 and no decompositions (Apple's MPS).
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent


@pytest.mark.parametrize("kind", ["gpu", "mps"])
def test_verbs_methods_and_waits_on_an_accelerator(kind: str) -> None:
    paths = os.pathsep.join([str(TESTS), str(TESTS / "support"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", TESTS / "accelerator/cases.py"],
        env={**os.environ, "PYTHONPATH": paths, "PRETENDED": kind},
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
