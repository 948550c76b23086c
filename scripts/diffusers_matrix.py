"""Patch every denoising class of diffusers that can be built as a tiny random model, and write what happened.

    python scripts/diffusers_matrix.py [--out docs/results/diffusers_matrix.json] [--only WanTransformer3DModel,...]

For each class, in float32 on the CPU: the unpatched outputs and how many SDPA calls made them; the exact policy; the
default recipe without length limits and as shipped; revert; what is not reached; and for classes with attention code of
their own, that apply() refuses. Differences are the largest absolute difference over the largest absolute output.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import diffusers  # noqa: E402

import sage_patch  # noqa: E402
import zoo.diffusers_matrix as zoo  # noqa: E402

TOLERANCE = 1e-5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "docs/results/diffusers_matrix.json")
    parser.add_argument("--only", type=lambda text: text.split(","), default=[], help="class names, comma separated")
    options = parser.parse_args()
    diffusers.utils.logging.set_verbosity_error()
    torch.set_num_threads(1)
    chosen = [d for d in zoo.denoisers() if not options.only or d.name in options.only]
    unknown = set(options.only) - {d.name for d in chosen}
    if unknown:
        sys.exit(f"no such class: {', '.join(sorted(unknown))}")
    records: dict[str, dict[str, Any]] = {}
    for denoiser in chosen:
        start = time.perf_counter()
        try:
            record = zoo.measure(denoiser)
        except Exception as error:
            record = {"kind": denoiser.kind, "outcome": "error", "error": f"{type(error).__name__}: {error}"[:300]}
        records[denoiser.name] = record | {"seconds": round(time.perf_counter() - start, 2)}
    versions = {"torch": torch.__version__, "diffusers": diffusers.__version__, "sage_patch": sage_patch.__version__}
    result = {
        "command": "python scripts/diffusers_matrix.py",
        "versions": versions,
        "counts": counts(records),
        "classes": records,
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result["counts"], indent=1))


def counts(records: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The sums, and the names behind every exception."""
    routed = {n: r for n, r in records.items() if r["outcome"] == "routed"}
    exact = {n: [c for c in r["default_calls"] if c.startswith("exact")] for n, r in routed.items()}
    calls = collections.Counter()
    for record in routed.values():
        calls.update(record["default_calls"])
    return {
        "classes": len(records),
        "kinds": dict(collections.Counter(r["kind"] for r in records.values())),
        "outcomes": dict(collections.Counter(r["outcome"] for r in records.values())),
        "sites": sum(sum(r["roles"].values()) for r in routed.values()),
        "exact_equal": sum(r["exact_difference"] < TOLERANCE for r in routed.values()),
        "exact_bit_equal": sum(r["exact_difference"] == 0 for r in routed.values()),
        "reverted_exactly": sum(r["revert_difference"] == 0 for r in routed.values()),
        "quantized_everywhere": sum(not words for words in exact.values()),
        "exact_with_reason": {n: words for n, words in exact.items() if words},
        "default_calls": dict(calls),
        "unreached": {n: r["unreached"] for n, r in records.items() if r.get("unreached")},
        "built_not_run": {n: r["not_run"] for n, r in records.items() if r["outcome"] == "built"},
        "refused": [n for n, r in records.items() if r["outcome"] == "refused"],
        "errors": [n for n, r in records.items() if r["outcome"] == "error"],
    }


if __name__ == "__main__":
    main()
