"""Which denoising step runs while calls are observed, told by the very clock that a patch follows a scheduler with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sage_patch.integrations.steps import StepClock, scheduler_problem


class RunningStep:
    """step of num_steps, None where none is known; request: how many requests have begun."""

    def __init__(self) -> None:
        self.step: int | None = None
        self.num_steps: int | None = None
        self.request = 0

    def enter(self, step: int, num_steps: int) -> None:
        """Step `step` of `num_steps` runs next."""
        if self.step is None or step == 0 < self.step:
            self.request += 1
        self.step, self.num_steps = step, num_steps

    def leave(self, why: str = "") -> None:
        """No step is running."""
        self.step = self.num_steps = None


@contextmanager
def following(pipeline: Any) -> Iterator[RunningStep]:
    """Follows the scheduler of a pipeline, if it has one that rules by step could follow, while the block lasts."""
    running, scheduler = RunningStep(), getattr(pipeline, "scheduler", None)
    if scheduler is None or scheduler_problem(pipeline, scheduler) is not None:
        yield running
        return
    clock = StepClock(pipeline, scheduler, running)
    clock.attach()
    try:
        yield running
    finally:
        clock.detach()
