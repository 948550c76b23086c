"""How far a picture or clip drawn with quantized attention is from the one drawn without it, frame by frame.

The frames are compared as the pipeline made them, before any file format. The figures are torchmetrics'.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from torch import Tensor

_SSIM_SIDE = 11  # the window of 11 x 11 pixels must fit in the picture
_MS_SSIM_SIDE = 176  # and, halved four times, in the smallest of five scales


@dataclass(frozen=True)
class PictureComparison:
    """One picture or clip against its exact one: a value a frame, or why there is none.

    psnr: dB of a range from 0 to 1, infinite where equal. ssim, ms_ssim: 1 where equal.
    """

    psnr: list[float]
    ssim: list[float] | str
    ms_ssim: list[float] | str


def missing_library() -> str | None:
    """What to install before pictures can be measured; None if all is there."""
    if importlib.util.find_spec("torchmetrics") is None:
        return "measuring pictures needs torchmetrics: pip install 'sage-patch[media]'"
    return None


def compare(actual: Tensor, exact: Tensor) -> PictureComparison:
    """Compare frames [F, 3, H, W] with values from 0 to 1. ValueError if the shapes differ."""
    from torchmetrics.functional.image import (
        multiscale_structural_similarity_index_measure,
        peak_signal_noise_ratio,
        structural_similarity_index_measure,
    )

    if actual.shape != exact.shape or actual.dim() != 4:
        raise ValueError(f"frames must be [F, 3, H, W] and alike; got {list(actual.shape)} and {list(exact.shape)}")
    a, e = actual.double(), exact.double()
    side = min(a.shape[-2:])
    psnr = peak_signal_noise_ratio(a, e, data_range=1.0, reduction="none", dim=(1, 2, 3))
    values: dict[str, list[float] | str] = {}
    for name, least, measure in (
        ("ssim", _SSIM_SIDE, structural_similarity_index_measure),
        ("ms_ssim", _MS_SSIM_SIDE, multiscale_structural_similarity_index_measure),
    ):
        if side < least:
            values[name] = f"unavailable: needs {least} pixels a side, and there are {side}"
        else:
            # One frame at a time: torchmetrics blurs all frames it is given at once, in ten times their memory.
            pairs = zip(a.split(1), e.split(1), strict=True)
            values[name] = [float(measure(x, y, data_range=1.0)) for x, y in pairs]  # type: ignore
    return PictureComparison(psnr.reshape(-1).tolist(), values["ssim"], values["ms_ssim"])


def temporal_error(actual: Tensor, exact: Tensor) -> float | str:
    """How far the motion of a clip [F, 3, H, W] is from the exact one's, 0 where equal, or why there is no value.

    sum |(a_t+1 - a_t) - (e_t+1 - e_t)| / sum |e_t+1 - e_t|, over all frames, channels and pixels: flicker that is added
    counts in full, an error that stays the same in all frames does not count.
    """
    if len(exact) < 2:
        return "unavailable: one frame has no motion"
    change, wanted = actual.double().diff(dim=0), exact.double().diff(dim=0)
    motion = wanted.abs().sum()
    if motion == 0:
        return "unavailable: nothing moves in the unpatched clip"
    return float((change - wanted).abs().sum() / motion)


def summary(comparisons: Sequence[PictureComparison]) -> dict[str, Any]:
    """Mean and worst of each figure over all frames of all pictures; the reason where a figure is unavailable."""
    found: dict[str, Any] = {}
    for name in ("psnr", "ssim", "ms_ssim"):
        parts = [getattr(c, name) for c in comparisons]
        reasons = [p for p in parts if isinstance(p, str)]
        values = [v for p in parts if not isinstance(p, str) for v in p]
        found[name] = reasons[0] if reasons else fmean(values)
        found[f"{name}_worst"] = reasons[0] if reasons else math.nan if any(map(math.isnan, values)) else min(values)
    return found
