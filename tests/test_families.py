"""Every attention feature of transformers' families: exact equals eager, quantized says what ran, own code refuses.

The families are tiny random models (tests/families). The representative ones run here; all of them run in
`scripts/family_matrix.py`, whose output is kept under docs/results.
"""

from __future__ import annotations

import pytest
import torch

import sage_patch
import zoo.families as zoo
from sage_patch.integrations.sites import find_sites
from sage_patch.policy import Policy

FAMILIES = {f.name: f for f in zoo.families()}
EXACT = Policy(recipe="exact")
EVERYTHING = Policy(quantize_fp32=True, min_q_len=1, min_kv_len=1)


def difference(got: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Largest difference over the largest magnitude, over all outputs."""
    assert len(got) == len(expected)
    pairs = [(g, e) for g, e in zip(got, expected, strict=True) if e.numel()]
    return max(float((g - e).abs().max() / e.abs().max().clamp_min(1e-9)) for g, e in pairs)


@pytest.mark.parametrize("name", zoo.REPRESENTATIVE)
def test_representative_family(name):
    check(FAMILIES[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(FAMILIES) - set(zoo.REPRESENTATIVE)))
def test_other_family(name):
    check(FAMILIES[name])


def check(family: zoo.Family) -> None:
    """Exact equals eager, every default call is quantized or says why, revert is exact; own code refuses."""
    model = zoo.build(family, "eager")
    inputs = zoo.inputs(family, model)
    expected = zoo.outputs(model, inputs)
    assert all(torch.isfinite(e).all() for e in expected)
    if not find_sites(model):
        with pytest.raises(ValueError, match="own code|nothing to patch"):
            sage_patch.apply(model)
        assert difference(zoo.outputs(model, inputs), expected) == 0
        return

    with sage_patch.applied(model, EXACT) as handle:
        assert difference(zoo.outputs(model, inputs), expected) < 1e-5
        assert handle.rows(), "no call reached a patched site"
    with sage_patch.applied(model, EVERYTHING) as handle:
        got = zoo.outputs(model, inputs)
        assert all(torch.isfinite(g).all() for g in got)
        for row in handle.rows():
            assert row["recipe"] == "qk_int8_pv_fp8" or row["reason"], row
    assert difference(zoo.outputs(model, inputs), expected) == 0, "revert"


def test_the_table_is_wide_enough():
    """At least 150 families are in the matrix, of every kind."""
    kinds = {f.kind for f in FAMILIES.values()}
    assert len(FAMILIES) >= 150
    assert {"causal_lm", "encoder", "seq2seq", "vision", "audio", "multimodal"} <= kinds
    assert set(zoo.REPRESENTATIVE) <= set(FAMILIES)
