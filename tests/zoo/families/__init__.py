"""Tiny random models of every transformers family, and inputs for them."""

from .build import build, outputs
from .catalog import Family, families
from .feed import inputs
from .tables import REPRESENTATIVE, UNBUILDABLE

__all__ = ["REPRESENTATIVE", "UNBUILDABLE", "Family", "build", "families", "inputs", "outputs"]
