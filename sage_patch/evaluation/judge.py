"""Measure any number of policies on one task, each against the same unpatched model with equal seeds.

A judge loads the model once and holds the unpatched model's answers, so that a calibration can try many policies. Text
tasks compare next-token distributions over windows and greedy continuations, picture tasks compare frames.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from sage_patch.evaluation import metrics, picture_metrics
from sage_patch.evaluation.costs import Cost, measuring
from sage_patch.evaluation.drawing import Drawer
from sage_patch.evaluation.models import ModelError, load_pipeline, load_text_model
from sage_patch.evaluation.text import Progress, encode_prompt, forward_logits, generate_greedy, text_windows
from sage_patch.patch import applied, model_hash, plan
from sage_patch.policy import Plan, Policy
from sage_patch.recipes import LADDER as LADDER
from sage_patch.schema import PictureTask, RunConfig, TextTask

_UNAVAILABLE = "unavailable: "  # what stands before a reason that takes a figure's place
_KEPT_LOGITS = 4 << 30  # bytes of the unpatched model's logits; those of later windows are computed again


@dataclass(frozen=True)
class Measured:
    """One policy on the task, against the unpatched model with equal seeds.

    metrics, of text: kl (nats a token, mean), top1 (share), ppl, ppl_change (relative), agreement (greedy tokens
    before the first difference, share); of pictures: psnr, worst_psnr (dB, infinite where equal), ssim, worst_ssim,
    ms_ssim, worst_ms_ssim, and temporal_error of clips. A metric that does not exist here is absent, its reason in
    `unavailable`. seconds, attention_seconds: of the patched windows or pictures alone; baseline_seconds: the unpatched
    model's for the same ones. peak_memory: bytes. calls: Handle.stats() over them. each: the figures of every window or
    picture. prompt_calls: Handle.stats() of a text task's continuations; short prompts run exact and then test nothing.
    fastest, baseline_fastest: seconds and attention_seconds of the fastest window or picture, patched and unpatched: on
    a machine that does other work too, the ones to compare.
    """

    name: str
    metrics: dict[str, float]
    unavailable: dict[str, str]
    seconds: float
    baseline_seconds: float
    attention_seconds: float | None
    peak_memory: int | None
    calls: list[dict[str, Any]]
    each: list[dict[str, Any]] = field(default_factory=list)
    prompt_calls: list[dict[str, Any]] = field(default_factory=list)
    fastest: dict[str, float | None] = field(default_factory=dict)
    baseline_fastest: dict[str, float | None] = field(default_factory=dict)


class Judge(ABC):
    """Made by `judge_for`. model: what apply() takes. num_steps: denoising steps of the task, None without."""

    def __init__(self, config: RunConfig, model: Any, progress: Progress):
        self.config = config
        self.kind: str = config.task.kind
        self.model = model
        self.progress = progress
        self.has_steps = plan(model, Policy()).has_steps  # also the first check that there are sites at all
        self.num_steps = config.task.steps if isinstance(config.task, PictureTask) else None
        self.model_hash = model_hash(model)

    def plan(self, policy: Policy) -> Plan:
        """The policy resolved against the model's sites; raises PolicyError if it does not fit."""
        return plan(self.model, policy)

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where the model computes."""

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """class, parameters, dtype and device of the model, for results."""

    @abstractmethod
    def baseline(self) -> None:
        """Compute the unpatched model's answers, unless they are there."""

    @abstractmethod
    def baseline_facts(self) -> dict[str, Any]:
        """The unpatched model on the whole task: metrics, unavailable, seconds, attention_seconds, peak_memory."""

    @abstractmethod
    def measure(self, name: str, policy: Policy, share: float = 1.0) -> Measured:
        """The policy on the task. share below 1: on the first windows or pictures alone, at least one of them."""

    @abstractmethod
    def run_exact(self, jobs: int = 1) -> None:
        """Run the first windows or pictures patched with `exact`, so that observers of the operator see every call."""


def judge_for(config: RunConfig, progress: Progress) -> Judge:
    """The judge of the configuration's task, its model loaded. Raises ModelError, PatchError or OwnAttentionError."""
    if config.model.meta:
        raise ModelError("model.meta gives a model without weights, which only `plan` can use; measuring needs weights")
    torch.manual_seed(config.seed)
    progress("loading the model", 0, 1)
    judge: Judge = TextJudge(config, progress) if config.task.kind == "text" else PictureJudge(config, progress)
    progress("loading the model", 1, 1)
    return judge


class TextJudge(Judge):
    """Windows of real text for the distributions, the task's prompts for the greedy continuations."""

    def __init__(self, config: RunConfig, progress: Progress):
        assert isinstance(config.task, TextTask)
        self.task = config.task
        model, self.tokenizer = load_text_model(config.model)
        super().__init__(config, model, progress)
        self.windows = text_windows(self.tokenizer, self.task, model)
        self._prompts = [encode_prompt(self.tokenizer, prompt) for prompt in self.task.prompts]
        self._logits: dict[int, Tensor] = {}
        self._cost: Cost | None = None
        self._texts: list[list[int]] = []
        self._nll: list[float] = []

    @property
    def device(self) -> torch.device:
        return self.windows.device

    def facts(self) -> dict[str, Any]:
        return {
            "class": type(self.model).__name__,
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "dtype": str(next(self.model.parameters()).dtype).removeprefix("torch."),
            "device": str(self.device),
        }

    @torch.no_grad()
    def baseline(self) -> None:
        if self._cost is not None:
            return
        forward_logits(self.model, self.windows[0][:32])  # the first call of a process is slower than the others
        cost, kept = Cost(), 0
        for number, tokens in enumerate(self.windows):
            self.progress("unpatched, windows", number, len(self.windows))
            with measuring(self.device, cost, patched=False):
                logits, _ = forward_logits(self.model, tokens)
            kept += logits.numel() * 4
            self._nll.append(metrics.ExactWindow(logits, tokens).nll)
            if kept <= _KEPT_LOGITS:
                self._logits[number] = logits.float().cpu()
        self._texts = [self._continue(inputs, "unpatched, prompts") for inputs in self._prompts]
        self._cost = cost

    def baseline_facts(self) -> dict[str, Any]:
        self.baseline()
        assert self._cost is not None
        return {"metrics": {"ppl": math.exp(fmean(self._nll))}, **self._cost.row()}

    @torch.no_grad()
    def measure(self, name: str, policy: Policy, share: float = 1.0) -> Measured:
        self.plan(policy)  # an error here costs no computation
        self.baseline()
        assert self._cost is not None
        windows = self.windows[: _first(share, len(self.windows))]
        comparison, cost = metrics.TextComparison(), Cost()
        calls: Counter[tuple[str, str, str, str]] = Counter()
        for number, tokens in enumerate(windows):
            self.progress(f"{name}, windows", number, len(windows))
            with applied(self.model, policy) as handle, measuring(self.device, cost, patched=True):
                logits, _ = forward_logits(self.model, tokens)
            comparison.add(logits, self._exact_window(number))  # after it, so that its memory is not counted
            for row in handle.stats():
                calls[row["site"], row["recipe"], row["backend"], row["reason"]] += row["calls"]
        with applied(self.model, policy) as handle:
            prompts = self._prompts[: _first(share, len(self._prompts))]
            texts = [self._continue(inputs, f"{name}, prompts") for inputs in prompts]
        one = ("windows", "kl_2se", "delta_nll_2se") if len(windows) == 1 else ("windows",)  # no spread of one
        figures = {k: v for k, v in comparison.summary().items() if k not in one}
        figures["agreement"] = fmean(map(metrics.greedy_agreement, texts, self._texts[: len(texts)]))
        each = [
            {"kl": kl, "top1": top1, "nll": nll, "nll_exact": nll_exact}
            for kl, top1, nll, nll_exact in zip(
                comparison.kl, comparison.top1, comparison.nll, comparison.nll_exact, strict=True
            )
        ]
        rows = [
            dict(zip(("site", "recipe", "backend", "reason", "calls"), (*k, n), strict=True)) for k, n in calls.items()
        ]
        return replace(_measured(name, figures, {}, cost, self._cost, rows, each), prompt_calls=handle.stats())

    @torch.no_grad()
    def run_exact(self, jobs: int = 1) -> None:
        with applied(self.model, Policy(recipe="exact")):
            for tokens in self.windows[:jobs]:
                forward_logits(self.model, tokens)

    def _exact_window(self, number: int) -> metrics.ExactWindow:
        tokens = self.windows[number]
        kept = self._logits.get(number)
        logits = forward_logits(self.model, tokens)[0] if kept is None else kept.to(self.device)
        return metrics.ExactWindow(logits, tokens)

    def _continue(self, inputs: Any, label: str) -> list[int]:
        budget = self.task.max_new_tokens
        return generate_greedy(self.model, self.tokenizer, inputs, budget, lambda n: self.progress(label, n, budget))[0]


class PictureJudge(Judge):
    """Every prompt of the task drawn from every seed, and compared frame by frame."""

    def __init__(self, config: RunConfig, progress: Progress):
        assert isinstance(config.task, PictureTask)
        missing = picture_metrics.missing_library()
        if missing is not None:
            raise ModelError(missing)  # before the work, not after it
        self.task = config.task
        self.jobs = [(p, seed) for p in self.task.prompts for seed in self.task.seeds or [config.seed]]
        super().__init__(config, load_pipeline(config.model), progress)
        self._drawer = Drawer(self.model, config.model, self.task)
        self._drawn: list[Tensor] = []
        self._cost: Cost | None = None

    @property
    def device(self) -> torch.device:
        return torch.device(self.model.device)

    def facts(self) -> dict[str, Any]:
        parts = {name: part for name, part in self.model.components.items() if isinstance(part, nn.Module)}
        return {
            "class": type(self.model).__name__,
            "parameters": sum(p.numel() for part in parts.values() for p in part.parameters()),
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "device": str(self.device),
        }

    def baseline(self) -> None:
        if self._cost is not None:
            return
        # The first call of a process is slower than the others.
        self._drawer.draw(*self.jobs[0], tick=lambda step: None, steps=min(2, self.task.steps))
        cost = Cost()
        self._drawn = self._draw("unpatched", len(self.jobs), cost, patched=False)
        self._cost = cost

    def baseline_facts(self) -> dict[str, Any]:
        self.baseline()
        assert self._cost is not None
        return {"metrics": {}, **self._cost.row()}

    def drawn_exact(self) -> list[Tensor]:
        """The unpatched model's frames [F, 3, H, W] of every job."""
        self.baseline()
        return self._drawn

    def measure(self, name: str, policy: Policy, share: float = 1.0) -> Measured:
        return self.measure_drawn(name, policy, share)[0]

    def measure_drawn(self, name: str, policy: Policy, share: float = 1.0) -> tuple[Measured, list[Tensor]]:
        """`measure`, and the patched frames of every job."""
        self.plan(policy)  # an error here costs no computation
        self.baseline()
        assert self._cost is not None
        cost = Cost()
        with applied(self.model, policy) as handle:
            drawn = self._draw(name, _first(share, len(self.jobs)), cost, patched=True)
        pairs = list(zip(drawn, self._drawn, strict=False))
        compared = [picture_metrics.compare(a, e) for a, e in pairs]
        figures, unavailable = _apart(picture_metrics.summary(compared))
        each: list[dict[str, Any]] = [
            {"prompt": prompt, "seed": seed, "psnr": c.psnr, "ssim": c.ssim, "ms_ssim": c.ms_ssim}
            for (prompt, seed), c in zip(self.jobs, compared, strict=False)
        ]
        if self.kind == "video":
            errors = [picture_metrics.temporal_error(a, e) for a, e in pairs]
            each = [row | {"temporal_error": error} for row, error in zip(each, errors, strict=True)]
            reasons = [e for e in errors if isinstance(e, str)]
            if reasons:
                unavailable["temporal_error"] = reasons[0].removeprefix(_UNAVAILABLE)
            else:
                figures["temporal_error"] = fmean(e for e in errors if not isinstance(e, str))
        measured = _measured(name, figures, unavailable, cost, self._cost, handle.stats(), each)
        return measured, drawn

    def run_exact(self, jobs: int = 1) -> None:
        with applied(self.model, Policy(recipe="exact")):
            self._draw("exact", min(jobs, len(self.jobs)), Cost(), patched=True)

    def _draw(self, name: str, count: int, cost: Cost, patched: bool) -> list[Tensor]:
        """The frames of the first `count` jobs."""
        torch.manual_seed(self.config.seed)  # for what a pipeline draws beside its own generator
        total, drawn = count * self.task.steps, []
        for number, (prompt, seed) in enumerate(self.jobs[:count]):
            before = number * self.task.steps
            self.progress(f"{name}, pictures", before, total)
            tick: Callable[[int], None] = lambda n, at=before: self.progress(f"{name}, pictures", at + n, total)  # type: ignore[misc]  # noqa: E731
            with measuring(self.device, cost, patched):
                frames = self._drawer.draw(prompt, seed, tick).frames
            drawn.append(frames)
        self.progress(f"{name}, pictures", total, total)
        return drawn


def _first(share: float, total: int) -> int:
    """How many of `total` a share is, at least one. ValueError for a share that is none."""
    if not 0 < share <= 1:
        raise ValueError(f"share must be more than 0 and at most 1; got {share!r}")
    return max(1, math.floor(share * total + 1e-9))


def _measured(
    name: str,
    figures: dict[str, float],
    unavailable: dict[str, str],
    cost: Cost,
    baseline: Cost,
    calls: list[dict[str, Any]],
    each: list[dict[str, Any]],
) -> Measured:
    """The row of one policy; the baseline's seconds are of the same first windows or pictures."""
    return Measured(
        name=name,
        metrics=figures,
        unavailable=unavailable | cost.why_not(),
        seconds=sum(cost.seconds),
        baseline_seconds=sum(baseline.seconds[: len(cost.seconds)]),
        attention_seconds=cost.attention_seconds,
        peak_memory=cost.peak_memory,
        calls=calls,
        each=each,
        fastest=cost.fastest(),
        baseline_fastest=baseline.fastest(len(cost.seconds)),
    )


def _apart(summary: dict[str, Any]) -> tuple[dict[str, float], dict[str, str]]:
    """(figures, reasons) of a summary in which a reason may stand for a figure; the worst of x is called worst_x."""
    figures: dict[str, float] = {}
    reasons: dict[str, str] = {}
    for key, value in summary.items():
        name = f"worst_{key.removesuffix('_worst')}" if key.endswith("_worst") else key
        if isinstance(value, str):
            reasons[name] = value.removeprefix(_UNAVAILABLE)
        else:
            figures[name] = value
    return figures, reasons
