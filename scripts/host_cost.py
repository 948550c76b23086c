#!/usr/bin/env python3
"""Microseconds of the host for one small attention call, layer by layer; on a card, or with a stand-in for its library.

    python scripts/host_cost.py [--out host_cost.json] [--profile]

On a card the kernels are launched as ever, a few calls at a time with an idle GPU, and torch's own SDPA stands beside.
Without one, CPU tensors go the same way up to the library, which is replaced by an empty C function: what is left is
the cost of Python alone. `--profile` prints where `sage_attention` spends it.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import json
import pstats
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from sage_patch import sage_attention  # noqa: E402
from sage_patch.args import plain  # noqa: E402
from sage_patch.kernels import library, ops, torch_private  # noqa: E402
from sage_patch.recipes import DEFAULT_RECIPE, parse_recipe  # noqa: E402
from zoo.plain_library import Silent, in_place  # noqa: E402

ON_CARD = torch.cuda.is_available()
DEVICE = "cuda" if ON_CARD else "cpu"


def microseconds(way: Callable[[], object]) -> float:
    """Median over rounds of five calls, the device idle before each."""
    times = []
    for _ in range(300):
        if ON_CARD:
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(5):
            way()
        times.append((time.perf_counter() - start) / 5 * 1e6)
    return statistics.median(times)


def ways() -> dict[str, Callable[[], object]]:
    """Name -> one call; 64 tokens of two heads."""
    q, k, v = (torch.randn(1, 2, 64, 64, device=DEVICE).bfloat16() for _ in range(3))
    p = [x[0].transpose(0, 1).contiguous() for x in (q, k, v)]
    n = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    ends = torch.tensor([0, 40, 64], dtype=torch.int32, device=DEVICE)
    keys = torch.arange(64, device=DEVICE)[None, None, None] < 50
    pairs = torch.rand(1, 1, 64, 64, device=DEVICE) > 0.2
    args, recipe = plain(0.125, recipe=DEFAULT_RECIPE), parse_recipe(DEFAULT_RECIPE)
    nhd = args._replace(out_layout="NHD")
    views = [x.transpose(1, 2) for x in n]

    def call(*tensors: torch.Tensor, **options: Any) -> Callable[[], object]:
        return lambda: sage_attention(*tensors, recipe=DEFAULT_RECIPE, **options)

    found = {
        "operator, eager": lambda: ops.attend(q, k, v, args),
        "operator, eager, NHD": lambda: ops.attend(*views, nhd),
        "operator, through the dispatcher": lambda: ops.attention(q, k, v, *args),
        "library": lambda: library.forward(q, k, v, args, recipe),
        "sage_attention": call(q, k, v),
        "sage_attention, causal": call(q, k, v, is_causal=True),
        "sage_attention, NHD": call(*n, tensor_layout="NHD"),
        "sage_attention, packed": call(*p, cu_seqlens_q=ends, cu_seqlens_k=ends),
        "sage_attention, key padding": call(q, k, v, attn_mask=keys),
        "sage_attention, mask": call(q, k, v, attn_mask=pairs),
        "sage_attention, too short, exact": lambda: sage_attention(q, k, v),
        "sdpa": lambda: F.scaled_dot_product_attention(q, k, v),
        "sdpa, mask": lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=pairs),
    }
    if ON_CARD:
        made = library.Call(q, k, v, args, recipe)
        found |= {"C: both launches": made.run, "C: K and V alone": made.prepare, "C: attention alone": made.forward}
        found["workspace"] = lambda: torch_private.free(torch_private.allocate(1 << 20, stream))
        stream = torch_private.current_stream(0)
        found["empty_like"] = lambda: torch.empty_like(q)
        found["add"] = lambda: q + q
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with torch.no_grad(), contextlib.nullcontext() if ON_CARD else in_place(Silent(), crossover_length=1024):
        table = ways()
        for way in table.values():
            for _ in range(50):
                way()
        rounds = [{name: microseconds(way) for name, way in table.items()} for _ in range(3)]
        found = {name: min(r[name] for r in rounds) for name in table}
        for name, us in found.items():
            print(f"{us:8.2f} us  {name}")
        if options.profile:
            with cProfile.Profile() as profile:
                for _ in range(5000):
                    table["sage_attention"]()
            pstats.Stats(profile).sort_stats("tottime").print_stats(25)
    if options.out:
        device = torch.cuda.get_device_name() if ON_CARD else "none: Python alone"
        record = {"device": device, "torch": torch.__version__, "host_us_per_call": found}
        options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
