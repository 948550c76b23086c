"""The time of one candidate in some milliseconds, for choices and small files; the benchmark proper has more care."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch


def median_ms(run: Callable[[], object], milliseconds: float) -> float:
    """Milliseconds of one run on the current CUDA device: the median of as many as fit into the budget, 9 to 60, after
    a warm-up of half of it."""

    def timed() -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)

    run()
    one = max(timed(), 0.01)
    for _ in range(min(100, int(milliseconds / 2 / one))):
        run()
    return statistics.median(timed() for _ in range(max(9, min(60, int(milliseconds / one)))))
