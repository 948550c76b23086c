"""What each precision recipe is, and the facts of a call that decide whether it runs.

Standard library only, so that policies can be planned and printed without torch. A recipe names how one attention call
is computed; what a recipe covers where is asked of backends.py.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from sage_patch.errors import SagePatchError

Smooth = Literal["none", "k", "q", "qk"]
Rotate = Literal["none", "hadamard", "auto"]  # of names and policies; "auto": left open
Exponent = Literal["exact", "duo", "chord"]
Granularity = Literal["tensor", "block", "warp", "thread", "token"]
Tiling = Literal["mma", "wgmma"]
ExactBackend = Literal["torch", "fa3"]  # what computes exact calls
QK_BITS = (4, 8)  # widths of Q and K that are computed


class UnsupportedCall(SagePatchError, ValueError):
    """The call cannot be computed as asked: no kernel covers it, and the exact path was not allowed or not asked."""


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
    rotate: "hadamard": Q and K are multiplied by a Hadamard matrix after smoothing and before quantization, which
        spreads outlier channels over all of them and changes no score (reference/rotation.py).
    exp: how 2^x is formed on its way to E4M3: "exact" in float32; by integer arithmetic "duo", two chords, to 0.5 %,
        or "chord", one, within 6 %: in tiles of integer scores that are seen whole, exactly elsewhere (edges of masks,
        additive masks, softcap) and where scores are too far apart. Only with P in fp8, INT8, and Q's mean kept.
    granularity: how many tokens share one INT scale; "thread" is the paper's per-thread grouping (section 3.2).
    tiling: whose thread layout "warp" and "thread" mean: mma.sync (128x64 tiles, 32 rows a warp) or
        wgmma (128 keys a tile, 16 rows a warp).

    And what else is known of a row of RECIPES:
    self_test_bound: relative L1 error of attention on the self-test's input, against float64, that `sage-patch env`
        allows: measured on the reference backend, plus half. A recipe without one fails the self-test.
    column: how the benchmark's columns of its compiled kernel begin; "" where it is not timed.
    cost: attention time relative to exact attention, pre-processing included, on the cards that calibration knows;
        empty: calibration does not choose it.
    open: what the name leaves open of "rotate" and "exp": the row's value where the backend of a call computes it, and
        "none" or "exact" elsewhere (backends.as_run). The name that is counted says so: a part that is not named in it
        ran as the row has it.
    narrower: of a recipe with something open, what runs without rotation, without its exponent, and without both.
    without_fp8: of the default recipe, what it means on cards whose tensor cores have no FP8 (backends.of_device).

    Raises ValueError for a width of Q and K, or a type of P and V, that nothing computes.
    """

    name: str
    qk_bits: int = 0
    pv: Literal["fp8", "fp16", "none"] = "none"
    smooth: Smooth = "none"
    smooth_v: bool = False
    rotate: Literal["none", "hadamard"] = "none"
    exp: Exponent = "exact"
    granularity: Granularity = "thread"
    tiling: Tiling = "wgmma"
    self_test_bound: float | None = field(default=None, compare=False)
    column: str = field(default="", compare=False)
    cost: Mapping[str, float] = field(default_factory=dict, compare=False)
    open: frozenset[str] = field(default=frozenset(), compare=False)
    narrower: tuple[Recipe, Recipe, Recipe] | None = field(default=None, compare=False, repr=False)
    without_fp8: Recipe | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if (self.qk_bits, self.pv) != (0, "none") and (self.qk_bits not in QK_BITS or self.pv not in ("fp8", "fp16")):
            raise ValueError(
                f"recipe {self.name!r}: nothing computes {self.qk_bits}-bit Q and K with P and V in {self.pv!r}; "
                f"there are {' and '.join(map(str, QK_BITS))} bits, fp8 and fp16"
            )

    @property
    def is_exact(self) -> bool:
        return self.qk_bits == 0

    @property
    def has_exponent(self) -> bool:
        """Its scores are integers that its `exp` can take."""
        return self.exp == "exact" or (self.pv == "fp8" and self.qk_bits == 8 and not self.smooth_q)

    @property
    def smooth_q(self) -> bool:
        return "q" in self.smooth

    @property
    def smooth_k(self) -> bool:
        return "k" in self.smooth


_OPEN = frozenset(("rotate", "exp"))


def _with_narrower(recipe: Recipe, open: frozenset[str] = _OPEN) -> Recipe:
    """A recipe that knows what runs where a backend has not what its name leaves open."""
    if recipe.is_exact:
        return recipe
    recipe = replace(recipe, open=open)
    if "exp" in recipe.open and not recipe.has_exponent:
        recipe = replace(recipe, exp="exact")
    plain = {"rotate": "none", "exp": "exact"}

    def without(*keys: str) -> Recipe:
        changes = {k: plain[k] for k in keys if k in recipe.open and getattr(recipe, k) != plain[k]}
        base, _, tail = recipe.name.partition(":")
        kept = [part for part in tail.split(",") if part and part.partition("=")[0].strip() not in changes]
        parts = kept + [f"{key}={value}" for key, value in changes.items()]
        name = f"{base}:{','.join(parts)}" if parts else base
        return replace(recipe, name=name, open=recipe.open - set(changes), **changes)  # type: ignore[arg-type]

    if not recipe.open:
        return recipe
    return replace(recipe, narrower=(without("rotate"), without("exp"), without("rotate", "exp")))


# Costs on "hopper": docs/results/kernels_h200.json; its tensor cores have no INT4, which runs as INT8 with more around
# it: never cheaper than INT8, and how much dearer was not measured. Any number from INT8's on keeps it off the ladder.
# On "ada": speeds that SageAttention's authors publish for their kernels on an RTX 4090. choose.py names the sources.
EXACT = Recipe("exact", self_test_bound=5e-4, cost={"hopper": 1.0, "ada": 1.0})

# The most precise first.
RECIPES: dict[str, Recipe] = {
    r.name: _with_narrower(r)
    for r in (
        EXACT,
        Recipe(
            "qk_int8_pv_fp16", 8, "fp16", smooth="k", rotate="hadamard",
            self_test_bound=0.02, column="sage2_pv_fp16", cost={"hopper": 0.85, "ada": 0.51},
        ),
        Recipe(
            "qk_int8_pv_fp8", 8, "fp8", smooth="k", smooth_v=True, rotate="hadamard", exp="duo",
            self_test_bound=0.06, column="sage2", cost={"hopper": 0.65, "ada": 0.39},
        ),
        Recipe("qk_int4_pv_fp16", 4, "fp16", smooth="qk", rotate="hadamard", self_test_bound=0.3),
        Recipe(
            "qk_int4_pv_fp8", 4, "fp8", smooth="qk", smooth_v=True, rotate="hadamard",
            self_test_bound=0.3, cost={"hopper": 1.0, "ada": 0.34},
        ),
    )
}  # fmt: skip
# What calibration chooses from, the cheapest first.
LADDER = tuple(name for name, recipe in reversed(RECIPES.items()) if recipe.cost)

AUTO = "sage2"  # the default recipe of the device, with the length thresholds of `Limits`
DEFAULT_RECIPE = "qk_int8_pv_fp8"
DEFAULT_WITHOUT_FP8 = "qk_int8_pv_fp16"

_VARIANT_FIELDS: dict[str, tuple[str, ...]] = {
    "smooth": ("none", "k", "q", "qk"),
    "smooth_v": ("on", "off"),
    "rotate": ("none", "hadamard", "auto"),
    "exp": ("exact", "duo", "chord"),
    "granularity": ("tensor", "block", "warp", "thread", "token"),
    "tiling": ("mma", "wgmma"),
}


def recipe_names() -> list[str]:
    return [AUTO, *RECIPES]


def parse_recipe(text: str) -> Recipe:
    """The recipe behind a name, with variants: `qk_int4_pv_fp8:smooth=none,granularity=block`.

    "sage2" gives the default recipe, which knows what it is on cards without FP8 (`without_fp8`). Variants exist for
    ablations; a compiled kernel covers only what its envelope says. Raises ValueError naming the nearest known word.
    """
    name, _, tail = text.partition(":")
    if name == AUTO:
        twin = _variant(RECIPES[DEFAULT_WITHOUT_FP8], tail, text)
        return replace(_variant(RECIPES[DEFAULT_RECIPE], tail, text), without_fp8=twin)
    if name not in RECIPES:
        raise ValueError(f"unknown recipe {text!r}{nearest(name, recipe_names())}")
    return _variant(RECIPES[name], tail, text)


def _variant(base: Recipe, tail: str, text: str) -> Recipe:
    """`base` with the changes that the tail of a recipe's name says. text: the whole name, for errors."""
    if not tail:
        return base
    if base.is_exact:
        raise ValueError(f"recipe {text!r}: 'exact' has no variants")
    changes: dict[str, object] = {}
    said: list[str] = []
    for part in tail.split(","):
        key, _, value = part.partition("=")
        key, value = key.strip(), value.strip()
        if key not in _VARIANT_FIELDS:
            raise ValueError(f"recipe {text!r}: unknown variant {key!r}{nearest(key, _VARIANT_FIELDS)}")
        if value not in _VARIANT_FIELDS[key]:
            raise ValueError(f"recipe {text!r}: {key} must be one of {', '.join(_VARIANT_FIELDS[key])}; got {value!r}")
        if (key, value) == ("rotate", "auto"):
            continue  # as if it were not said
        changes[key] = (value == "on") if key == "smooth_v" else value
        said.append(f"{key}={value}")
    name = f"{base.name}:{','.join(said)}" if said else base.name
    recipe: Recipe = replace(base, name=name, narrower=None, **changes)  # type: ignore[arg-type]
    return _with_narrower(recipe, _OPEN - set(changes))


def rotated(name: str, rotate: Rotate) -> str:
    """The name of a recipe of this rotation, its other variants as they are; exact attention has none."""
    base, _, tail = name.partition(":")
    if base != AUTO and RECIPES[base].is_exact:
        return name
    parts = [part for part in tail.split(",") if part and part.partition("=")[0].strip() != "rotate"]
    parts += [f"rotate={rotate}"] * (rotate != "auto")
    return f"{base}:{','.join(parts)}" if parts else base


def with_rotation(name: str, rotate: Rotate | None) -> str:
    """The name of a recipe that takes this rotation unless it names one itself; None: as it is."""
    named = any(part.partition("=")[0].strip() == "rotate" for part in name.partition(":")[2].split(","))
    return name if rotate is None or named else rotated(name, rotate)


def as_run(recipe: Recipe, rotates: bool, has_exponents: bool) -> Recipe:
    """What of a recipe runs where calls can be rotated or not, and have exponents by integer arithmetic or not."""
    if recipe.narrower is None or (rotates and has_exponents):
        return recipe
    return recipe.narrower[2 if not (rotates or has_exponents) else int(rotates)]


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

    backend: str  # what computes quantized recipes there: a name of backends.BACKENDS, or "none"
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
    # The card's measured break-even lengths of each recipe: ((batch x heads, length), ...)
    crossover: tuple[tuple[str, tuple[tuple[int, int], ...]], ...] = ()


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


USUAL_LIMITS = Limits()
NO_LIMITS = Limits(min_q_len=1, min_kv_len=1, quantize_fp32=True, crossover=False)
