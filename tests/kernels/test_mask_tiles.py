"""The mask kernels on a CPU, lane by lane: what a mask says is what the attention kernels are told, whether it is
looked at once a key or everywhere.
"""

from __future__ import annotations

import ctypes
import math

import pytest
import torch

from sage_patch.reference.emulator import tile_image as ti
from zoo.lane_simulator import NO_LIMIT, ROWS, compile_simulator, mask_bits, simulate_mask


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiled = compile_simulator(tmp_path_factory.mktemp("mask_tiles"))
    if compiled is None:
        pytest.skip("no C++ compiler")
    return compiled


@pytest.mark.parametrize("is_key_mask", [True, False])
@pytest.mark.parametrize("trial", range(24))
def test_what_a_mask_becomes(library: ctypes.CDLL, trial: int, is_key_mask: bool) -> None:
    generator = torch.Generator().manual_seed(trial)
    pick = lambda *of: of[int(torch.randint(len(of), (), generator=generator))]  # noqa: E731
    q_len, kv_len = pick(1, 65, 130, 300), pick(1, 127, 256, 700, 4300 if is_key_mask else 520)
    mb, mh = pick(1, 2), pick(1, 2)
    left, right, top_left = pick(NO_LIMIT, 200), pick(0, 0, 90, NO_LIMIT), pick(False, True)
    lens = pick(None, [pick(0, 1, kv_len // 2, kv_len) for _ in range(mb)])
    shape = (mb, mh, 1 if is_key_mask else q_len, kv_len)
    kept = torch.rand(shape, generator=generator) < pick(1.0, 0.98, 0.3)
    kept[..., kv_len - pick(0, 1, kv_len // 3) :] = False
    plain = torch.rand(shape, generator=generator) < pick(1.0, 0.99)
    number = torch.where(kept, torch.where(plain, 0.0, 1.5), -math.inf)
    is_bool = pick(True, False)
    found = simulate_mask(
        library, kept if is_bool else number, q_len, kv_lens=lens, top_left=top_left, left=left, right=right
    )

    blocks = -(-kv_len // ti.TILE_TOKENS)
    row, key = torch.arange(q_len)[:, None], torch.arange(blocks * ti.TILE_TOKENS)
    keys = torch.tensor(lens or [kv_len] * mb)[:, None, None, None]
    diagonal = row + (0 if top_left else keys - q_len)
    reach = (key < keys) & (key >= diagonal - left) & (key <= diagonal + right)
    behind = (0, blocks * ti.TILE_TOKENS - kv_len)
    visible = torch.nn.functional.pad(kept, behind) & reach
    unchanged = torch.nn.functional.pad(plain | is_bool, behind).expand(visible.shape)
    bits, lists, counts = mask_bits(visible.flatten(0, 1), unchanged.flatten(0, 1))
    assert torch.equal(found["counts"], counts)
    for plane, tile in torch.cartesian_prod(torch.arange(mb * mh), torch.arange(-(-q_len // ROWS))).tolist():
        walked = lists[plane, tile, : counts[plane, tile]]
        assert torch.equal(found["lists"][plane, tile, : len(walked)], walked)
        for entry in walked.tolist():
            for group in range(ROWS // 64):
                if entry >> (24 + 2 * group) & 3 == 2:  # kPartial: only these bits are read
                    at = plane, tile, entry & 0xFFFFFF, group
                    assert torch.equal(found["bits"][at], bits[at])
    seen = (found["seen"][..., None] >> torch.arange(32) & 1).bool().flatten(1)
    assert torch.equal(seen, visible.any(2).any(1))
