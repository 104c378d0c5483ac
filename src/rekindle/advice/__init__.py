"""Plasticity measured on this model and this data, and a remedy chosen by trying it.

May import everything up to `methods`. `probing` is the verb `probe`, `advising` is `advise`, `ranking` is `rank`;
`advised` is a method that applies the advice, `keeping` the Keeper for long runs. `tasks` says what a probe learns,
`candidates` what is tried, `trials` tries it on `copies`, `together` many at once (`stacking`, `stacked_layers`),
`executors` says where. `racing` drops who is behind, `judging` decides with `intervals`, `progress` says how far it is.
Start reading at `probing.probe`.
"""

from rekindle.advice.advised import Advised
from rekindle.advice.advising import Advice, advise
from rekindle.advice.keeping import Keeper
from rekindle.advice.probing import ProbeResult, probe
from rekindle.advice.ranking import Ranking, rank
from rekindle.diagnosis.agreement import conclusion

__all__ = ["Advice", "Advised", "Keeper", "ProbeResult", "Ranking", "advise", "conclusion", "probe", "rank"]
