"""torch.compile and the operator itself: one node in the graph, the same bits, and counters that still count."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from torch import Tensor

import sage_patch
from oracle import HALF, QUANTIZED, RECIPE_TOLERANCE, assert_attention_close, attention, qkv, visible
from sage_patch import backends
from sage_patch.attention import sage_attention
from sage_patch.kernels import crossover, ops
from sage_patch.policy import Policy
from tiny import text_model, tokens

RECIPE = "qk_int8_pv_fp8"
ALL = ["exact", *QUANTIZED]


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch.compiler.reset()


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, **options) -> Tensor | tuple[Tensor, Tensor]:
    """Something before and after the call, so that there is a graph to break."""
    out = sage_attention(q * 2, k, v, mask, **options)
    return (out[0] + 1, out[1]) if isinstance(out, tuple) else out + 1


CALLS = {
    "plain": {},
    "causal": dict(is_causal=True),
    "NHD lse": dict(tensor_layout="NHD", return_lse=True),
    "window softcap": dict(is_causal=True, window=9, softcap=20.0),
    "sinks": dict(sinks=torch.tensor([1.0, 2.0])),
    "scale": dict(scale=0.2),
}


@pytest.mark.parametrize("recipe", ["exact", "sage2", RECIPE, "qk_int4_pv_fp16"])
@pytest.mark.parametrize("name", CALLS)
def test_fullgraph_equals_eager_and_still_counts(name: str, recipe: str) -> None:
    """No graph break, equal bits, and every compiled call is counted, not only the traced one."""
    options = dict(**CALLS[name], recipe=recipe)
    q, k, v = qkv(2, 2, 140, dim=32)
    if options.get("tensor_layout") == "NHD":
        q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    want = attend(q, k, v, **options)
    (key,) = ops.counts()
    ops.reset_counts()
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        for n in range(1, 4):
            got = compiled(q, k, v, **options)
            assert ops.counts() == {key: n}
    for a, b in zip(got if isinstance(got, tuple) else [got], want if isinstance(want, tuple) else [want], strict=True):
        assert torch.equal(a, b) and a.stride() == b.stride()


@pytest.mark.parametrize("recipe", ["exact", RECIPE])
def test_calls_that_need_gradients_compile(recipe: str) -> None:
    """Training under fullgraph: exact with reason, counted at every step, the gradients of eager."""

    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sage_attention(q, k, v, is_causal=True, recipe=recipe).square().sum()

    results = []
    for call in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        ops.reset_counts()
        for n in range(1, 4):
            leaves = [x.requires_grad_() for x in qkv(1, 2, 40, dim=32, dtype=torch.float32)]
            loss = call(*leaves)
            loss.backward()
            assert sum(ops.counts().values()) == n
            (key,) = ops.counts()
            assert (key.recipe, key.backend) == ("exact", "exact")
            assert key.reason == "needs_grad"
        results.append([loss.detach(), *(x.grad for x in leaves)])
    assert all(torch.allclose(a, b, rtol=1e-6, atol=1e-7) for a, b in zip(*results, strict=True))


def test_one_graph_serves_many_lengths() -> None:
    """Dynamic lengths: after the second shape nothing is compiled again, and each length gives eager's bits."""
    compiled_graphs = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attend, fullgraph=True, backend=compiled_graphs, dynamic=True)
    for length in (140, 141, 200, 333):
        q, k, v = qkv(1, 2, length, dim=32)
        with torch.no_grad():
            assert torch.equal(compiled(q, k, v, is_causal=True), attend(q, k, v, is_causal=True))
    assert compiled_graphs.frame_count <= 2


def test_packed_calls_compile() -> None:
    """Cumulative lengths are data, not shapes: new ones need no new graph."""

    def packed(q: Tensor, k: Tensor, v: Tensor, cu: Tensor) -> Tensor:
        return sage_attention(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, recipe=RECIPE) * 2

    graphs = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(packed, fullgraph=True, backend=graphs)
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in qkv(1, 2, 60, dim=32))
    with torch.no_grad():
        for cu in (torch.tensor([0, 20, 60]), torch.tensor([0, 31, 60])):
            assert torch.equal(compiled(q, k, v, cu), packed(q, k, v, cu))
    assert graphs.frame_count == 1


def test_autocast_compiles() -> None:
    """The cast rule is part of the graph."""
    q, k, v = qkv(1, 2, 140, dim=32, dtype=torch.float32)
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        want, got = attend(q, k, v), compiled(q, k, v)
    assert got.dtype == torch.bfloat16 and torch.equal(got, want)


# --- reported faults -------------------------------------------------------------------------------------------


def call_by_name(q: Tensor, k: Tensor, v: Tensor, recipe: str) -> Tensor:
    return sage_attention(q, k, v, recipe=recipe)


@pytest.mark.parametrize("recipe", ALL)
def test_smoke_shape_of_a_release(recipe: str) -> None:
    """(4, 32, 64, 128) in fp16: right, compiled bit-equal to eager, and a tensor of its own."""
    q, k, v = qkv(4, 32, 64, dim=128)
    out = call_by_name(q, k, v, recipe)
    assert_attention_close(out, attention(q, k, v)[0], HALF if recipe == "exact" else RECIPE_TOLERANCE[recipe])
    torch.compiler.reset()
    assert torch.equal(torch.compile(call_by_name, fullgraph=True, backend="aot_eager")(q, k, v, recipe), out)
    assert out.untyped_storage().data_ptr() not in [x.untyped_storage().data_ptr() for x in (q, k, v)]


@pytest.mark.parametrize("recipe", ALL)
def test_global_matmul_switches_change_nothing(recipe: str) -> None:
    """Reduced-precision flags on or off, compiled or eager: four times the same bits."""
    q, k, v = qkv(1, 2, 140, dim=64)
    flags = torch.backends.cuda.matmul
    before = (torch.get_float32_matmul_precision(), flags.allow_fp16_accumulation, flags.allow_tf32)
    results = []
    try:
        for precision, fast in (("highest", False), ("medium", True)):
            torch.set_float32_matmul_precision(precision)
            flags.allow_fp16_accumulation = fast
            torch.compiler.reset()
            for call in (call_by_name, torch.compile(call_by_name, fullgraph=True, backend="aot_eager")):
                results.append(call(q, k, v, recipe))
    finally:
        torch.set_float32_matmul_precision(before[0])
        flags.allow_fp16_accumulation, flags.allow_tf32 = before[1:]
    assert all(torch.equal(r, results[0]) for r in results[1:])


# --- the operator ---------------------------------------------------------------------------------------------


def mask_of(kind: str, q_len: int, kv_len: int, dtype: torch.dtype) -> Tensor | None:
    seen = visible(q_len, kv_len, True)[None, None]
    if kind == "none":
        return None
    return seen if kind == "bool" else torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, -math.inf)


@pytest.mark.parametrize("dim", [32, 40, 64, 96, 128])
@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("mask", ["none", "bool", "float"])
@pytest.mark.parametrize("lse", [False, True])
def test_opcheck(dim: int, layout: str, mask: str, lse: bool) -> None:
    """Schema, fake shapes and strides, and dispatch agree with what the operator does."""
    dtype = torch.bfloat16 if dim == 40 else torch.float16
    q, k, v = qkv(2, 4, 9, 21, dim, dim // 2, kv_heads=2, dtype=dtype)
    if layout == "NHD":
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    for recipe in ("exact", RECIPE):
        args = (
            q, k, v, mask_of(mask, 9, 21, dtype), None, None, torch.zeros(4) if lse else None, None, None,
            dim**-0.5 if lse else 0.3, -1, 0 if lse else -1, False, 0.0, lse, layout, recipe, "", "opcheck",
        )  # fmt: skip
        torch.library.opcheck(
            torch.ops.sage_patch.attention.default, args,
            test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
        )  # fmt: skip
        out, _ = torch.ops.sage_patch.attention(*args)
        base = out.transpose(1, 2) if layout == "NHD" else out
        assert out.shape == (2, 4, 9, dim // 2) and base.is_contiguous()


def test_opcheck_packed_and_counter() -> None:
    """The packed form and the counting operator, under every opcheck test but gradients."""
    q, k, v = qkv(1, 2, 9, 9, 16)
    cu = torch.tensor([0, 4, 7])
    args = (q, k, v, None, None, None, None, cu, cu, 0.25, -1, 0, False, 0.0, True, "NHD", RECIPE, "", "opcheck")
    every = ("test_schema", "test_faketensor", "test_autograd_registration", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.sage_patch.attention.default, args, test_utils=every)
    torch.library.opcheck(
        torch.ops.sage_patch.count.default, (torch.zeros(1), "exact", "why", "opcheck"), test_utils=every
    )


def test_output_is_a_new_tensor() -> None:
    """Never an alias of an input, even where the answer equals V."""
    for recipe in ("exact", RECIPE):
        q, k, v = qkv(1, 1, 1, 1, 16)
        out = sage_attention(q, k, v, recipe=recipe)
        assert torch.equal(out, v)
        assert out.untyped_storage().data_ptr() not in [x.untyped_storage().data_ptr() for x in (q, k, v)]


# --- lengths that change ----------------------------------------------------------------------------------------

CARD = tuple(
    (dim, ((RECIPE, ((128, 4096),)),), ((RECIPE, ((128, length), (32, 2 * length))),))
    for dim, length in ((64, 1024), (128, crossover.NEVER))
)


@pytest.fixture
def like_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Describe calls as on a card with a table of break-even lengths that none of them reaches."""
    card = backends.BACKENDS["sm90"]
    row = replace(backends.BACKENDS["reference"], architectures=card.architectures, no_gain=card.no_gain)
    monkeypatch.setitem(backends.BACKENDS, "reference", row)
    monkeypatch.setattr(crossover, "_cached_table", lambda index, exact_backend: CARD)


def graphs_of(call: Callable[[int], object], run: Callable) -> int:
    """How many graphs `run` makes over changing lengths; its results are those of eager mode."""
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend="aot_eager")
    for length in (140, 141, 200, 333):
        given = call(length)
        with torch.no_grad():
            got, want = compiled(*given), run(*given)
        assert torch.allclose(got, want, rtol=1e-3, atol=1e-3)
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("head_dim", [32, 128])
def test_one_graph_where_the_card_has_a_table(head_dim: int, like_a_card: None) -> None:
    """The table is asked with a head_dim that is a symbol: as many graphs as torch's own attention."""

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sage_attention(q, k, v, is_causal=True)

    def theirs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def tensors(length: int) -> tuple[Tensor, ...]:
        return qkv(2, 2, length, dim=head_dim)

    assert graphs_of(tensors, ours) == graphs_of(tensors, theirs) == 1


def test_a_model_makes_as_many_graphs_as_unpatched(like_a_card: None) -> None:
    model = text_model()

    def run(ids: Tensor) -> Tensor:
        return model(input_ids=ids, use_cache=False).logits

    def ids(length: int) -> tuple[Tensor]:
        return (tokens(2, length),)

    unpatched = graphs_of(ids, run)
    with sage_patch.applied(model, Policy(quantize_fp32=True)):
        assert graphs_of(ids, run) == unpatched


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["sage2", "exact", RECIPE])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_one_graph_on_a_card(recipe: str, head_dim: int) -> None:
    """By inductor, over changing lengths: one graph, eager's bits."""
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(sage_attention, fullgraph=True, dynamic=True)
    for length in (300, 301, 777, 1200):
        q, k, v = (x.cuda() for x in qkv(2, 4, length, dim=head_dim, dtype=torch.bfloat16))
        with torch.no_grad():
            got = compiled(q, k, v, is_causal=True, recipe=recipe)
            assert torch.equal(got, sage_attention(q, k, v, is_causal=True, recipe=recipe))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.gpu
def test_a_model_on_a_card_makes_as_many_graphs_as_unpatched() -> None:
    model = text_model().cuda().bfloat16()
    made = []
    for policy in (None, Policy(), Policy(recipe=RECIPE, min_q_len=1, min_kv_len=1)):
        handle = sage_patch.apply(model, policy) if policy is not None else None
        torch.compiler.reset()
        torch._dynamo.utils.counters.clear()
        compiled = torch.compile(lambda ids: model(input_ids=ids, use_cache=False).logits, fullgraph=True, dynamic=True)
        for length in (140, 141, 300, 450):
            with torch.no_grad():
                assert torch.isfinite(compiled(tokens(2, length).cuda())).all()
        made.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        if handle is not None:
            handle.revert()
    assert made[1] == made[2] == made[0]


def test_a_module_in_training_mode_compiles_exact() -> None:
    """What is being compiled cannot tell inference from a checkpointed pass, so that the flag decides."""
    model = text_model().train()
    with sage_patch.applied(model, Policy(quantize_fp32=True)), torch.no_grad():
        torch.compile(model, backend="aot_eager")(input_ids=tokens(1, 150), use_cache=False)
        assert {key.reason for key in ops.counts()} == {"training"}
