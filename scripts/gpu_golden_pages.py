#!/usr/bin/env python3
"""Leaves what this GPU makes of the cases of tests/zoo/golden_pages.py, as golden arrays for machines without one.

python scripts/gpu_golden_pages.py --out tests/kernels/golden_pages.npz

Records of pages are kept for the first head of the first item, outputs and log-sum-exps whole.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import numpy as np  # noqa: E402

from sage_patch.evaluation.bench.measure import gpu_environment  # noqa: E402
from zoo import golden_pages as golden  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    arrays = {"meta": np.array(json.dumps(gpu_environment()))}
    for name, case in golden.CASES.items():
        records, out, lse = golden.run(case, "cuda")
        arrays[f"{name}.records"] = records[0, 0].numpy()
        arrays[f"{name}.out"], arrays[f"{name}.lse"] = out.numpy(), lse.numpy()
    np.savez_compressed(options.out, **arrays)  # type: ignore[arg-type]
    print(f"{options.out}: {options.out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
