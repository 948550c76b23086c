"""Small models of no library, each in the way its kind of repository writes attention, and inputs for them."""

from .build import KINDS, build, calls, outputs

__all__ = ["KINDS", "build", "calls", "outputs"]
