"""The index maps: bijections, equal to the C++ header, and consistent with the tensor-core register layouts."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sage_patch.reference.emulator import tile_image as ti

HEADER = Path(__file__).resolve().parents[2] / "cuda_kernels" / "tile_image.h"


@pytest.mark.parametrize("dim", [64, 128])
def test_maps_are_bijections(dim: int) -> None:
    for offsets, step in ((ti.k_offsets(dim), 1), (ti.v_offsets(dim), 1), (ti.v16_offsets(dim), 2)):
        assert torch.equal(offsets.flatten().sort().values, torch.arange(128 * dim) * step)
    tokens = torch.arange(128)
    assert torch.equal(ti.v_token(ti.v_position(tokens)), tokens)
    assert torch.equal(ti.v_position(ti.v_token(tokens)), tokens)


def accumulator_columns(lane: int) -> Tensor:
    """The 32 columns (keys) of a 64 x 128 accumulator that a lane holds in each of its two rows, in register order."""
    c = lane % 4
    return torch.tensor([8 * i + 2 * c + e for i in range(16) for e in range(2)])


@pytest.mark.parametrize("lane", range(4))
def test_scores_are_the_operand_of_the_second_product(lane: int) -> None:
    """A lane's P register for 16 keys multiplies V^T's positions 16u + 4c .. + 3; the kernel puts there the lane's four
    scores of two neighbouring 8-key blocks (pack_probabilities). Their tokens must be the tokens stored there."""
    c, columns = lane % 4, accumulator_columns(lane)
    for pair in range(8):  # 16 keys: two neighbouring 8-key blocks of the accumulator
        for t in range(4):
            score = columns[4 * pair + [0, 1, 2, 3][t]]
            assert int(ti.v_token(torch.tensor(16 * pair + 4 * c + t))) == int(score)


@pytest.mark.parametrize("lane", range(4))
def test_a_lane_needs_one_key_scale(lane: int) -> None:
    groups = ti.k_group(accumulator_columns(lane))
    assert groups.unique().tolist() == [lane % 4]


def test_a_thread_finds_the_mask_bits_of_its_scores() -> None:
    """Thread t of a warpgroup reads words 2t and 2t + 1: its rows r and r + 8, its columns in register order."""
    row, c = torch.arange(64)[:, None], torch.arange(4)
    assert torch.equal(ti.mask_word(row, c).flatten().sort().values, torch.arange(256))
    for t in range(128):
        r = t // 32 * 16 + t % 32 // 4
        words = ti.mask_word(torch.tensor([r, r + 8]), torch.tensor(t % 4))
        assert words.tolist() == [2 * t, 2 * t + 1]
    for lane in range(4):
        columns = accumulator_columns(lane)
        assert torch.equal(ti.mask_bit(columns), torch.arange(32))
        assert (columns % 8 // 2).unique().tolist() == [lane]


@pytest.mark.parametrize("dim", [64, 128])
def test_swizzle_spreads_a_core_matrix_over_all_banks(dim: int) -> None:
    """Eight consecutive rows at one 16-byte column: what one step of the tensor core reads."""
    offsets = ti.k_offsets(dim)
    for column in range(0, dim, 16):
        chunks = offsets[:8, column] // 16 % 8
        assert len(chunks.unique()) == 8


def test_equal_to_the_header(tmp_path: Path) -> None:
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    (tmp_path / "dump.cpp").write_text(f"""
        #include "{HEADER}"
        #include <cstdio>
        #include <initializer_list>
        using namespace sage2;
        int main() {{
          for (int dim = 64; dim <= 128; dim += 64)
            for (int t = 0; t < kTileTokens; t++)
              for (int c = 0; c < dim; c++)
                std::printf("%d %d %d\\n", k_offset(t, c, dim), v_offset(t, c), v16_offset(t, c));
          for (int t = 0; t < kTileTokens; t++) std::printf("%d %d %d\\n", k_group(t), v_position(t), v_token(t));
          for (int t = 0; t < kTileTokens; t++) {{
            const int row = t % 64, c = t / 64;
            std::printf("%d %d %d\\n", mask_word(row, c), mask_word(row, c + 2), mask_bit(t));
          }}
          for (int n : {{1, 2, 63, 64, 65, 1000, 8192, 1000000}})
            for (int s = 0; s < mean_samples(n); s++) std::printf("%d %d 0\\n", n, mean_token(s, n));
        }}""")
    subprocess.run([compiler, "-std=c++17", "dump.cpp", "-o", "dump"], cwd=tmp_path, check=True)
    out = subprocess.run([tmp_path / "dump"], capture_output=True, text=True, check=True).stdout
    got = torch.tensor([[int(x) for x in line.split()] for line in out.splitlines()])
    want = []
    for dim in (64, 128):
        want.append(torch.stack([f(dim).flatten() for f in (ti.k_offsets, ti.v_offsets, ti.v16_offsets)], 1))
    tokens = torch.arange(128)
    want.append(torch.stack([ti.k_group(tokens), ti.v_position(tokens), ti.v_token(tokens)], 1))
    row, c = tokens % 64, tokens // 64
    want.append(torch.stack([ti.mask_word(row, c), ti.mask_word(row, c + 2), ti.mask_bit(tokens)], 1))
    for n in (1, 2, 63, 64, 65, 1000, 8192, 1000000):
        sampled = ti.mean_tokens(n)
        want.append(torch.stack([torch.full_like(sampled, n), sampled, torch.zeros_like(sampled)], 1))
    assert torch.equal(got, torch.cat(want))


def test_smoothing_vectors() -> None:
    x = torch.randn(2, 500, 8) * torch.tensor([1.0] * 7 + [0.0]) + torch.tensor([0.0, 5, -5, 0, 0, 40, 0, 0.001])
    mean = ti.sampled_mean(x)
    assert torch.allclose(mean, x[:, ti.mean_tokens(500)].mean(1), atol=1e-5)
    shift = ti.v_mean(x)
    assert torch.equal(shift[:, [1, 2, 5, 7]], mean[:, [1, 2, 5, 7]])  # offset and constant channels are shifted
    assert torch.equal(mean[:, 7], x[:, 0, 7])  # a constant is its own mean, exactly
    assert torch.equal(ti.v_mean(x[:, :1]), x[:, 0])
    assert torch.equal(ti.v_mean(x[:, :0]), torch.zeros(2, 8))
    x[0, 0, 0] = float("nan")
    assert bool(ti.sampled_mean(x).isfinite().all())
