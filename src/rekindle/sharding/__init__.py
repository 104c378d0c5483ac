"""Models whose parameters are distributed over processes: their placement, who solves which matrix, how they get there.

Knows tensors, index rules, DTensor and process groups; may import `engine` and `blocks`. `spread` says what each rank
holds, `units` cuts parameters into boxes of whole matrices, `owners` gives each box a rank and counts what that costs,
`messages` says which bytes go where, `exchange` moves them in packed lots, `gram` avoids moving tall ones; `assembly`
does all that for the weights of a model, `norms` needs no moving; `zero` and `partitions` do the same through
DeepSpeed's accessors; `whole` gathers a model temporarily. `team` is how processes talk and agree, `passes` does it in
forward passes too, `replicas` keeps copies of a model (DDP) alike. Start reading at `team.opened`, then
`assembly.Assembly`.
"""

from rekindle.sharding.exchange import Exchange
from rekindle.sharding.owners import Parcel, assign
from rekindle.sharding.spread import LayoutNotSupported, Spread
from rekindle.sharding.team import LostRank, RankError, Team
from rekindle.sharding.units import Unit, units
from rekindle.sharding.whole import gathered

__all__ = [
    "Exchange",
    "LayoutNotSupported",
    "LostRank",
    "Parcel",
    "RankError",
    "Spread",
    "Team",
    "Unit",
    "assign",
    "gathered",
    "units",
]
