#!/usr/bin/env python3
"""What packed sequences and padding masks cost on this GPU, against the dense call for the same work.

    python scripts/gpu_packed.py --out packed.json

bf16, N(0,1), 24 heads, head_dim 128. Each case is the whole call of `sage_attention`, as a burst (20 calls after half a
second of rest), sustained (the second half of 1.5 seconds of calls), and on the device alone (20 calls as a graph). The
output of every timed call is compared with float64 on a few rows in the same run.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import sage_patch
from sage_patch.evaluation.bench import timing
from sage_patch.evaluation.bench.measure import gpu_environment

HEADS, DIM, ROWS = 24, 128, 16
SHAPES = ((1, 2048), (1, 6480), (4, 4096))  # batch, tokens


def device_ms(run: Callable[[], Any]) -> float:
    """Time of a call on the device alone: 20 of them as a graph, without the host."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(20):
            run()
    times = []
    for _ in range(10):
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        graph.replay()
        last.record()
        last.synchronize()
        times.append(first.elapsed_time(last) / 20)
    return statistics.median(times)


def cases(batch: int, tokens: int, is_causal: bool) -> dict[str, dict[str, Any]]:
    """Name -> keywords of sage_attention. Packed cases lay the batch end to end."""
    ends = torch.arange(batch + 1, device="cuda", dtype=torch.int32) * tokens
    short = torch.ones(1, 1, 1, tokens, dtype=torch.bool, device="cuda")
    short[..., -1] = False
    scattered = torch.rand(1, 1, 1, tokens, generator=torch.Generator("cuda").manual_seed(1), device="cuda") > 0.02
    packed = {"cu_seqlens_q": ends, "cu_seqlens_k": ends}
    found: dict[str, dict[str, Any]] = {
        "dense": {},
        "dense, NHD": {"tensor_layout": "NHD"},
        "packed": packed,
        "one key hidden": {"attn_mask": short},
        "2 % of the keys hidden": {"attn_mask": scattered},
        "window that hides nothing": {"window": (tokens, tokens)},
    }
    return {name: keywords | {"is_causal": is_causal} for name, keywords in found.items()}


def exact_rows(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, keywords: dict[str, Any]) -> Tensor:
    """float64 attention of some rows of the last sequence, [H, rows, D]."""
    s = q[:, rows].double() @ k.double().transpose(-1, -2) / math.sqrt(q.shape[-1])
    keys = torch.arange(k.shape[1], device=k.device)
    if keywords["is_causal"]:
        s = s.masked_fill(keys > rows[:, None], -math.inf)
    if "attn_mask" in keywords:
        s = s.masked_fill(~keywords["attn_mask"][0, 0, 0], -math.inf)
    return torch.softmax(s, -1) @ v.double()


def measure(batch: int, tokens: int, name: str, keywords: dict[str, Any], recipe: str) -> dict[str, Any]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(batch, HEADS, tokens, DIM, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    given = (q, k, v)
    tokens_first = "cu_seqlens_q" in keywords or "tensor_layout" in keywords
    if tokens_first:
        given = tuple(x.transpose(1, 2).contiguous() for x in given)
    if "cu_seqlens_q" in keywords:
        given = tuple(x.flatten(0, 1) for x in given)
    run = lambda: sage_patch.sage_attention(*given, recipe=recipe, **keywords)  # noqa: E731
    rows = torch.linspace(0, tokens - 1, ROWS, device="cuda").long()
    want = exact_rows(q[-1], k[-1], v[-1], rows, keywords)
    out = run()
    if tokens_first:
        out = out.reshape(batch, tokens, HEADS, DIM).transpose(1, 2)
    out = out[-1][:, rows].double()
    time = timing.measure(run, timing.FROM_REST)
    return {
        "batch": batch, "tokens": tokens, "is_causal": keywords["is_causal"], "case": name, "recipe": recipe,
        "burst_ms": time.burst_ms, "sustained_ms": time.sustained_ms, "device_ms": device_ms(run),
        "rel_l1": float((out - want).abs().sum() / want.abs().sum()),
        "worst_row": float(((out - want).norm(dim=-1) / want.norm(dim=-1)).max()),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--recipe", default="qk_int8_pv_fp8")
    parser.add_argument("--tokens", type=int, action="append", help="of the shapes to measure; default all")
    options = parser.parse_args()
    record: dict[str, Any] = {"environment": gpu_environment(), "command": "python scripts/gpu_packed.py", "rows": []}
    for batch, tokens in (shape for shape in SHAPES if not options.tokens or shape[1] in options.tokens):
        for is_causal in (False, True):
            dense: dict[str, Any] = {}
            for name, keywords in cases(batch, tokens, is_causal).items():
                row = measure(batch, tokens, name, keywords, options.recipe)
                dense = dense or row
                row |= {f"{x}_to_dense": row[f"{x}_ms"] / dense[f"{x}_ms"] for x in ("burst", "sustained", "device")}
                record["rows"].append(row)
                print({x: round(y, 4) if isinstance(y, float) else y for x, y in row.items()}, flush=True)
                options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
