"""`fire` on a file: read a checkpoint tensor by tensor, and project its weights without loading it whole.

From top to bottom: `opening` finds out what a path holds (`folders`: which files of a folder); `safetensors_files`,
`torch_files` and `dcp_files` (`dcp_metadata`: its table) know one format each, `parts` is what they have in common,
`byte_files` a file as ranges, `archives` a zip of records, `trees` what torch pickles in it, `byte_map` which bytes
belong to which tensor; `firing` makes or matches the plan and hands a store that reads one file and writes another to
`projection.execute`; `training_state` resets optimizer states in the file; `assembling` says what an output consists
of and may replace; `staging` and `journal` make sure that a crash loses nothing; `hub` reads what lies on the Hugging
Face Hub; `inspection` measures one file, `comparison` two. May import everything up to `diagnosis`. Start reading at
`firing.fire_file`.

>>> import tempfile, torch
>>> from pathlib import Path
>>> from safetensors.torch import save_file
>>> with tempfile.TemporaryDirectory() as folder:
...     old, new = Path(folder, "old.safetensors"), Path(folder, "new.safetensors")
...     save_file({f"layers.{i}.weight": torch.randn(4, 4) for i in range(3)}, old)
...     receipt = fire_file(old, new)
...     with open_checkpoint(new) as checkpoint:
...         receipt.changed == checkpoint.names
True
"""

from rekindle.checkpoint.comparison import FileComparison, compare_files
from rekindle.checkpoint.firing import fire_file
from rekindle.checkpoint.inspection import FileHealth, inspect_file
from rekindle.checkpoint.opening import Checkpoint, open_checkpoint
from rekindle.checkpoint.parts import CheckpointError

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "FileComparison",
    "FileHealth",
    "compare_files",
    "fire_file",
    "inspect_file",
    "open_checkpoint",
]
