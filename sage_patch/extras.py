"""Packages that only some uses need, and the extra of sage-patch that brings each: what a missing one is told by.

`sage_attention`, kernels and policies in Python need torch alone. Everything else is imported where it is used, and
what is not there is said with the extra that installs it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from sage_patch.errors import SagePatchError

# Which extra brings a package that this one imports, by the name it is imported by.
EXTRAS = {
    "pydantic": "policy",
    "yaml": "policy",
    "transformers": "transformers",
    "diffusers": "diffusers",
    "accelerate": "diffusers",
    "peft": "lora",
    "bitsandbytes": "quantized",
    "torchao": "quantized",
    "gguf": "quantized",
    "typer": "cli",
    "rich": "cli",
    "huggingface_hub": "run",
    "safetensors": "run",
    "PIL": "media",
    "av": "media",
    "torchmetrics": "media",
    "matplotlib": "bench",
}


class MissingPackage(SagePatchError, ImportError):
    """A package that this use needs is not installed, or too old; the message names what to install."""


@contextlib.contextmanager
def needed_for(what: str) -> Iterator[None]:
    """What is imported inside is needed for `what`: a package of EXTRAS that is not there raises MissingPackage."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS:
            raise
        raise MissingPackage(
            f"{what} needs {package}, which is not installed: pip install 'sage-patch[{EXTRAS[package]}]'", name=package
        ) from error
