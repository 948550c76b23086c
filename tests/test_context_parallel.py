"""A sequence split over processes: Ulysses, ring and unified modes run the recipe and give the whole's attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import sage_patch
from distributed_ranks import Wire, run
from sage_patch.policy import Policy
from tiny import EVERYTHING, EXACT, relative_l1

HEADS, DIM = 4, 32


class Site(torch.nn.Module):
    """A diffusers attention module that hands its three tensors [B, tokens, H, D] to the dispatcher, no more."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        from diffusers.models._modeling_parallel import ParallelConfig

        self.parallel = ParallelConfig(context_parallel_config=config) if config is not None else None


def mesh_config(ring: int, ulysses: int, anything: bool = False, copies: int = 1) -> Any:
    """diffusers' config over a CPU mesh; enable_parallelism itself wants an accelerator."""
    from diffusers.models._modeling_parallel import ContextParallelConfig
    from torch.distributed.device_mesh import init_device_mesh

    config = ContextParallelConfig(
        ring_degree=ring,
        ulysses_degree=ulysses,
        ulysses_anything=anything and ulysses > 1,
        ring_anything=anything and ring > 1,
    )
    shape, names = ((ring, ulysses), ("ring", "ulysses"))
    if copies > 1:
        shape, names = (copies, *shape), ("cfg", *names)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    config.setup(dist.get_rank(), dist.get_world_size(), torch.device("cpu"), mesh)
    return config


def sentences(lengths: list[int], seed: int = 0, heads: int = HEADS) -> list[torch.Tensor]:
    """query, key and value [1, all tokens, H, D]; the keys have a large mean, which smoothing takes away."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, sum(lengths), heads, DIM, generator=generator).bfloat16() for _ in range(3))
    return [q, k + 8 * torch.randn(1, 1, heads, DIM, generator=generator).bfloat16(), v]


def exact(tensors: list[torch.Tensor], mask: torch.Tensor | None = None) -> torch.Tensor:
    q, k, v = (x.double().transpose(1, 2) for x in tensors)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2)


def attention(
    rank: int, world: int, ring: int, ulysses: int, lengths: list[int], recipe: str, anything: bool, options: dict
) -> tuple[torch.Tensor, set, dict[str, int]]:
    """This rank's rows through the dispatcher that patched processors call."""
    from diffusers.models.attention_dispatch import dispatch_attention_fn
    from diffusers.models._modeling_parallel import ParallelConfig
    from sage_patch.integrations.diffusers import dispatchers
    from sage_patch.integrations.sdpa import RUNNING
    from sage_patch.integrations.tags import SiteTag
    from sage_patch.integrations.source import MaskStyle
    from sage_patch.kernels import ops
    from sage_patch.recipes import Limits, parse_recipe

    copies = options.get("copies", 1)
    config = mesh_config(ring, ulysses, anything, copies)
    tensors = sentences(lengths, seed=rank // (ring * ulysses), heads=options.get("heads", HEADS))
    mine = [x.split(lengths, dim=1)[rank % (ring * ulysses)].contiguous() for x in tensors]
    mask = options.get("mask")
    if mask is not None:
        mask = mask.split(lengths, dim=-1)[rank]
    limits = Limits(**options.get("limits", {"min_q_len": 1, "min_kv_len": 1}))
    style = next(iter(MaskStyle)) if hasattr(MaskStyle, "__members__") else None
    RUNNING.tag = SiteTag("m/site", "m/*", parse_recipe(recipe), "exact", limits, "", style)
    replaced = dispatchers()[dispatch_attention_fn]
    with Wire() as wire, torch.no_grad():
        out = replaced(*mine, mask, parallel_config=ParallelConfig(context_parallel_config=config))
    RUNNING.tag = None
    counted = {(k.recipe, k.reason, n) for k, n in ops.counts("m/").items()}
    return out.numpy() if out.dtype != torch.bfloat16 else out.float().numpy(), counted, dict(wire.sent)


def joined(results: list, dim: int = 1) -> torch.Tensor:
    return torch.cat([torch.from_numpy(out) for out, _, _ in results], dim=dim)


# name: ring, ulysses, tokens of each rank, uneven
MODES = {
    "ulysses": (1, 2, [160, 160], False),
    "ring": (2, 1, [160, 160], False),
    "ulysses, uneven": (1, 2, [131, 190], True),
    "ring, uneven": (2, 1, [131, 190], True),
    "unified": (2, 2, [80, 80, 80, 80], False),
    "ring of four, uneven": (4, 1, [70, 1, 150, 99], True),
}


@pytest.mark.parametrize("mode", MODES)
def test_quantized_and_equal_to_the_whole(mode: str, tmp_path: Path) -> None:
    ring, ulysses, lengths, anything = MODES[mode]
    recipe = "qk_int8_pv_fp16"
    results = run(attention, ring * ulysses, tmp_path, ring, ulysses, lengths, recipe, anything, {})
    wanted = exact(sentences(lengths))
    alone = [x.transpose(1, 2) for x in sentences(lengths)]
    with torch.no_grad():
        one = sage_patch.sage_attention(*alone, recipe=recipe).transpose(1, 2)
    error = relative_l1(joined(results), wanted)
    assert error < 1.25 * relative_l1(one, wanted) + 2e-3, error
    assert all(counted == {(recipe, "", ring)} for _, counted, _ in results)
