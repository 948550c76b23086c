"""Masks as diffusers pipelines send them: through the real processors, against the float64 oracle and native SDPA."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import oracle
import sage_patch
import zoo.diffusers_matrix as zoo
from sage_patch.args import key_padding
from sage_patch.backends import why_not
from sage_patch.dispatch import Options, describe
from sage_patch.recipes import parse_recipe
from tiny import EVERYTHING, EXACT

BATCH, HEADS, TOKENS, DIM = 3, 2, 97, 32


def dispatching() -> nn.Module:
    """One attention whose processor goes through diffusers' dispatcher and hands its mask on as it is."""
    from diffusers.models.transformers.transformer_wan import WanAttention, WanAttnProcessor

    return WanAttention(HEADS * DIM, HEADS, DIM, processor=WanAttnProcessor())


def direct() -> nn.Module:
    """One attention whose processor calls torch's SDPA, with a mask [batch, 1 or tokens, tokens] of any dtype."""
    from diffusers.models.attention_processor import Attention, AttnProcessor2_0

    return Attention(HEADS * DIM, heads=HEADS, dim_head=DIM, processor=AttnProcessor2_0())


class Recorded(TorchFunctionMode):
    """Keeps the last arguments that reached SDPA."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.scaled_dot_product_attention:
            self.last = dict(zip(("query", "key", "value", "attn_mask"), args, strict=False)) | (kwargs or {})
        return func(*args, **(kwargs or {}))


def padding(*lengths: int) -> Tensor:
    return torch.arange(TOKENS) < torch.tensor(lengths)[:, None]


def hole() -> Tensor:
    """Padding in the middle, different in each item: text, padding, image."""
    keep = torch.ones(BATCH, TOKENS, dtype=torch.bool)
    keep[0, 10:40], keep[1, 20:21] = False, False
    return keep


KEEP = {
    "end": padding(97, 60, 33),
    "start": padding(97, 60, 33).flip(1),
    "middle": hole(),
    "one key": padding(97, 1, 97),
}


def forms(keep: Tensor) -> dict[str, Tensor]:
    """One key padding [B, kv_len] in every form that the dispatcher's callers use."""
    additive = torch.zeros(keep.shape)
    return {
        "B,K": keep,
        "B,1,1,K": keep[:, None, None, :],
        "B,1,Q,K": keep[:, None, None, :].expand(-1, 1, TOKENS, -1),
        "B,H,Q,K contiguous": keep[:, None, None, :].expand(-1, HEADS, TOKENS, -1).contiguous(),
        "additive -inf": additive.masked_fill(~keep, -math.inf)[:, None, None, :],
        "additive -10000": additive.masked_fill(~keep, -10000.0)[:, None, None, :],
    }


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def attend(attention: nn.Module, mask: Tensor | None, hidden: Tensor, keys: Tensor | None = None) -> Tensor:
    with torch.no_grad():
        return attention(hidden, encoder_hidden_states=keys, attention_mask=mask)


@pytest.fixture
def hidden() -> Tensor:
    return normal(BATCH, TOKENS, HEADS * DIM)


@pytest.mark.parametrize("where", KEEP)
def test_key_padding_in_every_form(where, hidden):
    """All forms agree; exact equals native; quantized equals the oracle over the keys that are left."""
    torch.manual_seed(0)
    attention = dispatching()
    first = None
    for form, mask in forms(KEEP[where]).items():
        with Recorded() as seen:
            native = attend(attention, mask, hidden)
        q, k, v = seen.last["query"], seen.last["key"], seen.last["value"]
        expected, _ = oracle.attention(q, k, v, KEEP[where][:, None, None, :])
        with sage_patch.applied(attention, EXACT):
            assert (attend(attention, mask, hidden) - native).abs().max() < 1e-5, form
        with sage_patch.applied(attention, EVERYTHING) as handle:
            quantized = attend(attention, mask, hidden)
            assert [(r["recipe"], r["calls"]) for r in handle.rows()] == [("qk_int8_pv_fp8", 1)], form
        out = torch.linalg.solve(attention.to_out[0].weight, (quantized - attention.to_out[0].bias).mT).mT
        out = out.detach().unflatten(-1, (HEADS, DIM)).transpose(1, 2)
        oracle.assert_attention_close(out, expected, oracle.T8F8, what=f"{where}, {form}")
        first = quantized if first is None else first
        assert (quantized - first).abs().max() < 1e-5, form


def test_hidden_keys_cannot_be_read_whatever_they_hold(hidden):
    keep = KEEP["middle"]
    attention = dispatching()
    for noise in (1e4, math.nan):
        loud = torch.where(keep[..., None], hidden, noise * hidden.sign())
        for policy in (EXACT, EVERYTHING):
            with sage_patch.applied(attention, policy):
                assert torch.equal(attend(attention, keep, hidden, loud), attend(attention, keep, hidden, hidden))


def test_a_mask_without_effect_changes_nothing(hidden):
    attention = dispatching()
    with sage_patch.applied(attention, EVERYTHING):
        free = attend(attention, None, hidden)
        assert torch.equal(attend(attention, torch.ones(BATCH, 1, 1, TOKENS, dtype=torch.bool), hidden), free)
        assert torch.equal(attend(attention, torch.zeros(1, 1, TOKENS, TOKENS), hidden), free)


def test_fully_hidden_rows_are_zero_as_in_native_sdpa(hidden):
    """A boolean row without a key gives 0 (then the output projection's bias); -10000 everywhere is an average."""
    attention = dispatching()
    keep = padding(97, 0, 33)[:, None, None, :]
    additive = torch.full((BATCH, 1, 1, TOKENS), -10000.0)
    for mask in (keep, additive):
        native = attend(attention, mask, hidden)
        with sage_patch.applied(attention, EXACT):
            assert (attend(attention, mask, hidden) - native).abs().max() < 1e-5
        with sage_patch.applied(attention, EVERYTHING):
            quantized = attend(attention, mask, hidden)
        assert torch.isfinite(quantized).all()
        assert (quantized - native).abs().max() < 0.05 * native.abs().max()
    with sage_patch.applied(attention, EVERYTHING):
        assert torch.equal(attend(attention, keep, hidden)[1], attention.to_out[0].bias.expand(TOKENS, -1))


def test_a_float_mask_of_zeros_and_ones_is_a_bias(hidden):
    """Chroma's pipeline sends one: it adds 1 to some scores and hides nothing."""
    attention = dispatching()
    bias = (KEEP["end"][:, :, None] & KEEP["end"][:, None, :])[:, None].float()
    native = attend(attention, bias, hidden)
    assert (native - attend(attention, bias.bool(), hidden)).abs().max() > 0.05  # the two readings differ
    with sage_patch.applied(attention, EXACT):
        assert (attend(attention, bias, hidden) - native).abs().max() < 1e-5
    with sage_patch.applied(attention, EVERYTHING) as handle:
        assert (attend(attention, bias, hidden) - native).abs().max() < 0.02
        assert {r["recipe"] for r in handle.rows()} == {"qk_int8_pv_fp8"}


@pytest.mark.parametrize("rows", [1, TOKENS])
def test_masks_of_the_older_processors(rows, hidden):
    """[batch, 1 or tokens, tokens], which Attention repeats to batch x heads and the processor reshapes back."""
    attention = direct()
    additive = torch.zeros(BATCH, rows, TOKENS).masked_fill(~KEEP["end"][:, None, :], -10000.0)
    native = attend(attention, additive, hidden)
    with sage_patch.applied(attention, EXACT):
        assert (attend(attention, additive, hidden) - native).abs().max() < 1e-5
    with sage_patch.applied(attention, EVERYTHING) as handle:
        assert (attend(attention, additive, hidden) - native).abs().max() < 0.02
        assert {r["recipe"] for r in handle.rows()} == {"qk_int8_pv_fp8"}


def test_the_mask_that_reaches_us_is_the_models_own(hidden):
    """No mask is added, removed or changed on the way: the very mask of the caller reaches the operator."""
    from sage_patch.kernels import ops

    attention = dispatching()
    for mask in (None, KEEP["end"][:, None, None, :]):
        seen = []
        with (
            sage_patch.applied(attention, EVERYTHING),
            ops.observe(lambda call, seen=seen: seen.append(call.attn_mask)),
        ):
            attend(attention, mask, hidden)
        assert len(seen) == 1
        assert (
            (seen[0] is None)
            if mask is None
            else (seen[0].data_ptr() == mask.data_ptr() and seen[0].dtype is torch.bool)
        )


@pytest.mark.parametrize(
    "mask, expected",
    [
        (padding(97, 60, 33)[:, None, None, :], padding(97, 60, 33)),
        (padding(97, 60, 33)[:, None, None, :].expand(-1, HEADS, TOKENS, -1), padding(97, 60, 33)),
        (padding(60)[None, None, :1, :], padding(60)),
        (torch.ones(BATCH, 1, TOKENS, TOKENS, dtype=torch.bool), None),  # written out: only a look at its values tells
        (torch.zeros(BATCH, 1, 1, TOKENS), None),
        (torch.ones(BATCH, HEADS, 1, TOKENS, dtype=torch.bool), None),
    ],
)
def test_key_padding_is_recognised_by_its_strides(mask, expected):
    found = key_padding(mask)
    assert (found is None) == (expected is None)
    if expected is not None:
        assert torch.equal(found, expected)
        assert found.data_ptr() == mask.data_ptr()


def test_recognised_padding_is_told_to_the_envelope():
    q = normal(BATCH, HEADS, TOKENS, DIM)
    call = describe(q, q, q, Options(attn_mask=padding(97, 60, 33)[:, None, None, :]))
    assert call.mask == "padding"
    on_hopper = call._replace(backend="sm90", device="cuda", dtype="float16", kv_len=4096, q_len=4096)
    recipe = parse_recipe("sage2")
    assert why_not(recipe, on_hopper) == why_not(recipe, on_hopper._replace(mask="bool"))


@pytest.mark.parametrize(
    "name", ["HunyuanVideoTransformer3DModel", "HunyuanImageTransformer2DModel", "Krea2Transformer2DModel",
             "Lumina2Transformer2DModel", "QwenImageTransformer2DModel", "JoyImageEditPlusTransformer3DModel"]
)  # fmt: skip
def test_padded_text_cannot_be_read(name):
    """Loud padding tokens change nothing of the exact result that they do not change natively. Quantized, they cannot
    be read either: what is left is the rounding of real rows that share a scale with them."""
    denoiser = next(d for d in zoo.denoisers() if d.name == name)
    model = zoo.build(denoiser)
    fed = zoo.inputs(denoiser, model)
    mask = next(fed[k] for k in ("encoder_attention_mask", "encoder_hidden_states_mask") if k in fed)
    text = fed["encoder_hidden_states"]
    hidden = ~mask.view(*mask.shape, *[1] * (text.dim() - 2))
    assert hidden.any() and not hidden.all()
    loud = fed | {"encoder_hidden_states": torch.where(hidden, 30 * text, text)}
    native, native_loud = zoo.outputs(model, fed)[0], zoo.outputs(model, loud)[0]
    size = native.abs().max()
    with sage_patch.applied(model, EXACT):
        assert torch.equal(zoo.outputs(model, fed)[0], native)
        assert torch.equal(zoo.outputs(model, loud)[0], native_loud)
    with sage_patch.applied(model, EVERYTHING) as handle:
        quiet, noisy = zoo.outputs(model, fed)[0], zoo.outputs(model, loud)[0]
        assert {(r["recipe"], r["reason"]) for r in handle.rows()} == {("qk_int8_pv_fp8", "")}
    print(name, *(float(d.abs().max() / size) for d in (native - native_loud, quiet - native, noisy - quiet)))
    assert (quiet - native).abs().max() < 0.05 * size
    assert (noisy - native_loud).abs().max() < 0.05 * size
