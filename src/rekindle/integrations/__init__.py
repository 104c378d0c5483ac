"""Remedies inside common trainers: one line, one constructor, the same behavior everywhere.

`when` decides, `what` acts, `clock` counts the steps, and `application` joins them and keeps what happened; `tally`
adds up the receipts of methods that act in every step, `arguments` checks the constructor's arguments, `gradients` is
what happens to them between backward pass and step, `mirroring` EMA and target
networks. `attaching` is for plain loops and accelerate (`rekindle.attach`), whose steps begin where `passes` says;
`transformers`, `lightning`, `ignite` and `sb3` each translate the hooks of one trainer;
`agent_networks` is an agent as one model, `agent_advice` lets copies of it play; `peft` is FIRE on LoRA layers. May
import everything up to `advice`; knows nothing of checkpoints, the command line or the lab. Start reading at
`application.Application`.
"""

from rekindle.integrations.application import Application
from rekindle.methods.naming import named
from rekindle.monitoring.sinks import receipt_numbers as flat

__all__ = ["Application", "flat", "named"]
