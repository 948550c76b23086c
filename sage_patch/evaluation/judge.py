"""Measure any number of policies on one task, each against the same unpatched model with equal seeds.

A judge loads the model once and holds the unpatched model's answers in bounded memory, so that many policies can be
tried. Text tasks compare next-token distributions over windows and greedy continuations, picture tasks frames.
"""

from __future__ import annotations

import math
import textwrap
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from sage_patch.evaluation import metrics, picture_metrics
from sage_patch.evaluation.costs import Cost, measuring
from sage_patch.evaluation.drawing import Drawer
from sage_patch.evaluation.models import ModelError, load_pipeline, load_text_model
from sage_patch.evaluation.text_model import (
    Continuation,
    encode_prompt,
    forward_logits,
    generate_greedy,
    module_outputs,
    text_windows,
)
from sage_patch.patch import applied, device_of, model_hash, plan
from sage_patch.policy import Plan, Policy
from sage_patch.recipes import LADDER as LADDER
from sage_patch.schema import PictureTask, RunConfig, TextTask

Progress = Callable[[str, int, int], None]  # (what is going on, steps done, steps in all)
POLICY = "policy"  # the name of a configuration's own policy among the measured ones
UNPATCHED = "unpatched"
KEPT_BYTES = 4 << 30  # of the unpatched model's answers; those of later windows are computed again
_CALL = ("site", "recipe", "backend", "reason", "calls")  # a row of Handle.rows()
_NOT_FINITE = "not a number: the patched model's output is not finite"


@dataclass(frozen=True)
class Measured:
    """One policy on the task, against the unpatched model with equal seeds.

    metrics: by the keys of figures.FIGURES, and worst_x beside the mean x of pictures; one that does not exist here is
    absent, its reason in `unavailable`. seconds, attention_seconds: of the patched windows or pictures alone;
    baseline_seconds: the unpatched model's. peak_memory: bytes. seconds_per_step: median over all denoising steps, None
    if they are not told. fastest, baseline_fastest: seconds and attention_seconds of the fastest window or picture,
    patched and unpatched: on a machine that does other work too, the ones to compare; slowdown is their ratio. calls:
    Handle.rows() over the windows or pictures. prompt_calls: over a text task's continuations; short prompts run exact
    and then test nothing. each: the figures of every window or picture. texts: the continuations. outputs: errors of
    every site's output on the first window, with what it inherits from the layers before it. took: seconds with
    everything around. frames: [F, 3, H, W] of every picture; not in results.
    """

    name: str
    recipe: str
    metrics: dict[str, float]
    unavailable: dict[str, str]
    seconds: float
    baseline_seconds: float
    attention_seconds: float | None
    seconds_per_step: float | None
    peak_memory: int | None
    fastest: dict[str, float | None]
    baseline_fastest: dict[str, float | None]
    slowdown: float
    calls: list[dict[str, Any]]
    prompt_calls: list[dict[str, Any]] = field(default_factory=list)
    each: list[dict[str, Any]] = field(default_factory=list)
    texts: list[dict[str, Any]] = field(default_factory=list)
    outputs: list[dict[str, Any]] = field(default_factory=list)
    took: float = 0.0
    frames: list[Tensor] = field(default_factory=list, repr=False)

    def row(self) -> dict[str, Any]:
        """As results hold it."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "frames"}

    @classmethod
    def of(cls, row: dict[str, Any]) -> Measured:
        """What `row` gave, read back from JSON, which has null for the infinite PSNR of equal pictures."""
        return cls(**row | {"metrics": {k: math.inf if v is None else v for k, v in row["metrics"].items()}})

    @property
    def exact_sites(self) -> dict[str, str]:
        """The reason of every site of which no call ran quantized."""
        quantized = {row["site"] for row in self.calls if row["recipe"] != "exact"}
        return {row["site"]: row["reason"] for row in self.calls if row["site"] not in quantized | {"*"}}


@dataclass
class _Trial:
    """A policy while it is measured on windows."""

    name: str
    policy: Policy
    cost: Cost = field(default_factory=Cost)
    comparison: metrics.TextComparison = field(default_factory=metrics.TextComparison)
    calls: Counter[tuple[str, ...]] = field(default_factory=Counter)  # by all of _CALL but the last
    outputs: list[dict[str, Any]] = field(default_factory=list)
    texts: list[Continuation] = field(default_factory=list)
    prompt_calls: list[dict[str, Any]] = field(default_factory=list)
    took: float = 0.0


class Judge(ABC):
    """Made by `judge_for`. model: what apply() takes. num_steps: denoising steps of the task, None without."""

    def __init__(self, config: RunConfig, model: Any, progress: Progress):
        self.config = config
        self.kind: str = config.task.kind
        self.model = model
        self.progress = progress
        resolved = plan(model, Policy())  # also the first check that there are sites at all
        self.sites, self.has_steps = resolved.sites, resolved.has_steps
        self.num_steps = config.task.steps if isinstance(config.task, PictureTask) else None
        self.model_hash = model_hash(model)
        self.say: Callable[[str], None] = lambda text: None  # told what is worth reading before the figures are there
        self._cost = Cost()

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

    def baseline_facts(self) -> dict[str, Any]:
        """The unpatched model on the whole task, as results hold it."""
        self.baseline()
        return {"metrics": {}, "unavailable": self._cost.why_not(), **self._cost.row()}

    def measure(self, name: str, policy: Policy) -> Measured:
        """One policy on the task. Raises PolicyError if it does not fit."""
        return self.measure_all({name: policy})[0]

    @abstractmethod
    def measure_all(self, policies: Mapping[str, Policy]) -> list[Measured]:
        """Policies by name on the task, those of a language model window by window, under like conditions."""

    @abstractmethod
    def run_exact(self, jobs: int = 1) -> None:
        """Run the first windows or pictures patched with `exact`, so that observers of the operator see every call."""

    def _measured(
        self, name: str, policy: Policy, cost: Cost, figures: dict[str, float], reasons: dict[str, str], **more: Any
    ) -> Measured:
        """A figure that is not a number is unavailable."""
        lost = {key: _NOT_FINITE for key, value in figures.items() if math.isnan(value)}
        own, base = cost.row(), self._cost.row()
        return Measured(
            name=name,
            recipe=policy.recipe,
            metrics={key: value for key, value in figures.items() if key not in lost},
            unavailable=reasons | lost | cost.why_not(),
            baseline_seconds=base["seconds"],
            baseline_fastest=base["fastest"],
            slowdown=own["fastest"]["seconds"] / base["fastest"]["seconds"],
            **own,
            **more,
        )


def judge_for(config: RunConfig, progress: Progress, kept_bytes: int = KEPT_BYTES) -> Judge:
    """The judge of the configuration's task, its model loaded.

    kept_bytes: what of a language model's unpatched answers may be kept for later policies. Raises ModelError,
    PatchError or OwnAttentionError.
    """
    if config.model.meta:
        raise ModelError("model.meta gives a model without weights, which only `plan` can use; measuring needs weights")
    torch.manual_seed(config.seed)
    once = ", which is converted to transformers' format the first time (under a minute)" if config.model.gguf else ""
    progress(f"loading the model{once}", 0, 1)
    text = config.task.kind == "text"
    judge: Judge = TextJudge(config, progress, kept_bytes) if text else PictureJudge(config, progress)
    progress("loading the model", 1, 1)
    return judge


class TextJudge(Judge):
    """Windows of real text for the distributions, the task's prompts for the greedy continuations."""

    def __init__(self, config: RunConfig, progress: Progress, kept_bytes: int = KEPT_BYTES):
        assert isinstance(config.task, TextTask)
        self.task = config.task
        model, self.tokenizer = load_text_model(config.model)
        super().__init__(config, model, progress)
        self.windows = text_windows(self.tokenizer, self.task, model)
        self._prompts = [encode_prompt(self.tokenizer, prompt) for prompt in self.task.prompts]
        self._room = kept_bytes
        self._kept: dict[int, tuple[Tensor, dict[str, Tensor]]] = {}
        self._texts: list[Continuation] = []
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
        if not self._texts:
            self._texts = self._continue(UNPATCHED)
        for number in range(len(self._cost.seconds), len(self.windows)):
            self.progress(f"windows, {UNPATCHED}", number, len(self.windows))
            self._answer(number)

    def baseline_facts(self) -> dict[str, Any]:
        facts = super().baseline_facts()
        prompts = [
            {"prompt": prompt, "prompt_tokens": inputs["input_ids"].shape[1], **text.row()}
            for prompt, inputs, text in zip(self.task.prompts, self._prompts, self._texts, strict=True)
        ]
        return facts | {"metrics": {"ppl": math.exp(fmean(self._nll))}, "texts": prompts}

    @torch.no_grad()
    def measure_all(self, policies: Mapping[str, Policy]) -> list[Measured]:
        trials = [_Trial(name, policy) for name, policy in policies.items()]
        for trial in trials:
            self.plan(trial.policy)  # an error here costs no computation
        if not self._texts:
            self._texts = self._continue(UNPATCHED)
        for trial in trials:
            self._write(trial)
        total = len(self.windows) * len(trials)
        for number in range(len(self.windows)):
            answer = self._answer(number)
            for i, trial in enumerate(trials):
                self.progress(f"windows, {trial.name}", number * len(trials) + i, total)
                self._compare(trial, number, *answer)
        self.baseline()  # what is left of it
        return [self._finish(trial) for trial in trials]

    def _compare(self, trial: _Trial, number: int, exact: Tensor, exact_outputs: dict[str, Tensor]) -> None:
        begun, tokens = time.monotonic(), self.windows[number]
        with applied(self.model, trial.policy) as handle, module_outputs(self.model, exact_outputs) as outputs:
            with measuring(self.device, trial.cost, patched=True):
                logits = forward_logits(self.model, tokens)
        # After the forward pass, so that its memory is not counted.
        trial.comparison.add(logits, metrics.ExactWindow(exact.to(self.device), tokens))
        for row in handle.rows():
            trial.calls[tuple(row[name] for name in _CALL[:-1])] += row["calls"]
        trial.outputs += [{"site": n} | metrics.errors(outputs[n], exact_outputs[n]) for n in outputs]
        trial.took += time.monotonic() - begun

    def _write(self, trial: _Trial) -> None:
        begun = time.monotonic()
        with applied(self.model, trial.policy) as handle:
            trial.texts = self._continue(trial.name)
        trial.prompt_calls = handle.rows()
        trial.took += time.monotonic() - begun

    def _finish(self, trial: _Trial) -> Measured:
        texts = trial.texts
        agreements = [metrics.greedy_agreement(a.tokens, e.tokens) for a, e in zip(texts, self._texts, strict=True)]
        return self._measured(
            trial.name,
            trial.policy,
            trial.cost,
            trial.comparison.summary() | {"agreement": fmean(agreements)},
            {},
            calls=[dict(zip(_CALL, (*key, n), strict=True)) for key, n in trial.calls.items()],
            prompt_calls=trial.prompt_calls,
            each=trial.comparison.rows(),
            texts=[text.row() | {"agreement": same} for text, same in zip(texts, agreements, strict=True)],
            outputs=trial.outputs,
            took=trial.took,
        )

    @torch.no_grad()
    def run_exact(self, jobs: int = 1) -> None:
        with applied(self.model, Policy(recipe="exact")):
            for tokens in self.windows[:jobs]:
                forward_logits(self.model, tokens)

    def _answer(self, number: int) -> tuple[Tensor, dict[str, Tensor]]:
        """The unpatched model's logits of a window and, of the first, the outputs of its sites; both on the CPU.

        Kept as far as there is room; timed the first time.
        """
        if number in self._kept:
            return self._kept[number]
        tokens, first = self.windows[number], number == len(self._cost.seconds)
        if first and number == 0:
            forward_logits(self.model, tokens[:32])  # the first call of a process is slower than the others
        with module_outputs(self.model, [s.name for s in self.sites] if number == 0 else []) as outputs:
            with measuring(self.device, self._cost if first else Cost(), patched=False):
                logits = forward_logits(self.model, tokens)
        if first:
            self._nll.append(metrics.ExactWindow(logits, tokens).nll)
        answer = logits.float().cpu(), outputs
        size = sum(t.numel() * t.element_size() for t in (answer[0], *outputs.values()))
        if size <= self._room:
            self._room -= size
            self._kept[number] = answer
        return answer

    def _continue(self, name: str) -> list[Continuation]:
        """Every prompt's greedy continuation by the model as it is."""
        budget, total = self.task.max_new_tokens, self.task.max_new_tokens * len(self._prompts)
        texts = [
            generate_greedy(
                self.model, self.tokenizer, inputs, budget,
                lambda n, at=i * budget: self.progress(f"prompts, {name}", at + n, total),  # type: ignore[misc]
            )
            for i, inputs in enumerate(self._prompts)
        ]  # fmt: skip
        for prompt, text in zip(self.task.prompts, texts, strict=True):
            asked, said = textwrap.shorten(prompt, 40), textwrap.shorten(text.text, 300)
            self.say(f"{name}: {asked} -> {said}")
        return texts


class PictureJudge(Judge):
    """Every prompt of the task drawn from every seed, and compared frame by frame."""

    def __init__(self, config: RunConfig, progress: Progress):
        assert isinstance(config.task, PictureTask)
        missing = picture_metrics.missing_library()
        if missing is not None:
            raise ModelError(missing)
        self.task = config.task
        self.jobs = [(p, seed) for p in self.task.prompts for seed in self.task.seeds or [config.seed]]
        super().__init__(config, load_pipeline(config.model), progress)
        self._drawer = Drawer(self.model, config.model, self.task)
        self._frames: list[Tensor] = []

    @property
    def device(self) -> torch.device:
        return device_of(self.model)

    def facts(self) -> dict[str, Any]:
        patched = {site.name.partition(".")[0] for site in self.sites}
        parts = {name: part for name, part in self.model.components.items() if isinstance(part, nn.Module)}
        return {
            "class": type(self.model).__name__,
            "denoisers": {name: type(part).__name__ for name, part in parts.items() if name in patched},
            "parameters": sum(p.numel() for part in parts.values() for p in part.parameters()),
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "device": str(self.device),
        }

    def baseline(self) -> None:
        if not self._frames:
            # The first call of a process is slower than the others.
            self._drawer.draw(*self.jobs[0], tick=lambda step: None, steps=min(2, self.task.steps))
            self._frames = self._draw(UNPATCHED, len(self.jobs), self._cost, patched=False)

    @property
    def frames(self) -> list[Tensor]:
        """The unpatched model's frames [F, 3, H, W] of every job."""
        self.baseline()
        return self._frames

    def measure_all(self, policies: Mapping[str, Policy]) -> list[Measured]:
        for policy in policies.values():
            self.plan(policy)  # an error here costs no computation
        self.baseline()
        return [self._try(name, policy) for name, policy in policies.items()]

    def _try(self, name: str, policy: Policy) -> Measured:
        begun, cost = time.monotonic(), Cost()
        with applied(self.model, policy) as handle:
            drawn = self._draw(name, len(self.jobs), cost, patched=True)
        compared = [picture_metrics.compare(a, e, self.kind) for a, e in zip(drawn, self._frames, strict=True)]
        figures, reasons = picture_metrics.summary(compared)
        each = [
            {"prompt": prompt, "seed": seed, "metrics": picture_metrics.summary([c])[0], "frames": c.frames}
            for (prompt, seed), c in zip(self.jobs, compared, strict=True)
        ]
        more = {"calls": handle.rows(), "each": each, "frames": drawn, "took": time.monotonic() - begun}
        return self._measured(name, policy, cost, figures, reasons, **more)

    def run_exact(self, jobs: int = 1) -> None:
        with applied(self.model, Policy(recipe="exact")):
            self._draw("exact", min(jobs, len(self.jobs)), Cost(), patched=True)

    def _draw(self, name: str, count: int, cost: Cost, patched: bool) -> list[Tensor]:
        """The frames of the first `count` jobs."""
        torch.manual_seed(self.config.seed)  # for what a pipeline draws beside its own generator
        total, frames = count * self.task.steps, []
        for number, (prompt, seed) in enumerate(self.jobs[:count]):
            before = number * self.task.steps
            self.progress(f"pictures, {name}", before, total)
            tick: Callable[[int], None] = lambda n, at=before: self.progress(f"pictures, {name}", at + n, total)  # type: ignore[misc]  # noqa: E731
            with measuring(self.device, cost, patched):
                drawn = self._drawer.draw(prompt, seed, tick)
            cost.step_seconds += drawn.step_seconds
            frames.append(drawn.frames)
        self.progress(f"pictures, {name}", total, total)
        return frames
