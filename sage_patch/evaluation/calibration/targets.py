"""What a calibration must reach, as it is asked for on the command line: "ppl<=+0.5%", "psnr>=30", "speed>=1.2".

Which figures there are, and how they add up, is in `figures.py`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from sage_patch.errors import SagePatchError
from sage_patch.figures import BY_TARGET, Figure
from sage_patch.recipes import nearest


class TargetError(SagePatchError, ValueError):
    """A target that cannot be read, or that this kind of task cannot measure."""


_TEXT = re.compile(r"\s*([a-z0-9_]+)\s*(<=|>=)\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?)\s*(%?)\s*", re.IGNORECASE)


@dataclass(frozen=True)
class Target:
    """A bound on one figure. text: as it was asked for; bound: in the figure's own unit (0.005 for "+0.5%")."""

    text: str
    name: str
    bound: float

    @property
    def figure(self) -> Figure:
        return BY_TARGET[self.name]

    @property
    def is_speed(self) -> bool:
        return self.name == "speed"

    def value(self, metrics: Mapping[str, float]) -> float:
        """The figure among measured ones; NaN if it is not there."""
        return metrics.get(self.figure.key, math.nan)

    def met_by(self, metrics: Mapping[str, float]) -> bool:
        """Does what was measured keep the bound? A missing figure or NaN keeps none."""
        value = self.value(metrics)
        return value >= self.bound if self.figure.more else value <= self.bound

    def shown(self, value: float) -> str:
        """The figure for people: "ppl +0.12 %", "psnr 34.20"."""
        if self.figure.unit == "change":
            return f"ppl {100 * value:+.2f} %"
        return f"{self.name} {value:.4g}"


def parse_targets(texts: Iterable[str], kind: str) -> tuple[Target, ...]:
    """The targets of a task of `kind`. Raises TargetError for a text that cannot be read, an unknown figure, a bound in
    the wrong direction, a figure that the task does not measure, one that is given twice, or none at all."""
    targets = [_parse(text, kind) for text in texts]
    if not targets:
        raise TargetError(f"a calibration needs a target: --target 'FIGURE<=BOUND'; {_examples(kind)}")
    names = [t.name for t in targets]
    for name in names:
        if names.count(name) > 1:
            raise TargetError(f"the target {name} is given {names.count(name)} times; give one bound for it")
    return tuple(targets)


def _parse(text: str, kind: str) -> Target:
    found = _TEXT.fullmatch(text)
    if found is None:
        raise TargetError(f"cannot read the target {text!r}: write FIGURE<=BOUND or FIGURE>=BOUND; {_examples(kind)}")
    name, sign, number, percent = found[1].lower(), found[2], float(found[3]), found[4]
    if name not in BY_TARGET:
        raise TargetError(f"target {text!r}: unknown figure {name!r}{nearest(name, BY_TARGET)}; {_examples(kind)}")
    figure = BY_TARGET[name]
    if kind not in figure.kinds:
        raise TargetError(f"target {text!r}: {name} is not measured by {kind} tasks; {_examples(kind)}")
    better = ">=" if figure.more else "<="
    if sign != better:
        raise TargetError(f"target {text!r}: {name} is the {figure.name}, so its bound is written {name}{better}BOUND")
    bound = number / 100 if percent else number
    if figure.unit == "change" and not percent:
        raise TargetError(
            f"target {text!r}: {name} is a change in percent of the unpatched model's; write {name}{better}+0.5%"
        )
    if percent and figure.unit not in ("change", "share"):
        raise TargetError(f"target {text!r}: {name} is no share, so its bound has no %")
    if figure.unit == "share" and not 0 <= bound <= 1:
        raise TargetError(f"target {text!r}: {name} is a share, from 0 to 1 (or 0 % to 100 %); got {number:g}")
    return Target(text.strip(), name, bound)


def damage_ratio(targets: Iterable[Target], metrics: Mapping[str, float]) -> float:
    """The measured damage over the allowed one, of the target that is worst off: at most 1 where all are met."""
    ratios = [0.0]
    for target in targets:
        if not target.is_speed:
            allowed, found = target.figure.damage(target.bound), target.figure.damage(target.value(metrics))
            ratios.append(found / allowed if allowed > 0 else math.inf if found > 0 else 0.0)
    return max(ratios)


def exact_misses(targets: Iterable[Target]) -> Target | None:
    """A target of quality that not even the unpatched model meets, or None."""
    quality = (t for t in targets if not t.is_speed and t.figure.exact is not None)
    return next((t for t in quality if not t.met_by({t.figure.key: t.figure.exact or 0.0})), None)


def _examples(kind: str) -> str:
    known = {"text": "ppl<=+0.5%, kl<=0.003, top1>=0.97, agreement>=0.99"}.get(kind, "psnr>=30, ssim>=0.95")
    return f"{kind} tasks take {known} or speed>=1.2"
