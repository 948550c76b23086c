#!/usr/bin/env python3
"""One decoding step of attention over a long cache on this GPU: quantized pages beside 16-bit caches.

    python scripts/gpu_decode.py --out decode.json [--lengths 32768,131072] [--batches 1,8,32]

The shape of Llama-3-8B: 32 query heads, 8 kv heads, head_dim 128, bf16, N(0,1). `attend` is attention over the pages,
`append` the new token's way into them, `step` both; beside them torch's SDPA and FlashAttention-3 over a 16-bit cache,
and `index_copy`, the two copies by which a static cache takes a token. Each candidate runs in a CUDA graph over as many
caches as layers would bring (enough to be far larger than the L2); medians of rounds that visit all candidates in
turn. Every output is compared with float64 in the same run, and memory is what the store holds.
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
import torch.nn.functional as F
from torch import Tensor

from sage_patch.args import PageArgs
from sage_patch.evaluation.bench.measure import gpu_environment
from sage_patch.pages import Pages

HEADS, KV_HEADS, DIM = 32, 8, 128
ROUNDS, REPLAYS = 5, 4
FAR_LARGER_THAN_L2 = 1 << 30  # bytes of 16-bit caches that a graph walks through
MOST_BYTES = 60 << 30

Run = Callable[[int], Tensor]  # of one layer


class Layer:
    """One layer's cache: pages, and the same tokens in bf16, [batch, tokens, kv_heads, dim] in memory."""

    def __init__(self, batch: int, length: int, seed: int):
        generator = torch.Generator("cuda").manual_seed(seed)
        shape = (batch, length, KV_HEADS, DIM)
        self.key, self.value = (
            torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16) for _ in range(2)
        )
        self.pages = Pages(batch, KV_HEADS, DIM, torch.bfloat16, "cuda")
        for start in range(0, length, 8192):
            self.pages.append(*(x[:, start : start + 8192].transpose(1, 2) for x in (self.key, self.value)))


def peers(query: Tensor, layers: list[Layer]) -> dict[str, Run]:
    """Attention over the 16-bit tokens, by name; FlashAttention-3 only where it is installed."""
    batch, length = layers[0].key.shape[:2]
    at = torch.tensor([length - 1], device="cuda")
    # torch's kernels get the layout they are fastest on, FlashAttention-3 its own.
    heads_first = [tuple(x.transpose(1, 2).contiguous() for x in (y.key, y.value)) for y in layers]
    new = torch.randn(batch, KV_HEADS, 1, DIM, device="cuda", dtype=torch.bfloat16)

    def sdpa(i: int) -> Tensor:
        return F.scaled_dot_product_attention(query, *heads_first[i], enable_gqa=True)

    def index_copy(i: int) -> Tensor:
        key, value = heads_first[i]
        key.index_copy_(2, at, new)
        return value.index_copy_(2, at, new)

    found: dict[str, Run] = {"sdpa": sdpa, "index_copy": index_copy}
    try:
        import fa3_fwd_interface as fa3
    except ImportError:
        return found
    lengths = torch.full((batch,), length, dtype=torch.int32, device="cuda")
    tokens_first = query.transpose(1, 2).contiguous()

    def fa3_bf16(i: int) -> Tensor:
        out = fa3.flash_attn_with_kvcache(
            tokens_first, layers[i].key, layers[i].value, cache_seqlens=lengths, causal=True, num_splits=0
        )
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return {**found, "fa3_bf16": fa3_bf16}


def ours(query: Tensor, layers: list[Layer]) -> dict[str, Run]:
    scale = 1 / math.sqrt(DIM)

    def attend(i: int) -> Tensor:
        return layers[i].pages.attend(query, PageArgs(scale=scale))[0]

    def append(i: int) -> Tensor:
        """The last token once more: a step's work, and the store stays as it was."""
        layer = layers[i]
        layer.pages.length -= 1
        layer.pages.append(*(x[:, -1:].transpose(1, 2) for x in (layer.key, layer.value)))
        return query

    def step(i: int) -> Tensor:
        append(i)
        return attend(i)

    return {"attend": attend, "append": append, "step": step}


def microseconds(runs: dict[str, Run], count: int) -> dict[str, float]:
    """Of each candidate, per layer."""
    graphs, kept = {}, []
    for name, run in runs.items():
        for i in range(count):
            run(i)
        torch.cuda.synchronize()
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            kept.append([run(i) for i in range(count)])
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(ROUNDS):
        for name, graph in graphs.items():
            graph.replay()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(REPLAYS):
                graph.replay()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end) * 1e3 / REPLAYS / count)
    return {name: statistics.median(t) for name, t in times.items()}


def error(out: Tensor, query: Tensor, layer: Layer) -> dict[str, float]:
    """Relative L1 and the lowest cosine of a row against float64, over the first two batch items."""
    want, got = [], out[:2].double()
    for b in range(min(2, query.shape[0])):
        for h in range(HEADS):
            key, value = (x[b, :, h // (HEADS // KV_HEADS)].double() for x in (layer.key, layer.value))
            want.append(torch.softmax(key @ query[b, h, 0].double() / math.sqrt(DIM), 0) @ value)
    exact = torch.stack(want).view_as(got[:, :, 0])
    got = got[:, :, 0]
    return {
        "rel_l1": float((got - exact).abs().sum() / exact.abs().sum()),
        "worst_row": float(F.cosine_similarity(got, exact, dim=-1).min()),
    }


def measure(batch: int, length: int) -> dict[str, Any]:
    bytes16 = 2 * batch * length * KV_HEADS * DIM * 2
    count = max(1, min(math.ceil(FAR_LARGER_THAN_L2 / bytes16), MOST_BYTES // (3 * bytes16)))
    layers = [Layer(batch, length, seed) for seed in range(count)]
    query = torch.randn(batch, HEADS, 1, DIM, device="cuda", dtype=torch.bfloat16)
    runs = {**ours(query, layers), **peers(query, layers)}
    errors = {n: error(runs[n](0), query, layers[0]) for n in ("attend", "sdpa", "fa3_bf16") if n in runs}
    times = microseconds(runs, count)
    row: dict[str, Any] = {
        "batch": batch, "kv_len": length, "q_len": 1, "num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": DIM,
        "caches": count, "microseconds": times, "errors": errors,
        "memory": layers[0].pages.nbytes / bytes16,
        "attend_over_sdpa": times["attend"] / times["sdpa"],
        "step_over_sdpa": times["step"] / (times["sdpa"] + times["index_copy"]),
    }  # fmt: skip
    if "fa3_bf16" in times:
        row["attend_over_fa3"] = times["attend"] / times["fa3_bf16"]
        row["step_over_fa3"] = times["step"] / (times["fa3_bf16"] + times["index_copy"])
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="32768,131072")
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    record: dict[str, Any] = {
        "command": f"python scripts/gpu_decode.py --lengths {options.lengths} --batches {options.batches}",
        "environment": gpu_environment(),
        "rows": [],
    }
    for length in map(int, options.lengths.split(",")):
        for batch in map(int, options.batches.split(",")):
            record["rows"].append(measure(batch, length))
            print(json.dumps(record["rows"][-1]), flush=True)
            options.out.write_text(json.dumps(record, indent=1) + "\n")
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
