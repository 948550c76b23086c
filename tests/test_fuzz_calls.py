"""Random calls of sage_attention (scripts/fuzz_calls.py): no internal error, no hang, no sound call refused, no wrong
value, and every wrong argument named."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "fuzz_calls.py"


@pytest.mark.parametrize("calls", [10_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_random_calls(calls: int) -> None:
    spec = importlib.util.spec_from_file_location("fuzz_calls", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    counts, wrong = script.fuzz(calls)
    print(dict(counts))
    assert not wrong, "\n".join(wrong[:10])
    assert sum(counts.values()) == calls and min(counts[verdict] for verdict in script.GOOD) > calls // 4
