"""The same bits every time: repeated calls, deterministic mode, another process."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import torch

from oracle import QUANTIZED, qkv
from zoo.calls import run

HASH = """
import hashlib, sys
sys.path.insert(0, sys.argv[1])
from oracle import QUANTIZED, qkv
from sage_patch.attention import sage_attention
for recipe in QUANTIZED:
    out = sage_attention(*qkv(1, 2, 1031, dim=64), recipe=recipe, is_causal=True)
    print(hashlib.sha256(out.numpy().tobytes()).hexdigest())
"""


def test_same_bits_every_time_and_in_another_process() -> None:
    """Repeated calls, a second process, and deterministic mode give one answer."""
    tensors = qkv(1, 2, 1031, dim=64)
    hashes = []
    torch.use_deterministic_algorithms(True)
    try:
        for recipe in QUANTIZED:
            outs = [run(*tensors, recipe, is_causal=True) for _ in range(10)]
            assert all(torch.equal(out, outs[0]) for out in outs)
            hashes.append(hashlib.sha256(outs[0].numpy().tobytes()).hexdigest())
    finally:
        torch.use_deterministic_algorithms(False)
    here = Path(__file__).parent
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(here.parent), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": str(torch.get_num_threads()),
    }
    told = subprocess.run([sys.executable, "-c", HASH, str(here)], capture_output=True, text=True, env=environment)
    assert told.returncode == 0, told.stderr
    assert told.stdout.split() == hashes
