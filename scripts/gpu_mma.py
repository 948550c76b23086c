#!/usr/bin/env python3
"""The mma.sync kernels on a Hopper card: right, equal to the Hopper kernels where they must be, and timed.

python scripts/gpu_mma.py --out mma.json

1. Images: the pre-processing without clusters writes what the one with clusters writes, byte for byte.
2. Every kind of call: its error against float64 beside the error of the Hopper kernels on the same call.
3. INT4 two a byte gives the bits of INT4 in INT8.
4. Times of the attention alone, and of the pre-processing, at 1 x 32 x 8192 tokens.

The file says for every row what it is, what was found and what was asked for. Exit code 1 if any row fails.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from oracle import KERNEL_TOLERANCE, attention, measure  # noqa: E402
from sage_patch.reference.emulator import prepare as mirror  # noqa: E402
from zoo import mma_library  # noqa: E402
from zoo.kernel_calls import Extras, make_call  # noqa: E402

FP8, FP16 = "qk_int8_pv_fp8", "qk_int8_pv_fp16"
TOPS_WANTED = {("mma", FP16, 128): 430.0}  # of 1 x 32 x 8192, not causal
Row = dict[str, Any]


def tensors(
    batch: int, heads: int, kv_heads: int, q_len: int, kv_len: int, dim: int, dtype: torch.dtype
) -> list[Tensor]:
    """Normal, with a K bias and a V offset, so that smoothing has something to do."""
    gen = torch.Generator("cuda").manual_seed(dim + q_len + kv_len)
    shapes = ((batch, heads, q_len, dim), (batch, kv_heads, kv_len, dim), (batch, kv_heads, kv_len, dim))
    q, k, v = (torch.randn(*shape, generator=gen, device="cuda") for shape in shapes)
    k[..., 3] += 5
    v[..., 1] += 3
    return [x.to(dtype) for x in (q, k, v)]


def images(rows: list[Row]) -> None:
    for dim, kv_len, dtype, recipe in (
        (64, 300, torch.float16, FP8), (64, 4096, torch.bfloat16, FP16), (128, 1, torch.float16, FP16),
        (128, 9000, torch.bfloat16, FP8), (128, 1000, torch.float16, "qk_int4_pv_fp16"), (40, 777, torch.float16, FP8),
        (256, 2000, torch.bfloat16, FP8), (100, 513, torch.float16, FP16),
    ):  # fmt: skip
        for shift in (0, 1):  # 1: rows that are not 16-byte aligned
            host = tensors(2, 4, 2, 64, kv_len, dim, dtype)
            q, k, v = (torch.cat([x.flatten()[:shift], x.flatten()])[shift:].view(x.shape) for x in host)
            found = []
            for backend in (None, "mma"):
                with on(backend):
                    call = make_call(q, k, v, scale=dim**-0.5, recipe=recipe)
                    call.workspace.zero_()
                    call.prepare()
                    found.append(
                        mirror.from_workspace(
                            call.workspace, 4, math.ceil(kv_len / 128), mirror.padded_dim(dim), recipe.endswith("fp16")
                        )
                    )
            differ = [n for n, x in vars(found[0]).items() if not torch.equal(bits(x), bits(getattr(found[1], n)))]
            rows.append(
                {"what": "images without clusters equal those with, bit for bit", "dim": dim, "kv_len": kv_len,
                 "dtype": str(dtype), "recipe": recipe, "shift": shift, "differ": differ, "ok": not differ}
            )  # fmt: skip


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def on(backend: str | None) -> Any:
    return contextlib.nullcontext() if backend is None else mma_library.on(backend)


def calls() -> list[tuple[str, tuple[int, ...], dict[str, Any], Callable[[int, int], dict[str, Any]]]]:
    """(name, shape, the kernel's options, the oracle's options of (q_len, kv_len)) of every kind of call."""

    def diagonal(q_len: int, kv_len: int) -> Tensor:
        columns, rows = torch.arange(kv_len, device="cuda"), torch.arange(q_len, device="cuda")[:, None]
        return columns - rows - (kv_len - q_len)

    gen = torch.Generator("cuda").manual_seed(1)
    mask = torch.rand(2, 4, 300, 700, generator=gen, device="cuda") < 0.6
    mask[:, :, 7] = False
    added = torch.randn(1, 1, 300, 700, generator=gen, device="cuda")
    sinks = torch.randn(4, generator=gen, device="cuda")
    shape = (2, 4, 2, 300, 700)
    return [
        ("dense", shape, {}, lambda q, k: {}),
        ("one key", (1, 2, 1, 1, 1), {}, lambda q, k: {}),
        ("long", (1, 4, 4, 1024, 8192), {}, lambda q, k: {}),
        ("causal", shape, {"is_causal": True}, lambda q, k: {"is_causal": True}),
        ("causal, more rows than keys", (2, 4, 2, 700, 300), {"is_causal": True}, lambda q, k: {"is_causal": True}),
        ("lengths", shape, {"kv_lens": torch.tensor([0, 333], dtype=torch.int32, device="cuda")},
         lambda q, k: {"kv_lens": [0, 333]}),
        ("window", shape, {"extras": Extras(left=100, right=30)},
         lambda q, k: {"attn_mask": (diagonal(q, k) >= -100) & (diagonal(q, k) <= 30)}),
        ("bool mask", shape, {"extras": Extras(attn_mask=mask)}, lambda q, k: {"attn_mask": mask}),
        ("added mask", shape, {"extras": Extras(attn_mask=added)}, lambda q, k: {"attn_mask": added}),
        ("sinks", shape, {"is_causal": True, "extras": Extras(sinks=sinks)},
         lambda q, k: {"is_causal": True, "sinks": sinks}),
        ("softcap", shape, {"extras": Extras(softcap=15.0)}, lambda q, k: {"softcap": 15.0}),
    ]  # fmt: skip


def variants(rows: list[Row]) -> None:
    kinds = [("mma", FP8, dim) for dim in (64, 96, 128, 256)] + [("mma", FP16, dim) for dim in (64, 96, 128, 256)]
    kinds += [("mma_split", recipe, dim) for recipe in (FP16, FP8) for dim in (64, 128)]
    kinds += [("mma_small", FP16, dim) for dim in (64, 128)]
    kinds += [("mma", "qk_int4_pv_fp8", 128), ("mma", "qk_int4_pv_fp16", 64)]
    kinds += [
        ("mma_int4", "qk_int4_pv_fp8", 64),
        ("mma_int4", "qk_int4_pv_fp8", 128),
        ("mma_int4", "qk_int4_pv_fp16", 128),
    ]
    for name, shape, options, exact in calls():
        for dim in sorted({kind[2] for kind in kinds}):
            q, k, v = tensors(*shape, dim, torch.bfloat16)
            want, want_lse = attention(q, k, v, scale=dim**-0.5, **exact(shape[3], shape[4]))
            for backend, recipe, width in kinds:
                if width != dim:
                    continue
                found: dict[str, Any] = {}
                held = (backend,) if dim > 128 and recipe == FP16 else (None, backend)  # Hopper's has 128 channels
                for who in held:
                    with on(who):
                        call = make_call(q, k, v, scale=dim**-0.5, recipe=recipe, return_lse=True, **options)
                        call.out.fill_(math.nan)
                        call.run()
                        first = call.out.clone()
                        call.run()
                        found["same bits twice"] = torch.equal(first, call.out)
                        errors = measure(call.out, want)
                        alive = want_lse > -math.inf
                        lse = call.lse.double() - want_lse
                        found["hopper" if who is None else "here"] = {
                            "cosine": errors.cosine, "rel_l1": errors.rel_l1,
                            "lse": float(lse[alive].abs().max()) if bool(alive.any()) else 0.0,
                            "dead rows": bool((call.out[~alive] == 0).all() and (call.lse[~alive] == -math.inf).all()),
                        }  # fmt: skip
                here, hopper = found["here"], found.get("hopper", {"rel_l1": 0.02, "lse": 0.1})
                near = here["rel_l1"] <= 1.15 * hopper["rel_l1"] + 0.002 and here["lse"] <= 1.2 * hopper["lse"] + 0.01
                rows.append(
                    {"what": "errors against float64, no worse than the Hopper kernels'", "call": name, "dim": dim,
                     "backend": backend, "recipe": recipe, **found,
                     "within the recipe's tolerance": KERNEL_TOLERANCE[recipe].holds(errors),
                     "ok": near and here["dead rows"] and found["same bits twice"]}
                )  # fmt: skip


def packed(rows: list[Row]) -> None:
    for dim, recipe in ((64, "qk_int4_pv_fp16"), (128, "qk_int4_pv_fp8"), (128, "qk_int4_pv_fp16")):
        q, k, v = tensors(2, 4, 2, 300, 700, dim, torch.float16)
        found = []
        for backend in ("mma", "mma_int4"):
            with on(backend):
                call = make_call(q, k, v, scale=dim**-0.5, recipe=recipe, is_causal=True, return_lse=True)
                call.run()
                found.append((call.out, call.lse))
        same = torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])
        rows.append(
            {"what": "INT4 two a byte gives the bits of INT4 in INT8", "dim": dim, "recipe": recipe, "ok": same}
        )


def milliseconds(launch: Callable[[], None], n: int = 20) -> float:
    for _ in range(5):
        launch()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    times = []
    for _ in range(3):
        start.record()
        for _ in range(n):
            launch()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / n)
    return min(times)


def timings(rows: list[Row]) -> None:
    n, heads = 8192, 32
    for dim in (64, 128, 256):
        q, k, v = tensors(1, heads, heads, n, n, dim, torch.float16)
        kinds = [(backend, recipe) for recipe in (FP16, FP8) for backend in (None, "mma", "mma_split")]
        kinds.append(("mma_small", FP16))
        for backend, recipe in [*kinds, ("mma", "qk_int4_pv_fp16"), ("mma_int4", "qk_int4_pv_fp16")]:
            if dim == 256 and (backend, recipe) not in ((None, FP8), ("mma", FP8), ("mma", FP16)):
                continue
            for causal in (False, True):
                with on(backend):
                    call = make_call(q, k, v, scale=dim**-0.5, recipe=recipe, is_causal=causal)
                    call.run()
                    forward, prepare = milliseconds(call.forward), milliseconds(call.prepare)
                work = 4.0 * heads * n * n * dim * (0.5 if causal else 1.0)
                tops = work / forward / 1e9
                wanted = None if causal else TOPS_WANTED.get((backend or "", recipe, dim))
                rows.append(
                    {"what": "time at 1 x 32 x 8192 tokens (attention alone; Q's smoothing is in it with INT4)",
                     "backend": backend or "hopper", "recipe": recipe, "dim": dim, "causal": causal,
                     "forward ms": round(forward, 4), "prepare ms": round(prepare, 4), "TOPS": round(tops, 1),
                     "wanted TOPS": wanted, "ok": wanted is None or tops >= wanted}
                )  # fmt: skip


def main() -> None:
    ap = argparse.ArgumentParser()
    ap.add_argument("--out", default="mma.json")
    ap.add_argument("--only", default="", help="images, variants, packed or timings")
    args = ap.parse_args()
    started = time.monotonic()
    built = {backend: str(mma_library.build_library(backend)) for backend in mma_library.BACKENDS}
    result: dict[str, Any] = {
        "about": __doc__, "card": torch.cuda.get_device_name(), "torch": torch.__version__, "libraries": built,
        "build s": round(time.monotonic() - started, 1), "rows": [],
    }  # fmt: skip
    rows: list[Row] = result["rows"]
    for part in (images, variants, packed, timings):
        if args.only and part.__name__ != args.only:
            continue
        before = len(rows)
        try:
            part(rows)
        except Exception as e:  # the other parts still say something
            rows.append({"what": f"{part.__name__} stopped", "error": f"{type(e).__name__}: {e}", "ok": False})
        for row in rows[before:]:
            if not row["ok"] or part is timings:
                print(json.dumps(row), flush=True)
        print(f"{part.__name__}: {sum(r['ok'] for r in rows[before:])} of {len(rows) - before} ok", flush=True)
        Path(args.out).write_text(json.dumps(result, indent=1))
    result["ok"] = all(row["ok"] for row in rows)
    result["seconds"] = round(time.monotonic() - started, 1)
    Path(args.out).write_text(json.dumps(result, indent=1))
    print("ALL GOOD" if result["ok"] else "NOT ALL GOOD", f"({args.out}, {result['seconds']} s)")
    sys.exit(not result["ok"])


if __name__ == "__main__":
    main()
