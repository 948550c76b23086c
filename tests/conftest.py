"""Shared fixtures, and the markers: `gpu` skips with a reason without a card that has kernels, `nvcc` without the
compiler, `slow` runs only when asked for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest
import torch

from sage_patch.kernels import build, ops
from sage_patch.kernels.plans import PLANS

try:
    from hypothesis import settings
except ModuleNotFoundError:  # a machine with a card may have only what `-m gpu` needs: torch, transformers and pytest
    pass
else:
    # Same examples in every run, and no time limit on one: a slow machine is not a failure. Search further with
    # `--hypothesis-profile=search`.
    settings.register_profile("repeatable", deadline=None, derandomize=True)
    settings.register_profile("search", deadline=None, max_examples=2000)
    settings.load_profile("repeatable")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--run-slow", action="store_true", help="also run tests marked slow (as `-m slow` does)")


def no_gpu() -> str | None:
    """Why tests of the kernels cannot run here; None where they can."""
    if not torch.cuda.is_available():
        return "needs a CUDA device; torch.cuda.is_available() is False"
    capability = torch.cuda.get_device_capability()
    return None if capability == (9, 0) else f"kernels exist for compute capability 9.0, this device is {capability}"


def no_nvcc() -> str | None:
    """Why nothing can be compiled here; None where it can."""
    missing = [name for name, found in (("nvcc", build.find_nvcc()), ("ninja", build.find_ninja())) if found is None]
    return f"compiles the kernels; no {' and no '.join(missing)}" if missing else None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`-m gpu` asks nothing of the packages that other tests need: a file without such a test is not imported."""
    if config.getoption("markexpr") != "gpu" or not fnmatch(collection_path.name, "test_*.py"):
        return None
    text = collection_path.read_text(encoding="utf-8")
    return None if any(word in text for word in ("mark.gpu", "@on_devices(", "(device: str")) else True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    run_slow = config.getoption("--run-slow") or "slow" in config.getoption("markexpr")
    reasons = {"gpu": no_gpu(), "nvcc": no_nvcc(), "slow": None if run_slow else "slow: run with -m slow or --run-slow"}
    for item in items:
        for marker, reason in reasons.items():
            if reason is not None and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True, scope="session")
def backend_of_the_card() -> None:
    """$SAGE_PATCH_TEST_BACKEND: which kernels for other cards a Hopper card shall run (zoo.mma_library)."""
    backend = os.environ.get("SAGE_PATCH_TEST_BACKEND")
    if backend and no_gpu() is None:
        from zoo import mma_library

        mma_library.use(backend)


@pytest.fixture(autouse=True)
def fresh_counters() -> Iterator[None]:
    """Every test starts with the call counters at zero, and with nothing known of any call: tests exchange backends,
    tables and libraries, which are fixed for the life of a process elsewhere."""
    ops.reset_counts()
    PLANS.clear()
    yield


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Where a call runs: the reference on the CPU, the kernels on the card. Tests whose recipes differ by device take
    both from `zoo.calls.on_devices` instead."""
    return request.param
