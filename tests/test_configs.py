"""Every policy of configs/ fits the real architectures of its family, and does what its head says.

The models are built at full size on the meta device: no weights, no memory.
"""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path

import pytest
from torch import nn

import sage_patch
from sage_patch.config import load_run_config
from sage_patch.policy import MAX_VARIANTS, Plan
from zoo.architectures import architectures, pipeline

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = ROOT / "configs"
FAMILIES = sorted({a.family for a in architectures().values()})
NAMES = list(architectures())
DIFFUSION = [name for name, a in architectures().items() if a.parts]
RUNS = ("quickstart", "tiny", "run_")  # configurations of runs, not policies of a family


@functools.cache
def built(name: str) -> nn.Module:
    return architectures()[name].build()


@functools.cache
def planned(name: str) -> Plan:
    """The family's policy on the bare model."""
    return sage_patch.plan(built(name), sage_patch.load_policy(CONFIGS / f"{architectures()[name].family}.yaml"))


def recipes(plan: Plan, name: str, steps: int) -> list[str]:
    """The site's recipe at each step; one entry for models without steps."""
    return [plan.choice(name, step, steps).recipe for step in range(steps)] if steps else [plan.choice(name).recipe]


def test_every_family_file_has_an_architecture_and_the_other_way_round():
    files = {p.stem for p in CONFIGS.glob("*.yaml") if not p.stem.startswith(RUNS)}
    assert files == set(FAMILIES)


@pytest.mark.parametrize("name", NAMES)
def test_the_built_model_has_the_published_size_and_the_sites_of_its_architecture(name):
    """A wrong number in an architecture's file shows in the size; a block that the finder misses, in the counts."""
    arch = architectures()[name]
    assert sum(p.numel() for p in built(name).parameters()) / 1e9 == pytest.approx(arch.billions, rel=0.01)
    found: dict[tuple, int] = {}
    for site in planned(name).sites:
        key = (arch.group_of(site.name)["match"], site.head_dim)
        found[key] = found.get(key, 0) + 1
    assert found == {(g["match"], g["head_dim"]): g["count"] for g in arch.sites}


@pytest.mark.parametrize("name", NAMES)
def test_roles_are_what_the_sites_attend_to(name):
    """A rule with `role` must mean what it says; the files of configs/ name sites by glob."""
    arch = architectures()[name]
    for site in planned(name).sites:
        assert site.role == arch.group_of(site.name)["role"], site.name


@pytest.mark.parametrize("name", NAMES)
def test_the_policy_keeps_text_exact_and_the_long_attention_below_exact(name):
    """Short attention is exact at every step; of the rest, long requests lose at most a tenth to exact and few-step
    ones at most a quarter."""
    arch, plan = architectures()[name], planned(name)
    for steps in arch.steps or [0]:
        chosen = {site.name: recipes(plan, site.name, steps) for site in plan.sites}
        main = [r for site, of_site in chosen.items() if arch.group_of(site)["quantized"] for r in of_site]
        rest = [r for site, of_site in chosen.items() if not arch.group_of(site)["quantized"] for r in of_site]
        assert set(rest) <= {"exact"}
        if main:
            assert main.count("exact") / len(main) <= (0.25 if 0 < steps < 20 else 0.1)


@pytest.mark.parametrize("name", DIFFUSION)
def test_a_request_of_any_length_needs_at_most_three_plans(name):
    """variants() raises above MAX_VARIANTS, since each plan may recompile a compiled model."""
    for steps in {1, 4, 8, 20, 28, 30, 50, *architectures()[name].steps}:
        found = planned(name).variants(steps)
        assert 1 <= len(found) <= MAX_VARIANTS
        assert sorted(step for variant in found for step in variant.steps) == list(range(steps))


@pytest.mark.parametrize(
    ("name", "site", "step", "steps", "recipe"),
    [
        ("wan21_t2v_14b", "blocks.20.attn1", 0, 50, "exact"),
        ("wan21_t2v_14b", "blocks.20.attn1", 2, 50, "exact"),
        ("wan21_t2v_14b", "blocks.20.attn1", 3, 50, "sage2"),
        ("wan21_t2v_14b", "blocks.20.attn1", 47, 50, "qk_int8_pv_fp16"),
        ("wan21_t2v_14b", "blocks.0.attn1", 25, 50, "qk_int8_pv_fp16"),
        ("wan21_t2v_14b", "blocks.39.attn1", 25, 50, "qk_int8_pv_fp16"),
        ("wan21_t2v_14b", "blocks.38.attn1", 25, 50, "sage2"),
        ("wan21_t2v_14b", "blocks.0.attn1", 0, 4, "exact"),
        ("wan21_t2v_14b", "blocks.20.attn1", 1, 4, "sage2"),
        ("mochi", "transformer_blocks.47.attn1", 30, 64, "exact"),
        ("mochi", "transformer_blocks.46.attn1", 0, 64, "sage2"),
        ("flux_schnell", "single_transformer_blocks.37.attn", 0, 1, "qk_int8_pv_fp16"),
        ("flux_dev", "transformer_blocks.0.attn", 1, 28, "qk_int8_pv_fp16"),
        ("flux_dev", "transformer_blocks.0.attn", 2, 28, "sage2"),
        ("qwen_image", "transformer_blocks.59.attn", 25, 50, "qk_int8_pv_fp16"),
        ("ltx2_19b", "transformer_blocks.9.attn1", 0, 40, "qk_int8_pv_fp16"),
        ("hunyuan_video", "single_transformer_blocks.39.attn", 49, 50, "sage2"),
        ("sd35_medium", "transformer_blocks.3.attn2", 0, 40, "sage2"),
    ],
)
def test_careful_rungs_stand_where_the_file_says(name, site, step, steps, recipe):
    assert planned(name).choice(site, step, steps).recipe == recipe


@pytest.mark.parametrize("name", DIFFUSION)
def test_a_pipeline_gets_the_same_plan_in_each_denoiser_and_nothing_else(name):
    """The files' globs hold with the component's prefix too, and no text encoder or VAE becomes a site."""
    arch, bare = architectures()[name], planned(name)
    parts = {part: built(name) if i == 0 else arch.build() for i, part in enumerate(arch.parts)}
    policy = sage_patch.load_policy(CONFIGS / f"{arch.family}.yaml")
    plan = sage_patch.plan(pipeline(parts), policy)
    expected = {f"{part}.{s.name}": recipes(bare, s.name, 20) for part in parts for s in bare.sites}
    assert {s.name: recipes(plan, s.name, 20) for s in plan.sites} == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_every_rule_says_why_and_every_file_says_for_whom(family):
    policy = sage_patch.load_policy(CONFIGS / f"{family}.yaml")
    assert all(rule.reason for rule in policy.rules)
    head = (CONFIGS / f"{family}.yaml").read_text().partition("version:")[0]
    assert head.startswith("# ") and len(head) > 100
    if not policy.rules:
        assert "No rule" in head


@pytest.mark.parametrize("family", FAMILIES)
def test_a_run_configuration_can_name_the_file(family, tmp_path):
    (tmp_path / "run.yaml").write_text(
        "version: 1\nmodel: {path: some/model}\n"
        f"policy: {CONFIGS / family}.yaml\n"
        f"task: {{kind: text, prompts: [hello], text: {ROOT / 'tests/assets/heldout.txt'}}}\n"
    )
    run = load_run_config(tmp_path / "run.yaml")
    assert run.policy.build() == sage_patch.load_policy(CONFIGS / f"{family}.yaml")


def test_the_page_of_families_is_fresh():
    spec = importlib.util.spec_from_file_location("update_families", ROOT / "scripts" / "update_families.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    page = script.PAGE.read_text()
    assert script.rewrite(page, planned) == page, "stale: run python scripts/update_families.py"
