"""The state that an optimizer keeps for parameters that changed.

Knows optimizers only; imports no other package. `slots` says what each optimizer class keeps, `resetting` starts it
afresh. Start reading at `resetting.reset`.
"""

from rekindle.optimizers.resetting import Policy, StateReset, check, register, reset, reset_rows, snapshot, unwrap

__all__ = ["Policy", "StateReset", "check", "register", "reset", "reset_rows", "snapshot", "unwrap"]
