"""SageAttention's names, as other projects call them: every argument counts or is refused, and `install` can be undone.

The calls are written as their callers write them: positional and keyword arguments, layouts, words.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import inspect
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import sage_patch
from sage_patch.compat import InstallError, install
from sage_patch.compat import sageattention as shim
from sage_patch.kernels import ops

ROOT = Path(__file__).resolve().parents[1]
FP8, FP16 = "qk_int8_pv_fp8", "qk_int8_pv_fp16"


def tensors(q_len: int = 160, kv_len: int = 160, heads: int = 2, kv_heads: int = 2, dim: int = 64) -> list[Tensor]:
    """q, k, v as HND, bfloat16."""
    torch.manual_seed(0)
    shapes = [(2, heads, q_len, dim), (2, kv_heads, kv_len, dim), (2, kv_heads, kv_len, dim)]
    return [torch.randn(shape, dtype=torch.bfloat16) for shape in shapes]


def nhd(*xs: Tensor) -> list[Tensor]:
    return [x.transpose(1, 2).contiguous() for x in xs]


def ran() -> set[tuple[str, str]]:
    """(recipe, reason) of the calls since the last time."""
    rows = {(key.recipe, key.reason) for key, calls in ops.counts().items() if key.site == "" and calls}
    ops.reset_counts()
    return rows


@pytest.fixture(autouse=True)
def from_zero():
    ops.reset_counts()


BY_NAME = {
    "sageattn_qk_int8_pv_fp16_cuda": FP16,
    "sageattn_qk_int8_pv_fp16_triton": FP16,
    "sageattn_qk_int8_pv_fp8_cuda": FP8,
    "sageattn_qk_int8_pv_fp8_cuda_sm90": FP8,
}


def test_the_names_are_upstreams():
    assert set(shim.__all__) == {"sageattn", "sageattn_varlen", *BY_NAME}
    assert all(inspect.signature(getattr(shim, name)).return_annotation for name in shim.__all__)


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("name", ["sageattn", *BY_NAME])
def test_it_is_sage_attention_in_both_layouts_with_lse(name, layout):
    q, k, v = tensors(kv_heads=1)
    function = getattr(shim, name)
    given = nhd(q, k, v) if layout == "NHD" else (q, k, v)
    out, lse = function(*given, tensor_layout=layout, return_lse=True)
    assert ran() == {(BY_NAME.get(name, FP8), "")}
    want, want_lse = sage_patch.sage_attention(
        q, k, v, enable_gqa=True, return_lse=True, recipe=BY_NAME.get(name, "sage2")
    )
    assert torch.equal(out if layout == "HND" else out.transpose(1, 2), want)
    assert torch.equal(lse, want_lse) and lse.shape == (2, 2, 160) and lse.dtype == torch.float32
    alone = function(*given, tensor_layout=layout)
    assert isinstance(alone, Tensor) and torch.equal(alone, out) and alone.is_contiguous()


def test_lse_is_the_natural_logarithm_of_the_scaled_scores():
    q, k, v = tensors()
    k = k + 3  # K's mean is taken out for quantization, and its part of the scores must come back
    _, lse = shim.sageattn(q, k, v, sm_scale=0.07, return_lse=True)
    exact = torch.logsumexp(0.07 * q.double() @ k.double().transpose(-1, -2), dim=-1)
    assert (lse - exact).abs().max() < 0.05


@pytest.mark.parametrize("name", ["sageattn", *BY_NAME])
def test_scale_mask_and_causality_are_honoured(name):
    q, k, v = tensors()
    function = getattr(shim, name)
    recipe = BY_NAME.get(name, "sage2")
    mask = torch.rand(2, 1, 160, 160) > 0.3
    for given in ({"sm_scale": 0.31}, {"is_causal": True}, {"attn_mask": mask}):
        told = {{"sm_scale": "scale"}.get(n, n): value for n, value in given.items()}
        assert torch.equal(function(q, k, v, **given), sage_patch.sage_attention(q, k, v, recipe=recipe, **told))
        assert not torch.equal(function(q, k, v, **given), function(q, k, v))


@pytest.mark.parametrize("name", ["sageattn", *BY_NAME])
def test_smooth_k_is_honoured(name):
    q, k, v = tensors()
    k = k + 100  # a mean that eats up the integers' range
    function = getattr(shim, name)
    rough = function(q, k, v, smooth_k=False)
    assert {recipe for recipe, _ in ran()} == {BY_NAME.get(name, "qk_int8_pv_fp8") + ":smooth=none"}
    exact = F.scaled_dot_product_attention(q.double(), k.double(), v.double())
    error = [float((x - exact).abs().mean()) for x in (rough, function(q, k, v))]
    assert error[0] > 2 * error[1]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("sageattn_qk_int8_pv_fp16_cuda", {"pv_accum_dtype": ("fp32", "fp16+fp32", "fp16")}),
        ("sageattn_qk_int8_pv_fp8_cuda", {"pv_accum_dtype": ("fp32", "fp32+fp32", "fp32+fp16")}),
        ("sageattn_qk_int8_pv_fp8_cuda_sm90", {"pv_accum_dtype": ("fp32+fp32",)}),
        ("sageattn_qk_int8_pv_fp16_cuda", {"qk_quant_gran": ("per_thread", "per_warp")}),
        ("sageattn_qk_int8_pv_fp8_cuda", {"qk_quant_gran": ("per_thread", "per_warp")}),
        ("sageattn_qk_int8_pv_fp16_triton", {"quantization_backend": ("triton", "cuda")}),
        ("sageattn_qk_int8_pv_fp16_cuda", {"smooth_v": (False, True)}),
        ("sageattn_qk_int8_pv_fp8_cuda", {"smooth_v": (False, True)}),
    ],
)
def test_words_for_less_precision_get_what_is_there_and_others_are_refused(name, words):
    q, k, v = tensors(q_len=32, kv_len=32)
    function = getattr(shim, name)
    ((argument, known),) = words.items()
    for word in known:
        assert torch.equal(function(q, k, v, **{argument: word}), function(q, k, v))
    with pytest.raises((ValueError, TypeError), match=f"^{argument} must be .*; got 'fp8'$"):
        function(q, k, v, **{argument: "fp8"})


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"tensor_layout": "BHSD"}, ValueError, 'tensor_layout must be "HND" or "NHD"; got \'BHSD\''),
        ({"is_causal": "yes"}, TypeError, "is_causal must be True or False"),
        ({"sm_scale": "0.1"}, TypeError, "sm_scale must be a number or None"),
        ({"sm_scale": math.nan}, ValueError, "sm_scale must be finite"),
        ({"smooth_k": None}, TypeError, "smooth_k must be True or False"),
        ({"return_lse": 1}, TypeError, "return_lse must be True or False"),
        ({"scale": 0.1, "sm_scale": 0.2}, ValueError, "two names of one argument"),
        ({"attn_mask": torch.ones(32, 32, dtype=torch.int64)}, ValueError, "attn_mask is torch.int64"),
        ({"smooth_q": True}, TypeError, "unexpected keyword argument 'smooth_q'"),
    ],
)
def test_what_is_not_understood_is_refused(given, error, message):
    q, k, v = tensors(q_len=32, kv_len=32)
    with pytest.raises(error, match=message):
        shim.sageattn(q, k, v, **given)


@pytest.mark.parametrize("name", ["sageattn", *BY_NAME])
def test_causal_calls_of_unequal_lengths_are_refused_with_both_ways_out(name):
    q, k, v = tensors(q_len=5, kv_len=9)
    with pytest.raises(ValueError, match="5 queries and 9 keys.*bottom_right.*top_left"):
        getattr(shim, name)(q, k, v, is_causal=True)
    with pytest.raises(ValueError, match="5 queries and 9 keys"):
        getattr(shim, name)(*nhd(q, k, v), "NHD", is_causal=True)


def packed(lengths: list[int], kv_lengths: list[int]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(1)
    q = torch.randn(sum(lengths), 4, 64, dtype=torch.bfloat16)
    k, v = (torch.randn(sum(kv_lengths), 2, 64, dtype=torch.bfloat16) for _ in range(2))
    cu = [F.pad(torch.tensor(x).cumsum(0), (1, 0)).int() for x in (lengths, kv_lengths)]
    return q, k, v, *cu


@pytest.mark.parametrize("is_causal", [False, True])
def test_varlen_is_each_sequence_by_itself(is_causal):
    lengths = [160, 40, 0, 200]
    q, k, v, cu_q, cu_k = packed(lengths, lengths)
    out = shim.sageattn_varlen(q, k, v, cu_q, cu_k, 200, 200, is_causal=is_causal, sm_scale=0.2)
    assert ran() == {(FP8, "")}
    assert out.shape == q.shape and out.is_contiguous()
    for begin, end in zip(cu_q.tolist(), cu_q.tolist()[1:], strict=False):
        part = [x[begin:end].transpose(0, 1)[None] for x in (q, k, v)]
        if end > begin:
            want = shim.sageattn_qk_int8_pv_fp8_cuda(*part, is_causal=is_causal, sm_scale=0.2)
            assert torch.equal(out[begin:end], want[0].transpose(0, 1))


def test_varlen_reads_its_longest_lengths():
    q, k, v, cu_q, cu_k = packed([10] * 30, [10] * 30)
    shim.sageattn_varlen(q, k, v, cu_q, cu_k, 10, 10)
    assert ran() == {("exact", "short_q")}, "300 tokens, but no sequence is long enough to quantize"
    with pytest.raises(ValueError, match="max_seqlen_k is 9, but a sequence has 10 tokens"):
        shim.sageattn_varlen(q, k, v, cu_q, cu_k, 10, 9)
    with pytest.raises(ValueError, match="max_seqlen_q must be the length of the longest sequence"):
        shim.sageattn_varlen(q, k, v, cu_q, cu_k, 10.0, 10)
    with pytest.raises(ValueError, match="10 queries and 12 keys"):
        shim.sageattn_varlen(q, k, v, cu_q, cu_k, 10, 12, is_causal=True)
    with pytest.raises(ValueError, match="cu_seqlens_q must rise"):
        shim.sageattn_varlen(q, k, v, cu_q + 1, cu_k, 10, 10)


# ---- the calls of others, as they write them -------------------------------------------------------------------------


def test_calls_of_diffusers_and_cache_dit():
    """Keywords only, NHD; the result is unpacked with `*_`, and the LSE turned."""
    query, key, value = nhd(*tensors())
    out = shim.sageattn(
        q=query, k=key, v=value, tensor_layout="NHD", is_causal=False, sm_scale=None, return_lse=True
    )  # fmt: skip
    out, lse, *_ = out
    assert out.shape == query.shape and lse.permute(0, 2, 1).shape == query.shape[:3]
    flat = [x.flatten(0, 1) for x in (query, key, value)]
    cu = torch.arange(0, 3, dtype=torch.int32) * 160
    got = shim.sageattn_varlen(
        q=flat[0], k=flat[1], v=flat[2], cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=160, max_seqlen_k=160,
        is_causal=False, sm_scale=None,
    )  # fmt: skip
    assert torch.equal(got.unflatten(0, (2, -1)), out)


def test_calls_of_lightx2v():
    """Packed tensors, positional lengths, smooth_k=False; one item viewed as rows; the LSE as [tokens, heads]."""
    q, k, v, cu_q, cu_k = packed([150, 150], [150, 150])
    x = shim.sageattn_varlen(q, k, v, cu_q, cu_k, 150, 150, is_causal=False, sm_scale=None, smooth_k=False)
    assert x.flatten(1).shape == (300, 256)
    q, k, v = (t.unsqueeze(0) for t in (q, k, v))
    assert shim.sageattn(q, k, v, tensor_layout="NHD").view(300, -1).shape == (300, 256)
    out, lse = shim.sageattn(q, k, v, tensor_layout="NHD", is_causal=False, sm_scale=0.1, return_lse=True)
    assert out.reshape(300, -1).shape == (300, 256) and lse.transpose(1, 2).reshape(300, 4).shape == (300, 4)


def test_calls_of_sglang():
    """NHD with causal, scale and LSE by name; a packed document is a slice with a batch dimension before it."""
    query, key, value = nhd(*tensors())
    output, lse = shim.sageattn(
        query, key, value, tensor_layout="NHD", is_causal=True, sm_scale=0.125, return_lse=True
    )  # fmt: skip
    assert output.shape == query.shape and lse.shape == (2, 2, 160)
    live = shim.sageattn(*(x[0, :100].unsqueeze(0) for x in (query, key, value)), tensor_layout="NHD")[0]
    want = sage_patch.sage_attention(*(x[:1, :100] for x in (query, key, value)), tensor_layout="NHD")
    assert torch.equal(live, want[0])


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("sageattn", {}),
        ("sageattn_qk_int8_pv_fp16_cuda", {"pv_accum_dtype": "fp32"}),
        ("sageattn_qk_int8_pv_fp16_triton", {}),
        ("sageattn_qk_int8_pv_fp8_cuda", {"pv_accum_dtype": "fp32+fp32"}),
        ("sageattn_qk_int8_pv_fp8_cuda", {"pv_accum_dtype": "fp32+fp16"}),
    ],
)
def test_calls_of_kjnodes_and_comfyui(name, given):
    """attn_mask with every function, with and without a mask; upstream's CUDA functions would drop it."""
    q, k, v = nhd(*tensors())
    function = getattr(shim, name)
    mask = (torch.arange(160) < 140)[None, None].expand(1, 160, 160).unsqueeze(1)
    plain = function(q, k, v, is_causal=False, attn_mask=None, tensor_layout="NHD", **given)
    masked = function(q, k, v, is_causal=False, attn_mask=mask, tensor_layout="NHD", **given)
    cut = function(q, k[:, :140], v[:, :140], tensor_layout="NHD", **given)
    assert not torch.equal(masked, plain)
    torch.testing.assert_close(masked, cut, rtol=0.05, atol=0.02)


def test_it_may_stand_in_the_place_of_sdpa(monkeypatch):
    """As SageAttention's README has it; the exact path behind it must not come back to it."""
    q, k, v = tensors()
    want = F.scaled_dot_product_attention(q, k, v, dropout_p=0.0, is_causal=True)
    monkeypatch.setattr(F, "scaled_dot_product_attention", shim.sageattn)
    got = F.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=True, scale=None)
    torch.testing.assert_close(got, want, rtol=0.05, atol=0.05)
    short = F.scaled_dot_product_attention(q[:, :, :1], k, v, attn_mask=None, enable_gqa=False)
    assert short.shape == (2, 2, 1, 64) and ran() == {(FP8, ""), ("exact", "decode")}


# ---- install ---------------------------------------------------------------------------------------------------------


def test_install_is_found_by_every_way_of_asking_and_can_be_taken_back():
    before = set(sys.modules), list(sys.meta_path)
    assert importlib.util.find_spec("sageattention") is None, "this test needs a machine without SageAttention"
    with install() as handle:
        assert install() is handle
        spec = importlib.util.find_spec("sageattention")
        assert spec is not None and spec.origin == shim.__file__
        assert importlib.metadata.version("sageattention") == shim.__version__
        assert "sageattention" in {d.metadata["Name"] for d in importlib.metadata.distributions()}
        import sageattention
        from sageattention import sageattn, sageattn_varlen  # noqa: F401
        from sageattention.core import sageattn_qk_int8_pv_fp8_cuda

        assert sageattn is shim.sageattn and sageattention.__version__ == shim.__version__
        assert sageattn_qk_int8_pv_fp8_cuda is shim.sageattn_qk_int8_pv_fp8_cuda
        assert importlib.reload(sageattention).sageattn is sageattn
        with pytest.raises(ImportError, match="sageattention.triton"):
            importlib.import_module("sageattention.triton")
    handle.remove()
    assert {n for n in set(sys.modules) - before[0] if n.startswith("sageattention")} == set()
    assert sys.meta_path == before[1] and importlib.util.find_spec("sageattention") is None
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("sageattention")


def test_install_refuses_beside_the_real_one(monkeypatch):
    real = type(sys)("sageattention")
    real.__file__ = "/somewhere/sageattention/__init__.py"
    monkeypatch.setitem(sys.modules, "sageattention", real)
    with pytest.raises(InstallError, match="imported already, from /somewhere/.*before whatever imports it"):
        install()
    assert sys.modules["sageattention"] is real


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_nothing_is_installed_by_an_import():
    run(
        "import sys, sage_patch, sage_patch.compat.sageattention\nassert 'sageattention' not in sys.modules\n"
        "import importlib.util; assert importlib.util.find_spec('sageattention') is None"
    )


def test_diffusers_own_sage_backends_run_on_the_shim():
    """diffusers looks for sageattention once, when it is imported: a process of its own."""
    out = run("""
import torch, sage_patch
installed = sage_patch.compat.install()
from diffusers import FluxTransformer2DModel, attention_backend
from diffusers.models.attention_dispatch import dispatch_attention_fn
from sage_patch.kernels import ops
torch.manual_seed(0)
q, k, v = (torch.randn(1, 192, 2, 64, dtype=torch.bfloat16) for _ in range(3))
recipes = {"sage": "sage2", "sage_varlen": "sage2", "_sage_qk_int8_pv_fp8_cuda": "qk_int8_pv_fp8",
    "_sage_qk_int8_pv_fp8_cuda_sm90": "qk_int8_pv_fp8", "_sage_qk_int8_pv_fp16_cuda": "qk_int8_pv_fp16",
    "_sage_qk_int8_pv_fp16_triton": "qk_int8_pv_fp16"}
for backend, recipe in recipes.items():
    with attention_backend(backend):
        got = dispatch_attention_fn(q, k, v, scale=0.1)
    assert torch.equal(got, sage_patch.sage_attention(q, k, v, scale=0.1, tensor_layout="NHD", recipe=recipe)), backend
model = FluxTransformer2DModel(patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=64,
    num_attention_heads=2, joint_attention_dim=8, pooled_projection_dim=8, axes_dims_rope=(16, 24, 24))
model = model.to(torch.bfloat16).eval()
inputs = dict(hidden_states=torch.randn(1, 256, 4), encoder_hidden_states=torch.randn(1, 32, 8),
    pooled_projections=torch.randn(1, 8))
inputs = {name: x.to(torch.bfloat16) for name, x in inputs.items()}
inputs |= dict(timestep=torch.tensor([0.5]), img_ids=torch.zeros(256, 3), txt_ids=torch.zeros(32, 3))
with torch.no_grad():
    with sage_patch.applied(model):
        patched = model(**inputs).sample
    ops.reset_counts()
    model.set_attention_backend("sage")
    assert torch.equal(model(**inputs).sample, patched)
print(sage_patch.stats()["quantized"], sage_patch.stats()["exact"])
installed.remove()
""")
    assert out.split() == ["2", "0"]


def test_diffusers_imported_before_is_said():
    out = run("""
import warnings, diffusers.models.attention_dispatch, sage_patch
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    sage_patch.compat.install()
print([str(w.message) for w in seen if "diffusers has looked" in str(w.message)])
""")
    assert "before diffusers" in out


# ---- compiled, and on the card ---------------------------------------------------------------------------------------


def test_it_compiles_without_a_break():
    q, k, v = tensors()

    def both(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return shim.sageattn(q, k, v, is_causal=True, return_lse=True)

    compiled = torch.compile(both, backend="aot_eager", fullgraph=True)
    for got, want in zip(compiled(q, k, v), both(q, k, v), strict=True):
        assert torch.equal(got, want)


@pytest.mark.gpu
@pytest.mark.parametrize("smooth_k", [True, False])
@pytest.mark.parametrize("name", ["sageattn", *BY_NAME])
def test_every_name_runs_quantized_on_the_card(name, smooth_k):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4096, 16, 128, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    recipe = BY_NAME.get(name, "sage2") + ("" if smooth_k else ":smooth=none")
    got = getattr(shim, name)(q, k, v, "NHD", smooth_k=smooth_k, return_lse=True)
    assert {reason for _, reason in ran()} == {""}
    want = sage_patch.sage_attention(q, k, v, tensor_layout="NHD", return_lse=True, recipe=recipe)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    exact = F.scaled_dot_product_attention(*(x[:1].transpose(1, 2).float() for x in (q, k, v))).transpose(1, 2)
    assert float((got[0][:1] - exact).abs().mean() / exact.abs().mean()) < 0.08


@pytest.mark.gpu
def test_varlen_on_the_card():
    torch.manual_seed(0)
    lengths = [3000, 4096, 2048]
    q, k, v = (torch.randn(sum(lengths), 16, 128, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    cu = F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).int().cuda()
    out = shim.sageattn_varlen(q, k, v, cu, cu, 4096, 4096, is_causal=True, smooth_k=False)
    assert {reason for _, reason in ran()} == {""}
    begin, end = cu.tolist()[1:3]
    want = F.scaled_dot_product_attention(
        *(x[begin:end].transpose(0, 1)[None].float() for x in (q, k, v)), is_causal=True
    )
    assert float((out[begin:end].transpose(0, 1)[None] - want).abs().mean() / want.abs().mean()) < 0.08


@pytest.mark.gpu
def test_diffusers_own_backend_equals_sage_attention_on_the_card():
    """With diffusers' own checks on: set_attention_backend("sage") on a Flux, and the patched model, bit for bit."""
    pytest.importorskip("diffusers")
    out = run("""
import os; os.environ["DIFFUSERS_ATTN_CHECKS"] = "1"
import torch, sage_patch
installed = sage_patch.compat.install()
from diffusers import FluxTransformer2DModel, attention_backend
from diffusers.models.attention_dispatch import dispatch_attention_fn
from sage_patch.kernels import ops
torch.manual_seed(0)
q, k, v = (torch.randn(2, 4096, 16, 128, dtype=torch.bfloat16, device="cuda") for _ in range(3))
for backend, recipe in {"sage": "sage2", "_sage_qk_int8_pv_fp8_cuda_sm90": "qk_int8_pv_fp8"}.items():
    with attention_backend(backend):
        got = dispatch_attention_fn(q, k, v, scale=0.1)
    assert torch.equal(got, sage_patch.sage_attention(q, k, v, scale=0.1, tensor_layout="NHD", recipe=recipe)), backend
with torch.device("cuda"):
    model = FluxTransformer2DModel(patch_size=1, in_channels=64, num_layers=1, num_single_layers=1,
        attention_head_dim=128, num_attention_heads=24, joint_attention_dim=64, pooled_projection_dim=64)
    model = model.to(torch.bfloat16).eval()
    inputs = dict(hidden_states=torch.randn(1, 4096, 64), encoder_hidden_states=torch.randn(1, 512, 64),
        pooled_projections=torch.randn(1, 64))
    inputs = {name: x.to(torch.bfloat16) for name, x in inputs.items()}
    inputs |= dict(timestep=torch.tensor([0.5]), img_ids=torch.zeros(4096, 3), txt_ids=torch.zeros(512, 3))
with torch.no_grad():
    with sage_patch.applied(model) as handle:
        patched = model(**inputs).sample
    ops.reset_counts()
    model.set_attention_backend("sage")
    assert torch.equal(model(**inputs).sample, patched)
print("quantized", sage_patch.stats()["quantized"], "of", sage_patch.stats()["calls"], handle.stats()["quantized"])
""")
    print(out)
    assert "quantized 2 of 2 2" in out
