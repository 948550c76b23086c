"""Exact calls on FlashAttention-3, where one of its packages is installed and a policy asks for it (`exact_backend`).

What its kernels do not take runs on torch's own path, and is counted with the word that `why_not` gives.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sage_patch.args import Args, scale_for
from sage_patch.errors import SagePatchError
from sage_patch.kernels.plain import in_layout
from sage_patch.recipes import Recipe

NAME = "fa3"  # what is counted
# (the module with flash_attn_func, what was compiled into it): of fa3-fwd, and of FlashAttention's own build
MODULES = (("fa3_fwd_interface", "fa3_fwd_config"), ("flash_attn_interface", "flash_attn_config"))


class Fa3Missing(SagePatchError, ImportError):
    """FlashAttention-3 was asked for and cannot be imported; the message says which modules were tried."""


class Fa3(NamedTuple):
    """attend: flash_attn_func, tensors [B, tokens, H, D]. takes_fp16: whether its kernels were compiled for float16."""

    attend: Callable[..., Any]
    takes_fp16: bool


@functools.cache
def find() -> Fa3:
    """The first of MODULES that can be imported. Raises Fa3Missing."""
    failures = []
    for interface, config in MODULES:
        try:
            attend = importlib.import_module(interface).flash_attn_func
        except (ImportError, OSError, AttributeError) as error:  # OSError: a library that does not load here
            failures.append(f"{interface}: {error}")
            continue
        try:
            flags = importlib.import_module(config).CONFIG["build_flags"]
        except (ImportError, AttributeError, KeyError):
            flags = {}
        return Fa3(attend, not flags.get("FLASHATTENTION_DISABLE_FP16", False))
    raise Fa3Missing(
        f"FlashAttention-3 is not installed ({'; '.join(failures)}): pip install fa3-fwd on a machine with a Hopper "
        'GPU, or leave exact_backend at "torch"'
    )


def backend_for(query: Tensor, key: Tensor, value: Tensor, args: Args) -> str:
    """What an exact call is counted under that would run on FlashAttention-3: its name, or torch's and why."""
    reason = why_not(query, key, value, args)
    return f"exact, not {NAME}: {reason}" if reason else NAME


def why_not(query: Tensor, key: Tensor, value: Tensor, args: Args) -> str:
    """The word for what its kernels do not take of an exact call, "" if they take it. Static facts only."""
    batch, heads, q_len, head_dim = query.shape
    kv_heads, kv_len = key.shape[1:3]
    half = query.dtype == torch.bfloat16 or (query.dtype == torch.float16 and find().takes_fp16)
    found = {
        "device": not is_served(query.device),
        "dtype": not half or not query.dtype == key.dtype == value.dtype,
        "head_dim": head_dim > 256 or head_dim % 8 != 0 or value.shape[3] != head_dim,
        "heads": key.shape[0] != batch or kv_heads == 0 or heads % kv_heads != 0,
        "empty": query.numel() == 0 or key.numel() == 0,
        "mask": args.attn_mask is not None or args.kv_lens is not None,
        "varlen": args.cu_seqlens_q is not None,
        "window": args.left >= 0 or args.right > 0,
        # It aligns the last query with the last key, and says nothing of rows without keys that torch would say.
        "causal": args.right == 0 and (q_len > kv_len or (args.top_left and q_len != kv_len)),
        "softcap": bool(args.softcap),
        "sinks": args.sinks is not None,
        "lse": args.return_lse,
        "scale": args.scale is not None and args.scale <= 0,
    }
    return next((word for word, is_so in found.items() if is_so), "")


def is_served(device: torch.device) -> bool:
    """Whether its kernels run there: a CUDA device of compute capability 9.0."""
    return device.type == "cuda" and _capability(device.index) == (9, 0)


@functools.cache
def _capability(index: int | None) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def forward(query: Tensor, key: Tensor, value: Tensor, args: Args, recipe: Recipe) -> tuple[Tensor, None]:
    """(out [B, Hq, q_len, D] in args.out_layout, None) of an exact call that `why_not` has nothing against."""
    scale = scale_for(args.scale, query.shape[-1])
    out = find().attend(
        *(x.transpose(1, 2) for x in (query, key, value)), softmax_scale=scale, causal=args.right == 0
    )  # fmt: skip
    out = out[0] if isinstance(out, tuple) else out  # some releases return the sums beside it
    return in_layout(out.transpose(1, 2), args.out_layout), None
