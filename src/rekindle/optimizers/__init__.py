"""The state that an optimizer keeps for parameters that changed.

Knows optimizers only; imports no other package. `slots` is the table of what each optimizer class keeps, `live_slots`
asks it, `resetting` resets, `rows` those of single neurons, `rehearsal` tries a reset that is a guess; `steps` tells
hooks where a full step begins and ends. Start reading at `resetting.reset`.
"""

from rekindle.optimizers.resetting import Policy, StateReset, check, register, reset, unwrap
from rekindle.optimizers.rows import reset_rows
from rekindle.optimizers.slots import Slot

__all__ = ["Policy", "Slot", "StateReset", "check", "register", "reset", "reset_rows", "unwrap"]
