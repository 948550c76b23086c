"""A stopwatch for many short pieces of work on one device; on CUDA it counts the GPU's time and never waits for it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch


class Stopwatch:
    """Adds up the time of the pieces that run inside `running`."""

    def __init__(self) -> None:
        self.pieces = 0
        self._seconds = 0.0
        self._events: list[tuple[Any, Any]] = []

    @contextlib.contextmanager
    def running(self, device: torch.device) -> Iterator[None]:
        """Count the work that is submitted to `device` inside the with-block."""
        self.pieces += 1
        if device.type == "cuda":
            pair: Any = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            with torch.cuda.device(device):
                pair[0].record()
                yield
                pair[1].record()
            self._events.append(pair)
        else:
            start = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - start

    def seconds(self) -> float:
        """All pieces so far. Waits for those that a GPU has not finished."""
        if self._events:
            self._events[-1][1].synchronize()
            self._seconds += sum(start.elapsed_time(end) for start, end in self._events) / 1e3
            self._events = []
        return self._seconds
