"""A text model under its tp_plan, in two processes: each rank's heads under the recipe, cache and counters included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from distributed_ranks import run

import sage_patch
from tiny import EVERYTHING, EXACT, relative_l1, text_config


def sharded(rank: int, world: int, folder: str) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    config = DistributedConfig(tp_plan="auto", tp_size=world)
    mesh = dist.init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=config, device_mesh=mesh).eval()
    ids = torch.arange(40)[None] % 90 + 3
    with torch.no_grad():
        plain = model(ids).logits
        with sage_patch.applied(model, EXACT):
            same = torch.equal(model(ids).logits, plain)
        sites = [s.name for s in sage_patch.plan(model, EVERYTHING).sites]
        with sage_patch.applied(model, EVERYTHING) as handle:
            logits = model(ids).logits
            cache = sage_patch.QuantizedCache(model.config)
            tokens = model.generate(ids, max_new_tokens=4, do_sample=False, past_key_values=cache)
            heads = {layer.pages.num_kv_heads for layer in cache.layers if getattr(layer, "pages", None) is not None}
            counts = handle.stats()
    return {
        "same": same, "sites": sites, "plain": plain.numpy(), "logits": logits.numpy(), "tokens": tokens.tolist(),
        "heads": heads, "quantized": counts["quantized"],
    }  # fmt: skip


def test_two_ranks_of_a_text_model(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(text_config(vocab_size=100)).eval()
    model.save_pretrained(tmp_path / "model")
    ids = torch.arange(40)[None] % 90 + 3
    with torch.no_grad(), sage_patch.applied(model, EVERYTHING):
        whole = model(ids).logits
    first, second = run(sharded, 2, tmp_path, str(tmp_path / "model"))
    assert first["sites"] == second["sites"] and len(first["sites"]) == 2
    assert first["tokens"] == second["tokens"]
    for of in (first, second):
        assert of["same"]
        assert relative_l1(torch.from_numpy(of["logits"]), whole) < 1e-4  # heads are quantized each for itself
        assert of["quantized"] >= 4
        assert of["heads"] == {1}  # one of the two kv heads
