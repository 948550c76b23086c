"""How much faster than exact attention the mma.sync kernels should be on a card that is not here: a prediction.

A warp works through a tile strictly in order: products on the tensor cores, then everything else. `W` warps share a
scheduler, and while one waits the others work. So a tile of 16 rows and 128 keys takes a scheduler

    max(tensor, MUFU, shared memory, issue slots, (tensor + latency * other instructions) / W)

clocks, where the first four are what its units need at the least, and the last is what one warp needs alone. The
instructions are counted in the machine code (tile_counts.json, scripts/count_tiles.py), the tensor cores' rates and the
clocks are those of data sheets (cards.json). `latency`, clocks of an instruction that waits for the one before, is what
fits the H200's measurements of these kernels and the published ones of others: docs/cards.md shows both beside the
model. Exact attention is FlashAttention-2 on the same tensor cores. Standard library only.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sage_patch.cards.table import Card, find
from sage_patch.recipes import RECIPES, Recipe

COUNTS = Path(__file__).with_name("tile_counts.json")
LATENCIES = (8.0, 5.5, 4.0)  # the slowest, the likely and the fastest of what was seen
# Architecture of tile_counts.json by compute capability.
ARCHITECTURES = {
    (8, 0): "80", (8, 6): "86", (8, 7): "86", (8, 9): "89", (10, 0): "100", (10, 3): "100", (11, 0): "110",
    (12, 0): "120", (12, 1): "120",
}  # fmt: skip
_MACS = {"s8": 16 * 8 * 32, "s4": 16 * 8 * 64, "f16": 16 * 8 * 16, "e4m3": 16 * 8 * 32}  # of one instruction of a warp
# FlashAttention-2: instructions beside the tensor cores' for 16 rows and 128 keys, from its 204 TOPS on an A100.
EXACT_OTHER = 766
LENGTHS = (2048, 4096, 8192, 16384, 32768, 65536, 131072)
HEADS = 32  # of the calls whose gains are listed, batch 1
CROSSOVER_HEADS = 128  # batch x heads where break-even lengths are measured (backends.py)
# The pre-processing: keys and values, one channel of each, that an SM rewrites in a clock, at the most (measured on an
# H200); the share of the DRAM's rate that it reaches; and what further launches cost a call.
PAIRS_A_CLOCK, DRAM_SHARE, LAUNCHES_US = 1.1, 0.85, 12.0
MARGIN, SHORTEST = 2, 1024  # of a predicted break-even length before the product uses it; and no less than that


@dataclass(frozen=True)
class Range:
    """Of one figure: with the slowest, the likely and the fastest latency."""

    low: float
    likely: float
    high: float


@functools.cache
def kernels() -> Mapping[str, list[dict[str, Any]]]:
    """Instructions of one warp and 64 keys, by architecture."""
    return json.loads(COUNTS.read_text(encoding="utf-8"))["kernels"]


def kernel_of(card: Card, head_dim: int, recipe: Recipe, sums: str | None = None) -> dict[str, Any] | None:
    """The counted kernel that runs a recipe on a card, dense; None if none does. sums: None for the card's own choice.

    INT4 is None where the tensor cores have none: it runs as INT8 there, and gains nothing.
    """
    architecture = ARCHITECTURES.get(card.capability)
    if architecture is None or not card.rates or recipe.is_exact or head_dim > 256:
        return None
    dim = next(d for d in (64, 128, 256) if d >= head_dim)
    return find_kernel(architecture, dim, recipe, sums or ("fp16" if recipe.pv in card.fp16_sums else "fp32"))


def find_kernel(architecture: str, dim: int, recipe: Recipe, sums: str) -> dict[str, Any] | None:
    """The row of an architecture's kernel; where it has none with sums in fp16, that with sums in fp32."""
    rows = {
        row["sums"]: row
        for row in kernels()[architecture]
        if (row["head_dim"], row["bits"], row["pv"]) == (dim, recipe.qk_bits, recipe.pv)
    }
    return rows.get(sums) or rows.get("fp32")


def warps_a_scheduler(kernel: Mapping[str, Any], shared_kib: int, architecture: str) -> float:
    """How many warps of this kernel a scheduler holds, by registers, shared memory and the limit of threads."""
    threads = 32 * kernel["warps"]
    registers = -(-kernel["registers"] // 8) * 8 * threads
    most_threads = 2048 if architecture in ("80", "90a", "100", "110") else 1536
    ctas = min(65536 // registers, shared_kib * 1024 // (kernel["shared_bytes"] + 1024), most_threads // threads)
    return max(ctas, 1) * kernel["warps"] / 4


def tile_clocks(
    kernel: Mapping[str, Any], rates: Mapping[str, float], shared_kib: int, architecture: str, latency: float
) -> dict[str, float]:
    """Clocks of one scheduler for 16 rows and 128 keys, all channels: by what limits them, and "tile", the largest."""
    share = 128 / 64 * 16 / kernel["rows"] * (2 if kernel["head_dim"] > 128 else 1)  # 256 channels are two launches
    tensor = sum(
        share * n * _MACS[kind.removesuffix("_fp16")] / (rates[kind] / 4)
        for kind, n in ((_kind(operation), n) for operation, n in kernel["tensor"].items())
    )
    other = share * sum(kernel[unit] for unit in ("mufu", "fp32", "alu", "ldsm", "other"))
    found = {
        "tensor": tensor,
        "mufu": share * 8 * kernel["mufu"],
        "shared memory": share * 16 * kernel["ldsm"],
        "issue": other + share * (kernel["nop"] + sum(kernel["tensor"].values())),
        "one warp": (tensor + latency * other + share * kernel["nop"])
        / warps_a_scheduler(kernel, shared_kib, architecture),
    }
    return found | {"tile": max(found.values())}


def _kind(operation: str) -> str:
    """Of a tensor-core instruction, as cards.json writes rates."""
    name = {"IMMA.16832.S8": "s8", "IMMA.16864.S4": "s4"}.get(operation)
    return name or ("f16" if operation.startswith("HMMA") else "e4m3") + ("_fp16" if operation.endswith(".F16") else "")


def exact_clocks(card: Card, head_dim: int) -> float:
    """The same of exact attention in 16 bits with fp32 sums."""
    dim = next(d for d in (64, 128, 256) if d >= head_dim)
    if card.exact_tops:
        return _tops_to_clocks(card, dim, card.exact_tops * min(1.0, (dim / 128) ** 0.5))
    assert card.rates is not None
    tensor = 2 * dim * _MACS["f16"] / (card.rates["f16"] / 4)
    return max(tensor, (tensor + LATENCIES[1] * EXACT_OTHER) / (3 if dim == 64 else 2))


def exact_tops(card: Card, head_dim: int) -> float:
    """TOPS of exact attention in 16 bits that the model takes."""
    dim = next(d for d in (64, 128, 256) if d >= head_dim)
    return _tops_to_clocks(card, dim, exact_clocks(card, dim))  # the relation is its own inverse


def _tops_to_clocks(card: Card, dim: int, tops: float) -> float:
    return 4 * 16 * 128 * dim * card.sms * 4 * card.boost_ghz / tops / 1e3


def tops(card: Card, head_dim: int, recipe: Recipe, sums: str | None = None) -> Range | None:
    """TOPS of the attention kernel alone at the boost clock; None where no kernel of the recipe gains anything."""
    if not card.sms:
        return None
    clocks = _each_latency(card, head_dim, recipe, sums)
    if clocks is None:
        return None
    dim = next(d for d in (64, 128, 256) if d >= head_dim)
    return Range(*(4 * 16 * 128 * dim * card.sms * 4 * card.boost_ghz / c / 1e3 for c in clocks))


def _each_latency(card: Card, head_dim: int, recipe: Recipe, sums: str | None = None) -> tuple[float, ...] | None:
    kernel = kernel_of(card, head_dim, recipe, sums)
    if kernel is None or card.rates is None:
        return None
    architecture = ARCHITECTURES[card.capability]
    return tuple(
        tile_clocks(kernel, card.rates, card.shared_kib, architecture, latency)["tile"] for latency in LATENCIES
    )


def gain(card: Card, head_dim: int, recipe: Recipe, length: int, heads: int = HEADS) -> Range | None:
    """Time of exact attention over the time of the whole quantized call, q_len = kv_len = length, no mask.

    heads: batch x heads. None as `tops`.
    """
    clocks = _each_latency(card, head_dim, recipe) if card.sms else None
    if clocks is None:
        return None
    tiles = heads * (length / 16) * (length / 128) / (card.sms * 4 * card.boost_ghz * 1e3)  # microseconds a clock
    before = prepare_us(card, head_dim, recipe, length, heads) + LAUNCHES_US
    exact = tiles * exact_clocks(card, head_dim)
    return Range(*(exact / (tiles * c + before) for c in clocks))


def prepare_us(card: Card, head_dim: int, recipe: Recipe, length: int, heads: int) -> float:
    """Microseconds of the pre-processing: one pass reads K and V once and writes their images."""
    pairs = float(heads) * length * head_dim
    moved = pairs * (4 + recipe.qk_bits / 8 + (1 if recipe.pv == "fp8" else 2))
    return max(pairs / (PAIRS_A_CLOCK * card.sms * card.boost_ghz * 1e3), moved / (DRAM_SHARE * card.dram_gbs * 1e3))


def break_even(gain_at: Callable[[int], float]) -> int | None:
    """The shortest multiple of 256 from which on a gain is at least 1; None if it is below at 128K."""
    if gain_at(131072) < 1:
        return None
    low, high = 1, 512  # in steps of 256
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if gain_at(256 * middle) >= 1 else (middle + 1, high)
    return 256 * low


def break_even_lengths(name: str) -> dict[str, Any] | None:
    """A card's entry for the table of break-even lengths, for a card that was never measured; None without a model.

    Twice the predicted length, no less than 1,024 tokens; a recipe that the model does not know, or sees no gain for,
    is never run. Causal calls do half the work on the same keys: their lengths are those at which half the gain pays.
    """
    card = find(name)
    if card is None or not card.sms or card.capability not in ARCHITECTURES:
        return None
    head_dims: dict[str, Any] = {}
    for dim in (64, 128, 256):
        modes: dict[str, dict[str, int | None]] = {"full": {}, "causal": {}}
        for recipe in RECIPES.values():
            if recipe.is_exact or recipe.qk_bits != 8:
                continue
            for mode, factor in (("full", 1), ("causal", 2)):
                length = predicted_break_even(card, dim, recipe)
                modes[mode][recipe.name] = None if length is None else max(MARGIN * factor * length, SHORTEST)
        head_dims[str(dim)] = modes
    return {"measured": "predicted, never timed on this card (docs/cards.md)", "head_dims": head_dims}


def predicted_break_even(card: Card, head_dim: int, recipe: Recipe) -> int | None:
    """The likely break-even length at batch x heads = 128; None: none."""
    if gain(card, head_dim, recipe, LENGTHS[0]) is None:
        return None

    def likely(length: int) -> float:
        found = gain(card, head_dim, recipe, length, CROSSOVER_HEADS)
        return found.likely if found else 0.0

    return break_even(likely)
