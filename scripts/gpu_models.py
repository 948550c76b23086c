"""Whole models on one GPU: how far the patched ones drift, and what they gain end to end.

    python scripts/gpu_models.py --parts lm,wan,llama8k --out results.json

lm: the trained language models in bf16, 16 windows of held-out text: KL(unpatched || patched) per recipe, beside bf16's
own noise KL(float32 || bf16), and KL(bf16 || bf16 by another exact kernel), which two bf16 runs differ by anyway.
The others are random weights in published shapes, few layers of each (model_shapes.py): one forward pass with torch's
default attention, patched with everything exact (the control: what the patch itself costs), patched, patched with the
fastest exponent, and with FlashAttention-3 where installed. The ways take turns, round by round, each from half a
second of rest: `burst_ms` is a pass of the first ones after it, `ms` one of the second half of 1.5 seconds of passes.
Medians over the rounds; the outputs are compared in the same run, clock, power and peak memory are read beside.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import torch
from model_shapes import MODELS
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import sage_patch
from sage_patch.evaluation.bench.timing import Figure, Monitor, Timing, measure
from sage_patch.evaluation.metrics import relative_l1
from sage_patch.kernels import fa3
from sage_patch.policy import Policy
from sage_patch.recipes import parse_recipe

ROOT = Path(__file__).resolve().parents[1]
RECIPES = ("qk_int8_pv_fp8", "qk_int8_pv_fp16")
PARTS = ("lm", "wan", "cogvideox", "flux", "llama4k", "llama8k", "llama32k", "llama128k")
TIMING = Timing(calls=4, longest=0.3, fewest=1)


def language_models() -> list[dict[str, Any]]:
    from sage_patch.config import load_run_config
    from sage_patch.evaluation.metrics import ExactWindow, TextComparison
    from sage_patch.evaluation.models import ModelError, load_text_model
    from sage_patch.evaluation.text_model import text_windows

    rows = []
    for name, config_file in (("lm-tiny-d128", "tiny.yaml"), ("SmolLM2-135M-Instruct", "quickstart.yaml")):
        overrides = ["model.device=cuda", "model.dtype=float32", "task.windows=16", "task.window_tokens=1024"]
        config = load_run_config(ROOT / "configs" / config_file, overrides)
        try:
            wide, tokenizer = load_text_model(config.model)
        except ModelError as error:
            rows.append({"model": name, "unavailable": str(error)})
            continue
        half, _ = load_text_model(config.model.model_copy(update={"dtype": "bfloat16"}))
        windows = text_windows(tokenizer, config.task, wide)
        noise, floor = TextComparison(), TextComparison()
        trials = {recipe: TextComparison() for recipe in RECIPES}
        calls: dict[str, Any] = {}
        with torch.no_grad():
            for window in windows:
                exact = half(window[None]).logits[0].float()
                noise.add(exact, ExactWindow(wide(window[None]).logits[0].float(), window))
                kept = ExactWindow(exact, window)
                with sdpa_kernel(SDPBackend.MATH):  # exact too, rounded at other places
                    floor.add(half(window[None]).logits[0].float(), kept)
                for recipe, comparison in trials.items():
                    with sage_patch.applied(half, Policy(recipe=recipe, min_q_len=1, min_kv_len=1)) as handle:
                        comparison.add(half(window[None]).logits[0].float(), kept)
                        calls[recipe] = handle.rows()
            prompt = windows[:1, :200]
            greedy = dict(max_new_tokens=48, do_sample=False, pad_token_id=0)
            before = half.generate(prompt, **greedy)[0, 200:]
            with sage_patch.applied(half, Policy(min_q_len=2, min_kv_len=1)) as handle:
                after = half.generate(prompt, **greedy)[0, 200:]
                report = handle.report()
        rows.append(
            {
                "model": name,
                "windows": len(windows),
                "bf16_noise": noise.summary(),
                "bf16_floor": floor.summary(),
                "recipes": {r: t.summary() for r, t in trials.items()},
                "backends": {r: sorted({(c["backend"], c["reason"]) for c in c_}) for r, c_ in calls.items()},
                "text": {"unpatched": tokenizer.decode(before), "patched": tokenizer.decode(after)},
                "report": report.splitlines()[:6],
            }
        )
        print(json.dumps(rows[-1], default=str)[:1500], flush=True)
    return rows


@contextlib.contextmanager
def patched(model: nn.Module, recipe: str, exact_backend: Literal["torch", "fa3"] = "torch") -> Iterator[Any]:
    with sage_patch.applied(model, Policy(recipe=recipe), exact_backend=exact_backend) as handle:
        yield handle


# What takes turns: name -> (recipe, what computes its exact calls); the first is the model as it is.
WAYS: dict[str, tuple[str, Literal["torch", "fa3"]] | None] = {
    "sdpa_default": None,
    "exact": ("exact", "torch"),
    "qk_int8_pv_fp8": ("qk_int8_pv_fp8", "torch"),
    "chord": ("qk_int8_pv_fp8:exp=chord", "torch"),
    "fa3_bf16": ("exact", "fa3"),
    "qk_int8_pv_fp16": ("qk_int8_pv_fp16", "torch"),
}


def unavailable(way: str) -> str:
    """Why a way cannot be run here, "" if it can."""
    recipe, exact_backend = WAYS[way] or ("exact", "torch")
    try:
        parse_recipe(recipe)
        if exact_backend == "fa3":
            fa3.find()
    except (ValueError, fa3.Fa3Missing) as error:
        return str(error)
    return ""


def shape(part: str, wanted: Sequence[str], rounds: int, seconds: float, device: str = "cuda") -> dict[str, Any]:
    """A row of one model: rounds in which every way is timed once from rest, no new one where it would end too late."""
    began, model_shape = time.perf_counter(), MODELS[part]
    attention = {name: getattr(model_shape, name) for name in ("tokens", "head_dim", "is_causal")}
    row: dict[str, Any] = {"model": model_shape.title, "attention": attention}
    ways = [way for way in wanted if not unavailable(way)]
    row |= {way: {"unavailable": unavailable(way)} for way in wanted if way not in ways}
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model, run = model_shape.make()
    torch.set_default_dtype(default)
    model.eval()
    figures: dict[str, list[Figure]] = {way: [] for way in ways}
    exact: Tensor | None = None
    with torch.no_grad(), Monitor() as monitor:
        for turn in range(rounds):
            started = time.perf_counter()
            for way in [*ways[turn % len(ways) :], *ways[: turn % len(ways)]]:
                told = WAYS[way]
                with contextlib.nullcontext() if told is None else patched(model, *told) as handle:
                    if turn == 0:
                        torch.cuda.reset_peak_memory_stats()
                        out = run()
                        exact = out if exact is None else exact
                        row[way] = {
                            "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
                            "rel_l1": relative_l1(out, exact),
                            "bit_equal": torch.equal(out, exact),
                            "ran": _ran(handle) if handle is not None else None,
                        }
                    figures[way].append(measure(run, TIMING))
                print(part, turn, way, [round(ms or 0.0, 3) for ms in figures[way][-1][:2]], flush=True)
            now = time.perf_counter()
            if now - began + (now - started) > seconds:
                break
    row["rounds"] = turn + 1
    for way, found in figures.items():
        sustained = [f.sustained_ms or 0.0 for f in found]
        row[way] |= {
            "burst_ms": statistics.median(f.burst_ms for f in found),
            "ms": statistics.median(sustained),
            "each_ms": [round(ms, 3) for ms in sustained],
            "card": monitor.over(found[-1].sustained_span),
        }
    for way in ways:
        row[way]["speedup_over_default"] = row[ways[0]]["ms"] / row[way]["ms"]
        row[way]["peak_over_default"] = row[way]["peak_gib"] / row[ways[0]]["peak_gib"]
    return row


def _ran(handle: sage_patch.Handle) -> list[tuple[str, str, str]]:
    return sorted({(r["recipe"], r["reason"], r["backend"]) for r in handle.rows()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of lm, {', '.join(MODELS)}")
    parser.add_argument("--ways", default=",".join(list(WAYS)[:5]), help=f"of {', '.join(WAYS)}; the first is first")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--budget", type=float, default=600.0, help="seconds, shared out among the parts as they come")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    parts, ways = options.parts.split(","), options.ways.split(",")
    unknown = [name for name in (*parts, *ways) if name not in (*MODELS, *WAYS, "lm")]
    if unknown or ways[0] != "sdpa_default":
        parser.error(f"no {', '.join(unknown)}" if unknown else "the first way must be sdpa_default")
    from sage_patch.evaluation.environment import environment

    driver = "nvidia-smi", "--query-gpu=name,driver_version,power.limit", "--format=csv,noheader"
    record: dict[str, Any] = {
        "command": f"python scripts/gpu_models.py --parts {options.parts} --ways {options.ways} "
        f"--rounds {options.rounds} --budget {options.budget:g}",
        "environment": environment(),
        "card": subprocess.run(driver, capture_output=True, text=True).stdout.strip()
        if shutil.which(driver[0])
        else "",
    }
    began = time.perf_counter()
    for i, part in enumerate(parts):
        start = time.perf_counter()
        left = (options.budget - (start - began)) / (len(parts) - i)
        try:
            if start - began > options.budget:
                raise TimeoutError(f"not begun: the budget of {options.budget:g} seconds was over")
            record[part] = language_models() if part == "lm" else shape(part, ways, options.rounds, left)
        except Exception as error:  # the other parts are still worth having
            record[part] = {"error": f"{type(error).__name__}: {error}"}
            print(part, record[part], flush=True)
        torch.cuda.empty_cache()
        print(f"{part}: {time.perf_counter() - start:.0f} s", flush=True)
        options.out.write_text(json.dumps(record, indent=1, default=str))


if __name__ == "__main__":
    main()
