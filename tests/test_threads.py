"""Counters beside threads, forks, and modules that are loaded a second time."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import sage_patch
from sage_patch.kernels import ops, shared
from sage_patch.kernels.ops import CallKey

ROOT = Path(__file__).resolve().parents[1]
THREADS, EACH = 4, 20_000


@pytest.fixture(autouse=True)
def switching() -> Iterator[None]:
    """Threads take turns a thousand times as often as usual."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-6)
    yield
    sys.setswitchinterval(before)
    ops.reset_counts()


def test_no_count_of_any_thread_is_lost_and_each_look_is_whole() -> None:
    done = threading.Event()

    def count(thread: int) -> None:
        for i in range(EACH):
            ops.add_count(CallKey(f"flag/same{i % 3}", "exact", "exact", "policy"))
            if i % 40 == 0:  # the table grows while others look
                ops.add_count(CallKey(f"flag/{thread}.{i}", "exact", "exact", "policy"))
                time.sleep(0)  # locks are not fair

    seen: list[int] = []

    def look() -> None:
        while not done.is_set():
            seen.append(sum(row["calls"] for row in rows()))
            ops.reset_counts("nobody")

    workers = [threading.Thread(target=count, args=(i,)) for i in range(THREADS)]
    watcher = threading.Thread(target=look)
    for thread in (watcher, *workers):
        thread.start()
    for thread in workers:
        thread.join()
    done.set()
    watcher.join()
    assert seen == sorted(seen) and len(seen) > 1
    counts = ops.counts("flag/same")
    assert sum(counts.values()) == THREADS * EACH
    assert sum(ops.counts().values()) == THREADS * (EACH + EACH // 40)


def rows() -> list[dict]:
    """One dict a counter, whichever name they have."""
    found = sage_patch.stats()
    return found if isinstance(found, list) else sage_patch.rows()


def test_a_process_forked_while_others_count_can_count() -> None:
    done = threading.Event()

    def count() -> None:
        while not done.is_set():
            ops.add_count(CallKey("x", "a", "b", "c"))

    threads = [threading.Thread(target=count) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(20):
            child = os.fork()
            if child == 0:
                ops.add_count(CallKey("y", "a", "b", "c"))
                os._exit(0 if ops.counts("y") else 1)
            until = time.monotonic() + 20
            while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < until:
                time.sleep(0.001)
            assert ended == (child, 0)
    finally:
        done.set()
        for thread in threads:
            thread.join()


RELOAD = """
import importlib, sys, torch, sage_patch
from sage_patch import Policy
from tiny import text_model, tokens, logits
from sage_patch.kernels import ops
def calls():
    rows = sage_patch.stats() if isinstance(sage_patch.stats(), list) else sage_patch.rows()
    return sum(row["calls"] for row in rows)
model, ids = text_model("llama", "sdpa"), tokens(1, 150)
sage_patch.apply(model, Policy(quantize_fp32=True, min_q_len=1, min_kv_len=1))
want = logits(model, ids)
q = torch.randn(1, 2, 200, 64)
sage_patch.sage_attention(q, q, q)
compiled = torch.compile(lambda q: sage_patch.sage_attention(q, q, q), backend="eager", fullgraph=True)
compiled(q)
assert calls() == 2, calls()
importlib.reload(ops)
assert torch.equal(logits(model, ids), want)
sage_patch.sage_attention(q, q, q)
compiled(q)
assert calls() == 4, calls()
for name in [n for n in sys.modules if n.partition(".")[0] == "sage_patch"]:
    del sys.modules[name]
import sage_patch
from sage_patch import sage_attention
torch.compile(lambda q: sage_attention(q, q, q), backend="eager", fullgraph=True)(q)
assert torch.equal(logits(model, ids), want)
assert calls() == 5, calls()
"""


def test_modules_loaded_again_go_on_with_the_operator_and_the_counters() -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    done = subprocess.run([sys.executable, "-c", RELOAD], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def test_another_version_with_other_arguments_asks_for_a_restart() -> None:
    operators = shared.Operators()
    with pytest.raises(ImportError, match="another version of sage_patch .* 'count' .*: restart the process"):
        operators.define("count(Tensor ticket) -> ()")
