"""The mma.sync kernels of a quantized cache, lane by lane on a CPU, against their emulator: no GPU, no nvcc."""

from __future__ import annotations

import ctypes
import math

import pytest
import torch

from sage_patch.args import PageArgs
from sage_patch.pages import Pages
from sage_patch.reference.emulator import pages_mma
from zoo.lane_simulator import compile_simulator
from zoo.lane_simulator.pages import simulate_pages


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiled = compile_simulator(tmp_path_factory.mktemp("lane_simulator_pages"))
    if compiled is None:
        pytest.skip("no C++ compiler")
    return compiled


def check(
    library: ctypes.CDLL,
    heads: tuple[int, int],
    q_len: int,
    length: int,
    dim: int,
    sms: int = 4,
    dtype: torch.dtype = torch.float16,
    bad: int | None = None,
    rotated: bool = False,
    **options: object,
) -> None:
    """The kernel's outputs are the emulator's, but for the last bits that orders of addition leave. bad: a token that
    is not finite."""
    torch.manual_seed(dim + length)
    query = torch.randn(1, heads[0], q_len, dim).to(dtype)
    key = (torch.randn(1, heads[1], length, dim) + 2 * torch.randn(1, heads[1], 1, dim)).to(dtype)
    value = (torch.randn(1, heads[1], length, dim) + 0.5).to(dtype)
    if bad is not None:
        value[:, :, bad, 3] = math.nan
    store = Pages(1, heads[1], dim, dtype, "cpu", rotated=rotated)
    store.append(key, value)
    args = PageArgs(scale=dim**-0.5, **options)  # type: ignore[arg-type]
    found = simulate_pages(library, store, query, args, sms)
    want = pages_mma.emulate(store, query, args, sms)[0].float()
    assert torch.equal(found.isnan(), want.isnan())
    error = (found - want).nan_to_num().abs()
    assert float(error.max()) <= 2 * torch.finfo(dtype).eps * float(want.nan_to_num().abs().max())
    assert float((error > 0).float().mean()) < 0.05


@pytest.mark.parametrize("dim", [64, 128, 40])
@pytest.mark.parametrize("length", [1, 64, 300])
def test_few_rows_take_turns(library: ctypes.CDLL, dim: int, length: int) -> None:
    check(library, (4, 2), 1, length, dim)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("heads", [(6, 2), (1, 1)], ids=str)
def test_many_rows_share_pages(library: ctypes.CDLL, dim: int, heads: tuple[int, int]) -> None:
    check(library, heads, 33, 200, dim, sms=1, dtype=torch.bfloat16)
    check(library, heads, 25, 700, dim, sms=4)


@pytest.mark.parametrize("q_len", [2, 24])
def test_what_a_call_can_ask_for(library: ctypes.CDLL, q_len: int) -> None:
    check(library, (4, 2), q_len, 300, 64, left=70)
    check(library, (4, 2), q_len, 300, 64, kv_starts=torch.tensor([130], dtype=torch.int32))
    check(library, (4, 2), q_len, 300, 64, softcap=3.0)
    mask = torch.rand(1, 1, q_len, 300, generator=torch.Generator().manual_seed(1)) < 0.4
    check(library, (4, 2), q_len, 300, 64, attn_mask=mask)
    check(library, (4, 2), q_len, 300, 64, rotated=True)
    check(library, (4, 2), q_len, 300, 64, bad=299 - q_len // 2)
    check(library, (4, 2), q_len, 300, 64, is_causal=False)


def test_sinks(library: ctypes.CDLL) -> None:
    check(library, (2, 1), 30, 200, 64, sms=1, sinks=torch.tensor([0.5, 2.0]))
