"""The published remedies for lost plasticity, and the controls, behind one interface.

Every method is `method(model, optimizer=None, *, batches=None, loss=None, generator=None) -> Receipt`. Its attributes
say what a trainer must do for it: `moment`, `batches`, `watches`, `period` (see `remedy`). Regularizers also have
`loss_term(model)`; methods that need the start of a model have `remember(model)`, those that gather statistics while
training `observe(model)`.

One file per paper; `controls`, `regularizers` and `resets` hold one kind each. Start reading at `remedy`: it owns the
call. `call` is what a method is given (and how replicas agree), `selection` which weights its targets mean, `writing`
how they are changed (`changes`: some rows of them), `neurons` how single neurons are replaced, `caching` what is kept
about a model, `naming` methods by name. May import everything up to `monitoring`; knows no trainer.

>>> from rekindle.methods import FullReset
>>> import torch
>>> FullReset()(torch.nn.Linear(2, 2)).changed
('weight', 'bias')
"""

from rekindle.methods.compose import Compose
from rekindle.methods.continual_backprop import ContinualBackprop
from rekindle.methods.controls import FreshAtNorm, Gaussian, RandomIsometry, Rescale, SingularClip
from rekindle.methods.dash import DASH
from rekindle.methods.fire import FIRE
from rekindle.methods.hare_tortoise import HareTortoise
from rekindle.methods.hyperball import Hyperball
from rekindle.methods.isometry_loss import IsometryLoss
from rekindle.methods.learning_rate import LearningRate, Rewarm
from rekindle.methods.muon import muon
from rekindle.methods.normalize_and_project import NormalizeAndProject
from rekindle.methods.plasticity_injection import PlasticityInjection
from rekindle.methods.redo import ReDo
from rekindle.methods.regrama import ReGraMa
from rekindle.methods.regularizers import L2Init, Parseval, SpectralRegularizer, WeightDecay
from rekindle.methods.resets import AdamRel, FullReset, HeadReset, LayerNormReset, LayerReset, OptimizerReset
from rekindle.methods.revive import Revive
from rekindle.methods.selective_weight_reset import SelectiveWeightReset
from rekindle.methods.self_normalized_reset import SelfNormalizedReset
from rekindle.methods.shrink_perturb import ShrinkPerturb
from rekindle.methods.soft_weight_rescaling import SoftWeightRescaling
from rekindle.methods.start_norm import StartNorm
from rekindle.methods.upgd import UPGD
from rekindle.methods.weight_clip import WeightClip

__all__ = [
    "DASH",
    "FIRE",
    "UPGD",
    "AdamRel",
    "Compose",
    "ContinualBackprop",
    "FreshAtNorm",
    "FullReset",
    "Gaussian",
    "HareTortoise",
    "HeadReset",
    "Hyperball",
    "IsometryLoss",
    "L2Init",
    "LayerNormReset",
    "LayerReset",
    "LearningRate",
    "NormalizeAndProject",
    "OptimizerReset",
    "Parseval",
    "PlasticityInjection",
    "RandomIsometry",
    "ReDo",
    "ReGraMa",
    "Rescale",
    "Revive",
    "Rewarm",
    "SelectiveWeightReset",
    "SelfNormalizedReset",
    "ShrinkPerturb",
    "SingularClip",
    "SoftWeightRescaling",
    "SpectralRegularizer",
    "StartNorm",
    "WeightClip",
    "WeightDecay",
    "muon",
]
