"""How far a picture or clip drawn with quantized attention is from the one drawn without it, frame by frame.

The frames are compared as the pipeline made them, before any file format. PSNR and SSIM are torchmetrics'. LPIPS, CLIP
score and FID need a trained model of their own, from local weights alone: nothing is downloaded, and without a path in
the configuration, or where a score would mean nothing, its reason stands in its place. LPIPS and FID take a TorchScript
file (`torch.jit.trace(model, example).save(path)`), because neither network comes with a library that is needed here.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from sage_patch.errors import SagePatchError
from sage_patch.evaluation.models import ModelError, load_clip
from sage_patch.figures import BY_KEY
from sage_patch.schema import EvaluateSpec

_SSIM_SIDE = 11  # the window of 11 x 11 pixels must fit in the picture
_MS_SSIM_SIDE = 176  # and, halved four times, in the smallest of five scales
_BATCH = 8  # frames at a time, for a trained model


class Unavailable(SagePatchError, ValueError):
    """These frames do not have the figure; the message is the reason."""


@dataclass(frozen=True)
class PictureComparison:
    """One picture or clip against its exact one.

    frames: of each figure of FRAMES a value a frame. whole: of each of CLIPS the clip's value. unavailable: why a
    figure is in neither.
    """

    frames: dict[str, list[float]] = field(default_factory=dict)
    whole: dict[str, float] = field(default_factory=dict)
    unavailable: dict[str, str] = field(default_factory=dict)


def missing_library() -> str | None:
    """What to install before pictures can be measured; None if all is there."""
    if importlib.util.find_spec("torchmetrics") is None:
        return "measuring pictures needs torchmetrics: pip install 'sage-patch[media]'"
    return None


def psnr(actual: Tensor, exact: Tensor) -> list[float]:
    """dB of a range from 0 to 1, infinite where equal."""
    from torchmetrics.functional.image import peak_signal_noise_ratio

    found = peak_signal_noise_ratio(actual, exact, data_range=1.0, reduction="none", dim=(1, 2, 3))
    return [float(v) for v in found.reshape(-1)]


def ssim(actual: Tensor, exact: Tensor) -> list[float]:
    """1 where equal."""
    from torchmetrics.functional.image import structural_similarity_index_measure

    return _by_frame(structural_similarity_index_measure, actual, exact, _SSIM_SIDE)


def ms_ssim(actual: Tensor, exact: Tensor) -> list[float]:
    """1 where equal."""
    from torchmetrics.functional.image import multiscale_structural_similarity_index_measure

    return _by_frame(multiscale_structural_similarity_index_measure, actual, exact, _MS_SSIM_SIDE)


def temporal_error(actual: Tensor, exact: Tensor) -> float:
    """How far the motion of a clip [F, 3, H, W] is from the exact one's, 0 where equal.

    sum |(a_t+1 - a_t) - (e_t+1 - e_t)| / sum |e_t+1 - e_t|, over all frames, channels and pixels: flicker that is added
    counts in full, an error that stays the same in all frames does not count.
    """
    if len(exact) < 2:
        raise Unavailable("one frame has no motion")
    change, wanted = actual.double().diff(dim=0), exact.double().diff(dim=0)
    motion = wanted.abs().sum()
    if motion == 0:
        raise Unavailable("nothing moves in the unpatched clip")
    return float((change - wanted).abs().sum() / motion)


# By their keys in figures.FIGURES, of frames [F, 3, H, W] in float64 from 0 to 1: a value a frame, and a value a clip.
FRAMES: dict[str, Callable[[Tensor, Tensor], Any]] = {"psnr": psnr, "ssim": ssim, "ms_ssim": ms_ssim}
CLIPS: dict[str, Callable[[Tensor, Tensor], Any]] = {"temporal_error": temporal_error}


def compare(actual: Tensor, exact: Tensor, kind: str = "image") -> PictureComparison:
    """Compare frames [F, 3, H, W] with values from 0 to 1, of a task of this kind. ValueError if the shapes differ."""
    if actual.shape != exact.shape or actual.dim() != 4:
        raise ValueError(f"frames must be [F, 3, H, W] and alike; got {list(actual.shape)} and {list(exact.shape)}")
    a, e = actual.double(), exact.double()
    found = PictureComparison()
    of_kind = {key: measure for key, measure in (FRAMES | CLIPS).items() if kind in BY_KEY[key].kinds}
    for key, measure in of_kind.items():
        try:
            value = measure(a, e)
        except Unavailable as error:
            found.unavailable[key] = str(error)
            continue
        (found.frames if key in FRAMES else found.whole)[key] = value
    return found


def summary(comparisons: Sequence[PictureComparison]) -> tuple[dict[str, float], dict[str, str]]:
    """(figures, reasons): the mean and the worst of each figure over all frames of all pictures, the mean over clips;
    the reason of a figure that one of them lacks."""
    figures: dict[str, float] = {}
    reasons: dict[str, str] = {}
    for c in comparisons:
        for key, why in c.unavailable.items():
            reasons |= {key: why} | ({f"worst_{key}": why} if key in FRAMES else {})
    for key in FRAMES:
        if key not in reasons:
            values = [v for c in comparisons for v in c.frames[key]]
            worst = min(values) if BY_KEY[key].more else max(values)
            figures |= {key: fmean(values), f"worst_{key}": math.nan if any(map(math.isnan, values)) else worst}
    for key in CLIPS:
        if key not in reasons and all(key in c.whole for c in comparisons):
            figures[key] = fmean(c.whole[key] for c in comparisons)
    return figures, reasons


def _by_frame(measure: Any, actual: Tensor, exact: Tensor, least: int) -> list[float]:
    """One frame at a time: torchmetrics blurs all frames it is given at once, in ten times their memory."""
    side = min(actual.shape[-2:])
    if side < least:
        raise Unavailable(f"needs {least} pixels a side, and there are {side}")
    return [float(measure(a, e, data_range=1.0)) for a, e in zip(actual.split(1), exact.split(1), strict=True)]


class PictureScores:
    """The scores that a configuration has weights for, on the device of the pictures' pipeline.

    prompts: the text of each picture, or None where prompts are rows of a table. Raises ModelError if a file cannot be
    loaded.
    """

    def __init__(self, spec: EvaluateSpec, prompts: Sequence[str] | None, device: torch.device):
        self._device = device
        self._prompts = prompts
        self._lpips = _script("lpips", spec.lpips, device)
        self._fid = _script("fid", spec.fid, device)
        self._clip = load_clip(spec.clip, device) if spec.clip is not None and prompts is not None else None
        self._why_no_clip = (
            "no local weights: evaluate.clip is not set"
            if spec.clip is None
            else "the prompts are rows of a table, not text"
        )

    @torch.no_grad()
    def compare(self, actual: Sequence[Tensor], exact: Sequence[Tensor]) -> tuple[dict[str, float], dict[str, str]]:
        """(figures, reasons) over all frames [F, 3, H, W], from 0 to 1, of every picture.

        lpips: mean distance to the exact frames, 0 where equal; worst_lpips. clip_score and clip_score_exact: 100 x
        cosine of a frame and its prompt, mean. fid: between the patched and the exact frames.
        """
        figures: dict[str, float] = {}
        reasons: dict[str, str] = {}
        if self._lpips is None:
            reasons["lpips"] = "no local weights: evaluate.lpips is not set"
        else:
            pairs = zip(_batches(actual, self._device), _batches(exact, self._device), strict=True)
            values = [v for a, e in pairs for v in self._lpips(2 * a - 1, 2 * e - 1).reshape(-1).tolist()]
            figures |= {"lpips": fmean(values), "worst_lpips": max(values)}
        if self._clip is None:
            reasons["clip_score"] = self._why_no_clip
        else:
            figures |= {"clip_score": self._clip_score(actual), "clip_score_exact": self._clip_score(exact)}
        if self._fid is None:
            reasons["fid"] = "no local weights: evaluate.fid is not set"
        else:
            ours, theirs = (self._features(frames) for frames in (actual, exact))
            count, size = ours.shape
            if count <= size:
                reasons["fid"] = f"its {size} features need more frames than that, and there are {count}"
            else:
                figures["fid"] = _frechet(ours, theirs)
        return figures, reasons

    def _features(self, pictures: Sequence[Tensor]) -> Tensor:
        batches = [(255 * b).round().to(torch.uint8) for b in _batches(pictures, self._device)]
        return torch.cat([self._fid(b).double().cpu() for b in batches])

    def _clip_score(self, pictures: Sequence[Tensor]) -> float:
        assert self._clip is not None and self._prompts is not None
        model, processor = self._clip
        scores = []
        for frames, prompt in zip(pictures, self._prompts, strict=True):
            shown = [(255 * f).round().to(torch.uint8) for f in frames]
            inputs = processor(text=[prompt], images=shown, return_tensors="pt", padding=True, truncation=True)
            out = model(**inputs.to(self._device))
            scores += (100 * out.image_embeds @ out.text_embeds[0]).tolist()  # both are of length 1
        return fmean(scores)


def _script(key: str, path: str | None, device: torch.device) -> Any:
    if path is None:
        return None
    if not Path(path).is_file():
        raise ModelError(f"evaluate.{key}: no such file: {path}")
    try:
        return torch.jit.load(path, map_location=device).eval()
    except RuntimeError as error:
        what = f"is not a TorchScript file ({str(error).splitlines()[0]}); write one with torch.jit.trace"
        raise ModelError(f"evaluate.{key}: {path} {what}") from error


def _batches(pictures: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    return [batch.to(device) for frames in pictures for batch in frames.split(_BATCH)]


def _frechet(a: Tensor, b: Tensor) -> float:
    """|m_a - m_b|^2 + tr(C_a) + tr(C_b) - 2 tr((C_a C_b)^(1/2)) of features [N, D]: mean and covariance of each."""
    cov_a, cov_b = torch.atleast_2d(torch.cov(a.T)), torch.atleast_2d(torch.cov(b.T))
    roots = torch.linalg.eigvals(cov_a @ cov_b).sqrt().real.sum()
    return float((a.mean(0) - b.mean(0)).square().sum() + cov_a.trace() + cov_b.trace() - 2 * roots)
