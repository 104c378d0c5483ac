"""FIRE: plan, check, solve, write, reset the optimizer's slots, and say what was done.

May import everything up to `initial`. In order: `planning` (with `targets`, `scales`, `keywords` and `entries`) →
`stores` (with `biases`) → `firing` → `execution` → `receipt`; `sharded` is the execution on a model that is distributed
over processes, `transaction` what happens when a call fails, `snapshots` the roll-back. `reading` how the weight of an
entry is read, `measuring` is what plan and receipt measure beyond the solver's own numbers, `plan_text` and
`receipt_text` print them, `recalibration` renews BatchNorm statistics, `method` is the protocol of all methods,
`reinitializer` the FIREReinitializer. Start reading at `firing.fire`.
"""

from rekindle.projection.execution import execute
from rekindle.projection.firing import fire
from rekindle.projection.stores import LiveStore, Store

__all__ = ["LiveStore", "Store", "execute", "fire"]
