"""The bounds of a run's `targets` section against what was measured. One rule for every command: run and evaluate name
their figures differently, and each says how a figure is found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sage_patch.schema import RunConfig

# bound in the configuration -> (metric, its words, whether more is better)
BOUNDS = {
    "max_kl": ("kl", "mean KL <=", False),
    "min_top1": ("top1", "top-1 agreement >=", True),
    "max_ppl_change": ("ppl_change", "perplexity change <=", False),
    "min_psnr": ("worst_psnr", "worst PSNR >=", True),
    "min_ssim": ("worst_ssim", "worst SSIM >=", True),
}


def check_bounds(config: RunConfig, figure: Callable[[str, str], float | str]) -> list[dict[str, Any]]:
    """One row a bound of the configuration: name, what, bound, value, met.

    figure(name, metric): what was measured of the policy or recipe of that name, or as text why it was not. A change
    may go either way. NaN and figures that are not there meet nothing.
    """
    rows = []
    for name, target in config.targets.items():
        for key, bound in target.model_dump(exclude_none=True).items():
            metric, what, more = BOUNDS[key]
            value = figure(name, metric)
            met = not isinstance(value, str) and (value >= bound if more else abs(value) <= bound)
            rows.append({"name": name, "what": what, "bound": bound, "value": value, "met": met})
    return rows
