"""rekindle: tells whether a network has lost its plasticity, and gives it back."""

from rekindle.isometry import Certificate, polar

__version__ = "0.1.0"
__all__ = ["Certificate", "polar"]
