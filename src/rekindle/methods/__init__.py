"""The published remedies for lost plasticity, and the controls, behind one interface.

Every method is `method(model, optimizer=None, *, batches=None, loss=None, generator=None) -> Receipt`; its `moment`
says when a trainer should call it. Regularisers also have `loss_term(model)`; methods that need the start of a
model have `remember(model)`, those that gather statistics while training `observe(model)`.

>>> from rekindle.methods import FullReset
>>> import torch
>>> FullReset()(torch.nn.Linear(2, 2)).changed
('weight', 'bias')
"""

from rekindle.methods.adam_rel import AdamRel
from rekindle.methods.compose import Compose
from rekindle.methods.continual_backprop import ContinualBackprop
from rekindle.methods.dash import DASH
from rekindle.methods.fire import FIRE
from rekindle.methods.fresh_at_norm import FreshAtNorm
from rekindle.methods.hare_tortoise import HareTortoise
from rekindle.methods.isometry_loss import IsometryLoss
from rekindle.methods.l2_init import L2Init
from rekindle.methods.muon import muon
from rekindle.methods.normalize_and_project import NormalizeAndProject
from rekindle.methods.optimizer_reset import OptimizerReset
from rekindle.methods.parseval import Parseval
from rekindle.methods.plasticity_injection import PlasticityInjection
from rekindle.methods.random_isometry import RandomIsometry
from rekindle.methods.redo import ReDo
from rekindle.methods.regrama import ReGraMa
from rekindle.methods.rescale import Rescale
from rekindle.methods.resets import FullReset, HeadReset, LayerNormReset, LayerReset
from rekindle.methods.self_normalized_reset import SelfNormalizedReset
from rekindle.methods.shrink_perturb import ShrinkPerturb
from rekindle.methods.singular_clip import SingularClip
from rekindle.methods.spectral_regulariser import SpectralRegulariser
from rekindle.methods.upgd import UPGD
from rekindle.methods.weight_clip import WeightClip
from rekindle.methods.weight_decay import WeightDecay

__all__ = [
    "DASH",
    "FIRE",
    "UPGD",
    "AdamRel",
    "Compose",
    "ContinualBackprop",
    "FreshAtNorm",
    "FullReset",
    "HareTortoise",
    "HeadReset",
    "IsometryLoss",
    "L2Init",
    "LayerNormReset",
    "LayerReset",
    "NormalizeAndProject",
    "OptimizerReset",
    "Parseval",
    "PlasticityInjection",
    "RandomIsometry",
    "ReDo",
    "ReGraMa",
    "Rescale",
    "SelfNormalizedReset",
    "ShrinkPerturb",
    "SingularClip",
    "SpectralRegulariser",
    "WeightClip",
    "WeightDecay",
    "muon",
]
