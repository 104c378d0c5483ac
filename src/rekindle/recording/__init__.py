"""One pass of a model, noted operation by operation, and what it shows about the weights.

`recorder` notes one pass as a list of operations (`graph`); `following` goes through them once more with *shadows*: an
integer tensor beside each value that names the row of the weight behind each element, moved by the same operations.
`traces` are what one value holds, `combining` and `following` what operations make of that, `shadows` the index
arithmetic, `operations` the tables. `weights` says how a parameter enters an operation, `facts` what follows for each
parameter: how its matrices lie, into which parts its output is cut, whether it reaches the caller, whether it selects,
whether it ran at all. `evidence` in blocks holds them.

`stacks` finds experts, codes, latents and ranks (`ancestry`: where values come from, `steps`: codes without a table),
`sights` sees their use again.

`wiring` says who consumes a neuron, from the same pass (`neurons` follows them, `reading` is where they show);
`first_pass` records a pass that training makes anyway, `first_batch` what a verb was given; `invariance` finds layers
that a normalization follows,
`normalization` says whether there is one at all.

May import everything up to `blocks`. Start reading at `recorder.record`.
"""

from rekindle.recording.facts import facts_of
from rekindle.recording.recorder import Recorder, RecordingError, record

__all__ = ["Recorder", "RecordingError", "facts_of", "record"]
