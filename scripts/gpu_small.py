#!/usr/bin/env python3
"""Small calls that reach every path of the kernels, for compute-sanitizer; with --golden FILE also saves their results.

PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python scripts/gpu_small.py
The same with --backend mma: the kernels for cards that are not here, on a Hopper card (tests/zoo/mma_library.py).
python scripts/gpu_small.py --golden tests/kernels/golden.npz
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import numpy as np  # noqa: E402
import torch  # noqa: E402

from oracle import KERNEL_TOLERANCE, attention, measure  # noqa: E402
from sage_patch.reference.emulator import prepare as mirror  # noqa: E402
from zoo import golden_pages, golden_stages, mma_library  # noqa: E402
from zoo.kernel_calls import forward, make_call  # noqa: E402


def tensors(d: int, n: int, kn: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """batch 1, 2 query heads on 1 kv head; a K bias and a V offset so that smoothing has something to do."""
    gen = torch.Generator().manual_seed(d + n)
    q, k, v = (torch.randn(1, h, m, d, generator=gen) for h, m in ((2, n), (1, kn), (1, kn)))
    k[..., 3] += 5
    v[..., 1] += 3
    return [x.to(dtype) for x in (q, k, v)]


def like_the_emulator(case: golden_stages.Case, recipe: str, bound: float) -> bool:
    """One call with masks, softcap or the like; whether its output is that of Hopper's emulator up to `bound`."""
    tensors, options = golden_stages.on_gpu(case)
    call = make_call(*tensors, recipe=recipe, **options)
    call.run()
    want = torch.zeros_like(call.out, device="cpu")
    for part in golden_stages.emulated(case, recipe):
        want[:, :, part.rows] = part.stages.out
    e = measure(call.out.cpu(), want)
    print(case.name, recipe, e, flush=True)
    return e.rel_l1 < bound


def pages_like_the_reference(name: str) -> bool:
    """One quantized cache, filled in pieces and attended over: its bytes equal, its output close."""
    records, out, _ = golden_pages.run(golden_pages.CASES[name], "cuda")
    want_records, want, _ = golden_pages.run(golden_pages.CASES[name], "cpu")
    error = float((out - want).abs().sum() / want.abs().sum())
    print("pages", name, error, flush=True)
    return torch.equal(records, want_records) and error < 0.03


def main() -> None:
    ap = argparse.ArgumentParser()
    ap.add_argument("--golden", default="")
    ap.add_argument("--backend", default="", choices=mma_library.BACKENDS, help="in place of Hopper's kernels")
    args = ap.parse_args()
    if args.backend:
        mma_library.use(args.backend)
    bound = 0.03 if args.backend else 1e-3  # other kernels: another order of keys, P of other codes
    saved: dict[str, Any] = {}
    bad = 0
    for d, n, kn in ((64, 70, 200), (128, 70, 300), (40, 300, 130), (128, 1, 1)):
        host = tensors(d, n, kn, torch.float16 if d == 64 else torch.bfloat16)
        for name, x in zip("qkv", host, strict=True):
            saved[f"{d}.{n}.{name}"] = x.view(torch.int16).numpy()
        for recipe in golden_stages.RECIPES:
            for causal in (False, True):
                for shift in (0, 1):  # 1: rows that are not 16-byte aligned
                    q, k, v = (torch.cat([x.flatten()[:shift], x.flatten()]).cuda()[shift:].view(x.shape) for x in host)
                    call = make_call(q, k, v, scale=d**-0.5, is_causal=causal, recipe=recipe, return_lse=True)
                    call.run()
                    ref, _ = attention(q, k, v, is_causal=causal)
                    found = measure(call.out, ref)
                    bad += not KERNEL_TOLERANCE[recipe].holds(found)
                    print(d, n, kn, recipe, causal, shift, found, flush=True)
                assert call.lse is not None
                key = f"{d}.{n}.{recipe}.{int(causal)}"
                saved[f"{key}.out"], saved[f"{key}.lse"] = (
                    call.out.cpu().view(torch.int16).numpy(),
                    call.lse.cpu().numpy(),
                )
            got = mirror.from_workspace(
                call.workspace, 1, math.ceil(kn / 128), 64 if d <= 64 else 128, recipe == "qk_int8_pv_fp16"
            )
            for name, x in vars(got).items():
                saved[f"{d}.{n}.{recipe}.{name}"] = x.numpy()
    lens = torch.tensor([5, 0, 77], dtype=torch.int32, device="cuda")
    x = torch.randn(3, 2, 77, 64, device="cuda").bfloat16()
    forward(x, x, x, scale=0.1, kv_lens=lens, is_causal=True, return_lse=True)
    for case in golden_stages.CASES:  # masks, windows, softcap, sinks, padding, sequences, INT4
        if case.has_extras or case.int4:
            for recipe in case.recipes:
                if not (args.backend and ":exp=" in recipe):  # Hopper's alone
                    bad += not like_the_emulator(case, recipe, bound)
    for name in golden_pages.CASES:
        bad += not pages_like_the_reference(name)
    torch.cuda.synchronize()
    if args.golden:
        np.savez_compressed(args.golden, **saved)
    print("bad", bad)
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
