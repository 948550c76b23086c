"""Whole models on one GPU: how far the patched ones drift, and what they gain end to end.

    python scripts/gpu_models.py --parts lm,wan,cogvideox,flux --out results.json

lm: the trained language models in bf16, 16 windows of held-out text: KL(unpatched || patched) per recipe, beside bf16's
own noise KL(float32 || bf16), and KL(bf16 || bf16 by another exact kernel), which two bf16 runs differ by anyway.
wan, cogvideox, flux: random weights in the shape of Wan-2.1-14B (3 layers,
75,600 tokens), CogVideoX-5B (6 layers, 17,776 tokens) and Flux-dev (4 + 8 layers, 4,608 tokens): one forward pass with
torch's default attention, patched with everything exact (the control: what the patch itself costs), FlashAttention-3
where installed, and patched. The ways take turns, round by round, each from half a second of rest: `burst_ms` is the
first pass after it, `ms` the mean of the passes that follow for over a second. Medians over the rounds; the outputs are
compared in the same run and the peak memory is read beside.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

import sage_patch
from sage_patch.evaluation.metrics import relative_l1
from sage_patch.policy import Policy

ROOT = Path(__file__).resolve().parents[1]
RECIPES = ("qk_int8_pv_fp8", "qk_int8_pv_fp16")
PATCHED = ("exact", *RECIPES)


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


def wan() -> tuple[nn.Module, dict[str, Any]]:
    from diffusers import WanTransformer3DModel

    model = WanTransformer3DModel(num_attention_heads=40, attention_head_dim=128, ffn_dim=13824, num_layers=3)
    inputs = dict(
        hidden_states=torch.randn(1, 16, 21, 90, 160),  # 21 x 45 x 80 patches
        timestep=torch.tensor([500.0]),
        encoder_hidden_states=torch.randn(1, 512, 4096),
    )
    return model, inputs


def cogvideox() -> tuple[nn.Module, dict[str, Any]]:
    from diffusers import CogVideoXTransformer3DModel

    model = CogVideoXTransformer3DModel(
        num_attention_heads=48, attention_head_dim=64, num_layers=6, use_rotary_positional_embeddings=True
    )
    inputs = dict(
        hidden_states=torch.randn(1, 13, 16, 60, 90),  # 13 x 30 x 45 patches and 226 text tokens
        encoder_hidden_states=torch.randn(1, 226, 4096),
        timestep=torch.tensor([500]),
        image_rotary_emb=(torch.ones(17550, 64), torch.zeros(17550, 64)),
    )
    return model, inputs


def flux() -> tuple[nn.Module, dict[str, Any]]:
    from diffusers import FluxTransformer2DModel

    model = FluxTransformer2DModel(num_layers=4, num_single_layers=8, guidance_embeds=True)
    inputs = dict(
        hidden_states=torch.randn(1, 4096, 64),
        encoder_hidden_states=torch.randn(1, 512, 4096),
        pooled_projections=torch.randn(1, 768),
        timestep=torch.tensor([0.5]),
        guidance=torch.tensor([3.5]),
        img_ids=torch.stack([torch.zeros(4096), torch.arange(4096.0) // 64, torch.arange(4096.0) % 64], 1),
        txt_ids=torch.zeros(512, 3),
    )
    return model, inputs


Made = tuple[nn.Module, dict[str, Any]]
# title, how it is made, and the shape of its self-attention, by which a report finds the kernel's time
SHAPES: dict[str, tuple[str, Callable[[], Made], dict[str, Any]]] = {
    "wan": ("Wan-2.1-14B, 3 layers, 75,600 tokens", wan, {"tokens": 75600, "head_dim": 128, "is_causal": False}),
    "cogvideox": (
        "CogVideoX-5B, 6 layers, 17,776 tokens", cogvideox, {"tokens": 17776, "head_dim": 64, "is_causal": False}
    ),
    "flux": ("Flux-dev, 4 + 8 layers, 4,608 tokens", flux, {"tokens": 4608, "head_dim": 128, "is_causal": False}),
}  # fmt: skip


class _FlashAttention3(TorchFunctionMode):
    """torch's attention replaced by FlashAttention-3 in bf16, for the length of a with-block."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention and kwargs.get("attn_mask") is None:
            import fa3_fwd_interface as fa3  # type: ignore[import-not-found]

            names = ("query", "key", "value")
            given = {**dict(zip(names, args, strict=False)), **{n: kwargs[n] for n in names if n in kwargs}}
            out = fa3.flash_attn_func(*(given[n].transpose(1, 2) for n in names), causal=kwargs.get("is_causal", False))
            return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)
        return func(*args, **kwargs)


@contextlib.contextmanager
def _patched(model: nn.Module, recipe: str) -> Iterator[Any]:
    with sage_patch.applied(model, Policy(recipe=recipe)) as handle:
        yield handle


def shape(part: str, rounds: int) -> dict[str, Any]:
    title, make, attention = SHAPES[part]
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model, inputs = make()
    torch.set_default_dtype(default)
    model.eval()
    row: dict[str, Any] = {"model": title, "attention": attention, "rounds": rounds}
    ways: dict[str, Callable[[], contextlib.AbstractContextManager]] = {
        "sdpa_default": contextlib.nullcontext,
        **{name: (lambda name=name: _patched(model, name)) for name in PATCHED},
        "fa3_bf16": _FlashAttention3,
    }
    if importlib.util.find_spec("fa3_fwd_interface") is None:
        row["fa3_bf16"] = {"unavailable": "fa3-fwd is not installed"}
        del ways["fa3_bf16"]
    run = lambda: model(**inputs, return_dict=False)[0]  # noqa: E731
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    exact: Tensor | None = None
    with torch.no_grad():
        for turn in range(rounds):
            for name in [*list(ways)[turn % len(ways) :], *list(ways)[: turn % len(ways)]]:
                with ways[name]() as handle:
                    if turn == 0:
                        torch.cuda.reset_peak_memory_stats()
                        out = run()
                        exact = out if exact is None else exact
                        row[name] = {
                            "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
                            "rel_l1": relative_l1(out, exact),
                            "bit_equal": torch.equal(out, exact),
                            "ran": _ran(handle) if name in PATCHED else None,
                        }
                    times[name].append(_timed(run))
                print(part, turn, name, times[name][-1], flush=True)
    for name, found in times.items():
        row[name] |= {
            "burst_ms": statistics.median(burst for burst, _ in found),
            "ms": statistics.median(sustained for _, sustained in found),
            "each_ms": [round(sustained, 3) for _, sustained in found],
        }
        row[name]["speedup_over_default"] = row["sdpa_default"]["ms"] / row[name]["ms"]
        row[name]["peak_over_default"] = row[name]["peak_gib"] / row["sdpa_default"]["peak_gib"]
    return row


def _ran(handle: sage_patch.Handle) -> list[tuple[str, str, str]]:
    return sorted({(r["recipe"], r["reason"], r["backend"]) for r in handle.rows()})


def _timed(run: Callable[[], Tensor]) -> tuple[float, float]:
    """(milliseconds of the first pass after half a second of rest, mean milliseconds of those of the next second)."""

    def passes(count: int) -> float:
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        for _ in range(count):
            run()
        last.record()
        last.synchronize()
        return first.elapsed_time(last)

    passes(1)
    time.sleep(0.5)
    burst = passes(1)
    count = max(1, int(1200 / burst))
    return burst, passes(count) / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="lm,wan,cogvideox,flux")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    from sage_patch.evaluation.environment import environment

    driver = "nvidia-smi", "--query-gpu=name,driver_version,power.limit", "--format=csv,noheader"
    record: dict[str, Any] = {
        "command": f"python scripts/gpu_models.py --parts {options.parts}",
        "environment": environment(),
        "card": subprocess.run(driver, capture_output=True, text=True).stdout.strip()
        if shutil.which(driver[0])
        else "",
    }
    for part in options.parts.split(","):
        start = time.perf_counter()
        try:
            record[part] = language_models() if part == "lm" else shape(part, options.rounds)
        except Exception as error:  # the other parts are still worth having
            record[part] = {"error": f"{type(error).__name__}: {error}"}
            print(part, record[part], flush=True)
        torch.cuda.empty_cache()
        print(f"{part}: {time.perf_counter() - start:.0f} s", flush=True)
        options.out.write_text(json.dumps(record, indent=1, default=str))


if __name__ == "__main__":
    main()
