#!/usr/bin/env python3
"""Everything that needs a Hopper GPU, step by step, each in its own process with a time limit; results as JSON.

    python scripts/gpu_check.py --out FOLDER [--only tests,bench] [--tests EXPRESSION] [--seconds 540]

Steps: build (the library), tests (pytest -m gpu), bench (speed beside the peers), crossover (break-even
lengths, head dimensions between 64 and 128 too), golden and stages (small calls and every stage of the kernel, saved
for the CPU tests), mma (the kernels for cards without wgmma, checked and timed on this one), memcheck and racecheck
(compute-sanitizer on the same small calls). FOLDER/gpu_check.json says of each step what ran, how it ended and how
long it took; the whole output of a step is FOLDER/STEP.txt. The exit status is 1 if a step failed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CLI = [sys.executable, "-m", "sage_patch"]
SMALL = [sys.executable, "scripts/gpu_small.py"]
SANITIZER = ["compute-sanitizer", "--error-exitcode", "9", "--tool"]


def steps(out: Path, tests: str) -> dict[str, tuple[int, list[str]]]:
    """Name -> (seconds at most, command), in the order in which they run."""
    options = ["-m", "gpu", "-n", "12", "-rs", "--maxfail=20", "--tb=short", "-p", "no:cacheprovider"]
    pytest = [sys.executable, "-m", "pytest", *options]
    return {
        "build": (120, [*CLI, "build", "--arch", "90", "--out", str(out / "lib")]),
        "tests": (300, pytest + (["-k", tests] if tests else [])),
        "bench": (300, [*CLI, "bench", "--budget", "240", "--out", str(out)]),
        "crossover": (
            200,
            [*CLI, "bench", "--crossover", "--budget", "170", "--head-dims", "64,128,40,80,96", "--table",
             str(out / "crossover.json"), "--out", str(out / "crossover"), "--no-plot"],
        ),
        "golden": (120, [*SMALL, "--golden", str(out / "golden.npz")]),
        "stages": (240, [sys.executable, "scripts/gpu_golden.py", "--out", str(out / "golden_stages.npz")]),
        "mma": (400, [sys.executable, "scripts/gpu_mma.py", "--out", str(out / "mma.json")]),
        "memcheck": (240, [*SANITIZER, "memcheck", *SMALL]),
        "racecheck": (240, [*SANITIZER, "racecheck", *SMALL]),
    }  # fmt: skip


def run_step(name: str, limit: float, command: list[str], out: Path) -> dict[str, object]:
    """Run one step; its row of the results. rc None: it ran past its limit, or its program is not there."""
    found = os.environ.get("PYTHONPATH", "")
    variables = {"PYTHONPATH": f"{ROOT}{os.pathsep}{found}", "PYTHONUNBUFFERED": "1"}
    if name.endswith("check"):
        variables["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    started = time.monotonic()
    rc: int | None = None
    with open(out / f"{name}.txt", "w+") as log:
        try:
            rc = subprocess.run(
                command, cwd=ROOT, env=os.environ | variables, stdout=log, stderr=subprocess.STDOUT, timeout=limit
            ).returncode
            why = "" if rc == 0 else f"exit status {rc}"
        except subprocess.TimeoutExpired:
            why = f"stopped after its limit of {limit:.0f} s"
        except OSError as error:
            why = str(error)
        log.seek(0)
        tail = log.read()[-2500:]
    seconds = round(time.monotonic() - started, 1)
    print(f"--- {name}: {why or 'ok'}, {seconds} s\n{tail}", flush=True)
    return {"step": name, "rc": rc, "why": why, "seconds": seconds, "command": " ".join(command), "tail": tail}


def main() -> int:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--out", type=Path, required=True)
    ap.add_argument("--only", default="", help="steps, with commas")
    ap.add_argument("--tests", default="", help="a pytest -k expression")
    ap.add_argument("--seconds", type=float, default=540.0, help="no step runs past this")
    args = ap.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    out = args.out.resolve()
    todo = steps(out, args.tests)
    wanted = args.only.split(",") if args.only else list(todo)
    unknown = set(wanted) - set(todo)
    if unknown:
        ap.error(f"no step {', '.join(sorted(unknown))}; there are {', '.join(todo)}")
    started, rows = time.monotonic(), []
    for name in wanted:
        limit, command = todo[name]
        left = args.seconds - (time.monotonic() - started)
        if left < 5:
            rows.append({"step": name, "rc": None, "why": f"not begun: --seconds {args.seconds:.0f} were over"})
        else:
            rows.append(run_step(name, min(limit, left), command, out))
        (out / "gpu_check.json").write_text(json.dumps(rows, indent=1) + "\n")
    return int(any(row["rc"] != 0 for row in rows))


if __name__ == "__main__":
    sys.exit(main())
