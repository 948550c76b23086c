"""Which sums of P V are faster on this card, fp16 or fp32: timed with the kernels alone, for `bench --crossover`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from sage_patch.args import plain
from sage_patch.backends import as_run, named
from sage_patch.evaluation.bench import timing
from sage_patch.evaluation.tables import Table
from sage_patch.kernels import accumulators, library, ops
from sage_patch.recipes import RECIPES, Recipe

HEAD_DIMS = (64, 128)
LENGTH, HEADS = 8192, 16
FASTER = 1.02  # fp16 must be this much faster, over both head_dims: equal is fp32
Times = dict[str, dict[str, dict[int, float]]]  # type of P V -> type of sums -> head_dim -> milliseconds


def types_here() -> tuple[str, ...]:
    """The types of P V whose sums can be in either type on the current device; empty where its kernels have one."""
    row = named(ops.backend_for(torch.device("cuda", torch.cuda.current_device())))
    if row is None or not row.has_fp16_sums:
        return ()
    return ("fp8", "fp16") if row.has_fp8 else ("fp16",)


def measure(types: Sequence[str], how: timing.Timing = timing.FROM_REST) -> Times:
    """Times of the attention kernels of the INT8 recipes with these types of P V, with sums in fp32 and in fp16."""
    index = torch.cuda.current_device()
    found: Times = {pv: {"fp32": {}, "fp16": {}} for pv in types}
    for dim in HEAD_DIMS:
        generator = torch.Generator("cuda").manual_seed(dim)
        q, k, v = (torch.randn(1, HEADS, LENGTH, dim, generator=generator, device="cuda").half() for _ in range(3))
        for pv in types:
            for sums in ("fp32", "fp16", "fp32", "fp16"):  # twice in turn: clocks and heat hit both
                with asked(index, pv, sums == "fp16"):
                    call = library.Call(q, k, v, plain(1 / math.sqrt(dim)), recipe_of(pv))
                call.prepare()
                ms = timing.measure(call.forward, how, is_sustained=False).burst_ms
                found[pv][sums][dim] = min(ms, found[pv][sums].get(dim, ms))
    return found


def recipe_of(pv: str) -> Recipe:
    return as_run(next(r for r in RECIPES.values() if (r.qk_bits, r.pv) == (8, pv)), "mma", 64)


@contextmanager
def asked(index: int, pv: str, in_fp16: bool) -> Iterator[None]:
    """Calls on cuda:`index` are packed with this type of sums inside."""
    library.of_device(index)
    before = set(library.sums_in_fp16)
    library.sums_in_fp16.discard((index, pv))
    library.sums_in_fp16.update([(index, pv)] if in_fp16 else [])
    try:
        yield
    finally:
        library.sums_in_fp16.clear()
        library.sums_in_fp16.update(before)


def choose(times: Times) -> dict[str, str]:
    """{"fp8": "fp16" or "fp32", ...}: what is faster, by the geometric mean over head_dims."""
    return {pv: "fp16" if gain_of(found) >= FASTER else "fp32" for pv, found in times.items()}


def gain_of(found: dict[str, dict[int, float]]) -> float:
    ratios = [found["fp32"][dim] / found["fp16"][dim] for dim in found["fp32"]]
    return math.prod(ratios) ** (1 / len(ratios))


def measure_sums(name: str, measured: str, path: Path) -> list[Table]:
    """Measure, and keep what was faster in a table file of break-even lengths. No table where there is no choice."""
    types = types_here()
    if not types:
        return []
    times = measure(types)
    accumulators.write(path, name, choose(times), measured)
    return [sums_table(name, times)]


def sums_table(name: str, times: Times) -> Table:
    rows = [
        (pv, *(f"{found[s][dim]:.3f}" for dim in HEAD_DIMS for s in ("fp32", "fp16")), choose(times)[pv])
        for pv, found in times.items()
    ]
    heads = [f"head_dim {dim}, {s}" for dim in HEAD_DIMS for s in ("fp32", "fp16")]
    return Table(f"Sums of P V on {name}: milliseconds", ("<P V", *heads, "<chosen"), tuple(rows))
