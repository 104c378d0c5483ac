"""FIRE: plan, check, solve, write, reset the optimizer's slots, and say what was done.

May import everything up to `initial`. In order: `planning` (with `targets`) → `stores` → `firing` → `receipt`;
`sharded` is the middle of it for a model that is distributed over processes. `measuring` is what plan and receipt
measure beyond the solver's own numbers, `recalibration` renews BatchNorm statistics, `method` is the protocol of all
methods, `reinitializer` the FIREReinitializer. Start reading at `firing.fire`.
"""

from rekindle.projection.firing import LiveStore, Store, execute, fire

__all__ = ["LiveStore", "Store", "execute", "fire"]
