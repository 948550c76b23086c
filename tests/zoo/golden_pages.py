"""The cases whose pages and outputs a GPU has left in golden_pages.npz: inputs and options, the same everywhere."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from sage_patch.args import PageArgs
from sage_patch.pages import Pages


class Case(NamedTuple):
    dim: int
    dtype: torch.dtype
    pieces: tuple[int, ...]
    q_len: int
    options: dict[str, Any]


def _some(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(3)) < 0.4


_STARTS = torch.tensor([0, 60], dtype=torch.int32)
CASES = {
    "decode": Case(64, torch.float16, (130, 1, 1, 38), 1, {}),
    "rows": Case(128, torch.bfloat16, (150,), 40, {}),
    "window": Case(64, torch.bfloat16, (170,), 3, {"left": 50}),
    "padding": Case(64, torch.float16, (170,), 3, {"kv_starts": _STARTS}),
    "softcap_sinks": Case(64, torch.float16, (170,), 3, {"softcap": 3.0, "sinks": torch.tensor([-1.0, 0.0, 1.0, 4.0])}),
    "mask": Case(64, torch.float16, (170,), 3, {"attn_mask": _some(2, 1, 3, 170), "is_causal": False}),
}


def inputs(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """Query of four heads, key and value of two, on the CPU."""
    g, n = torch.Generator().manual_seed(11), sum(case.pieces)
    query = torch.randn(2, 4, case.q_len, case.dim, generator=g)
    key = torch.randn(2, 2, n, case.dim, generator=g) + 2 * torch.randn(2, 2, 1, case.dim, generator=g)
    value = torch.randn(2, 2, n, case.dim, generator=g) + 0.5
    return query.to(case.dtype), key.to(case.dtype), value.to(case.dtype)


def filled(case: Case, device: str) -> Pages:
    pages = Pages(2, 2, case.dim, case.dtype, device, rotated=False)
    _, key, value = (x.to(device) for x in inputs(case))
    for k, v in zip(key.split(case.pieces, 2), value.split(case.pieces, 2), strict=True):
        pages.append(k, v)
    return pages


def run(case: Case, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """(records, out float32, lse) on the CPU, computed on `device`."""
    query, pages = inputs(case)[0].to(device), filled(case, device)
    options = {n: x.to(device) if isinstance(x, Tensor) else x for n, x in case.options.items()}
    out, lse = pages.attend(query, PageArgs(scale=case.dim**-0.5, return_lse=True, **options))
    assert lse is not None
    return pages.records(0, (pages.length + 127) // 128).cpu(), out.float().cpu(), lse.cpu()
