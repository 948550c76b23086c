#!/usr/bin/env python3
"""Dumps every stage of the Hopper kernel for small shapes, as golden arrays for machines without a GPU.

    python scripts/gpu_golden.py --out tests/kernels/golden_stages.npz

Builds the library with -DSAGE2_DUMP (cuda_kernels/dump.cuh) beside the product library, runs the cases of
tests/zoo/golden_stages.py on both, requires equal outputs bit for bit, compares every stage with the emulator
and writes a compressed file of at most 1 MB, the card and the versions inside it as `meta`; calls with another exponent
go to golden_exponents.npz beside it. --exponents: only those.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import numpy as np  # noqa: E402
import torch  # noqa: E402

from sage_patch.kernels import build, library  # noqa: E402
from sage_patch.reference.emulator.prepare import padded_dim  # noqa: E402
from sage_patch.reference.emulator.tile_image import TILE_TOKENS  # noqa: E402
from zoo import golden_stages as golden  # noqa: E402
from zoo.kernel_calls import make_call  # noqa: E402

START = time.monotonic()
MOST_BYTES = 1 << 20
# The units that hold attention kernels, each with its own function that sets where they write.
UNITS = [u for u, named in build.units().items() if {"90a", "all"} & set(named)]
SETTERS = {u: f"sage2_set_dump_{Path(u).stem}" for u in UNITS if u.startswith("fwd_")}
QUIET = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}


class Dump(ctypes.Structure):
    """Sage2Dump of dump.cuh."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("scores", "p", "m", "t")]


def build_dump(folder: Path) -> ctypes.CDLL:
    """The library with its hooks compiled in; it may spill, so it does not go through the gates of `build`."""
    nvcc = build.find_nvcc()
    if nvcc is None:
        raise SystemExit("no nvcc was found")
    target = "-gencode=arch=compute_90a,code=sm_90a"
    sources = build.source_dir()
    started = []
    for u in UNITS:
        hooks = [f"-DSAGE2_DUMP={SETTERS[u]}"] if u in SETTERS else []
        command = [nvcc, "-c", target, *build.FLAGS, *hooks, sources / u, "-o", folder / f"{u}.o"]
        started.append(subprocess.Popen(command, **QUIET))
    for process in started:
        output, _ = process.communicate()
        if process.returncode:
            raise SystemExit(output)
    objects = [folder / f"{u}.o" for u in UNITS]
    subprocess.run([nvcc, target, *build.LINK_FLAGS, *objects, "-o", folder / "dump.so"], check=True)
    lib = ctypes.CDLL(str(folder / "dump.so"))
    lib.sage2_last_error.restype = ctypes.c_char_p
    lib.sage2_prepare_and_forward.argtypes = [ctypes.c_char_p]
    for name in SETTERS.values():
        getattr(lib, name).argtypes = [ctypes.POINTER(Dump)]
    return lib


def run_case(lib: ctypes.CDLL, case: golden.Case, recipe: str) -> dict[str, torch.Tensor]:
    """All stages of one call on the GPU, on the CPU: scores, p, m, t, out, lse."""
    tensors, options = golden.on_gpu(case)
    n, dim = case.tiles * TILE_TOKENS, padded_dim(case.head_dim)
    fp16 = recipe.endswith("fp16")
    rows = (case.batch, case.heads, case.q_len)
    stages = {
        "scores": torch.zeros(*rows, n, dtype=torch.int32, device="cuda"),
        "p": torch.zeros(*rows, n, dtype=torch.float16 if fp16 else torch.uint8, device="cuda"),
        "m": torch.zeros(*rows, case.tiles, device="cuda"),
        "t": torch.zeros(*rows, case.tiles, dim + 1, device="cuda"),
    }
    product = make_call(*tensors, recipe=recipe, **options)
    debug = make_call(*tensors, recipe=recipe, **options)
    product.run()
    torch.cuda.synchronize()
    to = Dump(*(x.data_ptr() for x in stages.values()))
    code = 0
    for name in SETTERS.values():
        code = code or getattr(lib, name)(to)
    code = code or lib.sage2_prepare_and_forward(debug.args)
    if code:
        raise SystemExit(f"code {code}: {lib.sage2_last_error().decode()}")
    torch.cuda.synchronize()
    for a, b in ((product.out, debug.out), (product.lse, debug.lse)):
        if not torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
            raise SystemExit(f"{case.name} {recipe}: the debug build computes something else than the product build")
    return {n: x.cpu() for n, x in (*stages.items(), ("out", product.out), ("lse", product.lse))}


def environment() -> dict[str, object]:
    smi = subprocess.run(
        ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"], capture_output=True, text=True
    )
    nvcc = build.find_nvcc()
    return {
        "card": smi.stdout.strip().splitlines()[0] if smi.stdout.strip() else torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "nvcc": None if nvcc is None else build.nvcc_version(nvcc),
        "inputs": {case.name: golden.fingerprint(case) for case in golden.CASES},
    }


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--out", required=True, type=Path)
    ap.add_argument("--exponents", action="store_true")
    args = ap.parse_args()
    meta = np.array(json.dumps(environment()))
    files: dict[Path, dict[str, np.ndarray]] = {}
    with tempfile.TemporaryDirectory() as tmp:
        lib = build_dump(Path(tmp))
        library.prepare(None)
        print(f"both libraries ready after {time.monotonic() - START:.1f} s", flush=True)
        for case in golden.CASES:
            for recipe in case.recipes:
                is_other = ":exp=" in recipe
                if args.exponents and not is_other:
                    continue
                path = args.out.with_name("golden_exponents.npz") if is_other else args.out
                saved = files.setdefault(path, {"meta": meta})
                got = golden.to_store(case, recipe, run_case(lib, case, recipe))
                scores = got[f"{case.name}.scores"]
                if not np.array_equal(saved.setdefault(f"{case.name}.scores", scores), scores):
                    raise SystemExit(f"{case.name}: the two recipes disagree about the scores")
                saved |= got
                np.savez_compressed(path, **saved)  # what is there survives a case that fails
                print(case.name, recipe, asdict(golden.compare(case, recipe, saved)), flush=True)
    for path in files:
        size = path.stat().st_size
        print(f"{path}: {size} bytes after {time.monotonic() - START:.1f} s")
        if size > MOST_BYTES:
            raise SystemExit(f"{path}: more than {MOST_BYTES} bytes: keep fewer rows")


if __name__ == "__main__":
    main()
