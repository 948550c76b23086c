"""The compiled kernels on the GPU: graphs, streams, devices, repetition, memory, refusals."""

from __future__ import annotations

import math

import pytest
import torch
from gpu_cases import DEVICE, RECIPES, forward, qkv
from kernel_calls import make_call

from sage_patch.recipes import UnsupportedCall

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("causal", [False, True])
def test_graph_replay_sees_new_values(recipe: str, causal: bool) -> None:
    static = [x.clone() for x in qkv(2, 4, 2, 1031, 1031, 128)]
    forward(*static, scale=0.1, recipe=recipe, is_causal=causal)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream):
        out, lse = forward(*static, scale=0.1, recipe=recipe, is_causal=causal, return_lse=True)
    for seed in (1, 2, 3):
        fresh = qkv(2, 4, 2, 1031, 1031, 128, seed=seed)
        for a, b in zip(static, fresh, strict=True):
            a.copy_(b)
        graph.replay()
        want, want_lse = forward(*fresh, scale=0.1, recipe=recipe, is_causal=causal, return_lse=True)
        assert torch.equal(out, want) and torch.equal(lse, want_lse)


def test_side_stream_ordering() -> None:
    q, k, v = qkv(1, 8, 8, 1031, 2048, 128)
    want = forward(q, k, v, scale=0.1)[0]
    stream = torch.cuda.Stream()
    for _ in range(50):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(200_000)
            late = k.clone()
            got = forward(q, late, v, scale=0.1)[0]
            late.fill_(math.nan)  # ordered after the kernels on the same stream
        stream.synchronize()
        assert torch.equal(got, want)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("causal", [False, True])
def test_same_bits_every_time(recipe: str, causal: bool) -> None:
    q, k, v = qkv(2, 8, 4, 1031, 1031, 128)
    want, want_lse = forward(q, k, v, scale=0.1, recipe=recipe, is_causal=causal, return_lse=True)
    other, noise = torch.cuda.Stream(), torch.randn(2048, 2048, device=DEVICE)
    for _ in range(100):
        with torch.cuda.stream(other):
            noise = noise @ noise * 1e-3
        got, lse = forward(q, k, v, scale=0.1, recipe=recipe, is_causal=causal, return_lse=True)
        assert torch.equal(got, want) and torch.equal(lse, want_lse)
    alone = forward(q[1:], k[1:], v[1:], scale=0.1, recipe=recipe, is_causal=causal)[0]
    assert torch.equal(alone, want[1:])  # the batch around an item does not matter


def test_separate_launches_equal_the_fused_call() -> None:
    q, k, v = qkv(2, 4, 4, 500, 900, 128)
    call = make_call(q, k, v, scale=0.1, is_causal=True, return_lse=True)
    call.prepare()
    for _ in range(3):
        call.out.fill_(math.nan)
        call.forward()
        want, want_lse = forward(q, k, v, scale=0.1, is_causal=True, return_lse=True)
        assert call.lse is not None and torch.equal(call.out, want) and torch.equal(call.lse, want_lse)


def test_second_device_is_used_and_left_alone() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    q, k, v = (x.to("cuda:1") for x in qkv(1, 4, 4, 500, 900, 128))
    assert torch.cuda.current_device() == 0
    got = forward(q, k, v, scale=0.1)[0]
    assert torch.cuda.current_device() == 0 and got.device == q.device
    assert torch.equal(got.to("cuda:0"), forward(*(x.to("cuda:0") for x in (q, k, v)), scale=0.1)[0])


def test_memory_is_given_back() -> None:
    torch.cuda.synchronize()
    start = torch.cuda.memory_allocated()
    q, k, v = qkv(1, 8, 8, 4096, 4096, 128)
    inside = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = forward(q, k, v, scale=0.1)[0]
    images = 2 * k.numel()
    assert torch.cuda.max_memory_allocated() - inside - out.numel() * 2 <= images + (1 << 20)
    del q, k, v, out
    assert torch.cuda.memory_allocated() == start


def test_refusals() -> None:
    q, k, v = qkv(1, 3, 2, 16, 16, 64)
    with pytest.raises(ValueError, match="multiple of kv_heads"):
        forward(q, k, v, scale=1.0)
    q, k, v = qkv(1, 2, 2, 16, 16, 264)
    with pytest.raises(UnsupportedCall, match="head_dim 264: 1 to 256 are supported"):
        forward(q, k, v, scale=1.0)
    q, k, v = qkv(1, 2, 2, 16, 16, 64)
    with pytest.raises(ValueError, match="do not belong together"):
        forward(q, k.cpu(), v, scale=1.0)
    with pytest.raises(ValueError, match="kv_lens"):
        forward(q, k, v, scale=1.0, kv_lens=torch.tensor([3], device=DEVICE))
