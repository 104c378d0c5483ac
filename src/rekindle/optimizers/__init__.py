"""The state that an optimizer keeps for parameters that changed.

Knows optimizers only; imports no other package. `slots` says what each optimizer class keeps, `resetting` starts it
afresh, `rows` that of single neurons, `steps` tells the hooks which step is a whole one. Start reading at
`resetting.reset`.
"""

from rekindle.optimizers.resetting import Policy, StateReset, check, register, reset, snapshot, unwrap
from rekindle.optimizers.rows import reset_rows
from rekindle.optimizers.slots import Slot

__all__ = ["Policy", "Slot", "StateReset", "check", "register", "reset", "reset_rows", "snapshot", "unwrap"]
