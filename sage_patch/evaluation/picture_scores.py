"""Scores of pictures that need a trained model of their own: LPIPS, CLIP score and FID, from local weights alone.

Nothing is downloaded: without a path in the configuration, or where a score would mean nothing, its reason stands in
its place. LPIPS and FID take a TorchScript file (`torch.jit.trace(model, example).save(path)`), because neither network
comes with a library that this package needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from sage_patch.evaluation.models import ModelError, load_clip
from sage_patch.schema import EvaluateSpec

_BATCH = 8  # frames at a time


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
