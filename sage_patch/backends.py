"""What computes quantized recipes where: one row a backend, asked by everything that must know. Standard library only.

A backend is a family of kernels for some CUDA compute capabilities, or the reference on a CPU. To add a family: its
functions of (recipe, call) and its row here, its CUDA units, and its row in cuda_kernels/backends.cu
(docs/extending.md).
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from sage_patch import recipes
from sage_patch.recipes import USUAL_LIMITS, Call, Limits, Recipe

Rule = Callable[[Recipe, Call], str | None]  # None, or the reason why not: a stable word


@dataclass(frozen=True)
class Backend:
    """What computes quantized recipes on some devices.

    name: what is counted. device: the type of its devices.
    why_not: what it cannot compute. no_gain: what would be slower than the exact path; None: it is not asked, as where
        nobody uses a backend for its speed.
    kernels: the module with `prepare(index)`, which has everything for the device at hand or raises BuildError, and
        `forward(query, key, value, args: Args, recipe: Recipe) -> (out, lse or None)`.
    pages: the module with `append(pages, key, value)` and `attend(pages, query, args: PageArgs)` of quantized caches;
        None: caches on its devices are stored, and attended exactly.
    architectures: of CUDA devices, compute capability -> the architecture whose machine code it runs, a key of
        `kernels.build.architectures`.
    card: whose cost model calibration takes on its devices.
    rotates: whether it rotates Q and K of this head_dim. has_exponents: it has those of `exp`, duo and chord.
    newer: the architecture whose PTX devices run that came after every row; None: not here.
    card: whose measured cost model calibration takes on its devices; "": what is predicted for the card by its name.
    has_fp8: its devices multiply FP8, as the default recipe does where it can.
    has_fp16_sums: its kernels can sum P V in fp16, which some cards do twice as fast (cards/table.py).
    is_proven: its tests ran on a card of their own. Where they did not, the first use on a device compares its numbers
        with the reference's, and refuses to go on if they differ.
    """

    name: str
    device: Literal["cpu", "cuda"]
    why_not: Rule
    kernels: str
    pages: str | None = None
    no_gain: Rule | None = None
    architectures: Mapping[tuple[int, int], str] = field(default_factory=dict)
    newer: str | None = None
    card: str = ""
    has_fp8: bool = True
    has_fp16_sums: bool = False
    is_proven: bool = True
    rotates: Callable[[int], bool] = lambda head_dim: False
    has_exponents: bool = False

    @property
    def is_compiled(self) -> bool:
        """Kernels of CUDA cards, whose break-even lengths are measured."""
        return bool(self.architectures)

    def architecture(self, capability: tuple[int, int] | None) -> str | None:
        """The architecture whose code CUDA devices of this compute capability run; None: it does not serve them."""
        if (
            capability is not None
            and self.newer
            and capability > max(c for b in BACKENDS.values() for c in b.architectures)
        ):
            return self.newer
        return None if capability is None else self.architectures.get(capability)


def _reference_why_not(recipe: Recipe, call: Call) -> str | None:
    if not recipe.has_exponent:
        return "variant"
    # INT8 products of up to 1,024 channels are exact in the float32 matmul that the reference uses.
    return "head_dim" if call.head_dim > 1024 else None


def _compiled_why_not(recipe: Recipe, call: Call, fp16_head_dim: int = 256, has_exponents: bool = False) -> str | None:
    """What no compiled kernel takes yet. fp16_head_dim: the widest heads with FP16 P V; has_exponents: duo, chord."""
    if (recipe.granularity, recipe.tiling) != ("thread", "wgmma"):  # its tiles are what they are
        return "variant"
    if recipe.exp != "exact" and not (has_exponents and recipe.has_exponent):
        return "variant"
    if recipe.qk_bits not in (4, 8) or recipe.pv not in ("fp8", "fp16"):
        return "variant"
    if call.dtype == "float32":
        return "dtype_float32"
    widest = fp16_head_dim if recipe.pv == "fp16" else 256
    if call.head_dim > (128 if recipe.qk_bits == 4 or recipe.smooth_q else widest):
        return "head_dim"
    held = next(width for width in (64, 128, 256) if width >= call.head_dim)  # V is padded to what holds Q and K
    return "v_head_dim" if call.v_head_dim > held else None


def _sm90_why_not(recipe: Recipe, call: Call) -> str | None:
    """The Hopper kernel's FP16 P V takes 128 channels."""
    return _compiled_why_not(recipe, call, fp16_head_dim=128, has_exponents=True)


def _without_fp8_why_not(recipe: Recipe, call: Call) -> str | None:
    """The same on cards whose tensor cores have no FP8, or only an emulated one in mma.sync."""
    return "no_fp8" if recipe.pv == "fp8" else _compiled_why_not(recipe, call)


def _compiled_no_gain(recipe: Recipe, call: Call) -> str | None:
    """Added masks cost the kernels more than torch."""
    if call.mask == "float":
        return "mask_float"
    return None if breaks_even(recipe, call) else "short"


def _always(head_dim: int) -> bool:
    """Whatever a backend's `why_not` lets through it rotates too."""
    return True


CROSSOVER_HEADS = 128  # batch x heads at which break-even lengths are measured


def breaks_even(recipe: Recipe, call: Call) -> bool:
    """Is the whole quantized call at least as fast as exact attention, by the break-even lengths in `call`?

    A length L was measured with q_len = kv_len = L and so many heads (batch x heads: CROSSOVER_HEADS, and fewer). Below
    it the rewriting of K and V (which grows with kv_len, while what it saves grows with q_len) and the start of a
    kernel cost more than the faster products save. So both lengths must reach L, and the call must hold as much work,
    batch x heads x q_len x kv_len, as the measured one: few heads need longer sequences. One measured point that the
    call reaches is enough (crossover.points sees to it that they agree). Variants go by their recipe's lengths; a
    recipe without any breaks even.
    """
    points = dict(call.crossover).get(recipe.name.partition(":")[0])
    return points is None or any(_reaches(call, heads, length) for heads, length in points)


def _reaches(call: Call, heads: int, length: int) -> bool:
    """Whether both lengths of a call, and its work, are at least those of a measured one."""
    work = heads * length * length
    # The work first: of symbolic lengths each question that is asked becomes a condition of the graph. No call holds
    # as much as 2^62, and no symbol could be compared with it.
    if work >= 1 << 62 or call.batch * call.num_heads * call.q_len * call.kv_len < work:
        return False
    return call.q_len >= length and call.kv_len >= length


# The first row that serves a device computes there.
BACKENDS: dict[str, Backend] = {
    b.name: b
    for b in (
        Backend(
            "sm90",
            "cuda",
            _sm90_why_not,
            kernels="sage_patch.kernels.library",
            pages="sage_patch.kernels.pages",
            no_gain=_compiled_no_gain,
            architectures={(9, 0): "90"},
            card="hopper",
            rotates=_always,
            has_exponents=True,
        ),
        # mma.sync. Compiled, simulated, run on a Hopper card; never timed on a card of their own. Break-even lengths
        # are predicted (cards/model.py).
        Backend(
            "mma",
            "cuda",
            _compiled_why_not,
            kernels="sage_patch.kernels.library",
            pages="sage_patch.kernels.pages",
            no_gain=_compiled_no_gain,
            architectures={(8, 9): "89", (12, 0): "120", (12, 1): "120"},
            has_fp16_sums=True,
            is_proven=False,
            rotates=_always,
        ),
        Backend(
            "mma_fp16",
            "cuda",
            _without_fp8_why_not,
            kernels="sage_patch.kernels.library",
            pages="sage_patch.kernels.pages",
            no_gain=_compiled_no_gain,
            architectures={(8, 0): "80", (8, 6): "86", (8, 7): "86", (10, 0): "100", (10, 3): "100", (11, 0): "110"},
            newer="120",
            has_fp8=False,
            has_fp16_sums=True,
            is_proven=False,
            rotates=_always,
        ),
        Backend(
            "reference",
            "cpu",
            _reference_why_not,
            kernels="sage_patch.kernels.plain",
            pages="sage_patch.reference.pages",
            rotates=_always,
            has_exponents=True,
        ),
    )
}


def named(name: str) -> Backend | None:
    """The row of a backend; None for "none"."""
    return BACKENDS.get(name)


def of_device(recipe: Recipe, backend: str) -> Recipe:
    """What a recipe is on a backend's devices: the default recipe has FP16 P V where the tensor cores have no FP8."""
    row = named(backend)
    return recipe if recipe.without_fp8 is None or row is None or row.has_fp8 else recipe.without_fp8


def find(device: str, capability: tuple[int, int] | None = None) -> str:
    """The name of the backend of devices of this type and, with CUDA, compute capability; "none" if there is none."""
    served = (b for b in BACKENDS.values() if b.device == device and (device == "cpu" or b.architecture(capability)))
    return next((b.name for b in served), "none")


def capabilities() -> str:
    """The compute capabilities that kernels exist for, for messages: "8.9, 9.0 and newer"."""
    named = ", ".join(
        f"{major}.{minor}" for major, minor in sorted({c for b in BACKENDS.values() for c in b.architectures})
    )
    return f"{named} and newer" if any(b.newer for b in BACKENDS.values()) else named


def architecture_of(capability: tuple[int, int]) -> str | None:
    """The architecture whose machine code devices of this compute capability run; None if nothing is compiled."""
    return next((a for b in BACKENDS.values() if (a := b.architecture(capability))), None)


@functools.cache
def module(path: str) -> Any:
    """The module of a row, imported when first asked for."""
    return importlib.import_module(path)


def as_run(recipe: Recipe, backend: str, head_dim: int) -> Recipe:
    """What of a recipe runs on a backend's devices: what its name leaves open decided (recipes.Recipe.open), and the
    default's type of P and V."""
    row = named(backend)
    if row is None:
        return recipe
    return recipes.as_run(of_device(recipe, backend), row.rotates(head_dim), row.has_exponents)


def why_not(recipe: Recipe, call: Call, limits: Limits = USUAL_LIMITS) -> str | None:
    """Why `recipe` will not run this call on the backend of its device, or None if it will.

    The reasons are stable words: they are counted, printed in reports and matched in tests.
    """
    if recipe.is_exact:
        return "policy"
    recipe = as_run(recipe, call.backend, call.head_dim)
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
    backend = named(call.backend)
    if backend is None:
        return f"no_kernel_for_{call.device}"
    reason = backend.why_not(recipe, call)
    if reason is None and limits.crossover and backend.no_gain is not None:
        return backend.no_gain(recipe, call)
    return reason
