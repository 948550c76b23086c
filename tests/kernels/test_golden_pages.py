"""Pages and attention over them as a real H200 gave them (scripts/gpu_golden_pages.py), checked without a GPU."""

from __future__ import annotations

from pathlib import Path

import golden_pages as golden
import numpy as np
import pytest
import torch

GOLDEN = Path(__file__).with_name("golden_pages.npz")


@pytest.mark.parametrize("name", golden.CASES)
def test_the_reference_has_the_bytes_and_the_numbers_of_a_card(name: str) -> None:
    """Bytes are equal. Outputs differ by codes of P (a sixteenth of a probability each): on the card the two pages of a few
    rows are two parts, and P refers to the maximum of its own."""
    arrays = np.load(GOLDEN)
    records, out, lse = golden.run(golden.CASES[name], "cpu")
    assert torch.equal(records[0, 0], torch.from_numpy(arrays[f"{name}.records"]))
    card = torch.from_numpy(arrays[f"{name}.out"])
    assert (out - card).abs().sum() / card.abs().sum() < 0.02
    assert torch.nn.functional.cosine_similarity(out, card, dim=-1).min() > 0.998
    assert (lse - torch.from_numpy(arrays[f"{name}.lse"])).abs().max() < 0.02
