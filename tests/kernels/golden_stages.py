"""The small calls whose every stage is kept from a real GPU (scripts/gpu_golden.py), and how a stage is compared.

Inputs are made here again, from a generator whose stream is frozen, and are checked by their hash; of the stages only
every `keep`-th query row is stored. Arrays of a case: `<name>.scores` and, for each recipe, `<name>.<recipe>.p`, `.m`,
`.t`, `.out`, `.lse` (shapes: sage_patch/reference/sm90.py).
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sage_patch.reference import sm90
from sage_patch.reference import tile_image as ti
from sage_patch.reference.float32 import e4m3_value, exp2, to_half

RECIPES = ("qk_int8_pv_fp8", "qk_int8_pv_fp16")


@dataclass(frozen=True)
class Case:
    name: str
    head_dim: int
    q_len: int
    kv_len: int
    dtype: torch.dtype = torch.bfloat16
    heads: int = 2
    kv_heads: int = 1
    is_causal: bool = False
    top_left: bool = False
    kv_lens: tuple[int, ...] | None = None  # one an item
    k_bias: float = 0.0  # on one channel
    v_offset: float = 0.0  # on all channels
    v_outlier: float = 0.0  # on one token
    logits: float = 1.0  # standard deviation
    keep: int = 1

    @property
    def batch(self) -> int:
        return len(self.kv_lens) if self.kv_lens else 1

    @property
    def rows(self) -> Tensor:
        """Query rows whose stages are stored."""
        return torch.arange(self.q_len - 1, -1, -self.keep).flip(0)


CASES = (
    Case("d64", 64, 70, 200, torch.float16, heads=3, keep=7),
    Case("d128_causal", 128, 70, 200, heads=3, is_causal=True, keep=7),
    Case("d128_corner", 128, 33, 77, is_causal=True, top_left=True, k_bias=300.0, v_offset=40.0, keep=3),
    Case("d64_one_row", 64, 1, 129, is_causal=True, k_bias=300.0),
    Case("d128_one_row", 128, 1, 129, torch.float16, v_offset=40.0),
    Case("d64_lengths", 64, 70, 200, is_causal=True, kv_lens=(37, 0, 200), v_offset=40.0, keep=7),
    Case("d64_top_left", 64, 140, 200, torch.float16, heads=1, is_causal=True, top_left=True, k_bias=30.0, keep=10),
    Case("d40_padded", 40, 33, 77, keep=3),
    Case("d128_peaked", 128, 33, 300, logits=8.0, v_outlier=200.0, keep=4),
    Case("d64_peaked", 64, 33, 300, logits=30.0, v_outlier=3.0, is_causal=True, keep=4),
)


def inputs(case: Case) -> list[Tensor]:
    """query, key, value [batch, heads, tokens, head_dim]."""
    random = np.random.RandomState(sum(case.name.encode()))  # its stream never changes, unlike torch's
    shapes = ((case.heads, case.q_len), (case.kv_heads, case.kv_len), (case.kv_heads, case.kv_len))
    q, k, v = (torch.from_numpy(random.standard_normal((case.batch, *s, case.head_dim))) for s in shapes)
    q, k = q * case.logits**0.5, k * case.logits**0.5
    k[..., 3] += case.k_bias
    v += case.v_offset
    v[..., case.kv_len // 2, :] *= max(case.v_outlier, 1.0)
    return [x.to(case.dtype) for x in (q, k, v)]


def fingerprint(tensors: list[Tensor]) -> str:
    return hashlib.sha256(b"".join(x.contiguous().view(torch.int16).numpy().tobytes() for x in tensors)).hexdigest()


@functools.cache
def emulated(case: Case, recipe: str) -> sm90.Stages:
    return sm90.emulate(
        *inputs(case),
        recipe=recipe,
        scale=case.head_dim**-0.5,
        is_causal=case.is_causal,
        top_left=case.top_left,
        kv_lens=case.kv_lens,
    )


@dataclass
class Findings:
    """How the stages of a GPU differ from the emulator's; each stage is computed from the GPU's stage before it."""

    scores_equal: bool
    m_equal: bool
    p_outside_band: int  # codes that no exponential within its band gives
    p_share: float  # of codes that differ at all, over visible keys
    p_distance: int  # the largest difference, in codes
    t_share: float  # of partial sums that differ (fp8: of any bit)
    t_error: float  # largest difference relative to the sum of magnitudes (fp8: of the tile; fp16: of all so far)
    l_error: float  # relative, of the row sums
    out_steps: float  # largest difference of an output, see `output_steps`
    lse_error: float  # absolute up to 16, relative to |lse| / 16 above, where float32's own step grows with it


def compare(case: Case, recipe: str, got: Mapping[str, np.ndarray]) -> Findings:
    """got: the arrays of one file."""
    s, rows, fp16 = emulated(case, recipe), case.rows, recipe == "qk_int8_pv_fp16"

    def stored(name: str) -> Tensor:
        return torch.from_numpy(got[f"{case.name}.{name}"])

    scores, m, p, t = (stored(x) for x in ("scores", f"{recipe}.m", f"{recipe}.p", f"{recipe}.t"))
    walked = s.walked[:, rows][:, None].expand(m.shape)
    seen = walked.repeat_interleave(ti.TILE_TOKENS, -1)
    codes, low, high, mine = (_codes(x) for x in (p, s.p_low[:, :, rows], s.p_high[:, :, rows], s.p[:, :, rows]))
    visible = seen & s.visible[:, rows][:, None]
    distance = (codes - mine).abs()[seen]

    # what follows from the GPU's own P
    per = case.heads // case.kv_heads
    images = {
        n: x.view(case.batch, case.kv_heads, *x.shape[1:]).repeat_interleave(per, 1) for n, x in vars(s.images).items()
    }
    k_scale = images["k_scale"][..., ti.k_group(torch.arange(ti.TILE_TOKENS))]
    mine_scores = s.scores[:, :, rows]
    m_again, factors, exponents = sm90.exponents_of(mine_scores, k_scale, s.queries.scale[:, :, rows], fp16)
    p_again = torch.where(seen, p, torch.zeros_like(p))
    tiles = m.shape[-1]
    if fp16:
        weights = torch.where(mine_scores == sm90.HIDDEN, 0.0, exp2(exponents))
        again = sm90.accumulate_fp16(p_again, weights, images["v"], factors)
        magnitude = sm90.accumulate_fp16(p_again, weights, images["v"].abs(), factors)
        total = torch.where(walked[..., :1, None], t[..., :1, :], 0.0)[..., 0, :]
    else:
        again = sm90.partial_sums_fp8(p_again, images["v"])
        magnitude = sm90.partial_sums_fp8(p_again, images["v"] & 0x7F)
        total = sm90.fold_fp8(torch.where(walked[..., None], t, 0.0), factors)
    difference = torch.where(walked[..., None], (t - again).abs(), 0.0)
    relative = difference / magnitude.clamp_min(1e-30)
    out, lse = sm90.finish(
        total,
        torch.where(walked, m, sm90.NO_KEYS) if tiles else m,
        images["v_scale"],
        images["v_mean"],
        s.queries.dot[:, :, rows],
    )
    gpu_out = stored(f"{recipe}.out").view(case.dtype)[:, :, rows]
    gpu_lse = stored(f"{recipe}.lse")[:, :, rows]
    live = lse.isfinite() & gpu_lse.isfinite()
    same_dead = bool((lse.isinf() == gpu_lse.isinf()).all())
    want = to_half(out[..., : case.head_dim], case.dtype)
    return Findings(
        scores_equal=torch.equal(scores[seen], mine_scores[seen]),
        m_equal=torch.equal(m[walked], m_again[walked]),
        p_outside_band=int(((codes < low) | (codes > high))[seen].sum()),
        p_share=float((distance > 0).sum() / visible.sum().clamp_min(1)),
        p_distance=int(distance.max()) if distance.numel() else 0,
        t_share=float((difference[..., :-1] > 0).float().mean()),
        t_error=float(relative[..., :-1].max()),
        l_error=float(relative[..., -1].max()),
        out_steps=output_steps(gpu_out, want, inputs(case)[2]),
        lse_error=_lse_error(lse[live], gpu_lse[live]) if bool(live.any()) and same_dead else float(not same_dead),
    )


def _lse_error(lse: Tensor, gpu_lse: Tensor) -> float:
    return float(((lse - gpu_lse).abs() / (gpu_lse.abs() / 16).clamp_min(1)).max())


def output_steps(got: Tensor, want: Tensor, value: Tensor, slack: Tensor | float = 0.0) -> float:
    """The largest |got - want| in steps of the output's dtype, after what some float32 rounding units of the largest
    value, and `slack`, explain: 1 / l is an approximation, and an output near zero is a difference of larger terms."""
    difference = (got.double() - want.double()).abs() - slack - 2.0**-21 * float(value.double().abs().max())
    step = torch.finfo(got.dtype).eps * torch.exp2(torch.floor(torch.log2(want.double().abs().clamp_min(1e-30))))
    return float((difference / step).clamp_min(0).max()) if got.numel() else 0.0


def _codes(p: Tensor) -> Tensor:
    """E4M3 bytes or float16 as integers whose order is that of the (non-negative) values."""
    return (p if p.dtype == torch.uint8 else p.view(torch.int16)).int()


def values(p: Tensor) -> Tensor:
    """The operand P, E4M3 codes or float16, as float32."""
    return e4m3_value(p) if p.dtype == torch.uint8 else p.float()
