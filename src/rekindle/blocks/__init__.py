"""Which matrices a parameter holds, what they do, and why some are skipped by default.

May import `consumers`. `finding` walks a live model, `state_dicts` a file; `names` says
what parameters are called, where they sit and how they are stored; `layouts` are the index rules, `families` what the
class of a module and the names around a weight say of it (`known_classes` has the table), `outputs` which layers are
heads or fused, `parametrized` weights that are computed.
Start reading at `finding.find`.
"""

from rekindle.blocks.finding import ROLES, Block, Conv, Found, LayoutError, find, matrices, register

__all__ = ["ROLES", "Block", "Conv", "Found", "LayoutError", "find", "matrices", "register"]
