"""Remedies inside the trainers that people use: one line, one constructor, the same behaviour everywhere.

`application` is the core: which method, when, under which guard, and what happened. `attaching` is for plain loops and
accelerate (`rekindle.attach`); `transformers`, `lightning` and `ignite` each translate the hooks of one trainer.
Knows everything below it in the library and nothing of checkpoints, the command line or the lab.
"""

from rekindle.integrations.application import Application, flat
from rekindle.integrations.arguments import named

__all__ = ["Application", "flat", "named"]
