"""Patch every family of transformers that can be built as a tiny random model, and write what happened.

    python scripts/family_matrix.py [--out docs/results/family_matrix.json] [--only llama,t5] [--limit-seconds 30]

For each family, in float32 on the CPU: eager outputs; the exact policy's outputs without and with padding, compared
with eager; the default recipe (lengths and float32 allowed); revert; and for families with attention code of their own,
that apply() refuses. Differences are the largest absolute difference over the largest absolute output of eager. The
file is rewritten after each family, so a crash loses only the family that caused it.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import transformers  # noqa: E402

import sage_patch  # noqa: E402
import zoo.families as zoo  # noqa: E402
from sage_patch.integrations.transformers import OwnAttentionError  # noqa: E402
from sage_patch.patch import PatchError  # noqa: E402
from sage_patch.policy import Policy  # noqa: E402

EXACT = Policy(recipe="exact")
DEFAULT = Policy(quantize_fp32=True, min_q_len=1, min_kv_len=1)
TOLERANCE = 1e-5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "docs/results/family_matrix.json")
    parser.add_argument("--only", type=lambda text: text.split(","), default=[], help="family names, comma separated")
    parser.add_argument("--limit-seconds", type=int, default=60, help="time for one family")
    options = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(1)
    chosen = [family for family in zoo.families() if not options.only or family.name in options.only]
    unknown = set(options.only) - {family.name for family in chosen}
    if unknown:
        sys.exit(f"not in the table: {', '.join(sorted(unknown))}")
    records: dict[str, dict[str, Any]] = {}
    for family in chosen:
        records[family.name] = measure(family, options.limit_seconds)
        write(options.out, records)
    print(json.dumps(counts(records), indent=1))


def measure(family: zoo.Family, limit_seconds: int) -> dict[str, Any]:
    """The record of one family; whatever goes wrong becomes text in it."""
    record: dict[str, Any] = {"kind": family.kind, "auto": family.auto}
    start = time.perf_counter()
    with time_limit(limit_seconds):
        try:
            model = zoo.build(family, "eager")
            inputs = zoo.inputs(family, model)
            eager = zoo.outputs(model, inputs)
            record["outcome"] = _patched(family, model, inputs, eager, record)
            record["revert_difference"] = difference(eager, zoo.outputs(model, inputs))
        except Exception as error:
            record["outcome"] = "error"
            record["error"] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    record["seconds"] = round(time.perf_counter() - start, 2)
    return record


def _patched(family: zoo.Family, model: Any, inputs: dict, eager: list[torch.Tensor], record: dict[str, Any]) -> str:
    try:
        with sage_patch.applied(model, EXACT) as handle:
            record["exact_difference"] = difference(eager, zoo.outputs(model, inputs))
            record["sites"] = len(handle.plan.sites)
    except (OwnAttentionError, PatchError) as error:
        record["refusal"] = str(error)
        return "refused" if isinstance(error, OwnAttentionError) else "nothing to patch"
    for padding in ("left", "right"):
        padded = zoo.inputs(family, model, padding=padding)
        expected = zoo.outputs(model, padded)
        with sage_patch.applied(model, EXACT):
            record[f"exact_difference_{padding}_padding"] = difference(expected, zoo.outputs(model, padded))
    with sage_patch.applied(model, DEFAULT) as handle:
        record["default_difference"] = difference(eager, zoo.outputs(model, inputs))
        calls = collections.Counter({(r["recipe"], r["reason"]): 0 for r in handle.rows()})
        for row in handle.rows():
            calls[row["recipe"], row["reason"]] += row["calls"]
        record["sites_called"] = len({r["site"] for r in handle.rows()})
    record["default_calls"] = [{"recipe": k[0], "reason": k[1], "calls": n} for k, n in calls.items()]
    return "routed"


def difference(expected: list[torch.Tensor], got: list[torch.Tensor]) -> float:
    worst = 0.0
    for exact, other in zip(expected, got, strict=True):
        if exact.numel():
            gap = float((exact - other).abs().max() / exact.abs().max().clamp_min(1e-30))
            worst = max(worst, gap) if gap == gap else float("nan")
    return worst


def counts(records: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The sums that the README quotes, and the names behind every exception."""
    routed = {n: r for n, r in records.items() if r["outcome"] == "routed"}
    kinds = collections.Counter(r["kind"] for r in records.values())
    outcomes = collections.Counter(r["outcome"] for r in records.values())

    def beyond(field: str) -> list[str]:
        return [n for n, r in routed.items() if not r[field] < TOLERANCE]

    all_quantized = [n for n, r in routed.items() if all(c["recipe"] != "exact" for c in r["default_calls"])]
    return {
        "built": len(records),
        "kinds": ", ".join(f"{n} {kind}" for kind, n in sorted(kinds.items())),
        "outcomes": dict(outcomes),
        "routed": len(routed),
        "refused": outcomes["refused"],
        "exact_equal": len(routed) - len(beyond("exact_difference")),
        "exact_not_equal": beyond("exact_difference"),
        "exact_not_equal_left_padding": beyond("exact_difference_left_padding"),
        "exact_not_equal_right_padding": beyond("exact_difference_right_padding"),
        "quantized_everywhere": len(all_quantized),
        "exact_with_reason": {
            n: sorted({c["reason"] for c in r["default_calls"] if c["recipe"] == "exact"})
            for n, r in routed.items()
            if n not in all_quantized
        },
        "calls": sum(c["calls"] for r in routed.values() for c in r["default_calls"]),
        "calls_quantized": sum(
            c["calls"] for r in routed.values() for c in r["default_calls"] if c["recipe"] != "exact"
        ),
        "no_call": [n for n, r in routed.items() if not r["default_calls"]],
        "reverted_exactly": sum(r.get("revert_difference") == 0 for r in records.values()),
        "errors": [n for n, r in records.items() if r["outcome"] == "error"],
    }


def write(path: Path, records: dict[str, dict[str, Any]]) -> None:
    versions = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "sage_patch": sage_patch.__version__,
    }
    document = {
        "command": "python scripts/family_matrix.py",
        "versions": versions,
        "counts": counts(records),
        "unbuildable": zoo.UNBUILDABLE,
        "families": records,
    }
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(document, indent=1))
    os.replace(unfinished, path)


@contextlib.contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TimeoutError(f"more than {seconds} s")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


if __name__ == "__main__":
    main()
