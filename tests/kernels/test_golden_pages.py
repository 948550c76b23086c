"""Pages and attention over them as a real H200 gave them (scripts/gpu_golden_pages.py), checked without a GPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from sage_patch.args import PageArgs
from sage_patch.reference.emulator.pages import emulate
from zoo import golden_pages as golden

GOLDEN = np.load(Path(__file__).with_name("golden_pages.npz"))
EQUAL_OUTPUTS = 0.998  # what is left is 1 / l, an approximation on the card
LSE_ERROR = 2e-6


@pytest.mark.parametrize("name", golden.CASES)
def test_the_reference_has_the_bytes_of_a_card(name: str) -> None:
    records, out, lse = golden.run(golden.CASES[name], "cpu")
    assert torch.equal(records[0, 0], torch.from_numpy(GOLDEN[f"{name}.records"]))
    # All pages at once: the card's parts have maxima of their own, so codes of P differ, a sixteenth of one each.
    card = torch.from_numpy(GOLDEN[f"{name}.out"])
    assert (out - card).abs().sum() / card.abs().sum() < 0.02
    assert (lse - torch.from_numpy(GOLDEN[f"{name}.lse"])).abs().max() < 0.02


@pytest.mark.parametrize("name", golden.CASES)
def test_the_emulator_has_the_numbers_of_a_card(name: str) -> None:
    case = golden.CASES[name]
    out, lse = emulate(
        golden.filled(case, "cpu"), golden.inputs(case)[0], PageArgs(scale=case.dim**-0.5, **case.options)
    )
    card = torch.from_numpy(GOLDEN[f"{name}.out"])
    assert (out.float() == card).float().mean() >= EQUAL_OUTPUTS
    assert (out.float() - card).abs().max() <= card.abs().max() * torch.finfo(case.dtype).eps
    assert (lse - torch.from_numpy(GOLDEN[f"{name}.lse"])).abs().max() < LSE_ERROR
