"""What share of transformers' attention calls the Hopper kernels take, over every family that can be built.

    nice python scripts/coverage.py [--out docs/results/coverage.json] [--only llama,t5]

Each family is built as a tiny random model and run on the CPU under the default recipe: once as it is, once with
left-padded and once with right-padded text (a family that takes no padding makes the same calls three times, and is
counted once then). Of every call the static facts are kept (`recipes.Call`) and asked about again as if it ran in
bfloat16 on a Hopper card with lengths that are long enough: by today's envelope, and by that of the first kernel. Tiny
models have tiny heads, so a family's real head_dim is looked up in its configuration class: see `real_head_dim`.
`python scripts/update_families.py` makes the table of docs/families.md from the file.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import transformers  # noqa: E402
from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: E402

import families as zoo  # noqa: E402
import sage_patch  # noqa: E402
from sage_patch.dispatch import Options, describe  # noqa: E402
from sage_patch.integrations import transformers as adapter  # noqa: E402
from sage_patch.patch import PatchError  # noqa: E402
from sage_patch.policy import Policy  # noqa: E402
from sage_patch.recipes import Call, Limits, parse_recipe, why_not  # noqa: E402

DEFAULT = Policy(quantize_fp32=True, min_q_len=1, min_kv_len=1)
LONG_ENOUGH = Limits(min_q_len=1, min_kv_len=1)  # a call without measured lengths is never "short"
RECIPE = parse_recipe("sage2")
INPUTS = ("plain", "left", "right")


def first_kernel_why_not(call: Call, starts: bool) -> str | None:
    """The envelope of the first Hopper kernel. Packed calls were one plain call for each sequence then."""
    if call.head_dim > 128:
        return "head_dim"
    if call.v_head_dim != call.head_dim:
        return "v_head_dim"
    for reason in ("window", "softcap", "sinks"):
        if getattr(call, reason):
            return reason
    if starts or call.mask in ("padding", "bool"):  # where keys start it was not told: it would have got the mask
        return "mask_bool"
    return "mask_float" if call.mask == "float" else None


def on_hopper(call: Call) -> Call:
    """The same call as it would be made in bfloat16 there."""
    dtype = "bfloat16" if call.dtype == "float32" else call.dtype
    return call._replace(backend="sm90", device="cuda", dtype=dtype, needs_grad=False, crossover=())


def calls_of(family: zoo.Family) -> dict[str, collections.Counter]:
    """For each kind of input: how often each (facts, starts, not described) came."""
    model = zoo.build(family, "eager")
    found = {}
    for kind in INPUTS:
        inputs = zoo.inputs(family, model) if kind == "plain" else zoo.inputs(family, model, padding=kind)
        seen: collections.Counter = collections.Counter()

        def spy(query: Any, key: Any, value: Any, options: Options, seen: collections.Counter = seen) -> Call:
            call = describe(query, key, value, options)
            seen[on_hopper(call), options.kv_starts is not None, ""] += 1
            return call

        with sage_patch.applied(model, DEFAULT) as handle, mock.patch.object(adapter, "describe", spy):
            zoo.outputs(model, inputs)
            for row in handle.stats():  # exact without being described: another function's arguments, weights asked for
                if row["reason"].startswith("argument_") or row["reason"] == "output_attentions":
                    seen[None, False, row["reason"]] += row["calls"]
        found[kind] = seen
    return found


def measure(family: zoo.Family) -> dict[str, Any]:
    """The record of one family: calls and reasons before and now, for each kind of input."""
    record: dict[str, Any] = {"kind": family.kind}
    heads = real_head_dim(family.name)
    if heads:
        record["real_head_dim"] = heads
    seen_before = None
    for kind, seen in calls_of(family).items():
        if kind != "plain" and seen == seen_before:
            continue  # takes no padding mask
        seen_before = seen if kind == "plain" else seen_before
        before: collections.Counter = collections.Counter()
        now: collections.Counter = collections.Counter()
        real: collections.Counter = collections.Counter()
        masks: collections.Counter = collections.Counter()
        for (call, starts, undescribed), n in seen.items():
            if call is None:
                for reasons in (before, now, real):
                    reasons[undescribed] += n
                continue
            before[first_kernel_why_not(call, starts) or "quantized"] += n
            now[why_not(RECIPE, call, LONG_ENOUGH) or "quantized"] += n
            large = call._replace(head_dim=max(heads, call.head_dim), v_head_dim=max(heads, call.v_head_dim))
            real[why_not(RECIPE, large, LONG_ENOUGH) or "quantized"] += n
            masks["packed" if call.varlen else "window" if call.window else call.mask] += n
        record[kind] = {"before": before, "now": now, "now_real_head_dim": real, "masks": masks}
    return record


def real_head_dim(name: str) -> int:
    """The head_dim of the family's configuration class with its default values, 0 where it does not say."""
    config = CONFIG_MAPPING[name]() if name in CONFIG_MAPPING else None
    text = config.get_text_config() if config is not None else None
    dims = [getattr(text, field, None) for field in ("head_dim", "qk_head_dim")]
    dims = [d for d in dims if isinstance(d, int)]
    if dims:
        return max(dims)
    hidden, heads = (getattr(text, field, None) for field in ("hidden_size", "num_attention_heads"))
    return hidden // heads if isinstance(hidden, int) and isinstance(heads, int) and heads else 0


def summary(records: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Sums over families, by kind of input and by kind of family; and who keeps exact calls, and why."""
    rows: dict[str, dict[str, Any]] = {}
    exact: dict[str, dict[str, int]] = {}
    for name, record in records.items():
        for kind in INPUTS:
            if kind not in record:
                continue
            for row in (kind, record["kind"]):
                sums = rows.setdefault(row, {"calls": 0, "before": 0, "now": 0, "now_real_head_dim": 0})
                sums["calls"] += sum(record[kind]["now"].values())
                for when in ("before", "now", "now_real_head_dim"):
                    sums[when] += record[kind][when].get("quantized", 0)
            for reason, n in record[kind]["now_real_head_dim"].items():
                if reason != "quantized":
                    names = exact.setdefault(reason, {})
                    names[name] = names.get(name, 0) + n
    total = {f: sum(rows[kind][f] for kind in INPUTS if kind in rows) for f in next(iter(rows.values()), {})}
    reasons: collections.Counter = collections.Counter()
    for record in records.values():
        for kind in INPUTS:
            reasons.update(record.get(kind, {}).get("before", {}))
    return {
        "families": len(records),
        "rows": {"all": total, **rows},
        "reasons_before": {reason: n for reason, n in reasons.most_common() if reason != "quantized"},
        "exact_now": {reason: dict(sorted(names.items())) for reason, names in sorted(exact.items())},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "docs/results/coverage.json")
    parser.add_argument("--only", type=lambda text: text.split(","), default=[], help="family names, comma separated")
    options = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(1)
    records: dict[str, dict[str, Any]] = {}
    left_out: dict[str, str] = {}
    for family in zoo.families():
        if options.only and family.name not in options.only:
            continue
        try:
            with _time_limit(120):
                records[family.name] = measure(family)
        except PatchError:
            left_out[family.name] = "nothing to patch"
        except Exception as error:
            left_out[family.name] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    document = {
        "command": "python scripts/coverage.py",
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "summary": summary(records),
        "left_out": left_out,
        "records": records,
    }
    options.out.write_text(json.dumps(document, indent=1), encoding="utf-8")
    print(json.dumps(document["summary"]["rows"], indent=1))


@contextmanager
def _time_limit(seconds: int) -> Iterator[None]:
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
