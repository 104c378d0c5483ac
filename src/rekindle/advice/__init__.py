"""Plasticity measured on this model and this data, and a remedy chosen by trying it.

May import everything below: `diagnosis`, `monitoring`, `methods`. `probing` is the verb `probe`, `advising` the verb
`advise`; `tasks` says what a probe learns, `intervals` what a handful of seeds can say. Start reading at
`probing.probe`.
"""

from rekindle.advice.advising import Advice, advise
from rekindle.advice.probing import ProbeResult, probe

__all__ = ["Advice", "ProbeResult", "advise", "probe"]
