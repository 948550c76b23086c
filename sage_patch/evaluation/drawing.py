"""Draw one picture or clip with a diffusers pipeline, as a task describes it, and time its steps.

Nothing here knows a pipeline by name. What a call takes is read from its signature, and what a pipeline without a text
encoder or an autoencoder needs instead is said by the run's `model` section.
"""

from __future__ import annotations

import inspect
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sage_patch.errors import ModelError
from sage_patch.evaluation.models import callbacks_of
from sage_patch.patch import device_of
from sage_patch.recipes import nearest
from sage_patch.schema import ModelSpec, PictureTask

_OURS = {"prompt", "negative_prompt", "generator", "output_type", "return_dict", "latents"}
_OURS |= {"callback_on_step_end", "callback_on_step_end_tensor_inputs"}


@dataclass(frozen=True)
class Drawn:
    """frames: [F, 3, H, W] from 0 to 1, float32 on the CPU; one frame for a picture. seconds: the whole call's.

    step_seconds: from the end of one step to the end of the next, so without the first; empty if not told.
    """

    frames: Tensor
    seconds: float
    step_seconds: list[float]


class Drawer:
    """A pipeline and the arguments that every picture of a task shares. Raises ModelError if they do not fit."""

    def __init__(self, pipeline: Any, model: ModelSpec, task: PictureTask):
        self.pipeline = pipeline
        self.task = task
        self.device = device_of(pipeline)
        self._pixels = model.latents_are_pixels
        self._known = inspect.signature(type(pipeline).__call__).parameters
        self._shared = self._arguments(task)
        self._callbacks = callbacks_of(pipeline, task.callbacks)
        self._table = _PromptTable(model) if model.prompt_table is not None else None
        if self._table is not None and task.negative_prompt is not None:
            raise ModelError(
                "task.negative_prompt is text, and this model takes its prompts from model.prompt_table, "
                "whose last row is its negative prompt: leave it out"
            )
        for prompt in task.prompts:
            self._prompt(prompt)  # an error here costs no computation

    def draw(self, prompt: str | int, seed: int, tick: Callable[[int], None], steps: int | None = None) -> Drawn:
        """One picture. The noise is drawn on the CPU, so that a seed means the same on every device.

        tick is called with the number of steps done. steps: the task's if left out.
        """
        ends: list[float] = []

        def step_done(pipeline: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            self._wait()
            ends.append(time.perf_counter())
            tick(step + 1)
            for callback in self._callbacks:
                tensors = callback(pipeline, step, timestep, tensors)
            return tensors

        arguments = self._shared | self._prompt(prompt)
        arguments |= {"num_inference_steps": steps} if steps is not None else {}
        arguments["generator"] = torch.Generator().manual_seed(seed)
        arguments["output_type"] = "latent" if self._pixels else "pt"
        if "callback_on_step_end" in self._known:
            arguments["callback_on_step_end"] = step_done
        if self._callbacks:
            inputs = [name for callback in self._callbacks for name in callback.tensor_inputs]
            arguments["callback_on_step_end_tensor_inputs"] = list(dict.fromkeys(["latents", *inputs]))
        self._wait()
        start = time.perf_counter()
        with torch.no_grad():
            out = self.pipeline(**arguments)[0]
        self._wait()
        seconds = time.perf_counter() - start
        return Drawn(self._frames(out), seconds, [b - a for a, b in zip(ends, ends[1:], strict=False)])

    def _arguments(self, task: PictureTask) -> dict[str, Any]:
        """The task's arguments of the pipeline's call, each checked against its signature."""
        taken = sorted(set(task.arguments) & (_OURS | {"num_inference_steps"}))
        if taken:
            raise ModelError(f"task.arguments.{taken[0]}: is set by the run itself, from the task's other keys")
        given = {n: getattr(task, n) for n in ("guidance_scale", "height", "width", "num_frames", "negative_prompt")}
        given = {name: value for name, value in given.items() if value is not None}
        given = {"num_inference_steps": task.steps, **given, **task.arguments}
        for name in given:
            if name not in self._known:
                key = "task.steps" if name == "num_inference_steps" else f"task.{name}"
                key = f"task.arguments.{name}" if name in task.arguments else key
                raise ModelError(
                    f"{key}: {type(self.pipeline).__name__} has no argument {name!r}{nearest(name, list(self._known))}"
                )
        return given

    def _prompt(self, prompt: str | int) -> dict[str, Any]:
        if self._table is not None:
            rows = self._table.arguments(prompt, self._known)
            dtype = self.pipeline.dtype  # of embeddings; class labels stay whole numbers
            return {n: r.to(self.device, dtype if r.is_floating_point() else None) for n, r in rows.items()}
        if not isinstance(prompt, str):
            raise ModelError(f"task.prompts: {prompt} is a number, and there is no model.prompt_table to look it up")
        return {"prompt": prompt}

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _frames(self, out: Any) -> Tensor:
        """[F, 3, H, W] from what the pipeline returned: [1, C, H, W], [1, F, C, H, W], or pixels as latents."""
        if not isinstance(out, Tensor):
            raise ModelError(f"{type(self.pipeline).__name__} returned {type(out).__name__}s, not a tensor of pictures")
        if self._pixels:
            if out.dim() == 3:  # tokens of 2 x 2 pixels
                task, scale = self.task, self.pipeline.vae_scale_factor
                if task.height is None or task.width is None:
                    raise ModelError("task.height and task.width are needed to unpack this pipeline's latents")
                out = self.pipeline._unpack_latents(out, task.height, task.width, scale)
            if out.dim() == 5:
                out = out.transpose(1, 2)  # latents have their channels before their frames
            out = (out / 2 + 0.5).clamp(0, 1)
        frames = out.reshape(-1, *out.shape[-3:])
        return frames.float().cpu().expand(-1, 3, -1, -1).contiguous()


class _PromptTable:
    """Learned prompts in place of a text encoder; `ModelSpec` says what the file holds."""

    def __init__(self, model: ModelSpec):
        from safetensors import safe_open

        assert model.path is not None and model.prompt_table is not None
        self._file = Path(model.path) / model.prompt_table
        if not self._file.is_file():
            raise ModelError(f"model.prompt_table: no such file: {self._file}")
        with safe_open(self._file, framework="pt") as file:
            self._rows = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
            self._names: list[str] = json.loads((file.metadata() or {}).get("names", "[]"))
        self._count = min(len(rows) for rows in self._rows.values()) - 1

    def arguments(self, prompt: str | int, known: Any) -> dict[str, Tensor]:
        """Rows [1, ...] for the arguments they are named after; the unconditional row is the negative prompt."""
        if isinstance(prompt, str) and prompt not in self._names:
            raise ModelError(
                f"task.prompts: {prompt!r} is not in {self._file.name}{nearest(prompt, self._names)}; "
                f"it has {', '.join(self._names) or f'numbers only, 0 to {self._count - 1}'}"
            )
        row = self._names.index(prompt) if isinstance(prompt, str) else prompt
        if row >= self._count:
            raise ModelError(f"task.prompts: {self._file.name} has the prompts 0 to {self._count - 1}; got {row}")
        found = {name: rows[row : row + 1] for name, rows in self._rows.items()}
        found |= {f"negative_{name}": rows[-1:] for name, rows in self._rows.items()}
        return {name: row for name, row in found.items() if name in known}
