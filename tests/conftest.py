"""Settings for all tests: one thread, one seed, and hypothesis without deadlines on a busy machine."""

from __future__ import annotations

import os

from rekindle.engine import cpu

if cpu.bfloat16_fault() is not None:  # before torch is loaded; workers and children of tests inherit it
    os.environ.setdefault(*cpu.WAY_OUT)

import hypothesis
import pytest
import torch

hypothesis.settings.register_profile("rekindle", deadline=None, derandomize=True, max_examples=25)
hypothesis.settings.load_profile("rekindle")
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
