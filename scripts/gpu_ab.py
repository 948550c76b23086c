#!/usr/bin/env python3
"""Times several builds of the library against each other on a GPU, interleaved so that clocks and heat hit all alike.

    python scripts/gpu_ab.py LIB.so... [--shapes 128:0:8192,64:1:8192] [--recipe qk_int8_pv_fp8] [--rounds 5]

A shape is head_dim:causal:length, B H as in gpu_check.py. Prints TOPS of the attention launch and of the whole call,
and microseconds of the pre-processing; says where an output differs from the first library's.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import torch  # noqa: E402
from gpu_check import HEADS, median_ms  # noqa: E402

from sage_patch.kernels import library  # noqa: E402


def open_library(path: str) -> ctypes.CDLL:
    lib = ctypes.CDLL(str(Path(path).resolve()))
    lib.sage2_last_error.restype = ctypes.c_char_p
    lib.sage2_workspace_bytes.restype = ctypes.c_size_t
    for name in ("sage2_workspace_bytes", "sage2_prepare", "sage2_forward", "sage2_prepare_and_forward"):
        getattr(lib, name).argtypes = [ctypes.c_char_p]
    return lib


def main() -> None:
    ap = argparse.ArgumentParser()
    ap.add_argument("libs", nargs="+")
    ap.add_argument("--shapes", default="128:0:8192,128:1:8192,64:0:8192,64:1:8192,128:0:1024")
    ap.add_argument("--recipe", default="qk_int8_pv_fp8")
    ap.add_argument("--rounds", type=int, default=5)
    ap.add_argument("--parts", default="kernel,op,prepare")
    args = ap.parse_args()
    libs = {Path(p).stem: open_library(p) for p in args.libs}
    library._library = next(iter(libs.values()))
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    for shape in args.shapes.split(","):
        d, causal, n = (int(x) for x in shape.split(":"))
        b = {16384: 2, 32768: 1}.get(n, 4)
        q, k, v = (torch.randn(b, HEADS, n, d, device="cuda").bfloat16() for _ in range(3))
        work = 4.0 * b * HEADS * n * n * d / (2 if causal else 1) / 1e9
        call = library.make_call(q, k, v, scale=1 / math.sqrt(d), is_causal=bool(causal), recipe=args.recipe)
        times: dict[tuple[str, str], list[float]] = {}
        first = None
        for name, lib in libs.items():
            call.lib = lib
            call.out.fill_(math.nan)
            call.run()
            torch.cuda.synchronize()
            first = call.out.clone() if first is None else first
            if not torch.equal(call.out, first):
                print(f"  {name}: output differs by {float((call.out.float() - first.float()).abs().max()):.2e}")
        for _ in range(args.rounds):
            for name, lib in libs.items():
                call.lib = lib
                for part in args.parts.split(","):
                    run = {"kernel": call.forward, "op": call.run, "prepare": call.prepare}[part]
                    times.setdefault((name, part), []).append(median_ms(run, flush if n < 8192 else None, 25.0))
        for name in libs:
            cells = []
            for part in args.parts.split(","):
                ms = statistics.median(times[name, part])
                cells.append(f"{part} {ms * 1e3:.0f} us" if part == "prepare" else f"{part} {work / ms:.0f}")
            print(f"{shape} {args.recipe} {name:12s} " + "  ".join(cells), flush=True)


if __name__ == "__main__":
    main()
