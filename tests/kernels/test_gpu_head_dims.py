"""Head dimensions above 128, and values of another width than queries and keys, on the GPU against float64."""

from __future__ import annotations

import math

import pytest
import torch

from oracle import ROWS_REL_L1, attention, measure
from sage_patch.recipes import UnsupportedCall
from zoo.gpu_cases import DEVICE, FP8, FP16, check, forward, normal, poison, qkv
from zoo.kernel_calls import Extras

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("d,dv", [(256, 256), (192, 128), (192, 192), (160, 160), (250, 131), (129, 16), (256, 64)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_wide_heads(d: int, dv: int, dtype: torch.dtype) -> None:
    poison()
    for heads, kv_heads, n, kn in ((4, 2, 300, 430), (2, 2, 1, 77), (2, 1, 130, 1031), (1, 1, 64, 1)):
        q, k, _ = qkv(2, heads, kv_heads, n, kn, d, dtype)
        v = normal(2, kv_heads, kn, dv, dtype=dtype, seed=3)
        for causal in (False, True):
            check(FP8, q, k, v, causal=causal, lse_tolerance=0.1)
        check(FP8, q, k, v, kv_lens=[kn, max(1, kn // 3)], causal=True)


@pytest.mark.parametrize("recipe", [FP8, FP16])
@pytest.mark.parametrize("d,dv", [(128, 64), (96, 72), (64, 40), (72, 128), (40, 64)])
def test_values_of_another_width(recipe: str, d: int, dv: int) -> None:
    poison()
    q, k, _ = qkv(2, 4, 2, 200, 333, d)
    v = normal(2, 2, 333, dv, seed=3)
    check(recipe, q, k, v)
    check(recipe, q, k, v, causal=True)


def test_wide_heads_in_any_layout_and_the_other_families() -> None:
    """Views, packed sequences, masks, sinks and softcap reach the same code above 128 channels."""
    q, k, v = qkv(1, 4, 2, 300, 300, 256)
    want, _ = forward(q, k, v, scale=0.06, recipe=FP8)
    nhd = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    assert torch.equal(forward(*nhd, scale=0.06, recipe=FP8, out_layout="NHD")[0], want)
    wide = [torch.cat([x, x], -1)[..., 1:257] for x in (q, k, v)]  # rows that no 16-byte load can read
    odd = [torch.cat([x[..., :0], x], -1) for x in wide]
    assert torch.equal(forward(*wide, scale=0.06, recipe=FP8)[0], forward(*odd, scale=0.06, recipe=FP8)[0])
    everything = torch.ones(1, 1, 300, 300, dtype=torch.bool, device=DEVICE)
    assert torch.equal(forward(q, k, v, scale=0.06, recipe=FP8, extras=Extras(attn_mask=everything))[0], want)
    cu = torch.tensor([0, 300], dtype=torch.int32, device=DEVICE)
    assert torch.equal(
        forward(q, k, v, scale=0.06, recipe=FP8, extras=Extras(cu_seqlens_q=cu, cu_seqlens_k=cu))[0], want
    )
    out = forward(q, k, v, scale=0.06, recipe=FP8, extras=Extras(softcap=5.0))[0]
    assert measure(out, attention(q, k, v, scale=0.06, softcap=5.0)[0]).rel_l1 < ROWS_REL_L1[FP8]


def test_wide_heads_are_repeatable_and_refused_where_they_must_be() -> None:
    q, k, v = qkv(1, 4, 4, 700, 700, 256)
    runs = [forward(q, k, v, scale=0.06, recipe=FP8, is_causal=True)[0] for _ in range(20)]
    assert all(torch.equal(runs[0], x) for x in runs)
    with pytest.raises(UnsupportedCall, match="head_dim 256"):
        forward(q, k, v, scale=1 / math.sqrt(256), recipe=FP16)
