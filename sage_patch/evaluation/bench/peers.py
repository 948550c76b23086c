"""Other attention kernels for the benchmark: torch SDPA's backends, FlashAttention-3, cuDNN FP8, SageAttention, where
installed.

A peer is made for one set of tensors, query [B, Hq, q_len, D], key and value [B, Hkv, kv_len, D] in bf16 or fp16, and
gives a function that runs it once and returns its output as an HND view. What a peer needs beside the kernel itself
(another layout, FP8 values) is made beforehand and is not in its time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sage_patch.errors import SagePatchError
from sage_patch.kernels import fa3

Run = Callable[[], Tensor]
Maker = Callable[[Tensor, Tensor, Tensor, bool], Run]


class PeerMissing(SagePatchError, RuntimeError):
    """The peer's package is not installed; the message names it."""


def _sdpa(backend: str, query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> Run:
    """torch's scaled_dot_product_attention, held to one backend, or "" for the one that it chooses itself."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    grouped = query.shape[1] != key.shape[1]

    def run() -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=is_causal, enable_gqa=grouped)

    def held() -> Tensor:
        with sdpa_kernel(getattr(SDPBackend, backend)):
            return run()

    return held if backend else run


def _fa3(fp8: bool, query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> Run:
    """FlashAttention-3 of the package fa3-fwd; in FP8 with scales of 1, on inputs that are already E4M3."""
    try:
        flash_attn_func = fa3.find().attend
    except fa3.Fa3Missing as error:
        raise PeerMissing(str(error)) from None
    tensors = [x.transpose(1, 2).contiguous() for x in (query, key, value)]
    options: dict[str, Any] = {"causal": is_causal}
    if fp8:
        tensors = [x.to(torch.float8_e4m3fn) for x in tensors]
        scale = torch.ones(key.shape[0], key.shape[1], device=key.device)
        options |= {"q_descale": scale, "k_descale": scale, "v_descale": scale}

    def run() -> Tensor:
        out = flash_attn_func(*tensors, **options)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return run


def _sage(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> Run:
    """The SageAttention package of its authors, whose function chooses the kernel for the card; the whole call."""
    try:
        from sageattention import sageattn
    except ImportError:
        raise PeerMissing("sageattention is not installed (its authors' repository says how it is built)") from None

    def run() -> Tensor:
        return sageattn(query, key, value, tensor_layout="HND", is_causal=is_causal)

    return run


def _cudnn_fp8(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> Run:
    """cuDNN's FP8 attention of the package nvidia-cudnn-frontend, scales of 1. On Hopper it can only write E4M3."""
    try:
        import cudnn
    except ImportError:
        raise PeerMissing("nvidia-cudnn-frontend is not installed (pip install nvidia-cudnn-frontend)") from None
    e4m3, fp32 = cudnn.data_type.FP8_E4M3, cudnn.data_type.FLOAT
    handle = cudnn.create_handle()
    cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream(query.device).cuda_stream)
    graph = cudnn.pygraph(
        io_data_type=e4m3, intermediate_data_type=fp32, compute_data_type=fp32, handle=handle
    )  # fmt: skip
    # Tokens before heads in memory, heads first by its strides.
    tensors = [x.transpose(1, 2).contiguous().to(torch.float8_e4m3fn).transpose(1, 2) for x in (query, key, value)]
    out, one = torch.empty_like(tensors[0]), torch.ones(1, 1, 1, 1, device=query.device)
    sums = [torch.zeros_like(one) for _ in range(2)]

    def declare(x: Tensor, kind: Any) -> Any:
        return graph.tensor(dim=list(x.shape), stride=list(x.stride()), data_type=kind)

    inputs = {name: declare(x, e4m3) for name, x in zip("qkv", tensors, strict=True)}
    names = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
    scales = {name: declare(one, fp32) for name in names}
    output, _, amax_s, amax_o = graph.sdpa_fp8(
        **inputs, **scales, generate_stats=False, attn_scale=1 / math.sqrt(query.shape[-1]), use_causal_mask=is_causal
    )
    output.set_output(True).set_dim(list(out.shape)).set_stride(list(out.stride())).set_data_type(e4m3)
    for amax in (amax_s, amax_o):
        amax.set_output(True).set_dim([1, 1, 1, 1]).set_stride([1, 1, 1, 1]).set_data_type(fp32)
    graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    workspace = torch.empty(graph.get_workspace_size(), dtype=torch.uint8, device=query.device)
    pack = dict(zip(inputs.values(), tensors, strict=True)) | dict.fromkeys(scales.values(), one)
    pack |= {output: out, amax_s: sums[0], amax_o: sums[1]}

    def run() -> Tensor:
        graph.execute(pack, workspace, handle=handle)
        return out

    return run


# Column of a benchmark row -> its peer. A name that ends in "_kernel" takes inputs that are already quantized.
PEERS: dict[str, Maker] = {
    "sdpa_default": partial(_sdpa, ""),
    "sdpa_cudnn": partial(_sdpa, "CUDNN_ATTENTION"),
    "sdpa_fa2": partial(_sdpa, "FLASH_ATTENTION"),
    "sdpa_efficient": partial(_sdpa, "EFFICIENT_ATTENTION"),
    "fa3_bf16": partial(_fa3, False),
    "fa3_fp8_kernel": partial(_fa3, True),
    "cudnn_fp8_kernel": _cudnn_fp8,
    "sage_upstream": _sage,
}
BURST_ONLY = ("sdpa_fa2", "sdpa_efficient")  # far from the fastest of torch's own: not worth the seconds
PACKAGES = ("torch", "triton", "fa3-fwd", "nvidia-cudnn-frontend", "nvidia-cudnn-cu13", "sageattention")
