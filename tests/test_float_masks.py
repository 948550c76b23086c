"""Added masks that only hide become boolean ones where that lets a call run quantized; what else they hold is kept."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import sage_patch
import zoo.families as zoo
from sage_patch.dispatch import Options, describe
from sage_patch.integrations import float_masks, sdpa
from sage_patch.integrations import transformers as adapter
from sage_patch.integrations.float_masks import seen_keys, with_bool_mask
from sage_patch.policy import Policy
from sage_patch.recipes import EXACT, Call, Limits, parse_recipe
from tiny import scaled_difference

LONG_ENOUGH = Limits(min_q_len=1, min_kv_len=1)
RECIPE = parse_recipe("sage2")
FAMILIES = {f.name: f for f in zoo.families()}


def added(hidden: float = torch.finfo(torch.float32).min, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[2, 1, 6, 8] with 0 and one number; every row sees a key."""
    mask = torch.zeros(2, 1, 6, 8, dtype=dtype)
    mask[0, 0, :, 5:] = max(hidden, torch.finfo(dtype).min) if hidden > -torch.inf else hidden
    mask[1, 0, 2, :7] = mask[0, 0, 0, 5]
    return mask


@pytest.mark.parametrize("hidden", [-torch.inf, torch.finfo(torch.float32).min, -10000.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_mask_that_only_hides(hidden, dtype):
    mask = added(hidden, dtype)
    seen = seen_keys(mask)
    assert seen is not None and seen.dtype == torch.bool and torch.equal(seen, mask == 0)


def edited(change: Callable[[torch.Tensor], None]) -> torch.Tensor:
    mask = added()
    change(mask)
    return mask


@pytest.mark.parametrize(
    "mask",
    [
        pytest.param(edited(lambda m: m[0, 0, 0].fill_(0.5)), id="bias"),
        pytest.param(edited(lambda m: m[0, 0, 0, 1].fill_(-100.0)), id="a hundred is no infinity"),
        pytest.param(edited(lambda m: m[0, 0, 0, 1].fill_(torch.nan)), id="nan"),
        pytest.param(edited(lambda m: m[1, 0, 3].fill_(-1e4)), id="a row that hides every key attends to them all"),
        pytest.param(added().repeat(1, 4, 1, 1), id="a plane for each head"),
        pytest.param(added().requires_grad_(), id="learned"),
        pytest.param(added()[:0], id="empty"),
        pytest.param(None, id="no mask"),
    ],
)
def test_what_is_not_boolean(mask):
    assert seen_keys(mask) is None


def test_heads_that_share_one_plane_are_one_plane():
    seen = seen_keys(added().expand(-1, 4, -1, -1))
    assert seen is not None and seen.shape == (2, 1, 6, 8)


def test_inference_mode_keeps_the_float_mask():
    with torch.inference_mode():
        assert seen_keys(added()) is None


def test_values_are_read_once_a_tensor_and_again_when_written(monkeypatch):
    reads = []
    original = torch.Tensor.__bool__
    monkeypatch.setattr(torch.Tensor, "__bool__", lambda self: reads.append(1) or original(self))
    mask = added()
    first = seen_keys(mask)
    assert first is not None and seen_keys(mask) is first and len(reads) == 1
    mask[0, 0, 0, 0] = 3.0
    assert seen_keys(mask) is None and seen_keys(mask) is None and len(reads) == 2


def facts(backend: str, mask: torch.Tensor) -> tuple[Options, Call]:
    options = Options(attn_mask=mask)
    query, key = torch.zeros(2, 4, 6, 16, dtype=torch.bfloat16), torch.zeros(2, 4, 8, 16, dtype=torch.bfloat16)
    return options, describe(query, key, key, options)._replace(backend=backend, device="cuda")


def test_masks_are_looked_at_only_where_that_decides(monkeypatch):
    looked = []
    monkeypatch.setattr(float_masks, "seen_keys", lambda mask: looked.append(mask) or seen_keys(mask))
    options, call = facts("sm90", added())
    assert with_bool_mask(options, call, EXACT, LONG_ENOUGH) == (options, call)
    assert with_bool_mask(options, call, RECIPE, Limits()) == (options, call)  # too short anyway
    assert with_bool_mask(options, call._replace(needs_grad=True), RECIPE, LONG_ENOUGH)[0] is options
    assert with_bool_mask(*facts("reference", added()), RECIPE, LONG_ENOUGH)[1].mask == "float"
    assert not looked
    assert with_bool_mask(options, call, RECIPE, LONG_ENOUGH)[1].mask == "bool"
    keys = torch.zeros(2, 1, 1, 8).masked_fill_(torch.arange(8) > 5, -1e4)
    quick, call = with_bool_mask(*facts("sm90", keys), RECIPE, LONG_ENOUGH)
    assert call.mask == "padding" and quick.attn_mask is not None and quick.attn_mask.dtype == torch.bool
    assert len(looked) == 2


def as_on_hopper(monkeypatch: pytest.MonkeyPatch, module: object) -> list[str]:
    """Let an adapter decide as on a Hopper card, and run on the CPU; the reasons it decided for."""
    reasons: list[str] = []
    original = module.choose

    def described(*tensors: object) -> Call:
        return describe(*tensors)._replace(backend="sm90", device="cuda", dtype="bfloat16", crossover=())

    def chosen(recipe, call, limits, *rest):
        decided = original(recipe, call, LONG_ENOUGH, *rest)
        reasons.append(decided[1])
        return decided

    monkeypatch.setattr(module, "describe", described)
    monkeypatch.setattr(module, "choose", chosen)
    monkeypatch.setattr(module, "with_bool_mask", lambda o, c, r, _: with_bool_mask(o, c, r, LONG_ENOUGH))
    return reasons


@pytest.mark.parametrize("name, expected", [("pixtral", {""}), ("layoutlm", {""}), ("t5", {"mask_float"})])
def test_transformers_models_that_add_their_masks(name, expected, monkeypatch):
    reasons = as_on_hopper(monkeypatch, adapter)
    model = zoo.build(FAMILIES[name], "eager")
    inputs = zoo.inputs(FAMILIES[name], model)
    unpatched = zoo.outputs(model, inputs)
    for policy, limit in ((Policy(recipe="exact"), 1e-5), (Policy(quantize_fp32=True), 0.2)):
        reasons.clear()
        with sage_patch.applied(model, policy):
            got = zoo.outputs(model, inputs)
        for a, b in zip(got, unpatched, strict=True):
            assert not a.numel() or scaled_difference(a, b) < limit
    assert set(reasons) == expected


@pytest.mark.parametrize(
    "name, expected", [("OmniGenTransformer2DModel", ""), ("LTXVideoTransformer3DModel", "mask_float")]
)
def test_diffusers_models_that_add_their_masks(name, expected, monkeypatch):
    """OmniGen's layers share one mask; in LTX, as in all that repeat text padding for every head, each call has its own
    copy and stays exact: so few keys are too short for a kernel anyway."""
    from zoo import diffusers_matrix

    reasons = as_on_hopper(monkeypatch, sdpa)
    denoiser = next(d for d in diffusers_matrix.denoisers() if d.name == name)
    model = diffusers_matrix.build(denoiser)
    fed = diffusers_matrix.inputs(denoiser, model)
    unpatched = diffusers_matrix.outputs(model, fed)
    with sage_patch.applied(model, Policy(quantize_fp32=True)):
        got = diffusers_matrix.outputs(model, fed)
    for a, b in zip(got, unpatched, strict=True):
        assert scaled_difference(a, b) < 0.2
    assert expected in reasons and set(reasons) <= {"", "mask_float"}
    assert expected or set(reasons) == {""}
