"""Which matrices a parameter holds, what they do, and why some are skipped by default.

Knows modules and tensors; imports no other package. `finding` walks a live model, `state_dicts` a file, `configs`
builds the model of a config without weights; `entries` is what is found of one parameter, `evidence` what a recorded
pass showed; `normalization` says whether activations are normalized; `names` says what parameters are called, where
they sit and how they are stored, `layers` which modules are layers; `layouts` are the index rules, `families` what the
class of a module and the names around a weight say about it (`known_classes` has the table), `outputs` which layers are
heads (`heads` marks them), `fused` which are cut, `parametrized` weights that are computed. `source` reads what classes
do with their submodules' outputs: `statements` walks the syntax tree, `expressions` says what an expression holds,
`cutting` what is cut, `containers` opens tuples, dicts and what a call returned, `functions` tells which functions may
cut what they are given, `syntax` asks single nodes, `values` is what is recorded. Start reading at `finding.find`.
"""

from rekindle.blocks.finding import ROLES, Block, Conv, Found, LayoutError, find, matrices, register

__all__ = ["ROLES", "Block", "Conv", "Found", "LayoutError", "find", "matrices", "register"]
