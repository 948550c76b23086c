"""The compiled kernels on the GPU: graphs, streams, devices, repetition, memory, refusals."""

from __future__ import annotations

import hashlib
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sage_patch.recipes import UnsupportedCall
from zoo.calls import run
from zoo.gpu_cases import DEVICE, RECIPES, forward, normal, poison, qkv
from zoo.kernel_calls import make_call

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


# --- the public function: streams and devices -------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES)
def test_two_streams_with_events(recipe: str) -> None:
    """One call on a late stream feeds the next call on another, 100 times: each launch is on the current stream."""
    inputs = [qkv(1, 8, 8, 512, 1031, 128, seed=s) for s in range(4)]
    wants = [run(run(q, k, v, recipe), k, v, recipe) for q, k, v in inputs]
    torch.cuda.synchronize()
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    kept, outs = [], []
    for i in range(100):
        q, k, v = inputs[i % 4]
        done = torch.cuda.Event()
        with torch.cuda.stream(first):
            torch.cuda._sleep(100_000)
            kept.append(run(q, k, v, recipe))  # kept alive: the other stream reads it
            done.record()
        with torch.cuda.stream(second):
            second.wait_event(done)
            outs.append(run(kept[-1], k, v, recipe))
    torch.cuda.synchronize()
    assert all(torch.equal(out, wants[i % 4]) for i, out in enumerate(outs))


@pytest.mark.parametrize("recipe", RECIPES)
def test_keys_that_arrive_from_the_host_on_another_stream(recipe: str) -> None:
    """As under offload: K is copied from pinned memory on one stream, read by the call on another, and its buffer is
    filled again as soon as the call's own event allows; 200 times."""
    q, k, v = qkv(1, 8, 8, 512, 2048, 128)
    keys = [normal(*k.shape, seed=s) for s in range(4)]
    wants = [run(q, key, v, recipe) for key in keys]
    hosts = [key.cpu().pin_memory() for key in keys]
    buffer = torch.empty_like(k)
    torch.cuda.synchronize()
    copies, work = torch.cuda.Stream(), torch.cuda.Stream()
    arrived, read = torch.cuda.Event(), torch.cuda.Event()
    outs = []
    for i in range(200):
        with torch.cuda.stream(copies):
            if i:
                copies.wait_event(read)
            torch.cuda._sleep(50_000)  # a call that does not wait reads the keys before these
            buffer.copy_(hosts[i % 4], non_blocking=True)
            arrived.record()
        with torch.cuda.stream(work):
            work.wait_event(arrived)
            outs.append(run(q, buffer, v, recipe))
            read.record()
    torch.cuda.synchronize()
    assert all(torch.equal(out, wants[i % 4]) for i, out in enumerate(outs))


@pytest.mark.parametrize("recipe", RECIPES)
def test_call_runs_on_the_device_of_its_tensors(recipe: str) -> None:
    """Tensors on the second GPU while the first is current: right there, and the first stays current."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices; torch.cuda.device_count() is 1")
    tensors = qkv(2, 4, 2, 500, 900, 128)
    assert torch.cuda.current_device() == 0
    want, want_lse = run(*tensors, recipe, is_causal=True, return_lse=True)
    got, lse = run(*(x.to("cuda:1") for x in tensors), recipe, is_causal=True, return_lse=True)
    assert torch.cuda.current_device() == 0 and got.device == lse.device == torch.device("cuda:1")
    assert torch.equal(got.to(DEVICE), want) and torch.equal(lse.to(DEVICE), want_lse)


# --- the same bits in another process --------------------------------------------------------------------------


LENGTHS = [(1001, 503), (9, 9), (1031, 1031)]


def digests() -> list[str]:
    """A fingerprint, per recipe, of results at every kv_len up to 260 and at lengths with tails."""
    found = []
    for recipe in RECIPES:
        outs = []
        for d in (64, 128):
            q, k, v = qkv(1, 2, 2, 64, 260, d, torch.float16)
            outs += [run(q, k[:, :, :n], v[:, :, :n], recipe) for n in range(1, 261)]
            outs += [run(*qkv(2, 4, 4, *lengths, d), recipe, is_causal=c) for lengths in LENGTHS for c in (False, True)]
        data = b"".join(x.contiguous().view(torch.int16).cpu().numpy().tobytes() for x in outs)
        found.append(hashlib.sha256(data).hexdigest())
    return found


def test_same_bits_in_a_clean_process() -> None:
    """A new process computes the same bits at every length, and ends well, as this one after its memory was filled
    with NaN; torch's deterministic mode allows the calls."""
    poison()
    torch.use_deterministic_algorithms(True)
    try:
        here = digests()
    finally:
        torch.use_deterministic_algorithms(False)
    folder = Path(__file__).parent
    paths = [str(folder), str(folder.parent), str(folder.parents[1]), os.environ.get("PYTHONPATH", "")]
    script = "import test_gpu_runtime as t; print(*t.digests())"
    told = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
    )
    assert told.returncode == 0, told.stderr
    assert told.stdout.split() == here
    poison()
    assert digests() == here
