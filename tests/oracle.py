"""The oracle of all tests, on any device: attention in float64 straight from its definition, the one table of
tolerances, and the one way errors are reported.

Nothing here calls the package. The oracle sees the tensors that the package sees, already rounded to their dtype,
so it carries the same handicap. Where it is asked for something a float64 softmax cannot mean, the rules are:
a row that sees no key is 0 with lse -inf; a key that a row does not see cannot reach it, whatever it holds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tolerance:
    """How far a result may be from the oracle, and where the numbers come from."""

    cosine: float
    rel_l1: float
    worst_row: float
    origin: str
    centred: float | None = None

    def holds(self, errors: Errors) -> bool:
        """Whether all of `errors`, none of them NaN, are within it."""
        near = errors.cosine >= self.cosine and errors.rel_l1 <= self.rel_l1 and errors.worst_row >= self.worst_row
        return near and (self.centred is None or errors.centred <= self.centred)


_MODEL = "numpy model of the recipe on N(0,1), 1031 keys, with headroom"
T8F8 = Tolerance(0.998, 0.06, 0.99, f"INT8 QK + FP8 PV: {_MODEL} (0.9993 / 0.038 / 0.998)")
T8F16 = Tolerance(0.9995, 0.02, 0.999, f"INT8 QK + FP16 PV: {_MODEL} (0.9999 / 0.013 / 0.9998)")
T4 = Tolerance(0.96, 0.28, 0.85, f"INT4 QK: {_MODEL} (0.972 / 0.24 / 0.925)")
HALF = Tolerance(0.99999, 0.005, 0.9999, "exact attention in half precision: some roundings of 2^-9 (bfloat16)")
SINGLE = Tolerance(1 - 1e-9, 1e-5, 1 - 1e-8, "exact attention in float32: accumulated roundings of 2^-24")
_SHORT = "the kernels themselves at every length, where a row of few keys has more noise of its own"
_K8F16 = replace(T8F16, worst_row=0.99, origin=f"{T8F16.origin}; {_SHORT}")
_K4 = Tolerance(0.975, 0.24, 0.8, f"INT4 QK, head_dim 64 and 128: {_SHORT} (reference: 0.979 / 0.206 / 0.845)")
# Per recipe: calls of the public function on either device; calls of the compiled kernels at every length and shape.
_TOLERANCES = {
    "exact": (SINGLE, SINGLE),
    "qk_int8_pv_fp16": (T8F16, _K8F16),
    "qk_int8_pv_fp8": (T8F8, T8F8),
    "qk_int4_pv_fp16": (T4, _K4),
    "qk_int4_pv_fp8": (T4, _K4),
}
RECIPE_TOLERANCE = {name: public for name, (public, _) in _TOLERANCES.items()}
KERNEL_TOLERANCE = {name: kernel for name, (_, kernel) in _TOLERANCES.items()}
# Relative L1 of the kernels beside float64 under masks, windows, sinks and padding, short rows too (typical values are
# 0.038 and 0.011). INT4: of queries that hardly differ within a block, whose logits nearly all come from their mean.
ROWS_REL_L1 = {name: RECIPE_TOLERANCE[name.replace("int4", "int8")].rel_l1 for name in _TOLERANCES if name != "exact"}
QUANTIZED = [name for name in RECIPE_TOLERANCE if name != "exact"]


def visible(
    q_len: int,
    kv_len: int,
    is_causal: bool = False,
    causal_align: str = "bottom_right",
    window: int | tuple[int, int] | None = None,
    kv_lens: Sequence[int] | None = None,
) -> Tensor:
    """Boolean [q_len, kv_len] of causality and window; with kv_lens, the number of keys of each item, [B, 1, q_len,
    kv_len]: an item's last row and its own last key then lie on the diagonal."""
    i = torch.arange(q_len).view(-1, 1)
    j = torch.arange(kv_len).view(1, -1)
    ends = kv_len if kv_lens is None else torch.tensor(kv_lens).view(-1, 1, 1, 1)
    distance = j - i - (ends - q_len if causal_align == "bottom_right" else 0)  # 0 on the diagonal, < 0 in the past
    seen = (j < ends).expand(torch.broadcast_shapes(distance.shape, (j < ends).shape)).clone()
    if is_causal:
        seen &= distance <= 0
    if isinstance(window, tuple):
        if window[0] >= 0:
            seen &= distance >= -window[0]
        if window[1] >= 0:
            seen &= distance <= window[1]
    elif window is not None and window > 0:
        seen &= distance.abs() < window
    return seen


MOST_SCORES = 1 << 26  # scores that are formed at once: half a GiB of float64


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    causal_align: str = "bottom_right",
    window: int | tuple[int, int] | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    keep: Tensor | None = None,
    kv_lens: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """(out [B, Hq, q_len, Dv], lse [B, Hq, q_len]) in float64, differentiable, on the device of the tensors.

    Tensors are [B, H, N, D]. keep: multiplier of the weights, for checking dropout with a known pattern. kv_lens: how
    many of the keys each item has."""
    batch, heads, q_len, dim = query.shape
    kv_len, groups = key.shape[-2], heads // key.shape[1]
    k, v = key.double(), value.double()
    k = torch.stack([k] * groups, dim=2).flatten(1, 2)
    v = torch.stack([v] * groups, dim=2).flatten(1, 2)
    scale = 1 / math.sqrt(dim) if scale is None else scale
    whole = visible(q_len, kv_len, is_causal, causal_align, window, kv_lens).to(query.device)
    parts = []
    step = max(1, MOST_SCORES // max(1, batch * heads * kv_len))
    for first in range(0, max(q_len, 1), step):
        rows = slice(first, first + step)
        seen, mask, kept = (x if x is None or x.shape[-2] == 1 else x[..., rows, :] for x in (whole, attn_mask, keep))
        parts.append(_rows(query[:, :, rows].double(), k, v, scale, seen, mask, softcap, sinks, kept))
    return torch.cat([out for out, _ in parts], dim=2), torch.cat([lse for _, lse in parts], dim=2)


def _rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    seen: Tensor,
    attn_mask: Tensor | None,
    softcap: float | None,
    sinks: Tensor | None,
    keep: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """`attention` of some rows of float64 queries; keys and values have as many heads."""
    scores = torch.einsum("bhid,bhjd->bhij", q, k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    seen = seen.expand(scores.shape)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        seen = seen & attn_mask
    elif attn_mask is not None:
        scores = scores + attn_mask.double()
        seen = seen & (attn_mask != -math.inf)
    dead = ~seen.any(dim=-1, keepdim=True)
    logits = scores.masked_fill(~seen, -math.inf).masked_fill(dead, 0.0)
    if sinks is not None:
        column = sinks.double().view(1, -1, 1, 1).expand(*logits.shape[:-1], 1)
        logits = torch.cat([logits, column], dim=-1)
    lse = torch.logsumexp(logits, dim=-1) if logits.shape[-1] else logits.new_zeros(logits.shape[:-1])
    weights = torch.softmax(logits, dim=-1)[..., : k.shape[-2]].masked_fill(~seen, 0.0)
    if keep is not None:
        weights = weights * keep
    # by selection: a weight of zero times NaN would still be NaN
    finite = torch.isfinite(v)
    out = torch.einsum("bhij,bhjd->bhid", weights, v.masked_fill(~finite, 0.0))
    if not finite.all():
        poisoned = torch.einsum("bhij,bhjd->bhid", seen.double(), (~finite).double()) > 0
        out = out.masked_fill(poisoned, math.nan)
    return out.masked_fill(dead, 0.0), lse.masked_fill(dead[..., 0], -math.inf)


def packed_attention(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, **options: object
) -> tuple[Tensor, Tensor]:
    """The same over packed [total, H, D]: (out [total, Hq, Dv], lse [Hq, total]); tokens of no sequence are 0, -inf."""
    out = torch.zeros(query.shape[0], query.shape[1], value.shape[-1], dtype=torch.float64, device=query.device)
    lse = torch.full((query.shape[1], query.shape[0]), -math.inf, dtype=torch.float64, device=query.device)
    starts = zip(cu_seqlens_q.tolist(), cu_seqlens_k.tolist(), strict=True)
    ends = list(zip(cu_seqlens_q.tolist(), cu_seqlens_k.tolist(), strict=True))[1:]
    for (q0, k0), (q1, k1) in zip(starts, ends, strict=False):
        q, k, v = (x.transpose(0, 1)[None] for x in (query[q0:q1], key[k0:k1], value[k0:k1]))
        part, part_lse = attention(q, k, v, **options)  # type: ignore[arg-type]
        out[q0:q1] = part[0].transpose(0, 1)
        lse[:, q0:q1] = part_lse[0]
    return out, lse


@dataclass(frozen=True)
class Errors:
    """What `measure` finds. Rows are vectors along the last dimension; rows that must be zero are left out of
    the row cosine, because they have no direction."""

    cosine: float
    rel_l1: float
    worst_row: float
    centred: float
    norm_ratio: float
    worst_at: tuple[int, ...]
    worst_values: tuple[float, float]

    def __str__(self) -> str:
        got, want = self.worst_values
        return (
            f"cosine {self.cosine:.6f}, relative L1 {self.rel_l1:.3e}, worst-row cosine {self.worst_row:.6f}, "
            f"centred error {self.centred:.3e}, norm ratio {self.norm_ratio:.5f}, "
            f"worst element {self.worst_at}: {got:.6g} for {want:.6g}"
        )


def measure(actual: Tensor, expected: Tensor, value: Tensor | None = None) -> Errors:
    """Errors of `actual` against the oracle. value [B, Hkv, kv_len, Dv]: the centred error is taken relative to
    |expected - mean(value)|; without it, to |expected - its own mean over rows|."""
    a, e = actual.detach().double(), expected.detach().double()
    assert a.shape == e.shape, f"shape {list(a.shape)} for {list(e.shape)}"
    if not e.numel():
        return Errors(1.0, 0.0, 1.0, 0.0, 1.0, (), (0.0, 0.0))
    difference = (a - e).abs()
    worst = difference.nan_to_num(math.inf).argmax()
    at = tuple(int(i) for i in torch.unravel_index(worst, e.shape))
    if value is None:
        middle = e.mean(dim=-2, keepdim=True)
    else:
        middle = value.double().mean(dim=-2, keepdim=True).repeat_interleave(e.shape[1] // value.shape[1], dim=1)
    live = e.abs().amax(dim=-1) > 0
    rows = torch.cosine_similarity(a[live], e[live], dim=-1, eps=1e-300) if live.any() else torch.ones(1)
    e_norm, a_norm = e.norm().item(), a.norm().item()
    return Errors(
        cosine=float((a * e).sum() / max(e_norm * a_norm, 1e-300)) if e_norm else float(a_norm == 0),
        rel_l1=float(difference.sum() / e.abs().sum().clamp_min(1e-300)),
        worst_row=rows.min().item(),
        centred=float(difference.sum() / (e - middle).abs().sum().clamp_min(1e-300)),
        norm_ratio=a_norm / e_norm if e_norm else 1.0,
        worst_at=at,
        worst_values=(a[at].item(), e[at].item()),
    )


def assert_attention_close(
    actual: Tensor, expected: Tensor, tolerance: Tolerance, value: Tensor | None = None, what: str = ""
) -> Errors:
    """Assert that a result is within `tolerance` of the oracle; on failure say everything that `measure` knows."""
    errors = measure(actual, expected, value)
    told = f"{what or 'attention'}: {errors}; tolerance from {tolerance.origin}"
    zero = (expected == 0).all(dim=-1)
    assert torch.isfinite(actual).all(), f"not finite: {told}"
    assert not actual[zero].any(), f"a row that must be zero is not: {told}"
    assert errors.cosine >= tolerance.cosine, f"cosine < {tolerance.cosine}: {told}"
    assert errors.rel_l1 <= tolerance.rel_l1, f"relative L1 > {tolerance.rel_l1}: {told}"
    assert errors.worst_row >= tolerance.worst_row, f"worst row < {tolerance.worst_row}: {told}"
    if tolerance.centred is not None:
        assert errors.centred <= tolerance.centred, f"centred error > {tolerance.centred}: {told}"
    return errors


def normal(*shape: int, dtype: torch.dtype = torch.float16, seed: int = 0, device: str = "cpu") -> Tensor:
    """N(0,1) from its own generator, so that one tensor never depends on how many were made before it; drawn on the
    CPU, so that every device gets the same numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def qkv(
    batch: int = 2,
    heads: int = 4,
    q_len: int = 1031,
    kv_len: int | None = None,
    dim: int = 64,
    v_dim: int | None = None,
    kv_heads: int | None = None,
    dtype: torch.dtype = torch.float16,
    seed: int = 0,
    device: str = "cpu",
) -> tuple[Tensor, Tensor, Tensor]:
    """N(0,1) query, key and value, [B, H, N, D]."""
    kv_len, kv_heads, v_dim = kv_len or q_len, kv_heads or heads, v_dim or dim
    return (
        normal(batch, heads, q_len, dim, dtype=dtype, device=device, seed=3 * seed),
        normal(batch, kv_heads, kv_len, dim, dtype=dtype, device=device, seed=3 * seed + 1),
        normal(batch, kv_heads, kv_len, v_dim, dtype=dtype, device=device, seed=3 * seed + 2),
    )
