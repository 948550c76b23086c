"""What each precision recipe is, and what it can do: the envelope.

Standard library only, so that policies can be planned and printed without torch.

A recipe names how one attention call is computed. `why_not` answers, before anything is launched,
whether a recipe covers a call on a backend; the answer is None or a short reason that is counted.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

Smooth = Literal["none", "k", "q", "qk"]
Granularity = Literal["tensor", "block", "warp", "thread", "token"]
Tiling = Literal["mma", "wgmma"]


@dataclass(frozen=True)
class Recipe:
    """How the two matrix products of attention are computed.

    qk_bits: 4 or 8, the integer width of Q and K (symmetric, range +-7 or +-127); 0 means exact attention.
    pv: element type of P and V: "fp8" (E4M3) or "fp16" (the half type of the inputs; fp16 for fp32 inputs).
    smooth: which of Q and K have their mean removed before quantization (SageAttention2, section 3.1).
        K's mean is one vector per head and cannot change the softmax; Q's mean is one vector per block of
        query rows and comes back as an exact correction term.
    smooth_v: V's per-channel mean is removed before E4M3, where it is large enough to matter, and added back to the
        output.
    granularity: how many tokens share one INT scale; "thread" is the paper's per-thread grouping (section 3.2).
    tiling: whose thread layout "warp" and "thread" mean: mma.sync (128x64 tiles, 32 rows a warp) or
        wgmma (128 keys a tile, 16 rows a warp).
    """

    name: str
    qk_bits: int = 0
    pv: Literal["fp8", "fp16", "none"] = "none"
    smooth: Smooth = "none"
    smooth_v: bool = False
    granularity: Granularity = "thread"
    tiling: Tiling = "wgmma"

    @property
    def is_exact(self) -> bool:
        return self.qk_bits == 0

    @property
    def smooth_q(self) -> bool:
        return "q" in self.smooth

    @property
    def smooth_k(self) -> bool:
        return "k" in self.smooth


EXACT = Recipe("exact")

# The ladder, most precise first. Calibration walks it in this order.
RECIPES: dict[str, Recipe] = {
    r.name: r
    for r in (
        EXACT,
        Recipe("qk_int8_pv_fp16", 8, "fp16", smooth="k"),
        Recipe("qk_int8_pv_fp8", 8, "fp8", smooth="k", smooth_v=True),
        Recipe("qk_int4_pv_fp16", 4, "fp16", smooth="qk"),
        Recipe("qk_int4_pv_fp8", 4, "fp8", smooth="qk", smooth_v=True),
    )
}

AUTO = "sage2"  # the default recipe of the device, with the length thresholds of `Limits`
DEFAULT_RECIPE = "qk_int8_pv_fp8"

_VARIANT_FIELDS: dict[str, tuple[str, ...]] = {
    "smooth": ("none", "k", "q", "qk"),
    "smooth_v": ("on", "off"),
    "granularity": ("tensor", "block", "warp", "thread", "token"),
    "tiling": ("mma", "wgmma"),
}


def recipe_names() -> list[str]:
    return [AUTO, *RECIPES]


def parse_recipe(text: str) -> Recipe:
    """The recipe behind a name, with variants: `qk_int4_pv_fp8:smooth=none,granularity=block`.

    "sage2" gives the default recipe. Variants exist for ablations; a compiled kernel covers only what its
    envelope says. Raises ValueError naming the nearest known word.
    """
    name, _, tail = text.partition(":")
    if name == AUTO:
        name = DEFAULT_RECIPE
    if name not in RECIPES:
        raise ValueError(f"unknown recipe {text!r}{nearest(name, recipe_names())}")
    base = RECIPES[name]
    if not tail:
        return base
    if base.is_exact:
        raise ValueError(f"recipe {text!r}: 'exact' has no variants")
    changes: dict[str, object] = {}
    for part in tail.split(","):
        key, _, value = part.partition("=")
        key, value = key.strip(), value.strip()
        if key not in _VARIANT_FIELDS:
            raise ValueError(f"recipe {text!r}: unknown variant {key!r}{nearest(key, _VARIANT_FIELDS)}")
        if value not in _VARIANT_FIELDS[key]:
            raise ValueError(f"recipe {text!r}: {key} must be one of {', '.join(_VARIANT_FIELDS[key])}; got {value!r}")
        changes[key] = (value == "on") if key == "smooth_v" else value
    return replace(base, name=text, **changes)  # type: ignore[arg-type]


def nearest(word: str, known: object) -> str:
    """`; nearest: "x"` for error messages, or the whole list when nothing is close."""
    names = [str(k) for k in known]  # type: ignore[attr-defined]
    close = difflib.get_close_matches(word, names, n=2, cutoff=0.5)
    if close:
        return "; nearest: " + ", ".join(f'"{c}"' for c in close)
    return f"; known: {', '.join(names)}" if names else "; there are none"


class Call(NamedTuple):
    """The static facts of one attention call: what the envelope may look at.

    Everything here is known on the host without reading a tensor's values, so the decision is made
    before any launch, needs no device sync and is constant under torch.compile.
    """

    backend: str  # what computes quantized recipes there: "reference", "sm90", "none"
    device: str  # "cpu", "cuda"
    dtype: str  # "float32", "float16", "bfloat16", "mixed", ...
    head_dim: int
    v_head_dim: int
    num_heads: int
    num_kv_heads: int
    q_len: int
    kv_len: int
    is_causal: bool = False
    top_left: bool = False
    # lengths: each item's keys end somewhere; padding: a bool mask of keys, the same for all heads and queries
    mask: Literal["none", "lengths", "padding", "bool", "float"] = "none"
    window: bool = False
    softcap: bool = False
    sinks: bool = False
    varlen: bool = False
    return_lse: bool = False
    dropout: bool = False
    needs_grad: bool = False
    training: bool = False  # part of a training step (dispatch.is_training), whether or not it needs a gradient itself
    batch: int = 1
    crossover: tuple[tuple[str, int], ...] = ()  # the card's measured break-even length of each recipe


@dataclass(frozen=True)
class Limits:
    """When quantizing cannot pay or was not asked for, although the recipe could do it.

    min_q_len: fewer query rows than this go exact (reason "decode" for one row, "short_q" above).
    min_kv_len: fewer keys than this go exact (reason "short_kv").
    quantize_fp32: fp32 inputs are quantized too; otherwise they go exact (reason "dtype_float32"),
        because who runs fp32 asked for fp32 accuracy.
    crossover: calls that are faster exact by the card's own measurements go exact (reason "short", see
        `breaks_even`). Off wherever a user chose the lengths.
    """

    min_q_len: int = 16
    min_kv_len: int = 128
    quantize_fp32: bool = False
    crossover: bool = True


NO_LIMITS = Limits(min_q_len=1, min_kv_len=1, quantize_fp32=True, crossover=False)

CROSSOVER_HEADS = 128  # batch x heads at which break-even lengths are measured


def breaks_even(recipe: Recipe, call: Call) -> bool:
    """Is the whole quantized call at least as fast as exact attention, by the break-even lengths in `call`?

    A length L was measured with q_len = kv_len = L and batch x heads = CROSSOVER_HEADS. Below it the rewriting of K
    and V (which grows with kv_len, while what it saves grows with q_len) and the start of a kernel cost more than the
    faster products save. So both lengths must reach L, and the call must hold as much work, batch x heads x q_len x
    kv_len, as the measured one: few heads need longer sequences. A recipe without a measured length breaks even.
    """
    length = dict(call.crossover).get(recipe.name, 0)
    work = CROSSOVER_HEADS * length * length
    # The work first: of symbolic lengths each question that is asked becomes a condition of the graph. No call holds
    # as much as 2^62, and no symbol could be compared with it.
    if work >= 1 << 62 or call.batch * call.num_heads * call.q_len * call.kv_len < work:
        return False
    return call.q_len >= length and call.kv_len >= length


def why_not(recipe: Recipe, call: Call, limits: Limits = Limits()) -> str | None:
    """Why `recipe` will not run this call on the backend of its device, or None if it will.

    The reasons are stable words: they are counted, printed in reports and matched in tests.
    """
    if recipe.is_exact:
        return "policy"
    if call.needs_grad:
        return "needs_grad"
    if call.training:
        return "training"
    if call.dropout:
        return "dropout"
    if call.dtype == "float32":
        if not limits.quantize_fp32:
            return "dtype_float32"
    elif call.dtype not in ("float16", "bfloat16"):
        return f"dtype_{call.dtype}"
    if 0 in (call.q_len, call.kv_len, call.head_dim, call.v_head_dim):
        return "empty"
    if call.q_len < limits.min_q_len:
        return "decode" if call.q_len == 1 else "short_q"
    if call.kv_len < limits.min_kv_len:
        return "short_kv"
    if call.backend == "reference":
        # INT8 products of up to 1,024 channels are exact in the float32 matmul that the reference uses.
        return "head_dim" if call.head_dim > 1024 else None
    if call.backend == "sm90":
        return _sm90_why_not(recipe, call) or (_sm90_no_gain(recipe, call) if limits.crossover else None)
    return f"no_kernel_for_{call.device}"


def _sm90_no_gain(recipe: Recipe, call: Call) -> str | None:
    """Why the Hopper kernel would be slower than the exact path, or None. Added masks cost it more than torch."""
    if call.mask == "float":
        return "mask_float"
    return None if breaks_even(recipe, call) else "short"


def _sm90_why_not(recipe: Recipe, call: Call) -> str | None:
    """What the Hopper kernel does not take yet, as stable reasons."""
    if (recipe.granularity, recipe.tiling) != (EXACT.granularity, EXACT.tiling):  # its tiles are what they are
        return "variant"
    if call.dtype == "float32":
        return "dtype_float32"
    if call.head_dim > (128 if recipe.pv == "fp16" or recipe.qk_bits == 4 or recipe.smooth_q else 256):
        return "head_dim"
    held = next(width for width in (64, 128, 256) if width >= call.head_dim)  # V is padded to what holds Q and K
    return "v_head_dim" if call.v_head_dim > held else None
