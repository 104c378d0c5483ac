"""Real images and texts for the laboratory.

    images = load("cifar-10", size=16, count=10_000, seed=0)

`sets` finds and reads image sets, `text` the texts, `archives` knows the formats, `fetching` gets what is missing.
"""

from rekindle.lab.data.fetching import fetch
from rekindle.lab.data.sets import CLASSES, Images, Missing, load, resize, where

__all__ = ["CLASSES", "Images", "Missing", "fetch", "load", "resize", "where"]
