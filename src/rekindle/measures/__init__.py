"""Numbers about weight matrices: how far from an isometry, what spectrum, how different the neurons.

Knows tensors only; may import `engine`, for Gram matrices. `matrices` has the deviations and `measure`, which gathers
everything in one pass; `spectra` singular values and ranks, `diversity` the angles between rows and which are dead,
`bounds` the theorems of the FIRE paper. Start reading at `matrices.measure`.
"""

from rekindle.measures.matrices import *  # noqa: F403
from rekindle.measures.matrices import __all__ as __all__
