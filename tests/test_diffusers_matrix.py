"""Every denoising class of diffusers: exact equals native, every call is accounted for, own code refuses by name.

The classes are tiny random models (tests/diffusers_matrix). The representative ones run here, all of them in
`scripts/diffusers_matrix.py`, whose output is kept under docs/results.
"""

from __future__ import annotations

import pytest

import zoo.diffusers_matrix as zoo

DENOISERS = {d.name: d for d in zoo.denoisers()}
REFUSED = {"T5FilmDecoder", "UNet1DModel"}
# Attention that sage_patch does not reach, beside sites that it does; listed in the handle's report.
UNREACHED = {
    "ControlNetUnionModel": {"MultiheadAttention"},
    "HunyuanDiT2DControlNetModel": {"HunyuanDiTAttentionPool"},
    "HunyuanDiT2DModel": {"HunyuanDiTAttentionPool"},
    "HunyuanDiT2DMultiControlNetModel": {"HunyuanDiTAttentionPool"},
    "MultiControlNetUnionModel": {"MultiheadAttention"},
    "SanaControlNetModel": {"Attention"},
    "SanaTransformer2DModel": {"Attention"},
    "SanaVideoTransformer3DModel": {"Attention"},
    "SanaWMTransformer3DModel": {"SanaWMBidirectionalGDNAttention", "SanaWMBidirectionalGDNCamAttention"},
}
BLOCK_MASKS = {"AnyFlowFARTransformer3DModel", "Kandinsky6SRTransformer3DModel"}


@pytest.mark.parametrize("name", zoo.REPRESENTATIVE)
def test_representative_class(name):
    check(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(DENOISERS) - set(zoo.REPRESENTATIVE)))
def test_other_class(name):
    check(name)


def check(name: str) -> None:
    """Exact equals native, no SDPA call passes uncounted, every call is quantized or says why, revert is exact."""
    record = zoo.measure(DENOISERS[name])
    print(name, record)
    if record["outcome"] == "refused":
        assert name in REFUSED and name in record["refusal"] and "own code" in record["refusal"]
        return
    assert record["roles"], "nothing was patched and nothing was said"
    assert set(record["unreached"]) == UNREACHED.get(name, set())
    if record["outcome"] == "built":
        assert name in zoo.LEFT_OUT
        return

    assert record["exact_difference"] < 1e-5
    assert record["revert_difference"] == 0
    exact = {words for words in record["default_calls"] if words.startswith("exact")}
    assert exact == ({"exact mask_block"} if name in BLOCK_MASKS else set())
    assert sum(record["default_calls"].values()) == record["calls"]
    if exact:  # counted here, but not an SDPA call
        assert record["calls"] == record["native_calls"] + record["default_calls"]["exact mask_block"]
    else:
        assert record["calls"] == record["native_calls"]
        assert record["default_difference"] > 0


def test_the_catalog_is_wide_enough():
    """A hundred classes of all three packages; the tables name classes that exist."""
    assert len(DENOISERS) >= 100
    assert {d.kind for d in DENOISERS.values()} == {"transformers", "unets", "controlnets"}
    assert {*zoo.REPRESENTATIVE, *zoo.LEFT_OUT, *UNREACHED, *REFUSED, *BLOCK_MASKS} <= set(DENOISERS)
