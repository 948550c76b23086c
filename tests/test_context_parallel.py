"""A sequence split over processes: Ulysses, ring and unified modes run the recipe and give the whole's attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from distributed_ranks import Wire, run

import sage_patch
from sage_patch.integrations.context_parallel import merge
from sage_patch.integrations.tags import SiteTag
from sage_patch.kernels import ops
from sage_patch.policy import Policy
from sage_patch.recipes import Limits, parse_recipe
from tiny import EVERYTHING, relative_l1

HEADS, DIM = 4, 64
FP16, FP8 = "qk_int8_pv_fp16", "qk_int8_pv_fp8"


class Case(NamedTuple):
    """One call: how it is split, and the tokens of each rank. copies: groups of ranks that compute other calls."""

    ring: int
    ulysses: int
    lengths: tuple[int, ...]
    anything: bool = False
    recipe: str = FP16
    heads: int = HEADS
    copies: int = 1
    hidden: int = 0  # the last keys, by a mask
    min_kv_len: int = 1


TWO = {
    "ulysses": Case(1, 2, (160, 160)),
    "ring": Case(2, 1, (160, 160)),
    "ulysses, uneven": Case(1, 2, (131, 190), True),
    "ring, uneven": Case(2, 1, (131, 190), True),
    "odd heads": Case(1, 2, (131, 190), True, heads=3),
    "ulysses, E4M3": Case(1, 2, (256, 256), recipe=FP8),
    "ring, E4M3": Case(2, 1, (256, 256), recipe=FP8),
    "ring, INT4": Case(2, 1, (160, 160), recipe="qk_int4_pv_fp16"),
    "ulysses, masked": Case(1, 2, (160, 160), hidden=200),
    "ring, masked": Case(2, 1, (160, 160), hidden=200),
    "too short": Case(1, 2, (160, 160), min_kv_len=321),
    "long enough together": Case(2, 1, (160, 160), min_kv_len=320),
}
FOUR = {
    "unified": Case(2, 2, (80, 80, 80, 80)),
    "ring, one token": Case(4, 1, (70, 1, 150, 99), True),
    "ulysses, uneven": Case(1, 4, (70, 1, 150, 99), True),
    "two calls for guidance": Case(1, 2, (160, 160), copies=2),
}


def mesh_config(case: Case) -> Any:
    """diffusers' config over a CPU mesh; enable_parallelism itself wants an accelerator."""
    from diffusers.models._modeling_parallel import ContextParallelConfig
    from torch.distributed.device_mesh import init_device_mesh

    config = ContextParallelConfig(
        ring_degree=case.ring,
        ulysses_degree=case.ulysses,
        ulysses_anything=case.anything and case.ulysses > 1,
        ring_anything=case.anything and case.ring > 1,
    )
    names = ("guidance", "ring", "ulysses")
    mesh = init_device_mesh("cpu", (case.copies, case.ring, case.ulysses), mesh_dim_names=names)
    config.setup(dist.get_rank(), dist.get_world_size(), torch.device("cpu"), mesh)
    return config


def whole(case: Case, copy: int = 0) -> list[torch.Tensor]:
    """query, key and value [1, all tokens, H, D]; the keys have a large mean, which smoothing takes away."""
    generator = torch.Generator().manual_seed(copy)
    q, k, v = (torch.randn(1, sum(case.lengths), case.heads, DIM, generator=generator) for _ in range(3))
    return [x.bfloat16() for x in (q, k + 8 * torch.randn(1, 1, case.heads, DIM, generator=generator), v)]


def mask_of(case: Case) -> torch.Tensor | None:
    tokens = sum(case.lengths)
    return (torch.arange(tokens) < tokens - case.hidden)[None, None, None] if case.hidden else None


def attend_cases(rank: int, world: int, cases: dict[str, Case]) -> dict[str, Any]:
    """Of each case: this rank's rows through the dispatcher that patched processors call, its counts and its wire."""
    return {name: attend_case(rank, case) for name, case in cases.items()}


def attend_case(rank: int, case: Case) -> tuple[Any, set, dict[str, int]]:
    from diffusers.models._modeling_parallel import ParallelConfig
    from diffusers.models.attention_dispatch import dispatch_attention_fn

    from sage_patch.integrations.diffusers import dispatchers
    from sage_patch.integrations.sdpa import RUNNING

    copy, place = divmod(rank, case.ring * case.ulysses)
    config = ParallelConfig(context_parallel_config=mesh_config(case))
    mine = [x.split(case.lengths, dim=1)[place].contiguous() for x in whole(case, copy)]
    mask = mask_of(case)
    mask = None if mask is None else mask.split(case.lengths, dim=-1)[place]
    limits = Limits(min_q_len=1, min_kv_len=case.min_kv_len)
    ops.reset_counts()
    RUNNING.tag = SiteTag("m/site", "m/*", parse_recipe(case.recipe), "exact", limits, "", "bool")
    with Wire() as wire, torch.no_grad():
        out = dispatchers()[dispatch_attention_fn](*mine, mask, parallel_config=config)
    RUNNING.tag = None
    counted = {(k.recipe, k.reason, n) for k, n in ops.counts().items()}
    return out.float().numpy(), counted, dict(wire.sent)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run(attend_cases, 2, tmp_path_factory.mktemp("two"), TWO)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run(attend_cases, 4, tmp_path_factory.mktemp("four"), FOUR)


def check(case: Case, results: list[tuple[Any, set, dict[str, int]]]) -> None:
    size = case.ring * case.ulysses
    parts = case.ring if case.hidden else size
    exact = case.min_kv_len > sum(case.lengths)
    for copy in range(case.copies):
        mine = results[copy * size : (copy + 1) * size]
        got = torch.cat([torch.from_numpy(out) for out, _, _ in mine], dim=1)
        q, k, v = (x.transpose(1, 2) for x in whole(case, copy))
        mask = mask_of(case)
        wanted = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double(), mask)
        one = sage_patch.sage_attention(q, k, v, recipe="exact" if exact else case.recipe, attn_mask=mask)
        bound = relative_l1(one.double(), wanted)
        error = relative_l1(got.transpose(1, 2).double(), wanted)
        assert error < 1.1 * bound + 2e-3, (error, bound)
        assert all(n == (1 if exact else parts) for _, counted, _ in mine for _, _, n in counted)
        assert all({(r, why) for r, why, _ in counted} == {("exact", "short_kv") if exact else (case.recipe, "")}
                   for _, counted, _ in mine)  # fmt: skip


@pytest.mark.parametrize("name", TWO)
def test_two_ranks_give_the_attention_of_the_whole(name: str, two: list[dict[str, Any]]) -> None:
    check(TWO[name], [of[name] for of in two])


@pytest.mark.parametrize("name", FOUR)
def test_four_ranks_give_the_attention_of_the_whole(name: str, four: list[dict[str, Any]]) -> None:
    check(FOUR[name], [of[name] for of in four])


def test_keys_and_values_travel_in_8_bits(two: list[dict[str, Any]]) -> None:
    """Of 256 tokens with 4 heads of 64 channels, what one rank sends to the other."""
    row = 256 * HEADS * DIM * 2  # of Q, K, V or the output in 16 bits
    for of in two:
        assert of["ring, E4M3"][2]["ring"] <= 0.55 * 2 * row
        # half of the heads: Q and the output in 16 bits, K and V in 8
        assert of["ulysses, E4M3"][2]["all_to_all"] <= row / 2 * (2 + 0.55 * 2)
        assert of["ring"][2]["ring"] <= 0.8 * 2 * of["ring"][0].size * 2  # V in 16 bits
    masked = two[0]["ring, masked"]
    assert masked[2]["ring"] == 2 * masked[0].size * 2


@pytest.mark.parametrize("recipe", [FP16, FP8])
def test_a_ring_in_one_process(recipe: str) -> None:
    """Images of three parts, one of them a single key, attended to and merged."""
    from sage_patch.dispatch import Options, attend_image, image_kind

    case = Case(1, 1, (300, 1, 99))
    q, k, v = (x.transpose(1, 2) for x in whole(case))
    options, merged = Options(return_lse=True), None
    for key, value in zip(k.split(case.lengths, 2), v.split(case.lengths, 2), strict=True):
        kind = image_kind(key, value, 1, options, parse_recipe(recipe))
        assert kind is not None
        image = kind.quantize(key, value)
        assert image.numel() == kind.size()
        merged = merge(merged, attend_image(q, image, kind, options, "m/site"))
    assert merged is not None
    out, lse = sage_patch.sage_attention(q, k, v, recipe=recipe, return_lse=True)
    wanted = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double())
    assert relative_l1(merged[0].double(), wanted) < 1.1 * relative_l1(out.double(), wanted) + 2e-3
    assert (merged[1] - lse).abs().max() < 0.1  # of logits up to some hundreds


def test_rows_that_see_no_key_of_a_part_keep_the_other() -> None:
    nothing = torch.zeros(1, 1, 2, 4), torch.full((1, 1, 2), -torch.inf)
    some = torch.ones(1, 1, 2, 4), torch.tensor([[[0.5, -torch.inf]]])
    for pair in ((nothing, some), (some, nothing)):
        out, lse = merge(*pair)
        assert torch.equal(lse, some[1])
        assert torch.equal(out[..., 0], torch.tensor([[[1.0, 0.0]]]))


def split_model(rank: int, world: int, anything: bool) -> tuple[Any, Any, list]:
    """A Wan model, unpatched and patched, with its sequence split as its own plan says."""
    from diffusers.hooks.context_parallel import apply_context_parallel
    from diffusers.models._modeling_parallel import ParallelConfig
    from test_diffusers import build
    from test_diffusers import run as outputs

    model, inputs = build("wan")
    config = mesh_config(Case(1, world, ()))
    for module in model.modules():
        if hasattr(getattr(module, "processor", None), "_parallel_config"):
            module.processor._parallel_config = ParallelConfig(context_parallel_config=config)
    apply_context_parallel(model, config, model._cp_plan)
    reference = outputs(model, inputs)
    with sage_patch.applied(model, Policy(recipe="exact")):
        assert torch.equal(outputs(model, inputs), reference)
    with sage_patch.applied(model, EVERYTHING) as handle:
        out = outputs(model, inputs)
        return reference.numpy(), out.numpy(), [(r["site"], r["recipe"], r["reason"]) for r in handle.rows()]


def test_a_model_that_diffusers_splits(tmp_path: Path) -> None:
    """Self-attention runs the recipe; exact is bit-equal to unpatched."""
    from test_diffusers import build
    from test_diffusers import run as outputs

    model, inputs = build("wan")
    with sage_patch.applied(model, EVERYTHING):
        alone = outputs(model, inputs)
    for reference, out, rows in run(split_model, 2, tmp_path, False):
        assert len(rows) == 4 and not any(reason for _, _, reason in rows)
        error = relative_l1(torch.from_numpy(out), torch.from_numpy(reference))
        assert error < 1.5 * relative_l1(alone, torch.from_numpy(reference)) + 1e-3
