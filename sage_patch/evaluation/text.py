"""The text run: generate with and without the policy, and measure it on paired windows of real text.

Every window passes once through the unpatched model and then through each measured recipe before the next window
is read, so that memory holds one window's logits however long the run is, and the pairs share their conditions.
"""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from sage_patch.evaluation import metrics
from sage_patch.evaluation.bounds import check_bounds
from sage_patch.evaluation.environment import environment
from sage_patch.evaluation.models import ModelError, load_text_model
from sage_patch.patch import applied, plan
from sage_patch.policy import Plan, Policy
from sage_patch.schema import RunConfig, TextTask

Progress = Callable[[str, int, int], None]  # (what is going on, steps done, steps in all)
POLICY = "policy"  # the name of the run's own policy among the measured ones


@dataclass
class Measured:
    """One policy on trial and what was seen of it."""

    name: str
    policy: Policy
    comparison: metrics.TextComparison = field(default_factory=metrics.TextComparison)
    seconds: list[float] = field(default_factory=list)  # one a window
    calls: Counter[tuple[str, str, str, str]] = field(default_factory=Counter)  # site, recipe, backend, reason
    sites: list[dict[str, Any]] = field(default_factory=list)  # errors of each site's output on the first window


def run_text(config: RunConfig, command: str, progress: Progress) -> dict[str, Any]:
    """Run the configuration and return everything that results.json holds.

    Raises ModelError if the model or the text does not fit, PolicyError or PatchError if the policy does not.
    """
    started = time.perf_counter()
    task = config.task
    assert isinstance(task, TextTask)
    if config.model.meta:
        raise ModelError("model.meta gives a model without weights, which only `plan` can use; a run needs weights")
    once = ", which is converted to transformers' format the first time (under a minute)" if config.model.gguf else ""
    progress(f"loading the model{once}", 0, 1)
    model, tokenizer = load_text_model(config.model)
    policy = config.policy.build()
    torch.manual_seed(config.seed)
    resolved = plan(model, policy)  # an error here costs no computation
    windows = text_windows(tokenizer, task, model)
    progress("loading the model", 1, 1)

    trials = [Measured(POLICY, policy)]
    trials += [Measured(name, replace(policy, recipe=name, rules=())) for name in config.compare]
    generation = _compare_generation(model, tokenizer, task, policy, progress)
    exact_seconds = _compare_windows(model, windows, resolved, trials, progress)

    quality = [_quality(trial, exact_seconds) for trial in trials]
    targets = check_targets(config, quality)
    parameters = list(model.parameters())
    return {
        "schema": 1,
        "kind": "text",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
        "environment": environment(),
        "config": near(config.model_dump(mode="json", exclude_none=True)),
        "model": {
            "class": type(model).__name__,
            "parameters": sum(p.numel() for p in parameters),
            "dtype": str(parameters[0].dtype).removeprefix("torch."),
            "device": str(parameters[0].device),
        },
        "text": {"windows": len(windows), "window_tokens": windows.shape[1], "file": near(task.text)},
        "exact_seconds_per_window": exact_seconds,
        "plan": resolved.rows(),
        "quality": quality,
        "generation": generation,
        "targets": targets,
        "passed": all(t["met"] for t in targets),
        "seconds": time.perf_counter() - started,
    }


def text_windows(tokenizer: Any, task: TextTask, model: nn.Module) -> Tensor:
    """Tokens [windows, window_tokens] of the task's text, evenly spread over it, on the model's device."""
    longest = getattr(model.config, "max_position_embeddings", None)
    if longest is not None and task.window_tokens > longest:
        raise ModelError(f"task.window_tokens is {task.window_tokens}, and the model reads at most {longest} tokens")
    text = Path(task.text).read_text(encoding="utf-8")
    tokens = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    needed = task.windows * task.window_tokens
    if len(tokens) < needed:
        raise ModelError(
            f"{task.text} holds {len(tokens)} tokens; {task.windows} windows of {task.window_tokens} need {needed}: "
            "take fewer or shorter windows, or a longer text"
        )
    stride = (len(tokens) - task.window_tokens) // max(task.windows - 1, 1)
    pieces = [tokens[i * stride : i * stride + task.window_tokens] for i in range(task.windows)]
    return torch.tensor(pieces, device=next(model.parameters()).device)


def check_targets(config: RunConfig, quality: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The configuration's bounds against `_quality` rows; of a change the size alone is shown."""
    found = {q["name"]: q for q in quality}
    return check_bounds(config, lambda name, m: abs(found[name][m]) if m == "ppl_change" else found[name][m])


def near(value: Any) -> Any:
    """Paths inside the current folder relative to it, so that results can be shared and compared."""
    if isinstance(value, dict):
        return {k: near(v) for k, v in value.items()}
    return value.removeprefix(f"{Path.cwd()}/") if isinstance(value, str) else value


@torch.no_grad()
def _compare_windows(
    model: nn.Module, windows: Tensor, resolved: Plan, trials: list[Measured], progress: Progress
) -> float:
    """Fill the trials; returns the unpatched model's mean seconds a window."""
    exact_seconds = []
    names = [s.name for s in resolved.sites]
    steps, done = len(windows) * (1 + len(trials)), 0
    for number, tokens in enumerate(windows):
        label = f"window {number + 1} of {len(windows)}"
        progress(f"{label}, unpatched", done, steps)
        with _outputs(model, names if number == 0 else []) as exact_outputs:
            logits, seconds = forward_logits(model, tokens)
        exact = metrics.ExactWindow(logits, tokens)
        exact_seconds.append(seconds)
        done += 1
        for trial in trials:
            progress(f"{label}, {trial.name}", done, steps)
            with applied(model, trial.policy) as handle, _outputs(model, list(exact_outputs)) as outputs:
                logits, seconds = forward_logits(model, tokens)
            trial.comparison.add(logits, exact)
            trial.seconds.append(seconds)
            for row in handle.rows():
                trial.calls[row["site"], row["recipe"], row["backend"], row["reason"]] += row["calls"]
            trial.sites += [_site_error(name, outputs[name], exact_outputs[name]) for name in outputs]
            done += 1
    progress("windows", done, steps)
    return fmean(exact_seconds)


def forward_logits(model: nn.Module, tokens: Tensor) -> tuple[Tensor, float]:
    """(logits [T, vocab] of one window, seconds the forward took)."""
    start = time.perf_counter()
    logits = model(input_ids=tokens[None], use_cache=False).logits[0]
    if logits.is_cuda:
        torch.cuda.synchronize(logits.device)
    return logits, time.perf_counter() - start


@contextmanager
def _outputs(model: nn.Module, names: list[str]) -> Iterator[dict[str, Tensor]]:
    """Collects the outputs of the named modules while the block runs."""
    found: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            found[name] = (output[0] if isinstance(output, tuple) else output).detach()

        return hook

    hooks = [model.get_submodule(name).register_forward_hook(keep(name)) for name in names]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _site_error(name: str, output: Tensor, exact: Tensor) -> dict[str, Any]:
    return {
        "name": name,
        "cosine": metrics.cosine(output, exact),
        "rel_l1": metrics.relative_l1(output, exact),
        "worst_row": metrics.worst_row(output, exact),
    }


def _quality(trial: Measured, exact_seconds: float) -> dict[str, Any]:
    calls = [
        {"site": site, "recipe": recipe, "backend": backend, "reason": reason, "calls": n}
        for (site, recipe, backend, reason), n in trial.calls.items()
    ]
    seconds = fmean(trial.seconds)
    return {
        "name": trial.name,
        "recipe": trial.policy.recipe,
        **trial.comparison.summary(),
        "seconds_per_window": seconds,
        "slowdown": seconds / exact_seconds,
        "calls": calls,
        "sites": trial.sites,
    }


def _compare_generation(
    model: nn.Module, tokenizer: Any, task: TextTask, policy: Policy, progress: Progress
) -> dict[str, Any]:
    """Greedy continuations of the prompts by the unpatched model and under the policy, and the policy's calls."""
    budget = task.max_new_tokens * len(task.prompts)
    prompts = [encode_prompt(tokenizer, prompt) for prompt in task.prompts]

    def generate_all(label: str) -> list[tuple[list[int], float]]:
        return [
            generate_greedy(model, tokenizer, p, task.max_new_tokens, lambda n, i=i: progress(label, i + n, budget))  # type: ignore[misc]
            for i, p in zip(range(0, budget, task.max_new_tokens), prompts, strict=True)
        ]

    exact = generate_all("generating, unpatched")
    with applied(model, policy) as handle:
        patched = generate_all("generating, policy")
    progress("generating, policy", budget, budget)
    rows = []
    for prompt, inputs, (tokens, seconds), (expected, exact_seconds) in zip(
        task.prompts, prompts, patched, exact, strict=True
    ):
        rows.append(
            {
                "prompt": prompt,
                "prompt_tokens": inputs["input_ids"].shape[1],
                "exact": _said(tokenizer, expected, exact_seconds),
                "policy": _said(tokenizer, tokens, seconds),
                "agreement": metrics.greedy_agreement(tokens, expected),
            }
        )
    return {"prompts": rows, "agreement": fmean(r["agreement"] for r in rows), "calls": handle.rows()}


def encode_prompt(tokenizer: Any, prompt: str) -> Any:
    """The prompt as one user turn if the model has a chat template, else as it stands."""
    if getattr(tokenizer, "chat_template", None):
        turn = [{"role": "user", "content": prompt}]
        return tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    return tokenizer(prompt, return_tensors="pt")


class _Ticker:
    """What generate() calls a streamer: told of the prompt first, then of every new token."""

    def __init__(self, tick: Callable[[int], None]):
        self._tick = tick
        self._count = -1

    def put(self, value: Tensor) -> None:
        self._count += 1
        self._tick(self._count)

    def end(self) -> None:
        return None


def generate_greedy(
    model: nn.Module, tokenizer: Any, inputs: Any, max_new_tokens: int, tick: Callable[[int], None]
) -> tuple[list[int], float]:
    """(new tokens of the greedy continuation, seconds)."""
    settings: Any = copy.deepcopy(model.generation_config)
    settings.do_sample, settings.max_new_tokens = False, max_new_tokens
    settings.temperature = settings.top_p = settings.top_k = None  # they only speak when sampling
    if settings.pad_token_id is None:
        settings.pad_token_id = tokenizer.eos_token_id
    inputs = {
        k: v.to(next(model.parameters()).device) for k, v in inputs.items() if k in ("input_ids", "attention_mask")
    }
    start = time.perf_counter()
    with torch.no_grad():
        out = model.generate(**inputs, generation_config=settings, streamer=_Ticker(tick))  # type: ignore[operator]
    new = out[0, inputs["input_ids"].shape[1] :].tolist()
    return new, time.perf_counter() - start


def _said(tokenizer: Any, tokens: list[int], seconds: float) -> dict[str, Any]:
    text = tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return {"text": text, "tokens": len(tokens), "seconds": seconds, "tokens_per_second": len(tokens) / seconds}
