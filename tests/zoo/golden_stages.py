"""The small calls whose every stage is kept from a real GPU (scripts/gpu_golden.py), and how a stage is compared.

Inputs are made here again, from a generator whose stream is frozen, and are checked by their hash; of the stages only
every `keep`-th query row is stored. Arrays of a case: `<name>.scores` and, for each recipe, `<name>.<recipe>.p`, `.m`,
`.t`, `.out`, `.lse` (shapes: sage_patch/reference/emulator/forward.py; sequences laid end to end: each has its own
first tiles).
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sage_patch.reference.emulator import forward as sm90
from sage_patch.reference.emulator import tile_image as ti
from sage_patch.reference.emulator.float32 import e4m3_value, exp2, exp2_band, to_half
from zoo.kernel_calls import Extras, recipe_of

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
    # what the dense kernels do not know, and keys that do not exist
    kv_starts: tuple[int, ...] | None = None  # one an item; its keys are all from there on
    padding: bool = False  # half of the keys do not exist
    left: int = -1
    right: int = -1
    mask: torch.dtype | None = None
    softcap: float = 0.0
    sinks: tuple[float, ...] | None = None  # one a head
    sequences: tuple[tuple[int, int], ...] | None = None  # (q_len, kv_len) of each, after some tokens of none
    int4: bool = False
    rotated: bool = False
    exps: bool = False  # with the other exponents too
    only_exps: bool = False

    @property
    def recipes(self) -> tuple[str, ...]:
        others = tuple(f"{RECIPES[0]}:exp={exp}" for exp in ("duo", "chord")) if self.exps or self.only_exps else ()
        if self.only_exps:
            return others
        return (tuple(r.replace("int8", "int4") for r in RECIPES) if self.int4 else RECIPES) + others

    @property
    def batch(self) -> int:
        items = self.kv_lens or self.kv_starts
        return len(items) if items else 1

    @property
    def rows(self) -> Tensor:
        """Query rows whose stages are stored."""
        return torch.arange(self.q_len - 1, -1, -self.keep).flip(0)

    @property
    def tiles(self) -> int:
        """Key tiles of a row in the stored arrays."""
        if self.sequences:
            return self.kv_len // ti.TILE_TOKENS + len(self.sequences)
        return (self.kv_len + ti.TILE_TOKENS - 1) // ti.TILE_TOKENS

    @property
    def has_extras(self) -> bool:
        """Something is asked for that Extras says."""
        asked = (self.kv_starts, self.padding, self.mask, self.softcap, self.sinks, self.sequences)
        return any(asked) or self.left >= 0 or self.right >= 0


CASES = (
    Case("d64", 64, 70, 200, torch.float16, heads=3, keep=7, exps=True),
    Case("d128_causal", 128, 70, 200, heads=3, is_causal=True, keep=7, exps=True),
    Case("d128_corner", 128, 33, 77, is_causal=True, top_left=True, k_bias=300.0, v_offset=40.0, keep=3),
    Case("d64_one_row", 64, 1, 129, is_causal=True, k_bias=300.0),
    Case("d128_one_row", 128, 1, 129, torch.float16, v_offset=40.0),
    Case("d64_lengths", 64, 70, 200, is_causal=True, kv_lens=(37, 0, 200), v_offset=40.0, keep=7),
    Case("d64_top_left", 64, 140, 200, torch.float16, heads=1, is_causal=True, top_left=True, k_bias=30.0, keep=10),
    Case("d40_padded", 40, 33, 77, keep=3),
    Case("d128_peaked", 128, 33, 300, logits=8.0, v_outlier=200.0, keep=4),
    Case("d64_peaked", 64, 33, 300, logits=30.0, v_outlier=3.0, is_causal=True, keep=4, exps=True),
    Case("window", 64, 67, 300, heads=1, left=40, right=10, k_bias=4.0, keep=13),
    Case("bool_mask", 64, 67, 300, mask=torch.bool, v_offset=40.0, keep=13, exps=True),
    Case("causal_mask", 128, 20, 200, heads=1, is_causal=True, mask=torch.bool, keep=6),
    Case("float_mask", 64, 20, 300, torch.float16, heads=1, mask=torch.float32, keep=4, exps=True),
    Case("softcap", 64, 67, 150, heads=1, is_causal=True, softcap=5.0, k_bias=4.0, logits=4.0, keep=13),
    Case("softcap_mask", 128, 9, 200, heads=1, softcap=20.0, mask=torch.float16, keep=3),
    Case("sinks", 64, 33, 200, sinks=(1.5, 80.0), left=100, k_bias=4.0, v_offset=8.0, keep=8),
    Case("padding", 64, 33, 300, heads=1, padding=True, v_offset=40.0, keep=8),
    Case("left_padding", 64, 67, 200, heads=1, kv_starts=(9,), is_causal=True, top_left=True, keep=13),
    Case("sequences", 64, 80, 222, heads=1, is_causal=True, keep=5, sequences=((5, 77), (0, 10), (67, 130), (3, 0))),
    Case("steep_exponents", 128, 33, 300, heads=1, logits=300.0, keep=4, only_exps=True),
    Case("int4", 64, 200, 200, torch.float16, heads=1, is_causal=True, k_bias=4.0, keep=37, int4=True),
    Case("int4_d128", 128, 70, 200, v_offset=8.0, keep=31, int4=True),
    Case("int4_padding", 40, 33, 300, heads=1, padding=True, keep=11, int4=True),
    Case("int4_mask", 64, 67, 300, heads=1, mask=torch.float16, softcap=20.0, k_bias=4.0, keep=16, int4=True),
    Case("int4_sequences", 64, 80, 222, heads=1, is_causal=True, keep=7, sinks=(1.5,), int4=True,
         sequences=((5, 77), (0, 10), (67, 130), (3, 0))),
    Case("rotated", 128, 200, 300, is_causal=True, k_bias=300.0, v_offset=8.0, keep=29, rotated=True),
    Case("rotated_d64", 64, 300, 200, torch.float16, heads=1, keep=43, rotated=True),
    Case("rotated_d40", 40, 33, 77, heads=1, kv_lens=(50, 0), keep=16, rotated=True),
    Case("rotated_mask", 128, 67, 200, heads=1, mask=torch.bool, keep=33, rotated=True),
    Case("rotated_softcap", 64, 67, 150, heads=1, softcap=5.0, k_bias=4.0, logits=4.0, keep=33, rotated=True),
    Case("rotated_sinks", 64, 33, 200, heads=1, sinks=(1.5,), left=100, k_bias=4.0, keep=16, rotated=True),
    Case("rotated_padding", 64, 33, 300, heads=1, padding=True, keep=16, rotated=True),
    Case("rotated_sequences", 64, 80, 222, heads=1, is_causal=True, keep=16, rotated=True,
         sequences=((5, 77), (0, 10), (67, 130), (3, 0))),
    Case("rotated_int4", 128, 200, 200, torch.float16, heads=1, is_causal=True, k_bias=4.0, keep=66, int4=True,
         rotated=True),
    Case("rotated_int4_d40", 40, 33, 300, heads=1, padding=True, keep=16, int4=True, rotated=True),
)  # fmt: skip
CALLS = [(case, recipe) for case in CASES for recipe in case.recipes]


def inputs(case: Case) -> list[Tensor]:
    """query, key, value [batch, heads, tokens, head_dim]. Keys that no row sees under a mask and those that do not
    exist hold NaN, their values infinity."""
    random = _random(case)
    shapes = ((case.heads, case.q_len), (case.kv_heads, case.kv_len), (case.kv_heads, case.kv_len))
    q, k, v = (torch.from_numpy(random.standard_normal((case.batch, *s, case.head_dim))) for s in shapes)
    q, k = q * case.logits**0.5, k * case.logits**0.5
    k[..., 3] += case.k_bias
    v += case.v_offset
    v[..., case.kv_len // 2, :] *= max(case.v_outlier, 1.0)
    gone = torch.zeros(case.kv_len, dtype=torch.bool)
    if case.mask is not None:
        gone[_UNSEEN] = True
    if case.padding:
        gone = ~_padding(case)[0]
    k[..., gone, :], v[..., gone, :] = math.nan, math.inf
    return [x.to(case.dtype) for x in (q, k, v)]


_UNSEEN = [3, 50]


def _random(case: Case, seed: int = 0) -> np.random.RandomState:
    return np.random.RandomState(sum(case.name.encode()) + seed)  # its stream never changes, unlike torch's


def _padding(case: Case) -> Tensor:
    keep = torch.from_numpy(_random(case, 1).random_sample((1, case.kv_len)) > 0.5)
    keep[:, 128:160] = False
    return keep


def _mask(case: Case) -> Tensor:
    """[1, heads, q_len, kv_len]: random; whole tiles hidden, seen, zero (float); an empty row (bool); unseen keys."""
    shape = (1, case.heads, case.q_len, case.kv_len)
    draw = _random(case, 2)
    seen = torch.from_numpy(draw.random_sample(shape) > 0.4)
    bias = torch.from_numpy(draw.standard_normal(shape) * 2)
    seen[..., 128:256], bias[..., 128:256] = True, 0.0
    seen[:, 0, : case.q_len // 2, 256:] = False
    if case.heads > 1:
        seen[:, 1, :64, :128] = False
    seen[..., _UNSEEN] = False
    if case.mask == torch.bool:
        seen[..., case.q_len // 3, :] = False
        return seen
    assert case.mask is not None
    bias[..., 60:70] = -10000.0
    return bias.masked_fill(~seen, -math.inf).to(case.mask)


def arguments(case: Case) -> dict[str, Any]:
    """What sm90.emulate is told beside the inputs and the recipe; of sequences, for each alone."""
    return {
        "scale": case.head_dim**-0.5,
        "is_causal": case.is_causal,
        "top_left": case.top_left,
        "kv_lens": case.kv_lens if case.kv_starts is None else [case.kv_len - n for n in case.kv_starts],
        "kv_starts": case.kv_starts,
        "key_padding": _padding(case) if case.padding else None,
        "attn_mask": None if case.mask is None else _mask(case),
        "left": case.left,
        "right": case.right,
        "softcap": case.softcap,
        "sinks": None if case.sinks is None else torch.tensor(case.sinks),
        "rotated": case.rotated,
    }


def offsets(case: Case) -> tuple[list[int], list[int]]:
    """cu_seqlens_q, cu_seqlens_k of the case's sequences."""
    assert case.sequences is not None
    q, k = ([2, *(s[i] for s in case.sequences)] for i in (0, 1))
    return list(itertools.accumulate(q)), list(itertools.accumulate(k))


def on_gpu(case: Case) -> tuple[list[Tensor], dict[str, Any]]:
    """The same call for make_call, on the current GPU: (query, key and value; the options but the recipe).
    The caller keeps them while the call runs."""
    given = arguments(case)
    cu_q, cu_k = offsets(case) if case.sequences else (None, None)

    def numbers(x: Any) -> Tensor | None:
        return None if x is None else torch.tensor(x, dtype=torch.int32, device="cuda")

    def moved(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.cuda()

    extras = Extras(
        attn_mask=moved(given["attn_mask"]),
        key_padding=moved(given["key_padding"]),
        kv_starts=numbers(case.kv_starts),
        left=case.left,
        right=case.right,
        softcap=case.softcap,
        sinks=moved(given["sinks"]),
        cu_seqlens_q=numbers(cu_q),
        cu_seqlens_k=numbers(cu_k),
    )
    options = {
        "scale": given["scale"],
        "is_causal": case.is_causal,
        "causal_top_left": case.top_left,
        "kv_lens": numbers(given["kv_lens"]),
        "return_lse": True,
        "rotated": case.rotated,
        "extras": extras if case.has_extras else None,
    }
    return [x.cuda() for x in inputs(case)], options


def fingerprint(case: Case) -> str:
    given = arguments(case)
    tensors = [*inputs(case), *(x for x in (given["attn_mask"], given["key_padding"]) if x is not None)]
    return hashlib.sha256(b"".join(x.contiguous().view(torch.uint8).numpy().tobytes() for x in tensors)).hexdigest()


@dataclass(frozen=True)
class Part:
    """What the kernel computes as if alone: the whole call, or one of its sequences."""

    stages: sm90.Stages
    value: Tensor
    first: int  # row of the call

    @property
    def rows(self) -> slice:
        """Its rows in arrays of the whole call."""
        return slice(self.first, self.first + self.stages.scores.shape[2])

    @property
    def tiles(self) -> int:
        return self.stages.m.shape[-1]


def _exponent(recipe: str) -> str:
    """As the name has it: exact unless it says more."""
    return recipe_of(recipe).exp


@functools.cache
def emulated(case: Case, recipe: str) -> tuple[Part, ...]:
    tensors, given = inputs(case), arguments(case)
    name, given["exp"] = recipe.partition(":")[0], _exponent(recipe)
    if case.sequences is None:
        return (Part(sm90.emulate(*tensors, recipe=name, **given), tensors[2], 0),)
    cu = offsets(case)
    parts = zip(sm90.sequences(*tensors, *cu), cu[0], strict=False)
    return tuple(Part(sm90.emulate(*x, recipe=name, **given), x[2], first) for x, first in parts if x[0].shape[2])


@dataclass
class Findings:
    """How the stages of a GPU differ from the emulator's; each stage is computed from the GPU's stage before it."""

    scores_equal: bool
    m_equal: bool  # softcap: within the bounds of the logits
    p_outside_band: int  # codes that no exponential within its band gives
    p_differ: int  # codes that differ at all
    p_open: int  # codes that the band leaves open
    p_visible: int  # visible keys
    p_distance: int  # the largest difference, in codes
    t_share: float  # of partial sums that differ (fp8: of any bit)
    t_error: float  # largest difference relative to the sum of magnitudes (fp8: of the tile; fp16: of all so far)
    l_error: float  # relative, of the row sums
    out_steps: float  # largest difference of an output, see `output_steps`
    lse_error: float  # absolute up to 16, relative to |lse| / 16 above, where float32's own step grows with it


def compare(case: Case, recipe: str, got: Mapping[str, np.ndarray]) -> Findings:
    """got: the arrays of one file. The worst over the call's parts; counts are sums."""
    found = [compare_part(case, recipe, part, got) for part in emulated(case, recipe)]
    merge = {"scores_equal": all, "m_equal": all}
    merge |= dict.fromkeys(("p_outside_band", "p_differ", "p_open", "p_visible"), sum)
    return Findings(**{n: merge.get(n, max)([getattr(f, n) for f in found]) for n in vars(found[0])})


def compare_part(case: Case, recipe: str, part: Part, got: Mapping[str, np.ndarray]) -> Findings:
    s, fp16, tiles = part.stages, recipe.endswith("fp16"), part.tiles
    mine = (case.rows >= part.rows.start) & (case.rows < part.rows.stop)
    rows = case.rows[mine] - part.first  # of the part

    def stored(name: str, width: int | None = None) -> Tensor:
        x = torch.from_numpy(got[f"{case.name}.{name}"])[:, :, mine]
        return x if width is None else x[:, :, :, :width]

    scores, p = (stored(x, tiles * ti.TILE_TOKENS) for x in ("scores", f"{recipe}.p"))
    m, t = (stored(f"{recipe}.{x}", tiles) for x in ("m", "t"))
    walked = s.walked[:, :, rows].expand(m.shape)
    seen = walked.repeat_interleave(ti.TILE_TOKENS, -1)
    my_scores, steps, dot = s.scores[:, :, rows], s.steps[:, :, rows], s.queries.dot[:, :, rows]
    changed = None
    m_low = m_high = m_again = sm90.reference_exponents(my_scores, steps, None, fp16)
    if s.logits is not None:
        changed = sm90.Logits(*(x[:, :, rows] for x in vars(s.logits).values()))
        m_again, m_low, m_high = (
            sm90.reference_exponents(my_scores, steps, replace(changed, x=changed.x + side * changed.error), fp16)
            for side in (0, -1, 1)
        )

    # what follows from the GPU's own m
    m_gpu = torch.where(walked, m, m_again)
    factors = sm90.factors_of(m_gpu)
    exponents, low, high = sm90.exponents_of(my_scores, steps, changed, m_gpu)
    exp = _exponent(recipe)
    band = (
        exact if exp == "exact" else sm90.replace_by_bits(exact, s.by_bits[:, :, rows], my_scores, steps, m_gpu, exp)
        for exact in (
            sm90.probabilities(x, my_scores, fp16) for x in (exp2(exponents), exp2_band(low)[0], exp2_band(high)[1])
        )
    )
    codes, want, low, high = (_codes(x)[seen] for x in (p, *band))
    distance = (codes - want).abs()

    # what follows from the GPU's own P
    per = case.heads // case.kv_heads
    images = {
        n: x.view(case.batch, case.kv_heads, *x.shape[1:]).repeat_interleave(per, 1) for n, x in vars(s.images).items()
    }
    p_again = torch.where(seen, p, torch.zeros_like(p))
    if fp16:
        weights = torch.where(my_scores == sm90.HIDDEN, 0.0, exp2(exponents))
        again = sm90.accumulate_fp16(p_again, weights, images["v"], factors)
        magnitude = sm90.accumulate_fp16(p_again, weights, images["v"].abs(), factors)
        total = torch.zeros(*m.shape[:3], again.shape[-1])
        for tile in reversed(range(tiles)):  # of the last tile that the row walked
            total = torch.where(walked[..., tile, None], t[..., tile, :], total)
    else:
        again = sm90.partial_sums_fp8(p_again, images["v"])
        magnitude = sm90.partial_sums_fp8(p_again, images["v"] & 0x7F)
        total = sm90.fold_fp8(torch.where(walked[..., None], t, 0.0), factors)
    difference = torch.where(walked[..., None], (t - again).abs(), 0.0)
    relative = difference / magnitude.clamp_min(1e-30)
    sinks = None if case.sinks is None else torch.tensor(case.sinks)
    out, lse = sm90.finish(total, m_gpu, images["v_scale"], images["v_mean"], dot, sinks, case.softcap)
    gpu_out, gpu_lse = stored_rows(case, recipe, got, part)
    gpu_out, gpu_lse = gpu_out[:, :, rows], gpu_lse[:, :, rows]
    live = lse.isfinite() & gpu_lse.isfinite()
    same_dead = bool((lse.isinf() == gpu_lse.isinf()).all())
    return Findings(
        scores_equal=torch.equal(scores[seen], my_scores[seen]),
        m_equal=bool(((m_low <= m) & (m <= m_high))[walked].all()),
        p_outside_band=int(((codes < low) | (codes > high)).sum()),
        p_differ=int((distance > 0).sum()),
        p_open=int((low < high).sum()),
        p_visible=int((seen & s.visible[:, :, rows]).sum()),
        p_distance=int(distance.max()) if distance.numel() else 0,
        t_share=float((difference[..., :-1] > 0).float().mean()) if difference.numel() else 0.0,
        t_error=float(relative[..., :-1].max()) if relative.numel() else 0.0,
        l_error=float(relative[..., -1].max()) if relative.numel() else 0.0,
        out_steps=output_steps(gpu_out, to_half(out[..., : case.head_dim], case.dtype), part.value),
        lse_error=_lse_error(lse[live], gpu_lse[live]) if bool(live.any()) and same_dead else float(not same_dead),
    )


def stored_rows(case: Case, recipe: str, got: Mapping[str, np.ndarray], part: Part) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of a part, all of its rows."""
    out, lse = (torch.from_numpy(got[f"{case.name}.{recipe}.{n}"])[:, :, part.rows] for n in ("out", "lse"))
    return out.view(case.dtype), lse


def stages_of_the_emulator(case: Case, recipe: str) -> dict[str, np.ndarray]:
    """The arrays of a file, as the emulator would write them."""
    rows, n = (case.batch, case.heads, case.q_len), case.tiles * ti.TILE_TOKENS
    dim = sm90.padded_dim(case.head_dim)
    arrays = {
        "scores": torch.zeros(*rows, n, dtype=torch.int32),
        "p": torch.zeros(*rows, n, dtype=torch.float16 if recipe.endswith("fp16") else torch.uint8),
        "m": torch.zeros(*rows, case.tiles),
        "t": torch.zeros(*rows, case.tiles, dim + 1),
        "out": torch.zeros(*rows, case.head_dim, dtype=case.dtype),
        "lse": torch.full(rows, -math.inf),
    }
    for part in emulated(case, recipe):
        for name, x in arrays.items():
            mine = getattr(part.stages, name)
            (x[:, :, part.rows] if x.ndim == 3 else x[:, :, part.rows, : mine.shape[3]]).copy_(mine)
    return to_store(case, recipe, arrays)


def to_store(case: Case, recipe: str, stages: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    """Stages of a whole call under their names in the file, stored rows only (outputs: all rows)."""
    kept = {n: x if n in ("out", "lse") else x[:, :, case.rows] for n, x in stages.items()}
    kept["out"] = kept["out"].view(torch.int16)
    names = {n: f"{case.name}.{n}" if n == "scores" else f"{case.name}.{recipe}.{n}" for n in kept}
    return {names[n]: x.cpu().numpy().copy() for n, x in kept.items()}


def _lse_error(lse: Tensor, gpu_lse: Tensor) -> float:
    return float(((lse - gpu_lse).abs() / (gpu_lse.abs() / 16).clamp_min(1)).max())


def output_steps(got: Tensor, want: Tensor, value: Tensor, slack: Tensor | float = 0.0) -> float:
    """The largest |got - want| in steps of the output's dtype, after what some float32 rounding units of the largest
    value, and `slack`, explain: 1 / l is an approximation, and an output near zero is a difference of larger terms."""
    top = torch.where(value.isfinite(), value, 0.0).double().abs().amax() if value.numel() else 0.0
    difference = (got.double() - want.double()).abs() - slack - 2.0**-21 * float(top)
    step = torch.finfo(got.dtype).eps * torch.exp2(torch.floor(torch.log2(want.double().abs().clamp_min(1e-30))))
    return float((difference / step).clamp_min(0).max()) if got.numel() else 0.0


def _codes(p: Tensor) -> Tensor:
    """E4M3 bytes or float16 as integers whose order is that of the (non-negative) values."""
    return (p if p.dtype == torch.uint8 else p.view(torch.int16)).int()


def values(p: Tensor) -> Tensor:
    """The operand P, E4M3 codes or float16, as float32."""
    return e4m3_value(p) if p.dtype == torch.uint8 else p.float()
