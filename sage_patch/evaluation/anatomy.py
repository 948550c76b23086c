"""One attention head under the glass: its attention map exact and quantized, K's channels, and who shares a scale.

Everything is taken from one captured call and made small, so that a page can show it and a test can check it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sage_patch.errors import SagePatchError
from sage_patch.evaluation.calls import compute
from sage_patch.evaluation.metrics import errors, relative_l1
from sage_patch.evaluation.outliers import outliers
from sage_patch.kernels import ops
from sage_patch.kernels.plain import visibility_of
from sage_patch.reference.quantize import hide, key_groups, quantize_int, query_groups, subtract_mean

# What a map is drawn of: the two INT4 differ in smoothing alone.
SHOWN = {
    "exact": "exact",
    "INT4, no smoothing": "qk_int4_pv_fp8:smooth=none",
    "INT4, Q and K smoothed": "qk_int4_pv_fp8",
    "INT8, K smoothed": "qk_int8_pv_fp8",
}
NAIVE = SHOWN["INT4, no smoothing"]
BINS = 96
UNIT = 1e-5  # maps are stored in whole numbers of it
TILE = 128  # tokens in the tile whose groups are shown


class AnatomyError(SagePatchError, ValueError):
    """The site or head that was asked for is not among the captured ones; the message names those."""


def anatomy(calls: list[ops.ObservedCall], site: str | None = None, head: int | None = None) -> dict[str, Any]:
    """What anatomy.json holds of one model.

    site, head: which to show; left out, the head whose output INT4 without smoothing damages most, among all calls.
    maps: by the names of SHOWN, BINS x BINS (fewer for shorter calls) shares of attention in units of UNIT, a line of
    text a row: the mean over a bin of query rows of what they give to a bin of keys. misplaced: the mean share of a
    row's attention that another bin of keys gets than in the exact map. key: the largest magnitude of each channel of
    K over the call's tokens, as it is and after smoothing, and the mean step of its INT4 grid. groups: who shares a
    scale in a tile. outliers: of every site and head. Raises AnatomyError.
    """
    captured, chosen, why = _choose(calls, site, head)
    call = _one_head(captured, chosen)
    q_len, kv_len = call.query.shape[2], call.key.shape[2]
    key_bins, query_bins = _bins(kv_len), _bins(q_len)
    # A V that holds a one in the column of its token's bin makes the operator itself add up the attention of a bin.
    counting = call._replace(value=torch.nn.functional.one_hot(key_bins).float()[None, None])
    rows = {name: compute(counting, recipe)[0, 0] for name, recipe in SHOWN.items()}
    exact_out = compute(call, "exact")
    found = [
        {
            "name": name,
            "recipe": recipe,
            "misplaced": float((rows[name] - rows["exact"]).abs().sum(-1).mean() / 2),
            **errors(exact_out if recipe == "exact" else compute(call, recipe), exact_out),
        }
        for name, recipe in SHOWN.items()
    ]
    return {
        "site": call.site,
        "head": chosen,
        "heads": captured.query.shape[1],
        "chosen": why,
        "q_len": q_len,
        "kv_len": kv_len,
        "head_dim": call.query.shape[3],
        "causal": call.right == 0,
        "unit": UNIT,
        "maps": {name: _lines(_mean_rows(rows_of, query_bins)) for name, rows_of in rows.items()},
        "errors": found,
        "key": _key(call),
        "groups": groups(),
        "outliers": outliers(calls),
    }


def groups() -> dict[str, Any]:
    """Which tokens of a 128-token tile share one scale on the Hopper tensor cores: a group's number a token.

    A tile of keys has few groups of many tokens, the query rows many groups of two: a thread of the tensor core holds
    two rows and a quarter of the columns, and multiplies all that it holds by one product of two scales.
    """
    device = torch.device("cpu")
    return {
        "tile": TILE,
        "tiling": "wgmma",
        "key": key_groups(TILE, "thread", "wgmma", device).tolist(),
        "query": query_groups(TILE, "thread", "wgmma", device).tolist(),
    }


def _choose(calls: list[ops.ObservedCall], site: str | None, head: int | None) -> tuple[ops.ObservedCall, int, str]:
    """(call, head, why): as asked for, or what INT4 without smoothing damages most."""
    names = list(dict.fromkeys(c.site for c in calls))
    if site is not None and site not in names:
        raise AnatomyError(f"no captured call of site {site!r}; captured were {', '.join(names)}")
    own = [c for c in calls if site in (None, c.site)]
    heads = max(c.query.shape[1] for c in own)
    if head is not None and not 0 <= head < heads:
        raise AnatomyError(f"head {head} is not among 0 to {heads - 1}")
    worst, found = -1.0, (own[0], 0)
    for captured in own:
        exact, naive = compute(captured, "exact")[0], compute(captured, NAIVE)[0]
        for h in range(exact.shape[0]) if head is None else [head]:
            error = relative_l1(naive[h], exact[h])
            if error > worst:
                worst, found = error, (captured, h)
    asked = [f"the {n}" for n, given in (("site", site), ("head", head)) if given is not None]
    why = "what INT4 without smoothing damages most"
    return (*found, f"{why}, given {' and '.join(asked)}" if asked else why)


def _one_head(call: ops.ObservedCall, head: int) -> ops.ObservedCall:
    """The call's first batch entry at one query head, with the key and value head that serves it."""
    kv_head = head // (call.query.shape[1] // call.key.shape[1])
    mask = call.attn_mask
    if mask is not None:
        mask = mask[:1, head : head + 1] if mask.shape[1] > 1 else mask[:1]
    return call._replace(
        query=call.query[:1, head : head + 1],
        key=call.key[:1, kv_head : kv_head + 1],
        value=call.value[:1, kv_head : kv_head + 1],
        attn_mask=mask,
    )


def _bins(length: int) -> Tensor:
    """The bin of each token: equal runs of neighbours, as many as BINS or the tokens. int64 [length]."""
    count = min(BINS, length)
    return torch.arange(length) * count // length


def _mean_rows(rows: Tensor, bins: Tensor) -> Tensor:
    """[rows, C] -> [bins, C], the mean of each bin's rows."""
    count = int(bins[-1]) + 1
    sums = rows.new_zeros(count, rows.shape[1]).index_add_(0, bins, rows)
    return sums / torch.bincount(bins)[:, None]


def _lines(small: Tensor) -> list[str]:
    return [" ".join(map(str, row)) for row in (small / UNIT).round().int().tolist()]


def _key(call: ops.ObservedCall) -> dict[str, Any]:
    """Channel magnitudes of one head's K before and after smoothing, and its mean INT4 step."""
    visibility = visibility_of(
        call.query.shape[2], call.key.shape[2], call.attn_mask, call.left, call.right, call.top_left
    )
    visible = visibility.visible_keys(1, call.key.device)
    key = hide(call.key.float(), visible)
    smoothed = subtract_mean(key, visible)[0]
    by_thread = key_groups(key.shape[2], "thread", "wgmma", key.device)

    def largest(x: Tensor) -> list[float]:
        return [float(f"{v:.4g}") for v in x[0, 0].abs().amax(0).tolist()]

    return {
        "largest": largest(key),  # by channel
        "largest_smoothed": largest(smoothed),
        "int4_step": float(quantize_int(key, 4, by_thread).scale.mean()),
        "int4_step_smoothed": float(quantize_int(smoothed, 4, by_thread).scale.mean()),
    }
