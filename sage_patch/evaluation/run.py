"""`sage-patch run`: use the policy, and measure it beside the unpatched model in the same conditions.

The results are those of `evaluate` without the needle test and the sites' own errors, in one go. Every window of text
passes through the unpatched model and then through each measured recipe before the next one is read, so that memory
holds one window's logits however long the run is, and the pairs share their conditions.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from sage_patch.evaluation import media
from sage_patch.evaluation.evaluate import Results, add_row, begin, check_targets, trials_of
from sage_patch.evaluation.judge import UNPATCHED, PictureJudge, Progress, judge_for
from sage_patch.evaluation.media import Gallery
from sage_patch.evaluation.models import ModelError
from sage_patch.schema import PictureTask, RunConfig

_FPS = 8  # of clips whose task does not say


def run(
    config: RunConfig, command: str, progress: Progress, say: Callable[[str], None] = lambda text: None
) -> tuple[Results, Gallery | None]:
    """Run the configuration; returns everything that results.json holds, and what was drawn.

    say: told each text as it is written, which is before any figure.

    Raises ModelError, PatchError or OwnAttentionError if the model does not fit or a library is missing, PolicyError
    if the policy does not.
    """
    started = time.monotonic()
    missing = media.missing_writer() if config.task.kind == "video" else None
    if missing is not None:
        raise ModelError(missing)
    judge = judge_for(config, progress, kept_bytes=0)
    judge.say = say
    trials = trials_of(config, judge)
    results = begin("run", config, command, judge)
    measured = judge.measure_all(trials)
    for found in measured:
        add_row(results, judge, found)
    results |= check_targets(config, results["rows"]) | {"complete": True, "seconds": time.monotonic() - started}
    if not isinstance(judge, PictureJudge):
        return results, None
    drawn = {UNPATCHED: judge.frames} | {found.name: found.frames for found in measured}
    return results, Gallery(_labels(judge.jobs), drawn, _fps(judge.task))


def _labels(jobs: list[tuple[str | int, int]]) -> list[str]:
    """The prompt, with its seed where a prompt is drawn from several."""
    several = len({seed for _, seed in jobs}) > 1
    shown = [str(prompt) if len(str(prompt)) <= 60 else f"{str(prompt)[:57]}..." for prompt, _ in jobs]
    return [f"{text} (seed {seed})" if several else text for text, (_, seed) in zip(shown, jobs, strict=True)]


def _fps(task: PictureTask) -> int | None:
    return (task.fps or _FPS) if task.kind == "video" else None
