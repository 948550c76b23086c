"""The public function: signature, layouts, packed sequences, recipes, errors, counters, autocast."""

from __future__ import annotations

import inspect
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from oracle import (
    HALF,
    QUANTIZED,
    RECIPE_TOLERANCE,
    T8F8,
    assert_attention_close,
    attention,
    normal,
    packed_attention,
    qkv,
)
from sage_patch.attention import UnsupportedCall, sage_attention
from sage_patch.kernels import ops
from sage_patch.recipes import recipe_names

DEFAULT = "qk_int8_pv_fp8"


def counted() -> list[tuple[str, str, str, int]]:
    return [(k.recipe, k.backend, k.reason, n) for k, n in ops.counts().items()]


# --- signature ------------------------------------------------------------------------------------------------


def test_signature_begins_with_sdpas() -> None:
    """Names, order, kinds and defaults of torch's function (whose own signature is in its docstring)."""
    ours = inspect.signature(sage_attention).parameters
    theirs = dict(
        query=inspect.Parameter.empty, key=inspect.Parameter.empty, value=inspect.Parameter.empty,
        attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False,
    )  # fmt: skip
    assert F.scaled_dot_product_attention.__doc__ is not None
    first_line = F.scaled_dot_product_attention.__doc__.strip().splitlines()[0:2]
    assert all(name in "".join(first_line) for name in theirs)
    head = list(ours.values())[: len(theirs)]
    assert [p.name for p in head] == list(theirs)
    assert [p.default for p in head] == list(theirs.values())
    assert all(p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for p in head)
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in list(ours.values())[len(theirs) :])


@pytest.mark.parametrize("recipe", ["exact", DEFAULT])
def test_all_positional_equals_all_by_keyword(recipe: str) -> None:
    """Each argument means the same in both forms, and none is dropped."""
    q, k, v = qkv(2, 4, 60, 200, 32, kv_heads=2)
    mask = torch.rand(2, 1, 60, 200, generator=torch.Generator().manual_seed(0)) < 0.5
    by_place = sage_attention(q, k, v, mask, 0.0, True, 0.3, True, recipe=recipe)
    by_name = sage_attention(
        query=q,
        key=k,
        value=v,
        attn_mask=mask,
        dropout_p=0.0,
        is_causal=True,
        scale=0.3,
        enable_gqa=True,
        recipe=recipe,
    )
    assert torch.equal(by_place, by_name)
    tolerance = HALF if recipe == "exact" else T8F8
    assert_attention_close(by_name, attention(q, k, v, mask, is_causal=True, scale=0.3)[0], tolerance)


# --- errors ---------------------------------------------------------------------------------------------------

Q, K, V = (torch.zeros(2, 4, 6, 8) for _ in range(3))
QKV = [Q, K, V]
PACKED = [torch.zeros(6, 4, 8)] * 3
CU = torch.tensor([0, 2, 6])
ERRORS = [
    ("query must have 4 dimensions", [Q[0], K, V], {}, ValueError),
    ("needs cu_seqlens_q and cu_seqlens_k", PACKED, {}, ValueError),
    ("batch sizes differ", [Q, K[:1], V[:1]], {}, ValueError),
    ("batch sizes differ", [Q, K, V[:1]], {}, ValueError),
    ("key and value lengths differ", [Q, K, V[:, :, :5]], {}, ValueError),
    ("query and key head_dim differ", [Q, K[..., :4], V], {}, ValueError),
    ("key and value head counts differ", [Q, K, V[:, :2]], {}, ValueError),
    ("num_heads 4 must be a positive multiple of num_kv_heads 3", [Q, K[:, :3], V[:, :3]], {}, ValueError),
    ("num_heads 2 must be a positive multiple of num_kv_heads 4", [Q[:, :2], K, V], {"enable_gqa": True}, ValueError),
    ("num_heads 0 must be a positive multiple of num_kv_heads 4", [Q[:, :0], K, V], {}, ValueError),
    ("pass enable_gqa=True", [Q, K[:, :2], V[:, :2]], {}, ValueError),
    ("query must be floating point; got torch.int64", [Q.long(), K, V], {}, TypeError),
    ("value must be floating point; got torch.bool", [Q, K, V.bool()], {}, TypeError),
    ("query is on cpu but key is on meta", [Q, K.to("meta"), V], {}, ValueError),
    ('tensor_layout must be "HND" or "NHD"', [Q, K, V], {"tensor_layout": "BSHD"}, ValueError),
    ('causal_align must be "bottom_right" or "top_left"', [Q, K, V], {"causal_align": "lower"}, ValueError),
    ('on_unsupported must be "exact" or "error"', [Q, K, V], {"on_unsupported": "warn"}, ValueError),
    ("dropout_p must be in", [Q, K, V], {"dropout_p": 1.0}, ValueError),
    ("dropout_p must be in", [Q, K, V], {"dropout_p": -0.1}, ValueError),
    ("softcap must be positive", [Q, K, V], {"softcap": -1.0}, ValueError),
    ("attn_mask is torch.int64", [Q, K, V], {"attn_mask": torch.ones(6, 6).long()}, ValueError),
    ("attn_mask is torch.uint8", [Q, K, V], {"attn_mask": torch.ones(6, 6).byte()}, ValueError),
    ("query is on cpu but attn_mask is on meta", [Q, K, V], {"attn_mask": torch.ones(6, 6, device="meta")}, ValueError),
    ("attn_mask must have 2 to 4 dimensions", [Q, K, V], {"attn_mask": torch.ones(6)}, ValueError),
    ("does not broadcast to [B, Hq, q_len, kv_len] = [2, ", [Q, K, V], {"attn_mask": Q[0, 0, :, :5]}, ValueError),
    ("does not broadcast", [Q, K, V], {"attn_mask": torch.ones(2, 1, 6)}, ValueError),
    ("sinks must be float [4]", [Q, K, V], {"sinks": torch.zeros(2)}, ValueError),
    ("sinks must be float [4]", [Q, K, V], {"sinks": torch.zeros(4).long()}, ValueError),
    ("come together", PACKED, {"cu_seqlens_q": CU}, ValueError),
    ("come together", PACKED, {"cu_seqlens_k": CU}, ValueError),
    ("cu_seqlens_q must be int32 or int64", PACKED, {"cu_seqlens_q": CU.float(), "cu_seqlens_k": CU}, ValueError),
    ("cu_seqlens_k must be int32 or int64 [", PACKED, {"cu_seqlens_q": CU, "cu_seqlens_k": CU[:1]}, ValueError),
    ("has 2 sequences, cu_seqlens_k 1", PACKED, {"cu_seqlens_q": CU, "cu_seqlens_k": CU[:2]}, ValueError),
    ("must be packed", [Q, K, V], {"cu_seqlens_q": CU, "cu_seqlens_k": CU}, ValueError),
    (
        "attn_mask cannot be combined with cu_seqlens",
        PACKED, {"cu_seqlens_q": CU, "cu_seqlens_k": CU, "attn_mask": torch.ones(6, 6)}, ValueError,
    ),
    ('unknown recipe "qk_int8"; nearest', [Q, K, V], {"recipe": "qk_int8"}, ValueError),
    ("granularity must be one of", [Q, K, V], {"recipe": f"{DEFAULT}:granularity=row"}, ValueError),
    ('unknown variant', [Q, K, V], {"recipe": f"{DEFAULT}:smoothing=k"}, ValueError),
    ("'exact' has no variants", [Q, K, V], {"recipe": "exact:smooth=k"}, ValueError),
    # what is no tensor, no number, no word; unusual tensors
    *((f"{n} must be a torch.Tensor; got {type(x).__name__}", [*QKV[:i], x, *QKV[i + 1 :]], {}, TypeError)
      for i, n in enumerate(("query", "key", "value")) for x in (None, [1.0], "x", np.zeros((2, 4, 6, 8)))),
    *((f"{n} must be a torch.Tensor; got list", [Q, K, V], {n: [1.0]}, TypeError) for n in ("attn_mask", "sinks")),
    ("cu_seqlens_q must be a torch.Tensor", PACKED, {"cu_seqlens_q": [0, 6], "cu_seqlens_k": CU}, TypeError),
    ("query has dtype torch.float8_e4m3fn; float16", [Q.to(torch.float8_e4m3fn), K, V], {}, TypeError),
    ("query must be a strided tensor; got layout torch.sparse_coo", [Q.to_sparse(), K, V], {}, ValueError),
    ("key is a nested tensor", [Q, torch.nested.nested_tensor([K[0]]), V], {}, ValueError),
    ("attn_mask is torch.float8_e5m2", [Q, K, V], {"attn_mask": torch.ones(6, 6).to(torch.float8_e5m2)}, ValueError),
    ("query is on cpu but sinks is on meta", [Q, K, V], {"sinks": torch.zeros(4, device="meta")}, ValueError),
    *((f"{n} must be a number", [Q, K, V], {n: x}, TypeError)
      for n in ("scale", "softcap", "dropout_p") for x in ("x", [1], True, 1j, torch.ones(()))),
    *((f"{n} must be finite", [Q, K, V], {n: x}, ValueError)
      for n in ("scale", "softcap", "dropout_p") for x in (math.nan, math.inf, -math.inf, 10**400)),
    *((f"{n} must be True or False", [Q, K, V], {n: x}, TypeError)
      for n in ("is_causal", "enable_gqa", "return_lse") for x in ("no", 1, None)),
    *(("window must be an int, a pair of ints (left, right) or None", [Q, K, V], {"window": x}, TypeError)
      for x in ("x", 1.5, (None, 2), (1.5, 2), True, (1, 2, 3), (True, 1))),
    *(("recipe must be a name", [Q, K, V], {"recipe": x}, TypeError) for x in (3, ["exact"], b"exact")),
    *(("cu_seqlens_q must rise from 0 or more to at most the 6 tokens", PACKED,
       {"cu_seqlens_q": torch.tensor(x), "cu_seqlens_k": CU}, ValueError)
      for x in ([0, 2, 1000], [0, 5, 2], [-3, 2, 6], [0, 2, 1 << 40])),
    ("cu_seqlens_k must rise", PACKED, {"cu_seqlens_q": CU, "cu_seqlens_k": CU + 1}, ValueError),
]  # fmt: skip


@pytest.mark.parametrize(("words", "tensors", "options", "kind"), ERRORS, ids=[f"{n}" for n in range(len(ERRORS))])
def test_errors_name_the_argument(words: str, tensors: list, options: dict, kind: type[Exception]) -> None:
    """Refused before anything runs, with the argument, what it was and what it must be; nothing is counted."""
    with pytest.raises(kind) as caught:
        sage_attention(*tensors, **options)
    assert words.replace('"qk_int8"', "'qk_int8'") in str(caught.value)
    assert not ops.counts()


def test_numbers_of_numpy_and_the_default_recipe_by_none() -> None:
    """What is a number is taken, whoever made it; None is the default recipe."""
    q, k, v = qkv(1, 2, 20, 200, 32)
    for numpy, plain in (
        (dict(window=np.int64(3)), dict(window=3)),
        (dict(window=(np.int32(3), np.int64(-1))), dict(window=(3, -1))),
        (dict(scale=np.float32(0.25), softcap=np.float64(4)), dict(scale=0.25, softcap=4.0)),
        (dict(is_causal=np.bool_(True), dropout_p=np.float32(0)), dict(is_causal=True)),
    ):
        for recipe in ({}, dict(recipe="exact")):
            assert torch.equal(sage_attention(q, k, v, **recipe, **numpy), sage_attention(q, k, v, **recipe, **plain))
    assert torch.equal(sage_attention(q, k, v, recipe=None), sage_attention(q, k, v))
    assert {key.reason for key in ops.counts()} == {"", "policy"}


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("given", "meant"),
    [([0, 1000, 5], [0, 10, 10]), ([5, 2, 10], [5, 5, 10]), ([-3, 4, 10], [0, 4, 10]), ([0, 4, 1 << 30], [0, 4, 10])],
)
def test_lengths_that_cannot_be_read_are_made_to_fit(given: list[int], meant: list[int], dtype: torch.dtype) -> None:
    """Inside a graph, as on a GPU, nothing waits for values: they are clamped, and never lead outside of the tensor."""

    def call(x: torch.Tensor, cu: torch.Tensor) -> torch.Tensor:
        return sage_attention(x, x, x, cu_seqlens_q=cu, cu_seqlens_k=cu, recipe=DEFAULT)

    x = normal(10, 2, 32)
    compiled = torch.compile(call, fullgraph=True, backend="eager")
    assert torch.equal(compiled(x, torch.tensor(given, dtype=dtype)), call(x, torch.tensor(meant, dtype=dtype)))


def test_a_fake_tensor_beside_a_real_one_is_named() -> None:
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(torch.zeros(2, 4, 6, 8))
    with pytest.raises(ValueError, match="key is a fake tensor but query holds values"):
        sage_attention(Q, fake, V)


@pytest.mark.parametrize("recipe", ["exact", "sage2", DEFAULT])
def test_meta_tensors_give_shapes(recipe: str) -> None:
    x = torch.empty(1, 2, 150, 64, device="meta")
    out, lse = sage_attention(x, x, x, recipe=recipe, return_lse=True)
    assert out.shape == x.shape and out.device.type == "meta" and lse.shape == (1, 2, 150)


@pytest.mark.parametrize(
    "cu", [[0, 2, 7], [0, 4, 2], [1, 2, 6], [-1, 2, 6]], ids=["past the end", "falling", "late start", "negative"]
)
def test_bad_cumulative_lengths_never_crash(cu: list[int]) -> None:
    """Values are not read on the host before a launch, so bad ones may give any finite answer or an error, but
    never wrong memory: the output has its shape, and nothing outside a sequence is written."""
    try:
        out = sage_attention(
            *(normal(6, 2, 8, seed=n) for n in range(3)), cu_seqlens_q=torch.tensor(cu), cu_seqlens_k=torch.tensor(cu)
        )
    except (ValueError, RuntimeError):
        return
    assert out.shape == (6, 2, 8)


# --- recipes, limits, counters --------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_a_named_recipe_runs_at_any_length(recipe: str) -> None:
    """By name: quantized from one row and one key up, and in float32."""
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        sage_attention(*qkv(1, 1, 1, 1, 32, dtype=dtype), recipe=recipe, on_unsupported="error")
        sage_attention(*qkv(1, 1, 3, 200, 32, dtype=dtype), recipe=recipe, on_unsupported="error")
    assert counted() == [(recipe, "reference", "", 6)]


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        (dict(q_len=1, kv_len=500), "decode"),
        (dict(q_len=15, kv_len=500), "short_q"),
        (dict(q_len=16, kv_len=127), "short_kv"),
        (dict(q_len=16, kv_len=128), ""),
        (dict(q_len=200, kv_len=200, dtype=torch.float32), "dtype_float32"),
        (dict(q_len=200, kv_len=200, dtype=torch.float64), "dtype_float64"),
    ],
)
def test_the_default_recipe_has_limits(shape: dict, reason: str) -> None:
    """ "sage2" quantizes what pays; the rest is exact, bit for bit, with a counted reason."""
    q, k, v = qkv(1, 2, dim=32, **shape)
    out = sage_attention(q, k, v)
    expected = [("exact", "exact", reason, 1)] if reason else [(DEFAULT, "reference", "", 1)]
    assert counted() == expected
    if reason:
        assert torch.equal(out, F.scaled_dot_product_attention(q, k, v))


@pytest.mark.parametrize(
    ("options", "tensors", "reason"),
    [
        (dict(dropout_p=0.1), {}, "dropout"),
        (dict(), dict(grad=True), "needs_grad"),
        (dict(), dict(dtype=torch.float64), "dtype_float64"),
        (dict(), dict(mixed=True), "dtype_mixed"),
        (dict(), dict(dim=1025), "head_dim"),
    ],
)
def test_what_a_recipe_cannot_do_is_exact_or_an_error(options: dict, tensors: dict, reason: str) -> None:
    """on_unsupported decides; the error says the recipe, the reason and the remedy."""
    q, k, v = qkv(1, 1, 20, 200, tensors.get("dim", 32), dtype=tensors.get("dtype", torch.float16))
    if tensors.get("grad"):
        q.requires_grad_()
    if tensors.get("mixed"):
        v = v.bfloat16()
    sage_attention(q, k, v, recipe=DEFAULT, **options)
    assert counted() == [("exact", "exact", reason, 1)]
    with pytest.raises(UnsupportedCall, match=f"{DEFAULT}.*{reason}.*on_unsupported"):
        sage_attention(q, k, v, recipe=DEFAULT, on_unsupported="error", **options)
    assert counted() == [("exact", "exact", reason, 1)]


def test_limits_are_no_error() -> None:
    """on_unsupported="error" is about what a recipe cannot do, not about where it does not pay."""
    sage_attention(*qkv(1, 1, 1, 300, 32), on_unsupported="error")
    sage_attention(*qkv(1, 1, 20, 20, 32), on_unsupported="error")
    assert {r[2] for r in counted()} == {"decode", "short_kv"}


def test_exact_by_name_is_counted_as_policy() -> None:
    """Asked for, not fallen back to."""
    sage_attention(*qkv(1, 1, 200, dim=32), recipe="exact")
    assert counted() == [("exact", "exact", "policy", 1)]


def test_counts_by_prefix() -> None:
    """Counters are kept per site and can be read and cleared per model."""
    tensors = qkv(1, 1, 20, 20, 32)
    for site in ("a/0", "a/1", "b/0"):
        ops.attention(*tensors, *[None] * 6, 0.1, -1, -1, False, 0.0, False, "HND", "exact", "x", site)
    assert sum(ops.counts("a/").values()) == 2
    ops.reset_counts("a/")
    assert [k.site for k in ops.counts()] == ["b/0"]


def test_every_recipe_name_is_accepted() -> None:
    """The names that errors suggest all work."""
    for name in recipe_names():
        assert sage_attention(*qkv(1, 1, 16, 128, 32), recipe=name).shape == (1, 1, 16, 32)


@pytest.mark.parametrize("recipe", ["exact", DEFAULT])
def test_empty_tensors(recipe: str) -> None:
    """No rows, no keys, no batch: the right shape, zeros, lse -inf, no exception."""
    for batch, q_len, kv_len in [(1, 0, 5), (1, 5, 0), (0, 5, 5), (1, 0, 0)]:
        q, k, v = torch.ones(batch, 2, q_len, 8), torch.ones(batch, 2, kv_len, 8), torch.ones(batch, 2, kv_len, 4)
        for causal in (False, True):
            out, lse = sage_attention(q, k, v, recipe=recipe, is_causal=causal, return_lse=True)
            assert out.shape == (batch, 2, q_len, 4) and lse.shape == (batch, 2, q_len)
            assert not out.any() and torch.isneginf(lse).all()
            assert sage_attention(q, k, v, recipe=recipe, is_causal=causal).shape == out.shape


# --- layouts and packed sequences -----------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["exact", *QUANTIZED])
@pytest.mark.parametrize("return_lse", [False, True])
def test_layouts(recipe: str, return_lse: bool) -> None:
    """NHD is HND with heads and tokens swapped: same bits; output contiguous as asked; lse [B, Hq, q_len]."""
    q, k, v = qkv(2, 4, 40, 150, 32, 16, kv_heads=2)
    options = dict(recipe=recipe, enable_gqa=True, is_causal=True, return_lse=return_lse)
    hnd = sage_attention(q, k, v, **options)
    nhd = sage_attention(*(x.transpose(1, 2).contiguous() for x in (q, k, v)), tensor_layout="NHD", **options)
    if return_lse:
        assert torch.equal(hnd[1], nhd[1]) and hnd[1].shape == (2, 4, 40) and hnd[1].dtype == torch.float32
        hnd, nhd = hnd[0], nhd[0]
    assert hnd.shape == (2, 4, 40, 16) and nhd.shape == (2, 40, 4, 16)
    assert hnd.is_contiguous() and nhd.is_contiguous()
    assert torch.equal(hnd, nhd.transpose(1, 2))


@pytest.mark.parametrize("recipe", QUANTIZED)
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_packed(recipe: str, index: torch.dtype) -> None:
    """Packed sequences, empty ones included, equal the same sequences one by one, and a bad neighbour changes
    nothing; tokens outside every sequence are 0."""
    cu_q, cu_k = torch.tensor([0, 50, 50, 90, 97], dtype=index), torch.tensor([0, 140, 150, 150, 230], dtype=index)
    q, k, v = normal(100, 4, 32, seed=1), normal(240, 2, 32, seed=2), normal(240, 2, 32, seed=3)
    options = dict(
        cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, enable_gqa=True, is_causal=True, return_lse=True, recipe=recipe
    )
    out, lse = sage_attention(q, k, v, **options)
    want, want_lse = packed_attention(q, k, v, cu_q, cu_k, is_causal=True)
    assert out.shape == (100, 4, 32) and lse.shape == (4, 100) and out.is_contiguous()
    assert_attention_close(out.transpose(0, 1), want.transpose(0, 1), RECIPE_TOLERANCE[recipe])
    assert torch.equal(torch.isneginf(lse), torch.isneginf(want_lse))
    alone, alone_lse = sage_attention(
        *(x[None] for x in (q[:50], k[:140], v[:140])), tensor_layout="NHD",
        recipe=recipe, enable_gqa=True, is_causal=True, return_lse=True,
    )  # fmt: skip
    assert torch.equal(out[:50], alone[0]) and torch.equal(lse[:, :50], alone_lse[0])
    k[140:], v[140:] = math.nan, math.nan
    assert torch.equal(sage_attention(q, k, v, **options)[0][:50], alone[0])


# --- dtypes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtypes", [(0, 0, 1), (0, 1, 1), (1, 0, 0), (2, 2, 1)])
def test_mixed_dtypes_go_exact_in_their_common_dtype(dtypes: tuple[int, int, int]) -> None:
    """Outside autocast: counted, accurate, and in query's dtype."""
    kinds = [torch.float32, torch.bfloat16, torch.float16]
    q, k, v = (x.to(kinds[n]) for x, n in zip(qkv(1, 2, 40, 200, 32), dtypes, strict=True))
    out = sage_attention(q, k, v)
    assert out.dtype == q.dtype and counted() == [("exact", "exact", "dtype_mixed", 1)]
    assert_attention_close(out, attention(q, k, v)[0], HALF)


@pytest.mark.parametrize("grad", [False, True])
def test_autocast_casts_as_it_does_for_sdpa(grad: bool) -> None:
    """Mixed inputs take autocast's dtype; equal inputs of float32 do too, because SDPA's do."""
    mixed = qkv(1, 2, 40, 200, 32, dtype=torch.float32)
    for tensors in ([mixed[0], mixed[1], mixed[2].bfloat16()], mixed):
        tensors = [x.clone().requires_grad_(grad) for x in tensors]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = sage_attention(*tensors, recipe=DEFAULT)
            want = F.scaled_dot_product_attention(*tensors)
        assert out.dtype == want.dtype == torch.bfloat16
        assert (out.grad_fn is not None) == grad
        assert_attention_close(out, want.detach(), HALF if grad else T8F8)


@pytest.mark.parametrize("recipe", ["exact", *QUANTIZED])
def test_autocast_does_not_change_the_arithmetic(recipe: str) -> None:
    """float32 products inside either path stay float32 under autocast."""
    tensors = qkv(1, 2, 40, 200, 32, dtype=torch.bfloat16)
    options = dict(recipe=recipe, softcap=20.0, return_lse=True)
    plain = sage_attention(*tensors, **options)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = sage_attention(*tensors, **options)
    assert torch.equal(plain[0], inside[0]) and torch.equal(plain[1], inside[1])


def test_autocast_does_not_change_the_arithmetic_of_gradients() -> None:
    """The differentiable path too: softcap is computed in float32."""
    results = []
    for enabled in (False, True):
        tensors = [x.requires_grad_() for x in qkv(1, 2, 40, 60, 32, dtype=torch.bfloat16)]
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            out = sage_attention(*tensors, softcap=20.0)
        out.float().sum().backward()
        results.append([out, *(x.grad for x in tensors)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
