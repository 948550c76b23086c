"""Which models a QuantizedCache can hold: encoder-decoders, layers that differ, and those it refuses by name."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from test_quantized_cache import IDS, calls, in_pieces
from torch import Tensor, nn

import sage_patch
from sage_patch import QuantizedCache
from tiny import logits, relative_l1, text_config, text_model, tokens


def test_encoder_decoder_models_take_it_for_both_attentions() -> None:
    from transformers import BartConfig, BartForConditionalGeneration, EncoderDecoderCache

    torch.manual_seed(0)
    sizes = dict.fromkeys(("encoder_layers", "decoder_layers"), 2)
    heads = dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4)
    config = BartConfig(vocab_size=99, d_model=64, encoder_ffn_dim=64, decoder_ffn_dim=64, **sizes, **heads)
    model = BartForConditionalGeneration(config).eval()
    decoded = tokens(2, 12, seed=1)
    with sage_patch.applied(model) as handle, torch.no_grad():
        expected = model(input_ids=IDS, decoder_input_ids=decoded, use_cache=False).logits
        cache = EncoderDecoderCache(QuantizedCache(config), QuantizedCache(config))
        encoded = model.model.encoder(input_ids=IDS)
        steps = [
            model(encoder_outputs=encoded, decoder_input_ids=decoded[:, i : i + 3], past_key_values=cache).logits
            for i in range(0, 12, 3)
        ]
        assert calls(handle.rows())["qk_int8_pv_fp8", "cache"] == 2 * 2 * 3
    assert relative_l1(torch.cat(steps, dim=1), expected) < 0.01


def windowed_encoder_decoder() -> nn.Module:
    """A T5Gemma whose decoder sees 24 tokens in its first layer."""
    from transformers import T5GemmaConfig, T5GemmaForConditionalGeneration

    sizes = dict(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, vocab_size=99, sliding_window=24, layer_types=["sliding_attention", "full_attention"],
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    config = T5GemmaConfig(encoder=dict(sizes), decoder=dict(sizes, cross_attention_hidden_size=64), vocab_size=99)
    torch.manual_seed(0)
    model = T5GemmaForConditionalGeneration._from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.25)
    return model


def test_the_decoders_window_is_not_the_encoders() -> None:
    from transformers import DynamicCache, EncoderDecoderCache

    model = windowed_encoder_decoder()
    ids, decoded = tokens(2, 180), tokens(2, 60, seed=1)
    text = model.config.get_text_config(decoder=True)
    with torch.no_grad():
        encoded = model.get_encoder()(input_ids=ids)
        want = model(encoder_outputs=encoded, decoder_input_ids=decoded, use_cache=False).logits

        def run(cache: EncoderDecoderCache) -> Tensor:
            out, at = [], 0
            for n in (30, 1, 1, 12, 16):
                piece = decoded[:, at : at + n]
                out.append(model(encoder_outputs=encoded, decoder_input_ids=piece, past_key_values=cache).logits)
                at += n
            return torch.cat(out, dim=1)

        for patched in (False, True):
            errors = []
            for cross in (DynamicCache(), QuantizedCache(model.config), QuantizedCache(text)):
                cache = EncoderDecoderCache(QuantizedCache(model.config), cross)
                with sage_patch.applied(model) if patched else contextlib.nullcontext():
                    errors.append(relative_l1(run(cache), want))
                assert cache.cross_attention_cache.layers[0].keys.shape[2] == 180
                own = cache.self_attention_cache.layers[0]
                assert own.keys.shape[2] == 23 and own.get_seq_length() == 60
            assert max(errors[1:]) < 1.5 * errors[0] + 0.01, errors


def test_a_decoders_own_keys_lose_their_past_with_the_second_update() -> None:
    """Nothing says at the first whose keys they are. A store that was reset, or cropped, knows as little or as much."""
    cache = QuantizedCache(windowed_encoder_decoder().config)
    layer, key = cache.layers[0], torch.randn(1, 2, 600, 16)
    layer.update(key, key)
    assert layer.keys.shape[2] == 600 and layer.pages.first_token == 0
    assert layer.get_mask_sizes(1) == (24, 577)
    layer.update(key[:, :, :1], key[:, :, :1])
    assert layer.keys.shape[2] == 23 and layer.pages.first_token == 512
    layer.reset()
    layer.update(key, key)
    assert layer.keys.shape[2] == 600
    layer.crop(-1)
    assert layer.keys.shape[2] == 23 and layer.pages.first_token == 512
    only = QuantizedCache(text_config("mistral", sliding_window=24)).layers[0]
    only.update(key, key)
    assert only.keys.shape[2] == 23


@pytest.mark.parametrize(
    "differ",
    [
        {"per_layer_config": {1: {"head_dim": 32}, 3: {"head_dim": 32}}},
        {"global_head_dim": 32},
        {"global_head_dim": 16, "num_global_key_value_heads": 1, "attention_k_eq_v": True},
    ],
    ids=["per layer", "by kind of layer", "heads"],
)
def test_layers_may_differ(differ: dict[str, Any]) -> None:
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    config = Gemma4TextConfig(
        hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_hidden_layers=4,
        intermediate_size=96, vocab_size=99, sliding_window=24, pad_token_id=0, vocab_size_per_layer_input=99,
        hidden_size_per_layer_input=16, layer_types=["sliding_attention", "full_attention"] * 2, **differ,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Gemma4ForCausalLM._from_config(config, attn_implementation="eager").float().eval()
    with sage_patch.applied(model) as handle:
        got = in_pieces(model, cache := QuantizedCache(config))
    for site, layer in zip(handle.plan.sites, cache.layers, strict=True):
        assert (site.num_kv_heads, site.head_dim) == (layer.pages.num_kv_heads, layer.pages.head_dim)
    assert relative_l1(got, logits(model, IDS)) < 0.09
    assert [layer.window for layer in cache.layers] == [24, None, 24, None]


def test_each_layer_has_its_own_window() -> None:
    config = text_config("mistral", sliding_window=24, per_layer_config={1: {"sliding_window": 48}})
    assert [layer.window for layer in QuantizedCache(config).layers] == [24, 48]


def test_too_wide_layers_are_named() -> None:
    from transformers import Gemma4Config, Gemma4TextConfig

    for config in (Gemma4TextConfig(), Gemma4Config()):
        with pytest.raises(ValueError, match="up to 128 channels; this model has 256 and 512: use .*DynamicCache"):
            QuantizedCache(config)


@pytest.mark.parametrize("given", [None, {}, "llama", text_model], ids=lambda g: type(g).__name__)
def test_what_is_no_configuration_is_refused(given: Any) -> None:
    given = given("llama") if callable(given) else given
    with pytest.raises(TypeError, match=rf"QuantizedCache\(model.config\); got {type(given).__name__}"):
        QuantizedCache(given)
    for length in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match="max_cache_len must be a number of tokens or None"):
            QuantizedCache(text_config("llama"), max_cache_len=length)


REFUSED = {
    "linear attention": ("qwen3_next", {}, "linear_attention"),
    "wide heads": ("llama", {"head_dim": 256}, "up to 128 channels; this model has 256"),
    "latent": ("deepseek_v3", {"kv_lora_rank": 16}, "latent"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_it_cannot_hold_are_refused(name: str) -> None:
    kind, overrides, message = REFUSED[name]
    with pytest.raises(ValueError, match=message) as error:
        QuantizedCache(text_config(kind, **overrides))
    assert "DynamicCache" in str(error.value)


def test_tensors_that_it_cannot_hold_are_refused() -> None:
    cache = QuantizedCache(text_config("llama"))
    with pytest.raises(ValueError, match=r"layer 0 has keys of 16 and values of 8 channels.*DynamicCache"):
        cache.update(torch.randn(1, 2, 3, 16), torch.randn(1, 2, 3, 8), 0)
    with pytest.raises(ValueError, match=r"layer 1 has 192.*DynamicCache"):
        cache.update(torch.randn(1, 2, 3, 192), torch.randn(1, 2, 3, 192), 1)
    with pytest.raises(NotImplementedError, match="cannot be offloaded"):
        cache.layers[0].offload()
    with pytest.raises(NotImplementedError, match="cannot be offloaded"):
        cache.layers[0].prefetch()
