"""Settings for all tests."""

import hypothesis
import torch

hypothesis.settings.register_profile("rekindle", deadline=None, derandomize=True, max_examples=25)
hypothesis.settings.load_profile("rekindle")
torch.set_num_threads(1)
