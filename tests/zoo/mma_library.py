"""The mma.sync kernels on a Hopper card, whose own kernels are others: a library of the tests alone.

A Hopper card executes mma.sync (FP8 and INT4 emulated), so the family for cards that are not here can be tested on one.
`SAGE_PATCH_TEST_BACKEND=mma pytest -m gpu` runs every test of the card with it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from torch import Tensor

from sage_patch import backends
from sage_patch.kernels import build, library
from sage_patch.kernels.plans import PLANS
from sage_patch.reference.emulator import forward_mma
from sage_patch.reference.emulator.accumulator import FP16
from sage_patch.reference.emulator.forward import Stages

# Rows of cuda_kernels/backend_mma.cu; "mma_split": with P V summed in fp16 where the kernels have it.
ROWS = {"mma": "mma", "mma_int4": "mma_int4", "mma_split": "mma", "mma_small": "mma_small"}
BACKENDS = tuple(ROWS)
ARCHITECTURE, CAPABILITY = "90", 90
# What Python knows of these kernels, under the name and for the cards of Hopper's.
_HOPPER = backends.BACKENDS["sm90"]
_ROW = replace(
    backends.BACKENDS["mma"],
    name=_HOPPER.name,
    architectures=_HOPPER.architectures,
    card=_HOPPER.card,
    has_fp16_sums=False,
    is_proven=True,
)


def build_library(backend: str) -> Path:
    """The library in which `backend` serves Hopper cards, from the cache or compiled."""
    if backend not in BACKENDS:
        raise ValueError(f"unknown backend {backend!r}: {', '.join(BACKENDS)}")
    units = {  # without those of Hopper cards alone, which the row above theirs hides
        name: (*names, "90a") if name.endswith("_mma.cu") or name.startswith("fwd_mma") else names
        for name, names in build.units().items()
        if tuple(names) != ("90a",)
    }
    small = ("-DSAGE2_SMALL_SM",) if backend == "mma_small" else ()
    flags = (*build.FLAGS, f"-DSAGE2_TEST_BACKEND={ROWS[backend]}", *small)
    with mock.patch.object(build, "units", lambda: units), mock.patch.object(build, "FLAGS", flags):
        return build.build([ARCHITECTURE])


def use(backend: str, index: int = 0) -> None:
    """From now on calls on cuda:`index` run on this backend."""
    library._by_device[index] = library._open(str(build_library(backend))), CAPABILITY
    backends.BACKENDS["sm90"] = _ROW
    PLANS.clear()
    sums_in_fp16(index, backend == "mma_split")


def sums_in_fp16(index: int, on: bool) -> None:
    """Whether calls on cuda:`index` ask for sums of P V in fp16."""
    pairs = {(index, pv) for pv in library.PV}
    library.sums_in_fp16.difference_update(pairs)
    if on:
        library.sums_in_fp16.update(pairs)
    PLANS.clear()


@contextlib.contextmanager
def on(backend: str, index: int = 0) -> Iterator[None]:
    """Calls on cuda:`index` run on this backend inside."""
    before, sums, row = library.of_device(index), set(library.sums_in_fp16), backends.BACKENDS["sm90"]
    use(backend, index)
    try:
        yield
    finally:
        library._by_device[index] = before
        backends.BACKENDS["sm90"] = row
        library.sums_in_fp16.clear()
        library.sums_in_fp16.update(sums)
        PLANS.clear()


def of_the_card(stages: Stages, recipe: str, **options: Any) -> tuple[Tensor, Tensor]:
    """(out, lse) of a call's stages as the kernels form them that this run of the tests has on the card.

    options: sinks and softcap. mma.sync's FP8 is FP16 on a Hopper card.
    """
    if not os.environ.get("SAGE_PATCH_TEST_BACKEND"):
        return stages.out, stages.lse
    out, lse = forward_mma.attend(stages, recipe=recipe, accumulator=FP16, **options)
    return out[..., : stages.out.shape[-1]].to(stages.out.dtype), lse
