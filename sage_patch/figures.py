"""The figures of a run, one row each: what they are called, how they are written, what may be asked of them.

Tables, targets, bounds of a configuration, calibrations and reports all follow from FIGURES. A new figure is a function
that measures it, in evaluation/metrics.py or evaluation/picture_metrics.py, and a row here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

KINDS = ("text", "image", "video")  # of tasks
PICTURES = ("image", "video")
Unit = Literal["", "nats", "dB", "share", "change", "x"]


@dataclass(frozen=True)
class Figure:
    """One figure.

    key: its name in the `metrics` of results. name: for people. heading: of its column. spec: how it is written. fine:
    how where values are close to a bound, as in calibrations and in a terminal; like spec if left out. kinds: the tasks
    that measure it. more: more of it is better. unit: a share goes from 0 to 1, a change is relative to the unpatched
    model's. exact: its value for the unpatched model, None where that is no constant. bound: its key in a
    configuration's `targets`. target: its name on the command line of a calibration. damage: what a calibration adds
    up: 0 for the unpatched model, and growing as the power of noise does, so that a sum of local errors predicts it.
    words: what it is, below the tables that show it; a row without words is explained by the one before it. overview:
    a report shows it.
    """

    key: str
    name: str
    heading: str
    spec: str
    kinds: tuple[str, ...]
    more: bool = False
    unit: Unit = ""
    exact: float | None = None
    bound: str = ""
    target: str = ""
    damage: Callable[[float], float] = lambda value: 0.0
    words: str = ""
    overview: bool = False
    fine: str = ""

    def text(self, value: float | None) -> str:
        """The value as it is written where it is not only an overview; JSON has null where it is infinite."""
        return "inf" if value is None else format(value, self.fine or self.spec)

    def keeps(self, value: float, bound: float) -> bool:
        """Whether a value keeps a bound of a configuration. A change may go either way; NaN keeps nothing."""
        return value >= bound if self.more else (abs(value) if self.unit == "change" else value) <= bound


def _excess(value: float) -> float:
    return max(value, 0.0)


def _missing_share(value: float) -> float:
    return (1 - value) ** 2


FIGURES: tuple[Figure, ...] = (
    # Of text tasks. The first of a kind is what its charts show.
    Figure("kl", "mean KL", "mean KL", ".4f", ("text",), unit="nats", exact=0.0, bound="max_kl", target="kl",
           damage=_excess, overview=True,
           words="mean KL is KL(unpatched || patched) of the next-token distributions, in nats a token."),
    Figure("top1", "top-1 agreement", "top-1", ".2%", ("text",), more=True, unit="share", exact=1.0, bound="min_top1",
           target="top1", damage=_missing_share, overview=True,
           words="top-1: share of tokens with the same likeliest successor."),
    Figure("ppl", "perplexity", "ppl", ".3f", ("text",)),
    Figure("ppl_change", "perplexity change", "ppl change", "+.2%", ("text",), unit="change", exact=0.0,
           bound="max_ppl_change", target="ppl", damage=_excess, overview=True,
           words="Perplexity (ppl) alone is blind: errors cancel in it."),
    Figure("delta_nll", "NLL change", "ΔNLL", "+.4f", ("text",), unit="nats", exact=0.0,
           words="ΔNLL: mean change of the negative log likelihood, in nats a token; within its 2 s.e. (two standard "
           "errors over the windows) it is not told from zero."),
    Figure("delta_nll_2se", "NLL change, 2 s.e.", "2 s.e.", ".4f", ("text",), unit="nats"),
    Figure("logit_rel_l1", "error of the logits", "logit L1", ".4f", ("text",), exact=0.0,
           words="logit L1: relative L1 error of the logits."),
    Figure("agreement", "agreement of greedy texts", "greedy", ".2%", ("text",), more=True, unit="share", exact=1.0,
           target="agreement", damage=_missing_share, overview=True, fine=".0%",
           words="greedy: share of the prompts' continuations before the first different token."),
    # Of pictures and clips.
    Figure("psnr", "PSNR", "PSNR, dB", ".1f", PICTURES, more=True, unit="dB", exact=math.inf, overview=True, fine=".2f",
           words="PSNR and SSIM of the raw frames against the unpatched ones of the same seeds: mean, and worst frame. "
           "Equal frames have an infinite PSNR."),
    Figure("worst_psnr", "worst PSNR", "worst PSNR", ".1f", PICTURES, more=True, unit="dB", exact=math.inf,
           bound="min_psnr", target="psnr", damage=lambda value: 10 ** (-value / 10), overview=True, fine=".2f"),
    Figure("ssim", "SSIM", "SSIM", ".4f", PICTURES, more=True, unit="share", exact=1.0, overview=True),
    Figure("worst_ssim", "worst SSIM", "worst SSIM", ".4f", PICTURES, more=True, unit="share", exact=1.0,
           bound="min_ssim", target="ssim", damage=lambda value: max(1 - value, 0.0), overview=True),
    Figure("ms_ssim", "MS-SSIM", "MS-SSIM", ".4f", PICTURES, more=True, unit="share", exact=1.0, overview=True),
    Figure("temporal_error", "temporal error", "temporal", ".4f", ("video",), exact=0.0, overview=True,
           words="temporal: sum |(a' - a) - (e' - e)| / sum |e' - e| over neighbouring frames, a patched and e "
           "unpatched."),
    Figure("lpips", "LPIPS", "LPIPS", ".4f", PICTURES, exact=0.0),
    Figure("clip_score", "CLIP score", "CLIP", ".2f", PICTURES, more=True),
    Figure("fid", "FID", "FID", ".3f", PICTURES, exact=0.0),
    # Of every task, in calibrations.
    Figure("speed", "end-to-end speed over unpatched", "speed, x", ".2f", KINDS, more=True, unit="x", exact=1.0,
           target="speed"),
)  # fmt: skip
BY_KEY = {figure.key: figure for figure in FIGURES}
BY_BOUND = {figure.bound: figure for figure in FIGURES if figure.bound}
BY_TARGET = {figure.target: figure for figure in FIGURES if figure.target}


def of_kind(kind: str) -> tuple[Figure, ...]:
    """The figures that a task of this kind is measured by, in the order of tables."""
    return tuple(figure for figure in FIGURES if kind in figure.kinds and figure.key != "speed")


def notes(figures: tuple[Figure, ...]) -> str:
    """What the figures of a table mean."""
    return " ".join(figure.words for figure in figures if figure.words)
