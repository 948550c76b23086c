"""Shared fixtures, and the two markers: `gpu` skips with a reason without CUDA, `slow` runs only when asked for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from sage_patch.kernels import ops

# Same examples in every run, and no time limit on one: a slow machine is not a failure. Search further with
# `--hypothesis-profile=search`.
settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.register_profile("search", deadline=None, max_examples=2000)
settings.load_profile("repeatable")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--run-slow", action="store_true", help="also run tests marked slow (as `-m slow` does)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    run_slow = config.getoption("--run-slow") or "slow" in config.getoption("markexpr")
    has_cuda = torch.cuda.is_available()
    for item in items:
        if "gpu" in item.keywords and not has_cuda:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device; torch.cuda.is_available() is False"))
        if "slow" in item.keywords and not run_slow:
            item.add_marker(pytest.mark.skip(reason="slow: run with -m slow or --run-slow"))


@pytest.fixture(autouse=True)
def fresh_counters() -> Iterator[None]:
    """Every test starts with the call counters at zero."""
    ops.reset_counts()
    yield
