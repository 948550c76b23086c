"""The quantized cache on the mma.sync kernels, run by a Hopper card: the bytes of the reference, the numbers of the
emulator. `SAGE_PATCH_TEST_BACKEND=mma pytest -m gpu tests/kernels/test_gpu_pages.py` runs Hopper's tests with them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sage_patch.args import PageArgs
from sage_patch.pages import Pages
from sage_patch.reference.emulator import pages_mma
from zoo import golden_pages as golden
from zoo import mma_library

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", golden.CASES)
def test_bytes_and_numbers(name: str) -> None:
    case = golden.CASES[name]
    with mma_library.on("mma"):
        records, out, lse = golden.run(case, "cuda")
    mirror = golden.filled(case, "cpu")
    assert torch.equal(records, mirror.records(0, records.shape[2]))
    args = PageArgs(scale=case.dim**-0.5, **case.options)
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    want, want_lse = pages_mma.emulate(mirror, golden.inputs(case)[0], args, sms)
    assert (out == want.float()).float().mean() > 0.95
    assert (out - want.float()).abs().max() <= 2 * out.abs().max() * torch.finfo(case.dtype).eps
    assert (lse - want_lse).abs().max() < 1e-5


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("rows", [1, 24])
def test_lengths_of_every_residue(dim: int, rows: int) -> None:
    """A store that grows token by token, its rest poisoned: no row sees what is not there, each is right."""
    torch.manual_seed(dim)
    key, value, query = (torch.randn(1, h, 300, dim, device="cuda").half() for h in (2, 2, 8))
    with mma_library.on("mma"):
        pages = Pages(1, 2, dim, torch.float16, "cuda")
        for n in range(1, 301):
            pages.append(key[:, :, n - 1 : n], value[:, :, n - 1 : n])
            if n < rows or n % 7:
                continue
            tail = pages.tail.clone()
            pages.tail[..., n % 256 :, :] = torch.nan  # slots of no token, or of older ones
            out, _ = pages.attend(query[:, :, n - rows : n], PageArgs(scale=dim**-0.5))
            pages.tail.copy_(tail)
            want = exact(query[:, :, n - rows : n], key[:, :, :n], value[:, :, :n])
            assert bool(out.isfinite().all()) and float((out - want).abs().sum() / want.abs().sum()) < 0.06, n


def exact(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    q, k, v = query.float(), key.float().repeat_interleave(4, 1), value.float().repeat_interleave(4, 1)
    rows, n = q.shape[2], k.shape[2]
    ahead = torch.arange(n, device=q.device) > torch.arange(n - rows, n, device=q.device)[:, None]
    x = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).masked_fill(ahead, -torch.inf)
    return x.softmax(-1) @ v
