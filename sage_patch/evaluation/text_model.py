"""What measuring needs of a language model: windows of real text, logits, outputs of modules, greedy continuations."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sage_patch.errors import ModelError
from sage_patch.patch import device_of
from sage_patch.schema import TextTask


@dataclass(frozen=True)
class Continuation:
    """A greedy continuation of a prompt."""

    tokens: list[int]
    text: str
    seconds: float

    def row(self) -> dict[str, Any]:
        """As results hold it; tokens are counted."""
        return {"text": self.text, "tokens": len(self.tokens), "seconds": self.seconds}


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
    return torch.tensor(pieces, device=device_of(model))


def forward_logits(model: nn.Module, tokens: Tensor) -> Tensor:
    """Logits [T, vocab] of one window."""
    logits: Tensor = model(input_ids=tokens[None], use_cache=False).logits[0]
    return logits


@contextmanager
def module_outputs(model: nn.Module, names: Iterable[str]) -> Iterator[dict[str, Tensor]]:
    """Collects the outputs of the named modules, on the CPU, while the block runs."""
    found: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            found[name] = (output[0] if isinstance(output, tuple) else output).detach().cpu()

        return hook

    hooks = [model.get_submodule(name).register_forward_hook(keep(name)) for name in names]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def encode_prompt(tokenizer: Any, prompt: str) -> Any:
    """The prompt as one user turn if the model has a chat template, else as it stands."""
    if getattr(tokenizer, "chat_template", None):
        turn = [{"role": "user", "content": prompt}]
        return tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    return tokenizer(prompt, return_tensors="pt")


class _TokenCounter:
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
) -> Continuation:
    """The greedy continuation of an encoded prompt. tick: told the number of new tokens."""
    settings: Any = copy.deepcopy(model.generation_config)
    settings.do_sample, settings.max_new_tokens = False, max_new_tokens
    settings.temperature = settings.top_p = settings.top_k = None  # they only speak when sampling
    if settings.pad_token_id is None:
        settings.pad_token_id = tokenizer.eos_token_id
    device = device_of(model)
    inputs = {k: v.to(device) for k, v in inputs.items() if k in ("input_ids", "attention_mask")}
    start = time.perf_counter()
    with torch.no_grad():
        out = model.generate(**inputs, generation_config=settings, streamer=_TokenCounter(tick))  # type: ignore[operator]
    tokens = out[0, inputs["input_ids"].shape[1] :].tolist()
    seconds = time.perf_counter() - start
    text = tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return Continuation(tokens, text, seconds)
