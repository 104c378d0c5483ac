"""Which matrices a parameter holds, what they do, and why some are better left alone.

May import `engine`, `measures` and `consumers`. `finding` walks a live model, `state_dicts` a file; `layouts` are the
index rules, `families` the known module classes, `roles` what a weight does, `parametrized` weights that are computed,
`storage` how numbers are kept, `outputs` which layers are heads or fused. Start reading at `finding.find`.
"""

from rekindle.blocks.finding import ROLES, Block, Conv, Found, LayoutError, find, matrices, register

__all__ = ["ROLES", "Block", "Conv", "Found", "LayoutError", "find", "matrices", "register"]
