"""The node for ComfyUI, called as ComfyUI calls an attention override, with a MODEL made of its options alone.

ComfyUI itself is not a package that tests could install: `entry` is the rule by which it hands a call over, written
anew, and `own` its attention over torch, with its arguments and layouts.
"""

from __future__ import annotations

import copy
import gc
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import sage_patch
from sage_patch.dispatch import UnsupportedCall
from sage_patch.integrations.comfyui import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS, Override
from sage_patch.integrations.comfyui.nodes import OPTION, SagePatch, SagePatchReport, patched
from sage_patch.kernels import ops
from sage_patch.policy import Policy, PolicyError, Rule

ROOT = Path(__file__).resolve().parents[1]
HEADS, DIM, TOKENS = 2, 64, 160


class Model:
    """What a node sees of ComfyUI's MODEL. Clones copy their options deeply."""

    def __init__(self, options: dict[str, Any] | None = None):
        self.model_options: dict[str, Any] = {"transformer_options": {}} if options is None else options

    def clone(self) -> Model:
        return Model(copy.deepcopy(self.model_options))


def own(q, k, v, heads, mask=None, attn_precision=None, skip_reshape=False, skip_output_reshape=False, **kwargs):
    """An attention function of ComfyUI: flat tensors, or split ones with skip_reshape."""
    if not skip_reshape:
        q, k, v = (x.view(x.shape[0], -1, heads, x.shape[-1] // heads).transpose(1, 2) for x in (q, k, v))
    if mask is not None:
        mask = mask[None] if mask.ndim == 2 else mask
        mask = mask[:, None] if mask.ndim == 3 else mask
    grouped = {"enable_gqa": True} if kwargs.get("enable_gqa") else {}
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=kwargs.get("scale"), **grouped)
    return out if skip_output_reshape else out.transpose(1, 2).reshape(q.shape[0], -1, heads * q.shape[-1])


def entry(*args: Any, **kwargs: Any) -> Tensor:
    """`optimized_attention`: the outermost call asks the options of its own call for an override."""
    options = kwargs.get("transformer_options")
    if "_inside_attn_wrapper" not in kwargs and options is not None and OPTION in options:
        return options[OPTION](own, *args, _inside_attn_wrapper=True, **kwargs)
    return own(*args, **kwargs)


def flat(tokens: int = TOKENS, heads: int = HEADS, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(2, tokens, heads * DIM, dtype=dtype)


def split(tokens: int = TOKENS, heads: int = HEADS) -> Tensor:
    return torch.randn(2, heads, tokens, DIM, dtype=torch.bfloat16)


def sampling(step: int = 3, steps: int = 10, **more: Any) -> dict[str, Any]:
    """transformer_options in the middle of sampling."""
    sigmas = torch.linspace(1, 0, steps + 1)
    return {"sigmas": sigmas[step : step + 1].expand(2).clone(), "sample_sigmas": sigmas, **more}


def options_of(model: Model, **more: Any) -> dict[str, Any]:
    """What ComfyUI makes of a MODEL's options for one call."""
    return {**model.model_options["transformer_options"], **more}


def override(model: Model) -> Override:
    return model.model_options["transformer_options"][OPTION]


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


MASKS = {
    "none": None,
    "bool [q, k]": torch.rand(TOKENS, TOKENS) > 0.3,
    "bool [B, q, k]": torch.rand(2, TOKENS, TOKENS) > 0.3,
    "bool [B, 1, 1, k]": torch.rand(2, 1, 1, TOKENS) > 0.3,
    "added [B, 1, q, k]": torch.randn(2, 1, TOKENS, TOKENS, dtype=torch.bfloat16),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("skip_output_reshape", [False, True])
@pytest.mark.parametrize("skip_reshape", [False, True])
def test_every_form_of_a_call(skip_reshape, skip_output_reshape, mask):
    """Quantized, near to ComfyUI's own and of its shape, and equal to sage_attention."""
    make = split if skip_reshape else flat
    q, k, v = make(), make(), make()
    given = dict(mask=MASKS[mask], skip_reshape=skip_reshape, skip_output_reshape=skip_output_reshape)
    model = patched(Model(), Policy())
    got = entry(q, k, v, HEADS, transformer_options=options_of(model), **given)
    want = entry(q, k, v, HEADS, transformer_options={}, **given)
    assert got.shape == want.shape and not torch.equal(got, want)
    assert float((got - want).abs().mean() / want.abs().mean()) < 0.08
    assert "1 calls, 1 quantized" in override(model).report()
    if not skip_reshape:
        q, k, v = (x.unflatten(-1, (HEADS, DIM)).transpose(1, 2) for x in (q, k, v))
    true = sage_patch.sage_attention(q, k, v, attn_mask=_full(MASKS[mask]))
    assert torch.equal(got, true if skip_output_reshape else true.transpose(1, 2).flatten(2))


def _full(mask: Tensor | None) -> Tensor | None:
    return mask[:, None] if mask is not None and mask.dim() == 3 else mask


def test_calls_as_models_of_comfyui_write_them():
    """Positional mask (SD), heads by name (Wan), split tensors (Flux), text as keys, grouped heads, a scale."""
    model = patched(Model(), Policy())
    options = options_of(model, block_type="double", block_index=3, total_blocks=19)
    text = torch.randn(2, 130, HEADS * DIM, dtype=torch.bfloat16)
    calls: list[tuple[tuple, dict]] = [
        ((flat(), flat(), flat(), HEADS, MASKS["bool [q, k]"]), {"attn_precision": None}),
        ((flat(), flat(), flat()), {"heads": HEADS}),
        ((split(), split(), split(), HEADS), {"skip_reshape": True, "mask": None}),
        ((flat(), text, text, HEADS), {}),
        ((split(heads=4), split(), split(), 4), {"skip_reshape": True, "enable_gqa": True}),
        ((split(), split(), split(), HEADS), {"skip_reshape": True, "scale": 0.2}),
    ]
    for args, kwargs in calls:
        got, want = (entry(*args, transformer_options=o, **kwargs) for o in (options, {}))
        assert got.shape == want.shape and float((got - want).abs().mean() / want.abs().mean()) < 0.08
    said = override(model).report()
    assert "6 calls, 6 quantized" in said
    assert "double.3.attn1  qk_int8_pv_fp8 x5 on reference" in said and "double.3.attn2" in said


@pytest.mark.parametrize(
    ("kwargs", "reason"),
    [
        ({"attn_precision": torch.float32}, "argument_attn_precision"),
        ({"low_precision_attention": False}, "argument_low_precision_attention"),
        ({"an_option_of_tomorrow": 1}, "argument_an_option_of_tomorrow"),
    ],
)
def test_what_only_comfyui_understands_is_left_to_it_and_counted(kwargs, reason):
    model, q = patched(Model(), Policy()), flat()
    got = entry(q, q, q, HEADS, transformer_options=options_of(model), **kwargs)
    assert torch.equal(got, entry(q, q, q, HEADS, **kwargs))
    said = override(model).report()
    assert f"exact x1 ({reason})" in said and f"\n{reason}: " in said
    strict = patched(Model(), Policy(on_unsupported="error"))
    with pytest.raises(UnsupportedCall, match=f"at attn1: {reason}"):
        entry(q, q, q, HEADS, transformer_options=options_of(strict), **kwargs)


@pytest.mark.parametrize("mask", [torch.ones(TOKENS, TOKENS, dtype=torch.int64), object()])
def test_masks_that_are_none_of_torchs_are_left_to_comfyui(mask):
    model, q, given = patched(Model(), Policy()), flat(), []

    def theirs(*args, **kwargs):
        given.append(args[4])
        return args[0]

    assert override(model)(theirs, q, q, q, HEADS, mask, transformer_options={}) is q and given[0] is mask
    assert "exact x1 (argument_mask)" in override(model).report()


def test_short_and_float32_calls_are_left_too():
    model = patched(Model(), Policy())
    for q in (flat(tokens=8), flat(dtype=torch.float32)):
        got = entry(q, q, q, HEADS, transformer_options=options_of(model))
        assert torch.equal(got, own(q, q, q, HEADS))
    assert "short_q" in override(model).report() and "dtype_float32" in override(model).report()


def test_calls_without_options_are_not_ours():
    """Text encoders and autoencoders give none."""
    model, q = patched(Model(), Policy()), flat()
    entry(q, q, q, HEADS)
    assert "no call has reached it yet" in override(model).report()


def recipes(policy: Policy, calls: list[dict[str, Any]], cross: bool = False) -> list[str]:
    """ "exact" or "quantized" for each call's transformer_options."""
    found = []
    for told in calls:
        model, q = patched(Model(), policy), flat()
        k = flat(tokens=130) if cross else q
        entry(q, k, k, HEADS, transformer_options=options_of(model, **told))
        found.append("quantized" if "1 quantized" in override(model).report() else "exact")
    return found


def test_rules_by_layer_role_name_and_step():
    blocks = [{"block_index": i, "total_blocks": 4, "block_type": "single"} for i in range(4)]
    last = Policy(rules=[Rule(layers={"last": 1}, recipe="exact")])
    assert recipes(last, blocks) == ["quantized"] * 3 + ["exact"]
    assert recipes(Policy(rules=[Rule(role="cross", recipe="exact")]), [{}], cross=True) == ["exact"]
    assert recipes(Policy(rules=[Rule(role="cross", recipe="exact")]), [{}]) == ["quantized"]
    assert recipes(Policy(rules=[Rule(match="*attn2", recipe="exact")]), [{}], cross=True) == ["exact"]
    unet = [{"block": ("input", 4), "block_index": 0}, {"block": ("middle", 0), "block_index": 0}]
    assert recipes(Policy(rules=[Rule(match="input.4.*", recipe="exact")]), unet) == ["exact", "quantized"]
    by_step = Policy(rules=[Rule(steps={"first": 0.2}, recipe="exact"), Rule(steps=-1, recipe="exact")])
    steps = [sampling(step) for step in range(10)]
    assert recipes(by_step, steps) == ["exact"] * 2 + ["quantized"] * 7 + ["exact"]


def test_a_step_lasts_until_the_next_noise_level():
    """Samplers of higher order ask between two levels, and the first may be asked above the highest."""
    first = Policy(rules=[Rule(steps=0, recipe="exact")])
    told = [sampling() | {"sigmas": torch.tensor([sigma])} for sigma in (1.07, 1.0, 0.95, 0.901, 0.9, 0.85)]
    assert recipes(first, told) == ["exact"] * 4 + ["quantized"] * 2


def test_rules_that_cannot_be_followed_are_refused():
    q = flat()
    model = patched(Model(), Policy(rules=[Rule(steps=0, recipe="exact")]))
    with pytest.raises(PolicyError, match="tells none at attn1.*policy without `steps`"):
        entry(q, q, q, HEADS, transformer_options=options_of(model))
    model = patched(Model(), Policy(rules=[Rule(layers=-1, recipe="exact")]))
    with pytest.raises(PolicyError, match="layers from the end, and blocks.2.attn1 tells no number"):
        entry(q, q, q, HEADS, transformer_options=options_of(model, block_index=2))
    with pytest.raises(ValueError, match="unknown recipe 'qk_int9'"):
        patched(Model(), Policy(rules=[Rule(recipe="qk_int9")]))


def test_the_report_names_rules_that_matched_nothing():
    policy = Policy(rules=[Rule(match="*token_refiner*", recipe="exact"), Rule(role="self", recipe="qk_int8_pv_fp16")])
    model, q = patched(Model(), policy), flat()
    entry(q, q, q, HEADS, transformer_options=options_of(model))
    said = override(model).report()
    assert 'rule 1 ("*token_refiner*") matched no site that was seen' in said and "rule 2" not in said
    assert "qk_int8_pv_fp16 x1" in said


@pytest.mark.parametrize("name", ["wan", "flux", "qwen_image", "sdxl", "ltx_video", "hunyuan_video"])
def test_shipped_policies_can_be_followed(name):
    policy, q, k = sage_patch.load_policy(name), flat(), flat(tokens=130)
    model = patched(Model(), policy)
    for step in range(4):
        for i in range(3):
            told = sampling(step, 4, block_index=i, total_blocks=3, block_type="double")
            entry(q, q, q, HEADS, transformer_options=options_of(model, **told))
            entry(q, k, k, HEADS, transformer_options=options_of(model, **told))
    assert "24 calls" in override(model).report()


def test_the_model_itself_and_other_clones_are_untouched():
    base = Model()
    one, two = patched(base, Policy()), patched(base, Policy(recipe="exact"))
    assert base.model_options == {"transformer_options": {}}
    q = flat()
    again = one.clone()  # as the next node in the graph does
    for model in (again, two):
        entry(q, q, q, HEADS, transformer_options=options_of(model))
    assert "1 calls, 1 quantized" in override(one).report(), "clones count in one place"
    assert "1 calls, 0 quantized" in override(two).report()
    anew = patched(again, Policy(recipe="exact"))
    assert override(anew) is not override(again)
    without_options = patched(Model({}), Policy())
    assert override(without_options)


def test_a_model_that_is_dropped_takes_its_counters_along():
    model, q = patched(Model(), Policy()), flat()
    token = override(model)._token
    entry(q, q, q, HEADS, transformer_options=options_of(model))
    assert ops.counts(token)
    del model
    gc.collect()
    assert not ops.counts(token)


def test_another_nodes_override_is_not_replaced():
    def attention_override_sage(func, *args, **kwargs):
        return func(*args, **kwargs)

    with pytest.raises(PolicyError, match="attention_override_sage"):
        patched(Model({"transformer_options": {OPTION: attention_override_sage}}), Policy())


def test_the_nodes():
    assert set(NODE_CLASS_MAPPINGS) == set(NODE_DISPLAY_NAME_MAPPINGS)
    for node in NODE_CLASS_MAPPINGS.values():
        inputs = node.INPUT_TYPES()["required"]
        assert hasattr(node(), node.FUNCTION) and node.CATEGORY and node.RETURN_TYPES
        assert inputs["model"] == ("MODEL",)
    (model,) = SagePatch().patch(Model(), policy=" qk_int8_pv_fp16 ")
    q = flat()
    entry(q, q, q, HEADS, transformer_options=options_of(model))
    shown = SagePatchReport().show(model, {"samples": None})
    assert shown["ui"]["text"] == [shown["result"][0]] and "qk_int8_pv_fp16 x1" in shown["result"][0]
    assert "is not patched" in SagePatchReport().show(Model(), None)["result"][0]
    assert math.isnan(SagePatchReport.IS_CHANGED(model, None))
    with pytest.raises(sage_patch.ConfigError, match="nearest"):
        SagePatch().patch(Model(), policy="qk_int8_pv_fp17")


def test_an_edited_policy_file_is_read_again(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("version: 1\nrecipe: exact\n")
    assert SagePatch.IS_CHANGED(None, str(file)) == file.stat().st_mtime
    assert SagePatch.IS_CHANGED(None, "wan") == "wan"
    (model,) = SagePatch().patch(Model(), policy=str(file))
    assert override(model).policy.recipe == "exact"


def test_calibrated_policies_of_other_models_are_refused():
    calibrated = next((ROOT / "docs" / "calibrated").glob("*.yaml"))
    with pytest.raises(PolicyError, match="belongs to the one .* model"):
        SagePatch().patch(Model(), policy=str(calibrated))


def test_the_folder_of_two_lines(tmp_path):
    """As the page has it, found by ComfyUI by its two names, with neither transformers nor diffusers loaded."""
    page = (ROOT / "docs" / "compat.md").read_text()
    lines = page.split("```python\n# custom_nodes/sage_patch_nodes/__init__.py\n")[1].split("```")[0]
    assert len(lines.strip().splitlines()) == 2
    (tmp_path / "sage_patch_nodes.py").write_text(lines)
    code = (
        "import sys, sage_patch_nodes as n; assert set(n.NODE_CLASS_MAPPINGS) == set(n.NODE_DISPLAY_NAME_MAPPINGS)\n"
        "assert not {'transformers', 'diffusers'} & set(sys.modules)"
    )
    path = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]\n"
    done = subprocess.run([sys.executable, "-c", path + code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_compiled_model_compiles_without_a_break():
    model = patched(Model(), Policy())
    options = options_of(model, block_index=1, total_blocks=2, block_type="double")

    def block(q: Tensor) -> Tensor:
        return entry(q, q, q, HEADS, transformer_options=options)

    q = flat()
    got = torch.compile(block, backend="aot_eager", fullgraph=True)(q)
    assert torch.equal(got, block(q))
    said = override(model).report()
    assert "*  qk_int8_pv_fp8 x1" in said and "double.1.attn1  qk_int8_pv_fp8 x1" in said
