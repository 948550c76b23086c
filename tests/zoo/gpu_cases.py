"""What the GPU tests share: inputs made on the card, a kernel call, a check against float64."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from oracle import KERNEL_TOLERANCE, ROWS_REL_L1, Errors, assert_attention_close, attention
from zoo import kernel_calls
from zoo.kernel_calls import Extras

DEVICE = "cuda"
FP8, FP16 = "qk_int8_pv_fp8", "qk_int8_pv_fp16"
RECIPES = (FP8, FP16)
INT4_RECIPES = ("qk_int4_pv_fp8", "qk_int4_pv_fp16")


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator(DEVICE).manual_seed(seed), device=DEVICE).to(dtype)


def qkv(
    b: int, h: int, hk: int, n: int, kn: int, d: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        normal(b, h, n, d, dtype=dtype, seed=seed),
        normal(b, hk, kn, d, dtype=dtype, seed=seed + 1000),
        normal(b, hk, kn, d, dtype=dtype, seed=seed + 2000),
    )


def poison() -> None:
    """Leaves NaN in the allocator's free blocks and in shared memory."""
    pools = [torch.full((size,), math.nan, device=DEVICE) for size in (1 << 10, 1 << 16, 1 << 20, 1 << 23, 1 << 25)]
    del pools
    for d, recipe in itertools.product((64, 128), RECIPES):
        bad = torch.full((1, 64, 256, d), math.nan, dtype=torch.bfloat16, device=DEVICE)
        forward(bad, bad, bad, scale=1.0, recipe=recipe, return_lse=True)


def forward(*tensors: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """kernel_calls.forward; its log-sum-exp is None unless it was asked for."""
    return kernel_calls.forward(*tensors, **options)  # type: ignore[return-value]


def check(
    recipe: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    lse_tolerance: float | None = None,
    causal: bool = False,
    top_left: bool = False,
    kv_lens: Sequence[int] | None = None,
) -> Errors:
    """Errors of one call against the oracle, asserted small; dead rows are asserted zero."""
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    lens = None if kv_lens is None else torch.tensor(kv_lens, dtype=torch.int32, device=DEVICE)
    out, lse = forward(
        q,
        k,
        v,
        scale=scale,
        recipe=recipe,
        return_lse=True,
        kv_lens=lens,
        is_causal=causal,
        causal_top_left=top_left,
    )
    align = "top_left" if top_left else "bottom_right"
    ref, ref_lse = attention(q, k, v, scale=scale, is_causal=causal, causal_align=align, kv_lens=kv_lens)
    what = f"{tuple(q.shape)} {tuple(k.shape)} {q.dtype} {recipe} causal={causal} top_left={top_left} {kv_lens}"
    e = assert_attention_close(out, ref, KERNEL_TOLERANCE[recipe], what=what)
    dead = ref_lse == -math.inf
    assert bool((lse[dead] == -math.inf).all()) and bool((out[dead] == 0).all()), f"dead rows: {what}"
    if lse_tolerance is not None:
        assert float((lse.double() - ref_lse)[~dead].abs().max()) < lse_tolerance, what
    return e


def same(
    recipe: str, q: Tensor, k: Tensor, v: Tensor, extras: Extras, hidden: Tensor, *, bias: Tensor | None = None,
    kv_lens: Tensor | None = None, is_causal: bool = False, top_left: bool = False,
) -> None:  # fmt: skip
    """One call against the oracle under a mask: close, dead rows zero, and the same bits without log-sum-exp.

    hidden: bool, broadcastable to [batch, heads, q_len, kv_len]; bias: what is added to the scores that are not."""
    scale = 1 / math.sqrt(q.shape[-1])
    out, lse = forward(
        q, k, v, scale=scale, recipe=recipe, return_lse=True, kv_lens=kv_lens, is_causal=is_causal,
        causal_top_left=top_left, extras=extras,
    )  # fmt: skip
    k, v = (torch.where(x.isfinite(), x, 0.0) for x in (k, v))
    mask = ~hidden if bias is None else bias.double().masked_fill(hidden, -math.inf)
    ref, ref_lse = attention(q, k, v, mask, softcap=extras.softcap, sinks=extras.sinks)
    dead = ref_lse == -math.inf
    assert bool((out[dead] == 0).all()) and bool((lse[dead] == -math.inf).all())
    assert bool(out.isfinite().all())
    live = ref[~dead]
    error = float((out[~dead].double() - live).abs().sum() / live.abs().sum()) if live.numel() else 0.0
    assert error < ROWS_REL_L1[recipe], f"relative L1 {error}"
    assert float((lse[~dead].double() - ref_lse[~dead]).abs().max() if live.numel() else 0.0) < 0.15
    plain, _ = forward(
        q,
        k,
        v,
        scale=scale,
        recipe=recipe,
        kv_lens=kv_lens,
        is_causal=is_causal,
        causal_top_left=top_left,
        extras=extras,
    )
    assert torch.equal(out, plain)


def diagonal(q_len: int, kv_len: int) -> Tensor:
    """key - (row + kv_len - q_len): 0 on the bottom-right diagonal."""
    return torch.arange(kv_len, device=DEVICE) - torch.arange(q_len, device=DEVICE)[:, None] - (kv_len - q_len)
