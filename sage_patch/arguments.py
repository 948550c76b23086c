"""The arguments of `sage_attention`: what each may be, and the error that names the one that is not.

Every check looks at types, shapes and dtypes only. Values are read on a CPU alone, where that waits for nobody.
"""

from __future__ import annotations

from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from sage_patch.kernels import torch_private
from sage_patch.recipes import AUTO

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_LARGEST = torch.finfo(torch.float32).max  # what kernels hold a number in
_FURTHEST = 1 << 30  # a window of more keys than there can be


def check_tensor(name: str, x: Any) -> None:
    """A plain tensor of whatever dtype."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor; got {type(x).__name__}")
    if x.is_nested:
        raise ValueError(f"{name} is a nested tensor; pack its sequences and pass cu_seqlens_q and cu_seqlens_k")
    if x.layout is not torch.strided:
        raise ValueError(f"{name} must be a strided tensor; got layout {x.layout}")


def check_tensors(query: Any, key: Any, value: Any, others: dict[str, Any]) -> None:
    """Plain tensors of one device and kind. others: what else may be a tensor or None, by name."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        check_tensor(name, x)
        if x.dtype not in _DTYPES:
            if not x.is_floating_point():
                raise TypeError(f"{name} must be floating point; got {x.dtype}")
            raise TypeError(f"{name} has dtype {x.dtype}; float16, bfloat16, float32 and float64 are supported")
        if x.device != query.device:
            raise ValueError(f"query is on {query.device} but {name} is on {x.device}")
    for name, x in others.items():
        if x is not None:
            check_tensor(name, x)
            if x.device != query.device:
                raise ValueError(f"query is on {query.device} but {name} is on {x.device}")
    if not torch.compiler.is_compiling() and not torch_private.dispatch_modes_in_force():
        _check_kinds({"query": query, "key": key, "value": value} | others)


def _check_kinds(given: dict[str, Any]) -> None:
    """Outside of the mode that made them, fake tensors go with fake tensors only."""
    fake = [name for name, x in given.items() if type(x) is not Tensor and hasattr(x, "fake_mode")]
    real = [name for name, x in given.items() if x is not None and name not in fake] if fake else []
    if real:
        raise ValueError(f"{fake[0]} is a fake tensor but {real[0]} holds values; both must be of one kind")


def check_rank(query: Tensor, key: Tensor, value: Tensor) -> None:
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dim() != 4:
            raise ValueError(
                f"{name} must have 4 dimensions [batch, heads, tokens, head_dim] (or NHD); got {list(x.shape)}; "
                "packed [tokens, heads, head_dim] needs cu_seqlens_q and cu_seqlens_k"
            )


def check_shapes(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> None:
    """query, key and value as [B, H, N, D] belong together."""
    (batch, heads, _, dim), (kv_batch, kv_heads, kv_len, kv_dim) = query.shape, key.shape
    wrong = ""
    if batch != kv_batch or kv_batch != value.shape[0]:
        wrong = "batch sizes differ"
    elif kv_len != value.shape[2]:
        wrong = "key and value lengths differ"
    elif dim != kv_dim:
        wrong = "query and key head_dim differ"
    elif kv_heads != value.shape[1]:
        wrong = "key and value head counts differ"
    elif heads == 0 or kv_heads == 0 or heads % kv_heads:
        wrong = f"num_heads {heads} must be a positive multiple of num_kv_heads {kv_heads}"
    elif heads != kv_heads and not enable_gqa:
        wrong = f"num_heads {heads} differs from num_kv_heads {kv_heads}: pass enable_gqa=True, or check tensor_layout"
    if wrong:
        raise ValueError(
            f"{wrong}: query {list(query.shape)}, key {list(key.shape)}, value {list(value.shape)} as [B, H, N, D]"
        )


def packed(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, cu_q: Tensor | None, cu_k: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(query, key, value as [1, H, total, D], cu_seqlens_q, cu_seqlens_k that stay inside of them)."""
    if cu_q is None or cu_k is None:
        raise ValueError("cu_seqlens_q and cu_seqlens_k come together; one of them is missing")
    for name, cu in (("cu_seqlens_q", cu_q), ("cu_seqlens_k", cu_k)):
        if cu.dim() != 1 or cu.shape[0] < 2 or cu.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"{name} must be int32 or int64 [sequences + 1]; got {cu.dtype} {list(cu.shape)}")
    if cu_q.shape[0] != cu_k.shape[0]:
        raise ValueError(f"cu_seqlens_q has {cu_q.shape[0] - 1} sequences, cu_seqlens_k {cu_k.shape[0] - 1}")
    if attn_mask is not None:
        raise ValueError("attn_mask cannot be combined with cu_seqlens; write the documents into one of them")
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dim() != 3:
            raise ValueError(f"with cu_seqlens, {name} must be packed [tokens, heads, head_dim]; got {list(x.shape)}")
    cu_q = _within("cu_seqlens_q", cu_q, query.shape[0])
    cu_k = _within("cu_seqlens_k", cu_k, key.shape[0])
    return query.transpose(0, 1)[None], key.transpose(0, 1)[None], value.transpose(0, 1)[None], cu_q, cu_k


def _within(name: str, cu: Tensor, tokens: int) -> Tensor:
    """Cumulative lengths that neither fall nor leave the tensor; kernels take them as addresses.

    On a CPU others are refused. Elsewhere, and inside graphs, reading them would wait: there every reader keeps inside
    of the tensors by itself.
    """
    if cu.device.type == "cpu" and type(cu) is Tensor and not torch.compiler.is_compiling():
        values = cu.tolist()
        if values[0] < 0 or values[-1] > tokens or any(a > b for a, b in zip(values, values[1:], strict=False)):
            shown = str(values) if len(values) <= 8 else f"[{', '.join(map(str, values[:8]))}, ...]"
            raise ValueError(f"{name} must rise from 0 or more to at most the {tokens} tokens there are; got {shown}")
    return cu


def mask4(attn_mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """The mask as a 4-D broadcastable tensor. Strides are free: it is only ever read by position."""
    if attn_mask is None:
        return None
    if attn_mask.dtype != torch.bool and attn_mask.dtype not in _DTYPES:
        raise ValueError(
            f"attn_mask is {attn_mask.dtype}: a 0/1 mask must be bool (True = may attend), an additive one float "
            "(16, 32 or 64 bits)"
        )
    if not 2 <= attn_mask.dim() <= 4:
        raise ValueError(f"attn_mask must have 2 to 4 dimensions; got {list(attn_mask.shape)}")
    mask = attn_mask[(None,) * (4 - attn_mask.dim())]
    full = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    if any(m not in (1, f) for m, f in zip(mask.shape, full, strict=True)):
        raise ValueError(
            f"attn_mask {list(attn_mask.shape)} does not broadcast to [B, Hq, q_len, kv_len] = {list(full)}"
        )
    return mask


def check_sinks(sinks: Tensor | None, num_heads: int) -> None:
    if sinks is not None and (sinks.shape != (num_heads,) or sinks.dtype not in _DTYPES):
        raise ValueError(f"sinks must be float [{num_heads}]; got {sinks.dtype} {list(sinks.shape)}")


def check_flag(name: str, x: Any) -> None:
    """A truth value, also numpy's. A word or a number would be one by accident."""
    if type(x) is bool:
        return
    numpy_bool = type(x).__module__ == "numpy" and type(x).__name__.startswith("bool")
    if not isinstance(x, torch.SymBool) and not numpy_bool:
        raise TypeError(f"{name} must be True or False; got {_said(x)}")


def check_word(name: str, x: Any, known: tuple[str, ...]) -> None:
    if not isinstance(x, str) or x not in known:
        words = " or ".join(f'"{word}"' for word in known)
        raise ValueError(f"{name} must be {words}; got {_said(x)}")


def recipe_name(recipe: Any) -> str:
    """The name of a recipe; None is the default."""
    if recipe is None:
        return AUTO
    if not isinstance(recipe, str):
        raise TypeError(f'recipe must be a name such as "{AUTO}", or None; got {_said(recipe)}')
    return recipe


def check_number(name: str, x: Any, otherwise: str = "") -> None:
    """A finite real number, numpy's too. otherwise: what else the argument may be, for the message."""
    number = x
    if isinstance(x, bool) or not isinstance(x, (Real, torch.SymInt, torch.SymFloat)):
        raise TypeError(f"{name} must be a number{otherwise}; got {_said(x)}")
    if not -_LARGEST <= number <= _LARGEST:  # also false for NaN
        raise ValueError(f"{name} must be finite{otherwise}; got {_said(x)}")


def check_dropout(dropout_p: Any) -> None:
    if type(dropout_p) is not float or dropout_p != 0.0:
        check_number("dropout_p", dropout_p)
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"dropout_p must be in [0, 1); got {dropout_p}")


def check_softcap(softcap: Any) -> None:
    if softcap is None:
        return
    check_number("softcap", softcap, " or None")
    if softcap < 0:
        raise ValueError(f"softcap must be positive or None; got {softcap}")


def band(window: Any, is_causal: bool) -> tuple[int, int]:
    """(left, right): keys seen on each side of the diagonal, -1 for no limit."""
    if window is None:
        left = right = -1
    elif _is_whole(window):
        left = right = _reach(window - 1 if window > 0 else -1)
    elif isinstance(window, (tuple, list)) and len(window) == 2 and all(_is_whole(w) for w in window):
        left, right = (_reach(w) for w in window)
    else:
        raise TypeError(f"window must be an int, a pair of ints (left, right) or None; got {_said(window)}")
    return left, 0 if is_causal else right


def _is_whole(x: Any) -> bool:
    return isinstance(x, (Integral, torch.SymInt)) and not isinstance(x, bool)


def _reach(keys: Any) -> int:
    return int(min(keys, _FURTHEST)) if keys >= 0 else -1


def _said(x: Any) -> str:
    """A value in a message: not longer than a line, and no tensor's contents."""
    if isinstance(x, Tensor):
        return f"a tensor {list(x.shape)} of {x.dtype}"
    text = repr(x) if isinstance(x, (str, int, float, tuple, list, complex, type(None))) else type(x).__name__
    return text if len(text) <= 60 else text[:57] + "..."
