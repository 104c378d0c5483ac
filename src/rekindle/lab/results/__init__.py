"""The results of a study: numbers per run, intervals over seeds, arms compared, and all of it as `Results`.

- `metrics`: one number per run, from its rows;
- `statistics`: intervals, paired differences, Holm's correction;
- `wording`: what measures are called, their units, and how numbers are written;
- `comparison`: the arms of one setting; the one place where intervals are computed;
- `study`: `Results`, every setting of a study as rows, table, frame and dictionary.

Imports settings and the store, never a view. Start with `comparison`.
"""

from rekindle.lab.results.comparison import ArmComparison, comparisons
from rekindle.lab.results.metrics import ArmRuns
from rekindle.lab.results.study import Results, RunEntry

__all__ = ["ArmComparison", "ArmRuns", "Results", "RunEntry", "comparisons"]
