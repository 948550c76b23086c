#!/usr/bin/env python3
"""Milliseconds a token of a whole model that decodes over a long cache on this GPU, 16-bit and quantized caches.

    python scripts/gpu_static_decode.py --out decode.json [--layers 32] [--length 32768] [--steps 24] [--forms ...]

The shape of Llama-3-8B with random weights in bf16, batch 1, greedy steps that feed their token back. All forms begin
with the same keys and values, those of a prompt of random tokens. Forms: static_sdpa and
static_quantized as `_graph` (one captured CUDA graph) or `_compiled` (torch.compile, reduce-overhead);
static_sdpa_unmasked: torch's attention without the mask that transformers passes for a static cache, the fastest it
can be; dynamic_sdpa and dynamic_quantized: eager, as generate runs them. The logits of the first step are compared with
those of static_sdpa.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import AttentionInterface

import sage_patch
from sage_patch.evaluation.bench.measure import gpu_environment

UNMASKED = "sdpa_unmasked"  # not known to the registry of masks, so that none is made
Step = Callable[[Tensor, Tensor], Tensor]  # (token [1, 1], position [1, 1]) -> logits [1, vocabulary]


def llama(layers: int) -> nn.Module:
    """Llama-3-8B's shape."""
    config = LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=layers, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=131072,
        rope_parameters={"rope_type": "default", "rope_theta": 5e5},
    )  # fmt: skip
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    return model.eval()


def prompt(model: nn.Module, length: int) -> DynamicCache:
    """A 16-bit cache that holds a prompt."""
    model.set_attn_implementation("sdpa")
    cache = DynamicCache(config=model.config)
    ids = torch.randint(0, 1000, (1, length), device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    model(input_ids=ids, past_key_values=cache, logits_to_keep=1)
    return cache


def filled(cache: Any, held: DynamicCache, length: int) -> Any:
    """The same keys and values in another cache."""
    for i, layer in enumerate(held.layers):
        cache.update(layer.keys[:, :, :length], layer.values[:, :, :length], i)
    return cache


def captured(run: Step) -> Step:
    """The step as a CUDA graph. Its first calls store tokens, which the caller takes back."""
    token, position = (torch.zeros(1, 1, dtype=torch.long, device="cuda") for _ in range(2))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run(token, position)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(token, position)

    def replay(new: Tensor, at: Tensor) -> Tensor:
        token.copy_(new)
        position.copy_(at)
        graph.replay()
        return out

    return replay


def set_length(cache: Any, length: int) -> None:
    """Take a static cache back to `length` tokens."""
    for layer in cache.layers:
        if isinstance(layer, sage_patch.integrations.static_cache.StaticQuantizedCacheLayer):
            layer.pages.held.copy_(torch.tensor([length, 0], dtype=torch.int32))
        elif hasattr(layer, "cumulative_length"):
            layer.cumulative_length.fill_(length)


def measure(model: nn.Module, form: str, held: DynamicCache, length: int, room: int, steps: int) -> dict[str, Any]:
    kind, _, how = form.rpartition("_") if form.endswith(("_graph", "_compiled")) else (form, "", "eager")
    quantized = kind.endswith("quantized")
    model.set_attn_implementation("sage2" if quantized else UNMASKED if kind.endswith("unmasked") else "sdpa")
    config = model.config
    makers: dict[str, Callable[[], Any]] = {
        "static_sdpa": lambda: StaticCache(config, max_cache_len=room),
        "static_sdpa_unmasked": lambda: StaticCache(config, max_cache_len=room),
        "static_quantized": lambda: sage_patch.StaticQuantizedCache(config, room),
        "dynamic_sdpa": lambda: DynamicCache(config=config),
        "dynamic_quantized": lambda: sage_patch.QuantizedCache(config),
    }
    cache = filled(makers[kind](), held, length)
    # One call that compiles, captures and warms up; then back to the prompt.
    call: Any = (
        torch.compile(model, mode="reduce-overhead", fullgraph=True, dynamic=False) if how == "compiled" else model
    )

    def run(token: Tensor, position: Tensor) -> Tensor:
        return call(input_ids=token, position_ids=position, past_key_values=cache).logits[:, -1]  # type: ignore[no-any-return]

    step = captured(run) if how == "graph" else run
    started = time.perf_counter()
    first = None
    times = []
    for _ in range(4):
        token = torch.full((1, 1), 7, device="cuda")
        set_length(cache, length) if "static" in kind else None
        position = torch.full((1, 1), length, device="cuda")
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            out = step(token, position)
            first = out.float().clone() if first is None else first
            token, position = out.argmax(-1, keepdim=True), position + 1
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3 / steps)
    return {
        "form": form, "ms_a_token": statistics.median(times[1:]), "all": times, "first": first,
        "seconds": time.perf_counter() - started,
    }  # fmt: skip


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--length", type=int, default=32768)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--forms", default="static_sdpa_graph,static_quantized_graph,dynamic_sdpa,dynamic_quantized")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    AttentionInterface.register(UNMASKED, sdpa_attention_forward)
    import sage_patch.integrations.static_cache  # noqa: F401

    began = time.perf_counter()
    model = llama(options.layers)
    room = options.length + 256
    held = prompt(model, options.length)
    torch.cuda.synchronize()
    print(f"model and prompt {time.perf_counter() - began:.1f} s", flush=True)
    record: dict[str, Any] = {
        "layers": options.layers, "length": options.length, "steps": options.steps, "rows": [],
        "environment": gpu_environment(),
    }  # fmt: skip
    want = None
    for form in options.forms.split(","):
        torch.compiler.reset()
        try:
            row = measure(model, form, held, options.length, room, options.steps)
        except Exception as error:  # the others are worth having
            traceback.print_exc()
            print(form, type(error).__name__, str(error)[:300], flush=True)
            continue
        first = row.pop("first")
        want = first if want is None else want
        row["logits_rel_l1"] = float((first - want).abs().sum() / want.abs().sum())
        row["same_token"] = bool(first.argmax() == want.argmax())
        record["rows"].append(row)
        print({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
        options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
