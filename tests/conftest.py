"""Settings for all tests: one thread, one seed, and hypothesis without deadlines on a busy machine."""

from __future__ import annotations

import importlib.metadata
import os
import signal
import threading

from rekindle.engine import cpu

if cpu.bfloat16_fault() is not None:  # before torch is loaded; workers and children of tests inherit it
    os.environ.setdefault(*cpu.WAY_OUT)

import hypothesis
import pytest
import torch

hypothesis.settings.register_profile("rekindle", deadline=None, derandomize=True, max_examples=25)
hypothesis.settings.load_profile("rekindle")
torch.set_num_threads(1)
# A shell that starts the tests in the background has them ignore Ctrl-C, and so would every command they start.
if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Files whose tests train networks: `.ci/run` runs them under a second arithmetic too, in which roundings differ, so
# that no test passes because of one CPU's last bits.
TRAINS = (
    "advice/",
    "diagnosis/test_activity.py",
    "integrations/",
    "lab/test_agents.py",
    "lab/test_networks_compute.py",
    "lab/test_study.py",
    "lab/test_train.py",
    "lab/test_tuning.py",
    "methods/",
    "monitoring/test_monitor.py",
    "optimizers/test_resetting.py",
)


# Tests whose models are those of a newer transformers than the lowest one that the package runs with.
NEWER_MODELS, SINCE = (
    ("blocks/zoo/", "blocks/test_families.py", "_of_the_zoo", "_no_matrix", "_transformers_model"),
    (5, 20),
)


def version(distribution: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in importlib.metadata.version(distribution).split(".")[:2])
    except importlib.metadata.PackageNotFoundError:
        return SINCE


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    older = version("transformers") < SINCE
    for item in items:
        if older and any(part in item.nodeid for part in NEWER_MODELS):
            item.add_marker(pytest.mark.skip(reason="its models are those of transformers 5.20 or newer"))
        if any(f"/tests/{part}" in item.path.as_posix() for part in TRAINS):
            item.add_marker("trains")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
