"""What rotating Q and K before quantization changes, on the CPU: docs/results/rotation_cpu.json.

    python scripts/rotation_cpu.py [--exponents]

Every recipe as it is and with `rotate=hadamard`: made inputs that are known to be hard or easy, the trained models'
own attention calls, and how far whole language models drift. A model whose package is not installed is left out, which
is said. Some minutes on two cores. With --exponents, of the FP8 recipe's exponents instead, as it is and rotated:
docs/results/exponent_cpu.json.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from sage_patch.attention import sage_attention
from sage_patch.config import load_run_config
from sage_patch.evaluation.calls import capturing, part_of, score
from sage_patch.evaluation.environment import record
from sage_patch.evaluation.judge import judge_for
from sage_patch.evaluation.metrics import relative_l1
from sage_patch.evaluation.models import ModelError, quiet_loading
from sage_patch.evaluation.tables import plain, write_whole
from sage_patch.policy import Policy

ROOT = Path(__file__).resolve().parents[1]
RECIPES = ("qk_int8_pv_fp8", "qk_int8_pv_fp16", "qk_int4_pv_fp8", "qk_int4_pv_fp16")
TURNED = ":rotate=hadamard"
WINDOWS = 3  # of 1,024 tokens
EXPONENTS = tuple(f"{RECIPES[0]}:exp={exp}" for exp in ("exact", "duo", "chord"))
KEYS = ("kl", "kl_2se", "top1", "ppl_change")
CONFIGS = {
    "lm-tiny-d128": "tiny.yaml",
    "SmolLM2-135M": "quickstart.yaml",
    "small Flux": "quickstart_image.yaml",
    "small Wan": "quickstart_video.yaml",
}
Call = tuple[Tensor, Tensor, Tensor, bool]  # query, key, value, is_causal


def made_inputs() -> Iterator[tuple[str, Call]]:
    """By name; bfloat16, head_dim 128."""
    for name, change in {
        "N(0,1), 4,096 keys": lambda k, g: k,
        "constant bias 40 in 4 channels": lambda k, g: k + _bias(40.0),
        "2 channels x 8, varying by token": lambda k, g: k * _larger(8.0),
        "2 channels x 20, varying by token": lambda k, g: k * _larger(20.0),
    }.items():
        g = torch.Generator().manual_seed(0)
        tokens = 4096 if "4,096" in name else 1024
        q, k, v = (torch.randn(1, 2, tokens, 128, generator=g) for _ in range(3))
        yield name, (*(x.bfloat16() for x in (q[:, :, :1024], change(k, g), v)), False)
    for where, pair in (("slow", 62), ("middle", 30), ("fast", 2)):
        for size in (30.0, 100.0):
            yield f"RoPE-turned bias {size:g}, {where} channel pair", _turned(pair, size)


def _larger(factor: float) -> Tensor:
    found = torch.ones(128)
    found[[7, 70]] = factor
    return found


def _bias(size: float) -> Tensor:
    found = torch.zeros(128)
    found[[3, 40, 77, 110]] = size
    return found


def _turned(pair: int, size: float) -> Call:
    """Keys with a constant bias in one channel pair before rotary positions, and queries that keep the logits sane."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 600, 128, generator=g).double() for _ in range(3))
    k[..., pair] += size
    k[..., pair + 64] -= 0.6 * size
    q[..., [pair, pair + 64]] *= min(1.0, 8 / size)
    angles = torch.arange(600.0, dtype=torch.float64)[:, None] * 1e6 ** (-torch.arange(0, 128, 2).double() / 128)
    cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
    q, k = (x * cos + torch.cat([-x[..., 64:], x[..., :64]], dim=-1) * sin for x in (q, k))
    return (*(x.bfloat16() for x in (q, k, v)), True)  # type: ignore[return-value]


def turned(recipe: str) -> str:
    return recipe + (f",{TURNED[1:]}" if ":" in recipe else TURNED)


def of_made_inputs(recipes: tuple[str, ...]) -> list[dict[str, Any]]:
    rows = []
    for name, (q, k, v, is_causal) in made_inputs():
        scores = q.double() @ k.double().transpose(-1, -2) / math.sqrt(q.shape[-1])
        if is_causal:
            scores = scores.masked_fill(~torch.ones_like(scores, dtype=torch.bool).tril(), -math.inf)
        exact = scores.softmax(-1) @ v.double()
        for recipe in recipes:
            plain_, rotated = (
                relative_l1(sage_attention(q, k, v, is_causal=is_causal, recipe=r), exact)
                for r in (recipe, turned(recipe))
            )
            rows.append({"input": name, "recipe": recipe, "rel_l1": plain_, "rel_l1_rotated": rotated})
    return rows


def of_model(config_name: str, title: str, recipes: tuple[str, ...]) -> dict[str, Any]:
    """Errors of the model's own calls, and of a language model the drift of its distributions."""
    text = config_name in ("tiny.yaml", "quickstart.yaml")
    config = load_run_config(
        ROOT / "configs" / config_name, [f"task.windows={WINDOWS}", "task.max_new_tokens=1"] if text else []
    )
    judge = judge_for(config, lambda label, done, total: None)
    with capturing(title, per_site=2) as kept:
        judge.run_exact(1)
    found: dict[str, Any] = {"model": judge.facts(), "calls": len(kept.calls), "sites": []}
    for recipe in recipes:
        pairs = [tuple(score(part_of(c), r)["rel_l1"] for r in (recipe, turned(recipe))) for c in kept.calls]
        found["sites"].append(
            {
                "recipe": recipe,
                "rel_l1": fmean(a for a, _ in pairs),
                "rel_l1_rotated": fmean(b for _, b in pairs),
                "worst_ratio": max(b / a for a, b in pairs),
                "better": sum(b < a for a, b in pairs),
            }
        )
    if text:
        names = [name for r in recipes for name in (r, turned(r))]
        runs = {m.name: m.metrics for m in judge.measure_all({n: Policy(recipe=n, quantize_fp32=True) for n in names})}
        found["windows"] = WINDOWS
        found["drift"] = [
            {"recipe": r, **{k: runs[r][k] for k in KEYS}, **{f"{k}_rotated": runs[turned(r)][k] for k in KEYS}}
            for r in recipes
        ]
    return found


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--exponents", action="store_true")
    exponents = ap.parse_args().exponents
    kind, recipes = ("exponent", EXPONENTS) if exponents else ("rotation", RECIPES)
    quiet_loading()
    command = "python scripts/rotation_cpu.py" + " --exponents" * exponents
    result: dict[str, Any] = record(command) | {"kind": kind}
    result["inputs"] = of_made_inputs(recipes)
    result["models"] = {}
    for title, config in CONFIGS.items():
        start = time.perf_counter()
        try:
            result["models"][title] = of_model(config, title, recipes)
        except ModelError as error:
            print(f"{title}: left out, {error}")
            continue
        print(f"{title}: {time.perf_counter() - start:.0f} s", flush=True)
    path = ROOT / f"docs/results/{kind}_cpu.json"
    write_whole(path, json.dumps(plain(result), indent=1, allow_nan=False) + "\n")
    print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
