"""How uneven the channels of K are, by site and head: what sets the step of its integer grid."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from torch import Tensor

from sage_patch.kernels import ops
from sage_patch.kernels.plain import visibility_of
from sage_patch.reference.quantize import hide, subtract_mean
from sage_patch.reference.rotation import rotate

SHARE = 32  # energy is that of the largest 1 / SHARE of the channels


def outliers(calls: list[ops.ObservedCall]) -> list[dict[str, Any]]:
    """One row a site and head of K, the mean over the site's calls: site, kv_head, and what `figures` says of K as it
    is (`given`), less its mean (`smoothed`) and then rotated (`rotated`)."""
    rows = []
    for site in dict.fromkeys(c.site for c in calls):
        found = [_stages(c) for c in calls if c.site == site]
        for head in range(found[0]["given"].shape[1]):
            rows.append(
                {"site": site, "kv_head": head}
                | {
                    stage: {
                        key: fmean(figures(x[stage][0, head])[key] for x in found)
                        for key in ("ratio", "kurtosis", "energy")
                    }
                    for stage in ("given", "smoothed", "rotated")
                }
            )
    return rows


def figures(k: Tensor) -> dict[str, float]:
    """Of one head's K [tokens, channels].

    ratio: the largest magnitude of any channel over that of the median channel. kurtosis: E x^4 / (E x^2)^2 of all its
    numbers; 3 is a normal distribution's. energy: the share of the sum of squares in the largest 1 / SHARE of the
    channels; 1 / SHARE if all are alike. Zeros have ratio 1, kurtosis 0 and energy 0.
    """
    k = k.double()
    largest, squares = k.abs().amax(0), k.square()
    median = float(largest.median())
    by_channel = squares.sum(0).sort(descending=True).values
    power, count = float(squares.mean()), max(1, k.shape[1] // SHARE)
    return {
        "ratio": float(largest.max()) / median if median else 1.0,
        "kurtosis": float(squares.square().mean()) / power**2 if power else 0.0,
        "energy": float(by_channel[:count].sum() / by_channel.sum()) if power else 0.0,
    }


def _stages(call: ops.ObservedCall) -> dict[str, Tensor]:
    visibility = visibility_of(
        call.query.shape[2], call.key.shape[2], call.attn_mask, call.left, call.right, call.top_left
    )
    visible = visibility.visible_keys(call.key.shape[1], call.key.device)
    smoothed = subtract_mean(call.key, visible)[0]
    return {"given": hide(call.key.float(), visible), "smoothed": smoothed, "rotated": rotate(smoothed)}
