"""FIRE: plan, check, solve, write, reset the optimizer's slots, and say what was done.

May import `engine`, `measures`, `blocks`, `sharding` and `optimizers`. The road: `planning` (with `targets`) →
`stores` → `firing` → `receipt`. Start reading at `firing.fire`.
"""

from rekindle.projection.firing import LiveStore, Store, execute, fire

__all__ = ["LiveStore", "Store", "execute", "fire"]
