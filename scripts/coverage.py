"""What share of transformers' attention calls the Hopper kernels take, over every family that can be built.

    nice python scripts/coverage.py [--out docs/results/coverage.json] [--only llama,t5]

Each family is built as a tiny random model and run on the CPU under the default recipe: once as it is, once with
left-padded and once with right-padded text (a family that takes no padding makes the same calls three times, and is
counted once then). Of every call the static facts are kept (`recipes.Call`) and asked about again as if it ran in
bfloat16 on a Hopper card with lengths that are long enough. Tiny models have tiny heads, so a family's real head_dim is
looked up in its configuration class: see `real_head_dim`.
`python scripts/update_families.py` makes the table of docs/families.md from the file.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import transformers  # noqa: E402
from family_matrix import DEFAULT, time_limit  # noqa: E402
from transformers.integrations.heterogeneity.configuration_utils import (  # noqa: E402
    AmbiguousGlobalPerLayerAttributeError,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: E402

import sage_patch  # noqa: E402
import zoo.families as zoo  # noqa: E402
from sage_patch.backends import why_not  # noqa: E402
from sage_patch.dispatch import Options, choose, describe  # noqa: E402
from sage_patch.integrations import transformers as adapter  # noqa: E402
from sage_patch.integrations.sites import TAG  # noqa: E402
from sage_patch.patch import PatchError  # noqa: E402
from sage_patch.recipes import Call, Limits, parse_recipe  # noqa: E402

LONG_ENOUGH = Limits(min_q_len=1, min_kv_len=1)  # a call without measured lengths is never "short"
RECIPE = parse_recipe("sage2")
INPUTS = ("plain", "left", "right")


def on_hopper(call: Call) -> Call:
    """The same call as it would be made in bfloat16 there."""
    dtype = "bfloat16" if call.dtype == "float32" else call.dtype
    return call._replace(backend="sm90", device="cuda", dtype=dtype, needs_grad=False, crossover=())


Seen = list[Call]  # the facts of each call that were decided on


def calls_of(family: zoo.Family) -> Iterator[tuple[str, Seen, collections.Counter]]:
    """For each kind of input: every call, and how many went elsewhere undescribed, by reason."""
    model = zoo.build(family, "eager")
    for kind in INPUTS:
        inputs = zoo.inputs(family, model) if kind == "plain" else zoo.inputs(family, model, padding=kind)
        seen: Seen = []

        def described(query: Any, key: Any, value: Any, options: Options) -> Call:
            return on_hopper(describe(query, key, value, options))

        def chosen(recipe: Any, call: Call, *rest: Any, seen: Seen = seen) -> Any:
            seen.append(call)
            return choose(recipe, call, *rest)

        with sage_patch.applied(model, DEFAULT) as handle:
            for module in (ref() for ref in handle._modules.values()):
                module.__dict__[TAG] = dataclasses.replace(module.__dict__[TAG], limits=LONG_ENOUGH)
            with mock.patch.object(adapter, "describe", described), mock.patch.object(adapter, "choose", chosen):
                zoo.outputs(model, inputs)
            elsewhere: collections.Counter = collections.Counter()
            for row in handle.rows():
                if row["reason"].startswith("argument_") or row["reason"] == "output_attentions":
                    elsewhere[row["reason"]] += row["calls"]
        yield kind, seen, elsewhere


def measure(family: zoo.Family) -> dict[str, Any]:
    """The record of one family: calls and reasons, for each kind of input."""
    record: dict[str, Any] = {"kind": family.kind}
    heads = real_head_dim(family.name)
    if heads:
        record["real_head_dim"] = heads
    plain: Seen = []
    for kind, seen, elsewhere in calls_of(family):
        if kind == "plain":
            plain = seen
        elif seen == plain:
            continue  # takes no padding mask
        now, real = collections.Counter(elsewhere), collections.Counter(elsewhere)
        masks: collections.Counter = collections.Counter()
        for call in seen:
            now[why_not(RECIPE, call, LONG_ENOUGH) or "quantized"] += 1
            large = call._replace(head_dim=max(heads, call.head_dim), v_head_dim=max(heads, call.v_head_dim))
            real[why_not(RECIPE, large, LONG_ENOUGH) or "quantized"] += 1
            masks["packed" if call.varlen else "window" if call.window else call.mask] += 1
        record[kind] = {"now": now, "now_real_head_dim": real, "masks": masks}
    return record


def real_head_dim(name: str) -> int:
    """The head_dim of the family's configuration class with its default values, 0 where it does not say."""
    if name not in CONFIG_MAPPING:
        return 0
    try:
        config = CONFIG_MAPPING[name]().get_text_config()
    except ValueError:  # made of other configurations, which are families of their own
        return 0
    try:
        named = [getattr(config, field, None) for field in ("head_dim", "qk_head_dim")]
    except AmbiguousGlobalPerLayerAttributeError:  # layers differ, in the tiny model too
        return 0
    dims = [dim for dim in named if isinstance(dim, int)]
    if dims:
        return max(dims)
    hidden, heads = (getattr(config, field, None) for field in ("hidden_size", "num_attention_heads"))
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
                sums = rows.setdefault(row, {"calls": 0, "now": 0, "now_real_head_dim": 0})
                sums["calls"] += sum(record[kind]["now"].values())
                for when in ("now", "now_real_head_dim"):
                    sums[when] += record[kind][when].get("quantized", 0)
            for reason, n in record[kind]["now_real_head_dim"].items():
                if reason != "quantized":
                    names = exact.setdefault(reason, {})
                    names[name] = names.get(name, 0) + n
    total = {f: sum(rows[kind][f] for kind in INPUTS if kind in rows) for f in next(iter(rows.values()), {})}
    return {
        "families": len(records),
        "rows": {"all": total, **rows},
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
            with time_limit(120):
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


if __name__ == "__main__":
    main()
