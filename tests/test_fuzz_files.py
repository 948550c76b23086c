"""Policy and run files that somebody broke: read, or refused by a ConfigError, never anything else."""

from __future__ import annotations

import importlib.util
import json
import time
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]
ALL, PART = 100_000, 5_000  # the part takes about half a minute of one core


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fuzz_files", ROOT / "scripts" / "fuzz_files.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("end", [PART, pytest.param(ALL, marks=pytest.mark.slow)])
def test_mutated_files_are_read_or_refused(script: ModuleType, end: int) -> None:
    found = script.fresh()
    script.fuzz(0 if end == PART else PART, end, time.monotonic() + 3600, found)
    print(found["counts"])
    assert found["failures"] == [] and set(found["counts"]) == {"accepted", "refused"}
    assert found["counts"]["accepted"] > (end - PART or PART) / 20


def test_the_recorded_run_is_whole_and_clean(script: ModuleType) -> None:
    found = json.loads((ROOT / "docs" / "results" / "fuzz_files.json").read_text())
    assert (found["files"], found["seed"], found["failures"]) == (ALL, script.SEED, [])
    assert sum(found["counts"].values()) == ALL
