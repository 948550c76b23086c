"""QuantizedCache under transformers: every duty of a cache, right tokens, and a count for every use."""

from __future__ import annotations

import copy
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import sage_patch
from sage_patch import Policy, QuantizedCache, UnsupportedCall
from sage_patch.evaluation.models import load_text_model
from sage_patch.integrations.quantized_cache_calls import CachedTensor
from sage_patch.kernels import ops
from sage_patch.schema import ModelSpec
from tiny import EXACT, logits, relative_l1, scaled_difference, text_config, text_model, tokens

IDS = tokens(2, 60)
PADDED = torch.ones_like(IDS)
PADDED[0, :13] = 0
PIECES = [30, 9, 1, 1, 1, 18]
FAMILIES = {
    "llama": {},
    "mistral": {"sliding_window": 20},
    "qwen2": {},
    "gemma2": {"sliding_window": 20, "attn_logit_softcapping": 2.0},
    "gpt_oss": {"sliding_window": 20, "num_local_experts": 2, "num_experts_per_tok": 2},
    "llama4_text": {
        "attention_chunk_size": 16, "num_local_experts": 2, "num_experts_per_tok": 2, "intermediate_size_mlp": 96,
    },
}  # fmt: skip
TINY = Path(__file__).parent / "assets" / "lm-tiny-d128"


def in_pieces(model: nn.Module, cache: Any, ids: Tensor = IDS, mask: Tensor | None = None, pieces=PIECES) -> Tensor:
    """Logits of ids, fed piece by piece into a cache."""
    mask = torch.ones_like(ids) if mask is None else mask
    out, at = [], 0
    with torch.no_grad():
        for n in pieces:
            seen = mask[:, : at + n]
            out.append(model(input_ids=ids[:, at : at + n], attention_mask=seen, past_key_values=cache).logits)
            at += n
    return torch.cat(out, dim=1)


def calls(rows: list[dict[str, Any]]) -> dict[tuple[str, str], int]:
    """Calls by (recipe, reason)."""
    found: Counter[tuple[str, str]] = Counter()
    for row in rows:
        found[row["recipe"], row["reason"]] += row["calls"]
    return dict(found)


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("mask", [None, PADDED], ids=["whole", "left-padded"])
def test_patched_models_attend_over_the_pages(kind: str, mask: Tensor | None) -> None:
    """Prefill, chunks, steps and a long draft: close to the uncached model, every call but the first over pages."""
    model = text_model(kind, "eager", **FAMILIES[kind])
    expected = logits(model, IDS, attention_mask=mask)
    with sage_patch.applied(model) as handle:
        got = in_pieces(model, QuantizedCache(model.config), mask=mask)
        assert calls(handle.rows()) == {("exact", "dtype_float32"): 2, ("qk_int8_pv_fp8", "cache"): 10}
    assert "qk_int8_pv_fp8 x5 (cache)" in handle.report()
    real = mask.bool() if mask is not None else torch.ones_like(IDS, dtype=torch.bool)
    assert relative_l1(got[real], expected[real]) < 0.08
    assert calls(sage_patch.rows()) == {}


@pytest.mark.parametrize("kind", ["llama", "mistral", "gpt_oss"])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_unpatched_models_get_tensors_and_the_use_is_counted(kind: str, implementation: str) -> None:
    if (kind, implementation) == ("gpt_oss", "sdpa"):
        pytest.skip("gpt_oss has no sdpa in transformers")
    model = text_model(kind, implementation, **FAMILIES[kind])
    expected = logits(model, IDS, attention_mask=PADDED)
    got = in_pieces(model, QuantizedCache(model.config), mask=PADDED)
    assert relative_l1(got[PADDED.bool()], expected[PADDED.bool()]) < 0.08
    assert calls(sage_patch.rows()) == {("exact", "cache_materialized"): 10}
    assert {row["site"] for row in sage_patch.rows()} == {"QuantizedCache.0", "QuantizedCache.1"}


def test_the_flag_finds_the_pages_too() -> None:
    model = text_model("llama", "sage2")
    got = in_pieces(model, QuantizedCache(model.config))
    assert calls(sage_patch.rows()) == {("exact", "dtype_float32"): 2, ("qk_int8_pv_fp8", "cache"): 10}
    assert relative_l1(got, logits(text_model("llama"), IDS)) < 0.08


def test_an_exact_policy_computes_exactly_on_what_the_cache_holds() -> None:
    model = text_model("llama", "sdpa")
    unpatched = in_pieces(model, QuantizedCache(model.config))
    with sage_patch.applied(model, EXACT) as handle:
        got = in_pieces(model, QuantizedCache(model.config))
        assert calls(handle.rows()) == {("exact", "policy"): 12}
    assert scaled_difference(got, unpatched) < 1e-5


def test_calls_that_pages_cannot_run_are_exact_with_their_reason() -> None:
    model = text_model("llama", "eager")
    cache = QuantizedCache(model.config)
    with sage_patch.applied(model) as handle, torch.no_grad():
        model(input_ids=IDS[:, :30], past_key_values=cache)
        output = model(input_ids=IDS[:, 30:31], past_key_values=cache, output_attentions=True)
        assert output.attentions[0].shape == (2, 4, 1, 31)
        wide = torch.zeros(2, 1, 2, 33)
        wide[..., 0, -1] = torch.finfo(torch.float32).min
        model(input_ids=IDS[:, 31:33], past_key_values=cache, attention_mask=wide)
        found = calls(handle.rows())
    assert found == {("exact", "dtype_float32"): 2, ("exact", "output_attentions"): 2, ("exact", "mask_float"): 2}
    with sage_patch.applied(model, Policy(on_unsupported="error", quantize_fp32=True)), torch.no_grad():
        wide = torch.zeros(2, 1, 1, 34)
        with pytest.raises(UnsupportedCall, match=r"model\.layers\.0\.self_attn: mask_float"):
            model(input_ids=IDS[:, 33:34], past_key_values=cache, attention_mask=wide)


def test_a_device_without_kernels_stores_and_computes_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    model = text_model("llama", "sdpa")
    exact = in_pieces(model, QuantizedCache(model.config))
    monkeypatch.setattr(ops, "backend_for", lambda device: "none")
    with sage_patch.applied(model) as handle:
        got = in_pieces(model, QuantizedCache(model.config))
        assert calls(handle.rows()) == {("exact", "dtype_float32"): 2, ("exact", "no_kernel_for_cpu"): 10}
    assert scaled_difference(got, exact) < 1e-5


def test_prefill_takes_the_ordinary_path_on_the_original_values() -> None:
    """The first update's keys are the model's own, so nothing is lost before the second."""
    model = text_model("llama", "sdpa")
    expected = logits(model, IDS)
    with torch.no_grad():
        got = model(input_ids=IDS, past_key_values=QuantizedCache(model.config)).logits
    assert torch.equal(got, expected)
    assert calls(sage_patch.rows()) == {}


def filled_layer(length: int = 40, **options: Any) -> tuple[Any, Tensor, Tensor]:
    cache = QuantizedCache(text_config("llama", num_hidden_layers=1), **options)
    key, value = torch.randn(2, 2, length, 16), torch.randn(2, 2, length, 16)
    cache.update(key, value, 0)
    return cache, key, value


def test_a_handle_is_a_tensor_without_data_until_it_is_computed_with() -> None:
    cache, key, value = filled_layer()
    k, v = cache.update(key[:, :, :3], value[:, :, :3], 0)
    assert isinstance(k, Tensor) and type(k) is CachedTensor
    assert k.shape == v.shape == (2, 2, 43, 16) and k.shape[-2] == 43 and k.size(1) == 2 and k.dim() == 4
    assert k.dtype == torch.float32 and k.device.type == "cpu" and not k.requires_grad and k.is_contiguous()
    assert "CachedTensor(key" in repr(k) and "CachedTensor(value" in repr(v)
    assert calls(sage_patch.rows()) == {}
    part = k[:, :, -5:]
    assert type(part) is Tensor and part.shape == (2, 2, 5, 16)
    assert torch.allclose(part[:, :, 2:], key[:, :, :3], atol=0.05)
    assert torch.equal(torch.cat([v, v], dim=-2)[:, :, :43], v + 0) and k.transpose(2, 3).shape == (2, 2, 16, 43)
    assert calls(sage_patch.rows()) == {("exact", "cache_materialized"): 1}  # once for the pair
    cache.update(key, value, 0)
    with pytest.raises(RuntimeError, match="kept beyond its next change"):
        cache.layers[0].keys  # noqa: B018 - a new one is fine
        k2, _ = cache.layers[0].keys, cache.crop(-1)
        k2 + 0


def test_the_layer_offers_its_keys_and_values() -> None:
    cache = QuantizedCache(text_config("llama"))
    assert cache.layers[0].keys is None and cache.layers[0].values is None
    cache, key, value = filled_layer()
    assert torch.allclose(cache.layers[0].keys + 0, key, atol=0.05)
    assert torch.allclose(cache.layers[0].values + 0, value, atol=0.2)


def test_a_conversation_keeps_its_dtype() -> None:
    cache, key, value = filled_layer()
    message = (
        "layer 0 .* holds torch.float32 tokens on cpu, and was given torch.bfloat16 on cpu: keep one dtype .*autocast"
    )
    with pytest.raises(ValueError, match=message):
        cache.update(key.bfloat16(), value.bfloat16(), 0)
    with pytest.raises(ValueError, match=message), torch.autocast("cpu", torch.bfloat16):
        cache.update(key, value, 0)
    assert cache.get_seq_length() == 40
    cache.reset()
    cache.update(key.bfloat16(), value.bfloat16(), 0)  # an emptied cache is as new
    assert cache.layers[0].pages.dtype == torch.bfloat16


def test_lengths_and_mask_sizes_are_those_of_a_dynamic_cache() -> None:
    from transformers import DynamicCache

    config = text_config("gemma2", sliding_window=20)
    ours, theirs = QuantizedCache(config), DynamicCache(config=config)
    assert ours.is_sliding == theirs.is_sliding and not ours.is_compileable and ours.is_croppable
    for n in [11, 8, 1, 1, 30, 4]:
        for layer in range(2):
            assert ours.get_mask_sizes(n, layer) == theirs.get_mask_sizes(n, layer)
            shapes = []
            for cache in (ours, theirs):
                keys, _ = cache.update(torch.randn(1, 2, n, 16), torch.randn(1, 2, n, 16), layer)
                shapes.append(tuple(keys.shape))
            assert shapes[0] == shapes[1]
        assert ours.get_seq_length() == theirs.get_seq_length()
    assert [ours.get_max_length(i) for i in (0, 1, None)] == [theirs.get_max_length(i) for i in (0, 1, None)]
    ours.reset()
    assert ours.get_seq_length() == 0 and ours.get_mask_sizes(5, 0) == (5, 0)


def test_crop_takes_back_what_a_draft_wrote() -> None:
    model = text_model("mistral", "sdpa", sliding_window=20)
    with sage_patch.applied(model), torch.no_grad():
        straight, drafted = QuantizedCache(model.config), QuantizedCache(model.config)
        in_pieces(model, straight, pieces=[50])
        in_pieces(model, drafted, pieces=[50])
        drafted.activate_past_recording()
        model(input_ids=tokens(2, 9, seed=4), past_key_values=drafted)
        drafted.crop(torch.tensor(-9))
        assert drafted.get_seq_length() == 50
        a, b = (model(input_ids=IDS[:, 50:], past_key_values=c).logits for c in (straight, drafted))
    assert torch.equal(a, b)
    drafted.crop(55)  # the old meaning of a positive number: the length to keep
    assert drafted.get_seq_length() == 55
    drafted.crop(99)
    assert drafted.get_seq_length() == 55
    QuantizedCache(model.config).crop(-3)


def test_batches_are_reordered_repeated_and_selected() -> None:
    model = text_model("llama", "sdpa")
    with sage_patch.applied(model), torch.no_grad():
        cache = QuantizedCache(model.config)
        in_pieces(model, cache, pieces=[50])
        kept = copy.deepcopy(cache)
        step = IDS[:, 50:51]
        plain = model(input_ids=step, past_key_values=copy.deepcopy(kept)).logits
        cache.reorder_cache(torch.tensor([1, 0]))
        swapped = model(input_ids=step.flip(0), past_key_values=cache).logits
        assert torch.allclose(swapped, plain.flip(0), atol=1e-5)
        more = copy.deepcopy(kept)
        more.batch_repeat_interleave(2)
        repeated = model(input_ids=step.repeat_interleave(2, 0), past_key_values=more).logits
        assert torch.allclose(repeated, plain.repeat_interleave(2, 0), atol=1e-5)
        for index in (torch.tensor([3]), torch.tensor([-1]), [3], torch.tensor([False, False, False, True])):
            one = copy.deepcopy(more)
            one.crop(-1)
            one.batch_select_indices(index)
            assert torch.allclose(model(input_ids=step[1:], past_key_values=one).logits, plain[1:], atol=1e-5)
        assert kept.get_seq_length() == 50


def test_a_copied_cache_counts_for_itself() -> None:
    cache, key, value = filled_layer()
    other = copy.deepcopy(cache)
    other.update(key, value, 0)
    assert (cache.get_seq_length(), other.get_seq_length()) == (40, 80)


def test_a_cache_made_early_is_filled_later() -> None:
    config = text_config("llama")
    cache = QuantizedCache(config)
    cache.early_initialization(2, 2, 16, torch.float32, torch.device("cpu"))
    assert cache.is_initialized and cache.get_seq_length() == 0 and cache.nbytes > 0
    model = text_model("llama", "sdpa")
    with sage_patch.applied(model):
        late = in_pieces(model, QuantizedCache(config))
        assert torch.equal(in_pieces(model, cache), late)
        cache.reset()
        again = in_pieces(model, cache, IDS[:1], pieces=[60])  # another batch size after reset
        assert again.shape[0] == 1


def test_a_static_cache_refuses_more_than_it_was_made_for() -> None:
    model = text_model("llama", "sdpa")
    with sage_patch.applied(model), torch.no_grad():
        cache = QuantizedCache(model.config, max_cache_len=60)
        static = in_pieces(model, cache)
        assert torch.equal(static, in_pieces(model, QuantizedCache(model.config)))
        with pytest.raises(ValueError, match="made for 60 tokens"):
            model(input_ids=IDS[:, :1], past_key_values=cache)
    assert cache.get_max_length() == 60


def test_gradients_are_refused_rather_than_lost() -> None:
    model = text_model("llama", "sdpa")
    cache = QuantizedCache(model.config)
    loss = model(
        input_ids=IDS, labels=IDS, past_key_values=cache
    ).loss  # nothing was cached before: gradients are whole
    loss.backward()
    assert model.model.layers[0].self_attn.k_proj.weight.grad.abs().sum() > 0
    with pytest.raises(ValueError, match="keeps no gradients"):
        model(input_ids=IDS[:, :1], past_key_values=cache)


def test_mixed_dtypes_of_autocast() -> None:
    model = text_model("llama", "sdpa")
    expected = logits(model, IDS)
    with sage_patch.applied(model) as handle, torch.autocast("cpu", torch.bfloat16):
        cache = QuantizedCache(model.config)
        got = in_pieces(model, cache)
        assert cache.layers[0].pages.dtype == torch.bfloat16
        assert calls(handle.rows())["qk_int8_pv_fp8", "cache"] == 10
    assert relative_l1(got.float(), expected) < 0.15


def test_a_compiled_model_runs_the_cache_between_its_graphs() -> None:
    torch.compiler.reset()
    model = text_model("llama", "sdpa", num_hidden_layers=1)
    with sage_patch.applied(model):
        expected = in_pieces(model, QuantizedCache(model.config), pieces=[30, 1, 1])
        compiled = torch.compile(model, backend="eager")
        assert torch.equal(in_pieces(compiled, QuantizedCache(model.config), pieces=[30, 1, 1]), expected)


@pytest.fixture(scope="module")
def trained() -> nn.Module:
    return load_text_model(ModelSpec(path=str(TINY), dtype="float32", device="cpu"))[0]


@pytest.fixture(scope="module")
def text() -> Tensor:
    return torch.from_numpy(np.load(TINY / "val_tokens.npy").astype(np.int64))


GENERATE = {
    "greedy": {},
    "prompt lookup": dict(prompt_lookup_num_tokens=5),
    "chunked prefill": dict(prefill_chunk_size=64),
    "assistant": dict(),
}
NEW = 24


def generated(model: nn.Module, prompt: Tensor, cache: Any, **options: Any) -> Tensor:
    """The tokens after the prompt."""
    options = dict(max_new_tokens=NEW, do_sample=False, pad_token_id=0, eos_token_id=-1) | options
    return model.generate(prompt, past_key_values=cache, **options)[:, prompt.shape[1] :]


def assert_same_until_a_near_tie(model: nn.Module, prompt: Tensor, got: Tensor, want: Tensor, mask=None) -> None:
    """`want` is the exact model's greedy choice. Where `got` first leaves it, the exact model must have been of two
    minds: INT8 moves probabilities by some hundredths, of two that are likely by a tenth, and after that the texts are
    different texts."""
    assert got.shape == want.shape == (prompt.shape[0], NEW)
    whole = torch.cat([prompt, want], dim=1)
    if mask is not None:
        mask = torch.nn.functional.pad(mask, (0, NEW), value=1)
    chances = logits(model, whole, attention_mask=mask)[:, prompt.shape[1] - 1 : -1].softmax(-1)
    for chosen, best, chance in zip(got, want, chances, strict=True):
        differs = (chosen != best).nonzero()
        if len(differs):
            i = int(differs[0])
            assert chance[i, best[i]] - chance[i, chosen[i]] < 0.15, f"token {i}: {chosen[i]} for {best[i]}"


@pytest.mark.parametrize("start", [0, 1000])
@pytest.mark.parametrize("name", GENERATE)
def test_a_trained_model_writes_the_same_text(trained: nn.Module, text: Tensor, name: str, start: int) -> None:
    from transformers import DynamicCache

    prompt = text[None, start : start + 300]
    options: dict[str, Any] = dict(GENERATE[name])
    want = generated(trained, prompt, DynamicCache(config=trained.config))
    if name == "assistant":
        options["assistant_model"] = copy.deepcopy(trained)
    with sage_patch.applied(trained) as handle:
        cache = QuantizedCache(trained.config)
        got = generated(trained, prompt, cache, **options)
        found = calls(handle.rows())
    assert found.pop(("exact", "dtype_float32")) == 8 and set(found) == {("qk_int8_pv_fp8", "cache")}
    assert cache.get_seq_length() == 300 + NEW - 1
    assert_same_until_a_near_tie(trained, prompt, got, want)


def test_a_left_padded_batch_writes_the_same_text(trained: nn.Module, text: Tensor) -> None:
    from transformers import DynamicCache

    prompt, mask = text[1000:1600].view(2, 300).clone(), torch.ones(2, 300, dtype=torch.long)
    mask[1, :171] = 0
    want = generated(trained, prompt, DynamicCache(config=trained.config), attention_mask=mask)
    with sage_patch.applied(trained):
        got = generated(trained, prompt, QuantizedCache(trained.config), attention_mask=mask)
    assert_same_until_a_near_tie(trained, prompt, got, want, mask)


def test_beam_search_keeps_every_beam_with_its_own_past(trained: nn.Module, text: Tensor) -> None:
    """The score that the search gives its text is the one that the exact model gives it."""
    prompt = text[None, 1000:1300]
    options = dict(max_new_tokens=NEW, num_beams=3, do_sample=False, pad_token_id=0, eos_token_id=-1)
    with sage_patch.applied(trained):
        found = trained.generate(
            prompt, past_key_values=QuantizedCache(trained.config), return_dict_in_generate=True, output_scores=True,
            **options,
        )  # fmt: skip
    new = found.sequences[:, 300:]
    chances = logits(trained, found.sequences)[:, 299:-1].log_softmax(-1)
    exact = chances.gather(-1, new[..., None]).mean()
    assert abs(float(found.sequences_scores[0] - exact)) < 0.02


@pytest.mark.parametrize("kind, implementation", [("mistral", "sdpa"), ("gemma2", "eager"), ("llama", "sdpa")])
def test_drafts_that_are_taken_back_leave_the_text_alone(kind: str, implementation: str) -> None:
    """Three tokens of text and five that turn out wrong, again and again, past the end of the window."""
    model = text_model(kind, implementation, **FAMILIES[kind])
    ids = tokens(2, 150)
    expected = logits(model, ids)
    with sage_patch.applied(model), torch.no_grad():
        cache = QuantizedCache(model.config)
        cache.activate_past_recording()
        got = [model(input_ids=ids[:, :30], past_key_values=cache).logits]
        for at in range(30, 150, 3):
            draft = torch.cat([ids[:, at : at + 3], tokens(2, 5, seed=at)], dim=1)
            got.append(model(input_ids=draft, past_key_values=cache).logits[:, :3])
            cache.crop(-5)
    assert cache.get_seq_length() == 150
    assert relative_l1(torch.cat(got, dim=1), expected) < 0.08


def test_assisted_generation_past_the_end_of_a_window() -> None:
    model = text_model("mistral", "sdpa", sliding_window=20)
    prompt = IDS[:1, :40].repeat(1, 2)
    for options in (dict(prompt_lookup_num_tokens=6), dict(assistant_model=text_model("mistral", "sdpa"))):
        cache = QuantizedCache(model.config)
        with sage_patch.applied(model) as handle:
            assert generated(model, prompt, cache, **options).shape == (1, NEW)
            assert ("exact", "cache_materialized") not in calls(handle.rows())
        assert cache.get_seq_length() == 80 + NEW - 1
    assert calls(sage_patch.rows()) == {}


@pytest.mark.parametrize("pieces", [[300, *[1] * 20], [64] * 5, [1, 319], [1, 127, 192]], ids=str)
def test_a_trained_model_predicts_the_same(trained: nn.Module, text: Tensor, pieces: list[int]) -> None:
    """Mean KL of the next-token distributions, as the README gives it for the ordinary quantized path (0.002)."""
    ids = text[None, 3000:3320]
    exact = logits(trained, ids).log_softmax(-1)
    with sage_patch.applied(trained):
        got = in_pieces(trained, QuantizedCache(trained.config), ids, pieces=pieces).log_softmax(-1)
    kl = (exact.exp() * (exact - got)).sum(-1)[:, pieces[0] :]
    assert kl.mean() < 0.006
