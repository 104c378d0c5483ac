"""Models whose parameters are distributed over processes: their placement, who solves which matrix, how they get there.

Knows tensors, index rules, DTensor and process groups; may import `engine` and `blocks`. `spread` says what each rank
holds, `units` cuts parameters into boxes of whole matrices, `owners` gives each box a rank, `messages` says which bytes
go where, `exchange` moves them in packed lots, `gram` avoids moving tall ones; `assembly` does all that for the
weights of a model, `norms` needs no moving; `zero` and `partitions` do the same through DeepSpeed's accessors; `whole`
gathers a model temporarily, `estimate` says beforehand what it costs. `team` makes all ranks agree, `passes` in
forward passes too. Start reading at `team.opened`, then `assembly.Assembly`.
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
