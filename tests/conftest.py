"""Settings for all tests: one thread, one seed, and hypothesis without deadlines on a busy machine."""

from __future__ import annotations

import hypothesis
import pytest
import torch

hypothesis.settings.register_profile("rekindle", deadline=None, derandomize=True, max_examples=25)
hypothesis.settings.load_profile("rekindle")
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
