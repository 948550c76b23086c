"""Tiny random models of every denoising class of diffusers, and inputs for them."""

from .build import build, outputs
from .catalog import Denoiser, denoisers
from .feed import inputs
from .measure import measure
from .overrides import LEFT_OUT, REPRESENTATIVE

__all__ = ["LEFT_OUT", "REPRESENTATIVE", "Denoiser", "build", "denoisers", "inputs", "measure", "outputs"]
