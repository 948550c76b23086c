"""StaticQuantizedCache on a CPU: the tokens of a QuantizedCache, in graphs that a compiler holds whole."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sage_patch
from sage_patch import QuantizedCache, StaticQuantizedCache, UnsupportedCall
from sage_patch.args import PageArgs
from sage_patch.integrations.static_cache_calls import run_of
from sage_patch.pages import Pages
from sage_patch.reference.pages import PAGE_TOKENS
from sage_patch.static_pages import StaticPages
from tiny import EXACT, relative_l1, text_config, text_model, tokens

IDS = tokens(2, 60)
WHOLE, RAGGED, HOLED = torch.ones_like(IDS), torch.ones_like(IDS), torch.ones_like(IDS)
RAGGED[0, :13] = 0
HOLED[1, 20:24] = 0
MASKS = {"whole": WHOLE, "ragged": RAGGED, "holed": HOLED}
PIECES = [30, 9, 1, 1, 1, 18]
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 20},
    "gemma2": {"sliding_window": 20, "attn_logit_softcapping": 2.0},
    "gpt_oss": {"sliding_window": 20, "num_local_experts": 2, "num_experts_per_tok": 2},
}


def in_pieces(model: nn.Module, cache: Any, mask: Tensor = WHOLE, pieces: list[int] = PIECES, at: int = 0) -> Tensor:
    """Logits of IDS, fed piece by piece into a cache."""
    out = []
    with torch.no_grad():
        for n in pieces:
            seen = mask[:, : at + n]
            out.append(model(input_ids=IDS[:, at : at + n], attention_mask=seen, past_key_values=cache).logits)
            at += n
    return torch.cat(out, dim=1)


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("mask", MASKS)
def test_the_bits_of_the_growing_cache(kind: str, mask: str) -> None:
    """Grouped heads, windows, sinks, softcap; prompts, chunks and steps."""
    model = text_model(kind, "eager", **FAMILIES[kind])
    with sage_patch.applied(model) as handle:
        want = in_pieces(model, QuantizedCache(model.config), MASKS[mask])
        cache = StaticQuantizedCache(model.config, 77)
        assert torch.equal(in_pieces(model, cache, MASKS[mask]), want)
        over_pages = sum(row["calls"] for row in handle.rows() if row["reason"] == "cache")
        assert over_pages == 20 and cache.get_seq_length() == 60


@pytest.mark.parametrize("rotated", [True, False])
@pytest.mark.parametrize("dim", [64, 80])
@pytest.mark.parametrize("pieces", [[300], [100, *[1] * 60, 140], [5, 122, 1, 1, 171]], ids=str)
def test_the_bytes_of_a_growing_store(pieces: list[int], dim: int, rotated: bool) -> None:
    key, value = torch.randn(2, 2, 3, 300, dim) + 1
    grown = Pages(2, 3, dim, torch.float32, "cpu", rotated=rotated)
    fixed = StaticPages(2, 3, dim, torch.float32, "cpu", 1500, rotated)
    for k, v in zip(key.split(pieces, 2), value.split(pieces, 2), strict=True):
        grown.append(k, v)
        fixed.append(k, v)
    assert fixed.length == 300 and fixed.settled == (pieces[0] >= 128 or max(pieces) >= 128)
    assert torch.equal(fixed.k_mean, grown.k_mean) and torch.equal(fixed.v_mean, grown.v_mean)
    records = fixed.store.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, : -(-300 // PAGE_TOKENS)]
    assert torch.equal(records, grown.records(0, 3))
    query = torch.randn(2, 6, 4, dim)
    args = PageArgs(dim**-0.5, left=150)
    assert torch.equal(fixed.attend(query, args, "").transpose(1, 2), grown.attend(query, args)[0])
    for x, y in zip(fixed.dequantize(), grown.dequantize(), strict=True):
        assert x.shape[2] == 1500 and torch.equal(x[:, :, :300], y) and not x[:, :, 300:].any()


def test_operators_pass_torchs_own_checks() -> None:
    """Schemas name what is written to; bodies that only plan shapes give those of the real ones."""
    pages = StaticPages(1, 2, 64, torch.float32, "cpu", 200)
    key, value = torch.randn(2, 1, 2, 3, 64)
    tests = ("test_schema", "test_faketensor")
    length, sizes = pages.held, (pages.max_length, pages.rotated)
    ops = torch.ops.sage_patch
    torch.library.opcheck(ops.pages_append, (key, value, *pages.tensors, *sizes, False), test_utils=tests)
    pages.append(key, value)
    query = torch.randn(1, 4, 2, 64)
    held = (pages.store, pages.table, pages.k_mean, pages.v_mean, length, *sizes)
    rest = (None, None, None, None, 0.125, -1, True, 0.0, "")
    torch.library.opcheck(ops.pages_attend, (query, *held, *rest), test_utils=tests)
    torch.library.opcheck(ops.pages_dequantize, (*pages.tensors, *sizes), test_utils=tests)
    torch.library.opcheck(ops.pages_length, (length,), test_utils=tests)


def masks_before(model: nn.Module, cache: Any, mask: Tensor, n: int) -> Any:
    """What generate makes outside of the compiled call."""
    from transformers.masking_utils import create_masks_for_generate

    like = torch.empty(mask.shape[0], n, 0)
    return create_masks_for_generate(
        config=model.config, inputs_embeds=like, attention_mask=mask, past_key_values=cache
    )


@pytest.mark.parametrize("kind", ["llama", "mistral"])
@pytest.mark.parametrize("mask", ["ragged", "holed"])
def test_one_graph_serves_all_steps(kind: str, mask: str) -> None:
    torch.compiler.reset()
    model = text_model(kind, "sdpa", num_hidden_layers=1, **FAMILIES[kind])
    with sage_patch.applied(model), torch.no_grad():
        want = in_pieces(model, QuantizedCache(model.config), MASKS[mask], [30, 1, 1, 1, 1])
        cache = StaticQuantizedCache(model.config, 50)
        first = in_pieces(model, cache, MASKS[mask], [30])
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=False)
        out = [first]
        for at in range(30, 34):
            with torch.compiler.set_stance("fail_on_recompile" if at > 30 else "default"):
                given = masks_before(model, cache, MASKS[mask][:, : at + 1], 1)
                step = IDS[:, at : at + 1]
                out.append(compiled(input_ids=step, attention_mask=given, past_key_values=cache).logits)
    assert torch.equal(torch.cat(out, dim=1), want)


def test_a_compiled_prompt_needs_its_store_before() -> None:
    torch.compiler.reset()
    model = text_model("llama", "sdpa", num_hidden_layers=1)
    with sage_patch.applied(model), torch.no_grad():
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=False)
        cache = StaticQuantizedCache(model.config, 50)
        with pytest.raises(Exception, match="early_initialization"):
            compiled(input_ids=IDS[:, :30], past_key_values=cache)
        cache.early_initialization(2, 2, 16, torch.float32, torch.device("cpu"))
        assert cache.is_compileable and cache.is_initialized and cache.get_seq_length() == 0
        got = compiled(input_ids=IDS[:, :30], past_key_values=cache).logits
        assert cache.get_seq_length() == 30
        assert torch.equal(got, in_pieces(model, StaticQuantizedCache(model.config, 50), pieces=[30]))


def test_positions_are_read_before_the_step_changes_them() -> None:
    """inductor reads views of a tensor as late as it can, also behind an operator that has written to it since."""
    torch.compiler.reset()
    pages = StaticPages(1, 1, 16, torch.float32, "cpu", 50)

    def step(key: Tensor) -> Tensor:
        position = pages.length + torch.arange(1)
        pages.append(key, key)
        return key * position

    compiled = torch.compile(step, fullgraph=True)
    for i in range(3):
        assert torch.equal(compiled(torch.ones(1, 1, 1, 16)), torch.full((1, 1, 1, 16), float(i)))
    assert pages.length == 3


def test_generate_writes_the_same_tokens_compiled_and_not() -> None:
    from transformers import CompileConfig

    torch.compiler.reset()
    model = text_model("llama", "sdpa", num_hidden_layers=1)
    given: dict[str, Any] = dict(
        input_ids=IDS[:, :40], attention_mask=RAGGED[:, :40], max_new_tokens=8, do_sample=False
    )
    how = CompileConfig(fullgraph=True, backend="aot_eager", mode=None)  # type: ignore[arg-type]
    how._compile_all_devices = True
    with sage_patch.applied(model) as handle:
        want = model.generate(**given, past_key_values=QuantizedCache(model.config))
        assert torch.equal(model.generate(**given, past_key_values=StaticQuantizedCache(model.config, 64)), want)
        cache = StaticQuantizedCache(model.config, 64)
        assert torch.equal(model.generate(**given, past_key_values=cache, compile_config=how), want)
        cache.reset()
        assert torch.equal(model.generate(**given, past_key_values=cache, compile_config=how), want)
        beams = {**given, "num_beams": 3, "max_new_tokens": 6}
        want = model.generate(**beams, past_key_values=QuantizedCache(model.config))
        assert torch.equal(model.generate(**beams, past_key_values=StaticQuantizedCache(model.config, 64)), want)
        assert sum(row["calls"] for row in handle.rows() if row["reason"] == "cache") > 0


def test_exact_calls_see_what_is_stored() -> None:
    model = text_model("llama", "sdpa")
    want = in_pieces(text_model("llama", "sdpa"), QuantizedCache(model.config), RAGGED)
    with sage_patch.applied(model, EXACT) as handle:
        got = in_pieces(model, StaticQuantizedCache(model.config, 70), RAGGED)
        assert {(r["recipe"], r["reason"]) for r in handle.rows()} == {("exact", "policy")}
    assert relative_l1(got[RAGGED.bool()], want[RAGGED.bool()]) < 1e-4


def test_other_code_is_refused() -> None:
    model = text_model("llama", "sdpa")
    cache = StaticQuantizedCache(model.config, 70)
    in_pieces(model, cache, pieces=[30])
    with pytest.raises((AttributeError, UnsupportedCall), match="read by attention that sage_patch has patched"):
        in_pieces(model, cache, pieces=[1], at=30)
    reading, _ = cache.update(*torch.randn(2, 2, 2, 1, 16), 0)
    assert tuple(reading.shape) == (2, 2, 70, 16) and reading.dtype == torch.float32
    with pytest.raises(UnsupportedCall, match="in matmul"):
        torch.matmul(torch.randn(2, 2, 1, 70), reading)


def test_what_does_not_fit_is_refused() -> None:
    config = text_config("llama")
    with pytest.raises(TypeError, match=r"StaticQuantizedCache\(model.config\)"):
        StaticQuantizedCache("llama", 40)  # type: ignore[arg-type]
    for bad in (0, None, 3.5, True):
        with pytest.raises(ValueError, match="max_cache_len must be a number"):
            StaticQuantizedCache(config, bad)  # type: ignore[arg-type]
    model = text_model("llama", "sdpa")
    cache = StaticQuantizedCache(model.config, 40)
    assert cache.get_max_length() == 40 and cache.layers[0].get_max_cache_shape() == 40
    with sage_patch.applied(model):
        in_pieces(model, cache, pieces=[39, 1])
        with pytest.raises(ValueError, match="made for 40 tokens; it holds 40 and was given 1 more"):
            in_pieces(model, cache, pieces=[1], at=40)
    assert cache.nbytes == sum(t.nbytes for layer in cache.layers for t in layer.pages.tensors)
    pages = StaticPages(1, 2, 64, torch.float32, "cpu", 20)
    with pytest.raises(ValueError, match="of 20 tokens at most"):
        pages.append(torch.randn(1, 2, 21, 64), torch.randn(1, 2, 21, 64))
    with pytest.raises(ValueError, match="up to 128 channels"):
        StaticPages(1, 2, 160, torch.float32, "cpu", 20)


def test_gradients_are_refused_rather_than_lost() -> None:
    model = text_model("llama", "sdpa")
    cache = StaticQuantizedCache(model.config, 70)
    model(input_ids=IDS, past_key_values=cache).logits.sum().backward()
    with pytest.raises(ValueError, match="keeps no gradients"):
        model(input_ids=IDS[:, :1], past_key_values=cache)


def test_a_copied_cache_counts_for_itself() -> None:
    model = text_model("llama", "sdpa")
    with sage_patch.applied(model):
        cache = StaticQuantizedCache(model.config, 70)
        in_pieces(model, cache, pieces=[30])
        other = copy.deepcopy(cache)
        a = in_pieces(model, other, pieces=[1], at=30)
        assert cache.get_seq_length() == 30 and other.get_seq_length() == 31
        assert other.layers[0].pages.table.tolist() == [other.layers[0].pages.store.data_ptr()]
        assert torch.equal(in_pieces(model, cache, pieces=[1], at=30), a)


def test_runs_of_masks() -> None:
    mask = torch.zeros(4, 1, 1, 9, dtype=torch.bool)
    mask[0, ..., :5] = mask[1, ..., 2:7] = mask[2, ..., 2:4] = True
    mask[2, ..., 6] = True
    starts, until = run_of(mask)
    assert starts.tolist() == [0, 2, 2, 9] and until.tolist() == [5, 7, 0, 0]
    assert starts.dtype == until.dtype == torch.int32
