"""`exact_backend: fa3`: which exact calls run on FlashAttention-3, and how the others are counted. On the CPU with a
module in its place, on a card with the package itself."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import sage_patch
import zoo.plain as zoo
from oracle import HALF, assert_attention_close, attention, qkv
from sage_patch.args import plain
from sage_patch.dispatch import Options, attend, choose, describe
from sage_patch.kernels import crossover, fa3, ops
from sage_patch.policy import Policy
from sage_patch.recipes import EXACT, Limits
from tiny import text_model, tokens

CALLS: list[dict[str, Any]] = []


def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """Exact attention in the package's own form: tokens before heads, causal from the last corner, sums beside."""
    CALLS.append({"shape": tuple(q.shape), "causal": causal, "scale": softmax_scale})
    query, key, value = (x.transpose(1, 2) for x in (q, k, v))
    mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1]) if causal else None
    out = F.scaled_dot_product_attention(query, key, value, mask, scale=softmax_scale, enable_gqa=True)
    return out.transpose(1, 2).contiguous(), out.new_zeros(1)


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """fa3-fwd as it is published: without float16. Every device is one of its own."""
    interface, config = ModuleType("fa3_fwd_interface"), ModuleType("fa3_fwd_config")
    interface.flash_attn_func = flash_attn_func  # type: ignore[attr-defined]
    config.CONFIG = {"build_flags": {"FLASHATTENTION_DISABLE_FP16": True}}  # type: ignore[attr-defined]
    for module in (interface, config):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(fa3, "is_served", lambda device: True)
    CALLS.clear()
    fa3.find.cache_clear()
    yield config
    fa3.find.cache_clear()


@pytest.fixture
def no_package(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for interface, _ in fa3.MODULES:
        monkeypatch.setitem(sys.modules, interface, None)  # an import of it fails
    fa3.find.cache_clear()
    yield
    fa3.find.cache_clear()


def run(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    given = Options(exact_backend="fa3", **options)
    call = describe(q, k, v, given)
    return attend(q, k, v, given, call, *choose(EXACT, call, Limits()), site="here/")[0]


def backends() -> dict[str, int]:
    return {key.backend: n for key, n in ops.counts("here/").items()}


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize(("is_causal", "q_len"), [(False, 24), (True, 24), (True, 40)])
def test_a_call_that_it_takes(package: ModuleType, is_causal: bool, q_len: int, layout: Any) -> None:
    q, k, v = qkv(2, 4, q_len, 40, 64, kv_heads=2, dtype=torch.bfloat16)
    out = run(q, k, v, right=0 if is_causal else -1, scale=0.3, out_layout=layout)
    assert_attention_close(out, attention(q, k, v, is_causal=is_causal, scale=0.3)[0], HALF)
    assert CALLS == [{"shape": (2, q_len, 4, 64), "causal": is_causal, "scale": 0.3}]
    assert backends() == {"fa3": 1}
    assert (out.transpose(1, 2) if layout == "NHD" else out).is_contiguous()


def refused() -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Word -> (how the tensors are made, options) of a call that it does not take."""
    ends = torch.tensor([0, 16, 24], dtype=torch.int32)
    return {
        "dtype": (dict(dtype=torch.float16), {}),
        "head_dim": (dict(dim=20), {}),
        "mask": ({}, dict(attn_mask=torch.ones(1, 1, 24, 24, dtype=torch.bool))),
        "varlen": (dict(batch=1), dict(cu_seqlens_q=ends, cu_seqlens_k=ends)),
        "window": ({}, dict(left=8, right=0)),
        "causal": (dict(q_len=30), dict(right=0)),
        "softcap": ({}, dict(softcap=20.0)),
        "sinks": ({}, dict(sinks=torch.zeros(4))),
        "lse": ({}, dict(return_lse=True)),
        "scale": ({}, dict(scale=-0.2)),
        "empty": (dict(q_len=0), {}),
    }


@pytest.mark.parametrize("word", list(refused()))
def test_what_it_does_not_take_runs_as_before_and_says_why(package: ModuleType, word: str) -> None:
    made, options = refused()[word]
    made = dict(batch=2, q_len=24, dim=64, dtype=torch.bfloat16) | made
    q, k, v = qkv(made["batch"], 4, made["q_len"], 24, made["dim"], dtype=made["dtype"])
    out = run(q, k, v, **options)
    assert not CALLS and backends() == {f"exact, not fa3: {word}": 1}
    plainly = Options(**options)
    call = describe(q, k, v, plainly)
    assert torch.equal(out, attend(q, k, v, plainly, call, EXACT, "policy")[0])


def test_other_devices_corners_and_gradients(package: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = qkv(1, 2, 24, 30, 64, dtype=torch.bfloat16)
    args = plain(0.125, is_causal=True, recipe="exact")
    assert fa3.why_not(q, k, v, args) == ""
    assert fa3.why_not(q, k, v, args._replace(top_left=True)) == "causal"
    assert fa3.why_not(q, k[:, :, :24], v[:, :, :24], args._replace(top_left=True)) == ""
    assert fa3.why_not(q, k, v[..., :32], args) == "head_dim"
    package.CONFIG["build_flags"].clear()  # type: ignore[attr-defined]
    fa3.find.cache_clear()
    assert fa3.why_not(q.half(), k.half(), v.half(), args) == ""
    run(q.requires_grad_(), k, v, right=0).float().sum().backward()
    assert q.grad is not None and not CALLS
    assert [(key.backend, key.reason) for key in ops.counts("here/")] == [("exact", "needs_grad")]
    monkeypatch.undo()
    assert fa3.why_not(q, k, v, args) == "device"


def test_apply_takes_it_by_argument_and_by_policy(package: ModuleType) -> None:
    """Of a plain module and of a transformers model; a copy of the model goes on with it."""
    model, inputs = zoo.build("vit")
    model, inputs = model.bfloat16(), {n: x.bfloat16() if x.is_floating_point() else x for n, x in inputs.items()}
    for given in (
        dict(policy="exact", exact_backend="fa3"),
        dict(policy={"version": 1, "recipe": "exact", "exact_backend": "fa3"}),
        dict(policy=Policy("exact", exact_backend="fa3")),
    ):
        with torch.no_grad(), sage_patch.applied(model, **given) as handle:
            model(**inputs)
            assert {(r["backend"], r["reason"]) for r in handle.rows()} == {("fa3", "policy")}
            assert "(policy; fa3)" in handle.report()
            pickle.loads(pickle.dumps(model))(**inputs)
        assert ("copy", "fa3") in {(key.site.partition("/")[0], key.backend) for key in ops.counts("copy/")}
    llama = text_model().bfloat16()
    padded = tokens(2, 20)
    with torch.no_grad(), sage_patch.applied(llama, "exact", exact_backend="fa3") as handle:
        llama(padded)
        assert {r["backend"] for r in handle.rows()} == {"fa3"}
        mask = torch.ones_like(padded)
        mask[0, :3] = 0
        llama(padded, attention_mask=mask)
        assert {r["backend"] for r in handle.rows()} == {"fa3", "exact, not fa3: mask"}
        assert "exact, not fa3: mask" in handle.report()
    with (
        torch.no_grad(),
        sage_patch.applied(llama, Policy("exact", exact_backend="fa3"), exact_backend="torch") as handle,
    ):
        llama(padded)
        assert {r["backend"] for r in handle.rows()} == {"exact"}


def test_a_compiled_graph_runs_it(package: ModuleType) -> None:
    model, inputs = zoo.build("vit")
    model, inputs = model.bfloat16(), {n: x.bfloat16() for n, x in inputs.items()}
    with torch.no_grad(), sage_patch.applied(model, "exact", exact_backend="fa3") as handle:
        torch.compile(model, backend="eager", fullgraph=True)(**inputs)
        assert {(r["site"], r["backend"]) for r in handle.rows()} == {("*", "fa3")}


def test_a_missing_package_is_one_message_and_the_model_is_untouched(no_package: None) -> None:
    model, _ = zoo.build("vit")
    with pytest.raises(fa3.Fa3Missing, match="pip install fa3-fwd.*exact_backend"):
        sage_patch.apply(model, exact_backend="fa3")
    assert not any("_sage_patch" in vars(module) for module in model.modules())
    with pytest.raises(sage_patch.PolicyError, match="exact_backend 'fa4' is none; there are 'torch' and 'fa3'"):
        sage_patch.apply(model, exact_backend="fa4")  # type: ignore[arg-type]
    with pytest.raises(sage_patch.SagePatchError, match="exact_backend"):
        sage_patch.apply(model, {"version": 1, "exact_backend": "fa4"})


def test_break_even_lengths_are_those_against_what_would_run(monkeypatch: pytest.MonkeyPatch) -> None:
    modes = {"full": {"qk_int8_pv_fp8": 1024}, "causal": {"qk_int8_pv_fp8": 2048}}
    slower = {"full": {"qk_int8_pv_fp8": 4096}, "causal": {"qk_int8_pv_fp8": 8192}}
    card = {"measured": "", "head_dims": {"64": modes, "128": modes}, "head_dims_fa3": {"128": slower}}
    assert crossover.look_up(card, 128, False) == (("qk_int8_pv_fp8", ((128, 1024),)),)
    assert crossover.look_up(card, 128, False, "fa3") == (("qk_int8_pv_fp8", ((128, 4096),)),)
    assert crossover.look_up(card, 64, True, "fa3") == (("qk_int8_pv_fp8", ((128, 2048),)),)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(("is_causal", "q_len"), [(False, 300), (True, 300), (True, 512)])
def test_on_a_card(head_dim: int, is_causal: bool, q_len: int) -> None:
    for interface, _ in fa3.MODULES[:1]:
        pytest.importorskip(interface)
    q, k, v = (x.cuda() for x in qkv(2, 4, q_len, 512, head_dim, kv_heads=2, dtype=torch.bfloat16))
    for layout in ("HND", "NHD"):
        out = run(q, k, v, right=0 if is_causal else -1, out_layout=layout)
        want = attention(q.cpu(), k.cpu(), v.cpu(), is_causal=is_causal)[0]
        assert_attention_close(out.cpu(), want, HALF)
    assert backends() == {"fa3": 2}
