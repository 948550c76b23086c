"""What a pass over a task costs: time, the attention's part of it, and the peak of the GPU's memory."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from sage_patch.kernels import ops
from sage_patch.kernels.stopwatch import Stopwatch


@dataclass
class Cost:
    """What a pass over the windows or pictures took, a value each. attention: None where it could not be seen.

    step_seconds: of denoising steps, where the pipeline tells when they end.
    """

    seconds: list[float] = field(default_factory=list)
    attention: list[float | None] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    peak_memory: int | None = None

    @property
    def attention_seconds(self) -> float | None:
        """Of all windows or pictures together."""
        seen = [a for a in self.attention if a is not None]
        return sum(seen) if seen and len(seen) == len(self.attention) else None

    def row(self) -> dict[str, Any]:
        """The pass as results hold it."""
        return {
            "seconds": sum(self.seconds),
            "attention_seconds": self.attention_seconds,
            "seconds_per_step": median(self.step_seconds) if self.step_seconds else None,
            "peak_memory": self.peak_memory,
            "fastest": self.fastest(),
        }

    def fastest(self) -> dict[str, float | None]:
        """seconds and attention_seconds of one window or picture, the least of all.

        What else runs on a machine can only add to a time, so the least one is the one to compare.
        """
        seen = [a for a in self.attention if a is not None]
        return {"seconds": min(self.seconds), "attention_seconds": min(seen) if seen else None}

    def why_not(self) -> dict[str, str]:
        """The reason of every figure that is None."""
        reasons = {}
        if self.attention_seconds is None:
            reasons["attention_seconds"] = "the unpatched model does not call torch's scaled_dot_product_attention"
        if self.peak_memory is None:
            reasons["peak_memory"] = "only CUDA keeps a peak that a run can set back"
        return reasons


@contextmanager
def measuring(device: torch.device, cost: Cost, patched: bool) -> Iterator[None]:
    """Add one window or picture to `cost`: its time from end to end, the attention's part of it, and the memory."""
    watch = Stopwatch()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    start = time.perf_counter()
    with ops.timed(watch) if patched else _TimedSdpa(watch):
        yield
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        cost.peak_memory = max(cost.peak_memory or 0, torch.cuda.max_memory_allocated(device))
    cost.seconds.append(time.perf_counter() - start)
    cost.attention.append(watch.seconds() if patched or watch.pieces else None)


class _TimedSdpa(TorchFunctionMode):
    """Lets a stopwatch run while torch's own attention runs: what an unpatched model computes with."""

    def __init__(self, watch: Stopwatch):
        self._watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.nn.functional.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        query = args[0] if args else (kwargs or {})["query"]
        with self._watch.running(query.device):
            return func(*args, **(kwargs or {}))
