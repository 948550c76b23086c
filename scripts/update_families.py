"""Rewrite the tables of docs/families.md: from configs/, the architectures under tests/zoo/architectures and the
envelope, and from docs/results/coverage.json.

    python scripts/update_families.py [--check]

Every model is built at full size on the meta device, so this takes seconds and no memory. With --check nothing is
changed, and a stale file is a failure.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import sage_patch  # noqa: E402
from sage_patch.backends import why_not  # noqa: E402
from sage_patch.dispatch import Options, describe  # noqa: E402
from sage_patch.policy import Plan  # noqa: E402
from sage_patch.recipes import parse_recipe  # noqa: E402
from zoo.architectures import Architecture, architectures  # noqa: E402

PAGE = ROOT / "docs" / "families.md"
COVERAGE = ROOT / "docs" / "results" / "coverage.json"
END = "<!-- end -->"
# Rows of the second table: what coverage.json calls them, and what the page does.
ROWS = {
    "all": "all calls",
    "plain": "inputs without padding",
    "left": "left-padded text",
    "right": "right-padded text",
    "causal_lm": "causal language models",
    "encoder": "encoders",
    "seq2seq": "sequence to sequence",
    "multimodal": "multimodal",
    "vision": "vision",
    "audio": "audio",
}


def planned(name: str) -> Plan:
    """The family's policy on the architecture of that name."""
    arch = architectures()[name]
    return sage_patch.plan(arch.build(), sage_patch.load_policy(ROOT / "configs" / f"{arch.family}.yaml"))


def table(plan_of: Callable[[str], Plan]) -> str:
    """One row an architecture."""
    lines = [
        "| policy | checkpoint | class | quantized | kept exact | below exact | Hopper kernel |",
        "|---|---|---|---|---|---|---|",
    ]
    for arch in architectures().values():
        quantized, exact = (_sites(arch, wanted) or "nothing" for wanted in (True, False))
        cells = [
            f"`{arch.family}.yaml`", arch.checkpoint, f"`{arch.class_name}`",
            quantized, exact, below_exact(arch, plan_of(arch.name)), hopper(arch),
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def below_exact(arch: Architecture, plan: Plan) -> str:
    """The share of calls that the plan leaves below exact, of the sites that are worth it, over a usual request."""
    names = [s.name for s in plan.sites if arch.group_of(s.name)["quantized"]]
    shares = {}
    for steps in arch.steps or [1]:
        calls = [plan.choice(name, step, steps).recipe != "exact" for name in names for step in range(steps)]
        shares[steps] = f"{100 * sum(calls) / len(calls):.0f} %" if calls else "0 %"
    if len(set(shares.values())) == 1:
        return shares.popitem()[1]
    return ", ".join(f"{share} of {steps} steps" for steps, share in shares.items())


def hopper(arch: Architecture) -> str:
    """What the Hopper kernel says to the calls of the quantized sites at their usual lengths: "runs", or its reason."""
    main = [group for group in arch.sites if group["quantized"]]
    if not main:
        return "nothing to run"
    return "; ".join(
        f"{call['of']}: ".removeprefix(": ") + _answer(call, call.get("head_dim", main[0]["head_dim"]))
        for call in arch.calls
    )


def _answer(call: dict[str, Any], head_dim: int) -> str:
    heads, q_len, kv_len = 8, call["q_len"], call["kv_len"]
    query, key, value = (
        torch.empty(1, heads, length, dim, dtype=torch.bfloat16, device="meta")
        for length, dim in ((q_len, head_dim), (kv_len, head_dim), (kv_len, call.get("v_head_dim", head_dim)))
    )
    options = Options(
        attn_mask=torch.empty(1, 1, 1, kv_len, dtype=torch.bool, device="meta") if call.get("mask") == "bool" else None,
        right=0 if call.get("causal") else -1,
        left=call.get("window", 0) - 1,
        softcap=50.0 if call.get("softcap") else 0.0,
        sinks=torch.empty(heads, device="meta") if call.get("sinks") else None,
    )
    facts = describe(query, key, value, options)._replace(backend="sm90", device="cuda")
    reason = why_not(parse_recipe("sage2"), facts)
    return f"exact, `{reason}`" if reason else "runs"


def _sites(arch: Architecture, quantized: bool) -> str:
    groups = [group for group in arch.sites if group["quantized"] == quantized]
    return "; ".join(f"{g['count']} {g['what']}" + (f" ({g['head_dim']})" if g["head_dim"] else "") for g in groups)


def coverage_table(record: dict[str, Any]) -> str:
    """The share of calls that the Hopper kernels take, and who keeps exact ones."""
    summary = record["summary"]
    lines = [
        "| calls of | number | quantized | with real head_dims |",
        "|---|---:|---:|---:|",
    ]
    for row, name in ROWS.items():
        sums = summary["rows"][row]
        shares = (f"{100 * sums[when] / sums['calls']:.1f} %" for when in ("now", "now_real_head_dim"))
        lines.append(f"| {name} | {sums['calls']} | {' | '.join(shares)} |")
    lines += ["", f"{summary['families']} families. What stays exact now, with the number of calls:", ""]
    for reason, names in summary["exact_now"].items():
        who = ", ".join(f"{name} {calls}" for name, calls in names.items())
        lines.append(f"- `{reason}`, {sum(names.values())}: {who}")
    return "\n".join(lines)


def rewrite(text: str, plan_of: Callable[[str], Plan] = planned) -> str:
    """The page with fresh tables between the markers."""
    coverage = json.loads(COVERAGE.read_text(encoding="utf-8"))
    for name, content in (("families", table(plan_of)), ("coverage", coverage_table(coverage))):
        before, rest = text.split(start := f"<!-- table: {name} -->")
        text = f"{before}{start}\n\n{content}\n\n{END}{rest.split(END, 1)[1]}"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="fail if the page is stale; change nothing")
    check = parser.parse_args().check
    old = PAGE.read_text(encoding="utf-8")
    new = rewrite(old)
    if check and new != old:
        sys.exit(f"{PAGE.name} is stale: run python scripts/update_families.py")
    if not check:
        PAGE.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
