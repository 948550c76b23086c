#!/usr/bin/env python3
"""What masks, windows, sinks, softcap, padding and packed sequences cost on this GPU, beside the dense call.

    python scripts/gpu_masks.py --out masks.json [--length 32768]

bf16, N(0,1), 32 heads, head_dim 128. Sustained and burst times (each from rest) of the whole call, pre-processing
and mask kernels included, and of torch's own attention with the same mask where it runs; every timed output is compared
with float64 on a few rows in the same run.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "tests")]

from sage_patch.evaluation.bench import timing  # noqa: E402
from sage_patch.evaluation.bench.measure import gpu_environment  # noqa: E402
from zoo.kernel_calls import Extras, forward, make_call  # noqa: E402

HEADS, DIM, ROWS = 32, 128, 16


def exact_rows(
    q: Tensor, k: Tensor, v: Tensor, rows: Tensor, added: Tensor, softcap: float, sinks: Tensor | None
) -> Tensor:
    """float64 attention of some rows of every head; added: float64 [rows, kv_len], -inf where hidden."""
    s = q[:, :, rows].double() @ k.double().transpose(-1, -2) / math.sqrt(q.shape[-1])
    s = (softcap * torch.tanh(s / softcap) if softcap else s) + added
    if sinks is not None:
        s = torch.cat([s, sinks.double()[None, :, None, None].expand(*s.shape[:-1], 1)], -1)
    return torch.softmax(s, -1)[..., : k.shape[2]] @ v.double()


def cases(n: int) -> dict[str, dict[str, Any]]:
    """Name -> options of library.forward, the same mask as an added float64 row function, and torch's own mask."""
    cuda = torch.device("cuda")
    generator = torch.Generator(cuda).manual_seed(1)
    half = torch.rand(1, n, device=cuda, generator=generator) > 0.5
    mixed = torch.rand(1, 1, n, n, device=cuda, generator=generator) > 0.5
    blocks = (torch.rand(n // 128, n // 128, device=cuda, generator=generator) > 0.5).repeat_interleave(128, 0)
    tiles = blocks.repeat_interleave(128, 1)[None, None].clone()
    tiles[..., 0] = True
    bias = torch.randn(1, 1, n, n, device=cuda, generator=generator, dtype=torch.bfloat16)
    sinks = torch.linspace(-2, 6, HEADS, device=cuda)
    keys = torch.arange(n, device=cuda)

    def band(left: int, right: int) -> Callable[[Tensor], Tensor]:
        return lambda rows: hide(~((keys <= rows[:, None] + right) & (keys >= rows[:, None] - left)))

    def hide(hidden: Tensor) -> Tensor:
        return torch.zeros(hidden.shape, dtype=torch.float64, device=cuda).masked_fill(hidden, -math.inf)

    def masked(extras: Extras, added: Callable[[Tensor], Tensor], mask: Tensor) -> dict[str, Any]:
        return {"extras": extras, "added": added, "torch": {"attn_mask": mask}}

    nothing = lambda rows: torch.zeros(1, n, dtype=torch.float64, device=cuda)  # noqa: E731
    causal = band(n, 0)
    return {
        "dense": {"added": nothing, "torch": {}},
        "causal": {"is_causal": True, "added": causal, "torch": {"is_causal": True}},
        "window 1024, causal": {"is_causal": True, "extras": Extras(left=1023), "added": band(1023, 0)},
        "window 512 + 512": {"extras": Extras(left=512, right=512), "added": band(512, 512)},
        "sinks, causal": {"is_causal": True, "extras": Extras(sinks=sinks), "added": causal, "sinks": sinks},
        "softcap 50, causal": {"is_causal": True, "extras": Extras(softcap=50.0), "added": causal, "softcap": 50.0},
        "half of the keys padded": masked(Extras(key_padding=half), lambda rows: hide(~half), half[:, None, None]),
        "bool mask, every tile mixed": masked(Extras(attn_mask=mixed), lambda rows: hide(~mixed[0, 0, rows]), mixed),
        "bool mask, half of the tiles": masked(Extras(attn_mask=tiles), lambda rows: hide(~tiles[0, 0, rows]), tiles),
        "bias, bf16": masked(Extras(attn_mask=bias), lambda rows: bias[0, 0, rows].double(), bias),
    }  # fmt: skip


def measure(name: str, case: dict[str, Any], n: int, recipe: str) -> dict[str, Any]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, HEADS, n, DIM, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    options = {"scale": 1 / math.sqrt(DIM), "recipe": recipe, "is_causal": case.get("is_causal", False)}
    run = lambda: forward(q, k, v, **options, extras=case.get("extras"))[0]  # noqa: E731
    rows = torch.linspace(0, n - 1, ROWS, device="cuda").long()
    want = exact_rows(q, k, v, rows, case["added"](rows), case.get("softcap", 0.0), case.get("sinks"))
    error = float((run()[:, :, rows].double() - want).abs().sum() / want.abs().sum())
    call = make_call(q, k, v, **options, extras=case.get("extras"))
    call.prepare()
    ways: dict[str, Callable[[], Any]] = {"op": run, "prepare": call.prepare, "kernel": call.forward}
    if "torch" in case:
        ways["sdpa"] = lambda: F.scaled_dot_product_attention(q, k, v, **case["torch"])
    row = {
        "case": name, "recipe": recipe, "q_len": n, "kv_len": n, "batch": 1, "num_heads": HEADS, "head_dim": DIM,
        "rel_l1": error,
    }  # fmt: skip
    for way, candidate in ways.items():
        figure = timing.measure(candidate, timing.Timing())
        row |= {f"{way}_ms": figure.sustained_ms, f"{way}_burst_ms": figure.burst_ms}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=32768)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    record: dict[str, Any] = {
        "environment": gpu_environment(),
        "command": f"python scripts/gpu_masks.py --length {options.length}",
    }
    record["rows"] = []
    for name, case in cases(options.length).items():
        for recipe in ("qk_int8_pv_fp8", "qk_int8_pv_fp16"):
            row = measure(name, case, options.length, recipe)
            record["rows"].append(row)
            print({x: round(y, 4) if isinstance(y, float) else y for x, y in row.items()}, flush=True)
            options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
