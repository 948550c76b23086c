"""Which denoising step of the request is running, and the tags that its sites carry then.

StepSwitch holds the tags: it gives every site whose recipe depends on the step the tag of the step at hand, or, where
no step is known, a tag that refuses calls. StepClock tells it the step, or any other StepListener, by following the
pipeline's scheduler object: one `step` of the scheduler ends one model evaluation, whether guidance took one call or
two, on whichever expert. No hook on the model (it would break full-graph compilation) and no timestep is read (it would
wait for the GPU).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol

from torch import Tensor, nn

from sage_patch.integrations.source import runs_on_scheduler_copies
from sage_patch.integrations.tags import TAG, SiteTag
from sage_patch.policy import Choice, Plan, PolicyError
from sage_patch.recipes import parse_recipe

_UNKNOWN = (
    "no denoising step is known: the scheduler that the pipeline had at apply() has not begun a request, has ended it "
    "or was replaced. After replacing a scheduler revert and apply again; in a loop of your own, or for a model "
    "without a pipeline, call handle.step(step, num_steps) before each step"
)


def stepped_sites(plan: Plan) -> list[str]:
    """Names of the sites whose recipe, or what happens where it cannot run, depends on the denoising step."""
    changes = {
        i for i, r in enumerate(plan.policy.rules) if r.steps is not None and (r.recipe or r.on_unsupported) is not None
    }
    return [name for name, rules in plan.matches.items() if not changes.isdisjoint(rules)]


class StepListener(Protocol):
    """What a StepClock tells the running step."""

    def enter(self, step: int, num_steps: int) -> None:
        """Step `step` (from 0) of `num_steps` runs next; PolicyError if that cannot be."""

    def leave(self, why: str = ...) -> None:
        """No step is running."""


class StepSwitch:
    """Puts the tag of the running step on every site that has rules by step.

    sites: (name, module, the tag it would carry without steps). A tag depends on the site and its choice alone: a
    later step or request with the same choice gets the very same object, so that compiled graphs are found again.
    """

    def __init__(self, plan: Plan, sites: list[tuple[str, nn.Module, SiteTag]]):
        self._plan = plan
        self._sites = sites
        self._tags: dict[tuple[str, str, str], SiteTag] = {}
        self._choices: dict[int, list[Mapping[str, Choice]]] = {}  # by num_steps: the choices at every step

    def enter(self, step: int, num_steps: int) -> None:
        """Step `step` (from 0) of `num_steps` runs next. PolicyError if the rules give too many plans."""
        if num_steps not in self._choices:
            self._choices[num_steps] = _by_step(self._plan, num_steps)
        choices = self._choices[num_steps][step]
        for name, module, base in self._sites:
            module.__dict__[TAG] = self._tag(name, base, choices[name])

    def leave(self, why: str = _UNKNOWN) -> None:
        """No step is running: calls of these sites are refused with `why`."""
        for name, module, base in self._sites:
            refusal = f"the recipe of {name!r} depends on the denoising step, and {why}"
            module.__dict__[TAG] = replace(base, refusal=refusal, by_step=True)

    def _tag(self, name: str, base: SiteTag, choice: Choice) -> SiteTag:
        key = (name, choice.recipe, choice.on_unsupported)
        if key not in self._tags:
            recipe = parse_recipe(self._plan.runs(choice.recipe))
            self._tags[key] = replace(base, recipe=recipe, on_unsupported=choice.on_unsupported, by_step=True)
        return self._tags[key]


class StepClock:
    """Follows the scheduler of one pipeline from attach() to detach().

    A request begins at the scheduler's `set_timesteps` and counts the model evaluations that it runs: with an image
    to start from, position 0 is the first step that is run. The scheduler keeps its object and name; its class becomes
    a subclass. Nothing raises from there: another pipeline may use the same scheduler, and the sites refuse instead.
    """

    def __init__(self, pipeline: Any, scheduler: Any, switch: StepListener, name: str = "scheduler"):
        self.scheduler = scheduler
        self._name = name  # of the pipeline's component
        self._pipeline = pipeline
        self._loops = [] if scheduler is None else _loops(getattr(pipeline, "_blocks", None))
        self._timesteps: Any = None  # of this request, whatever the scheduler's own are copied to
        self._told: int | None = None  # evaluations, where the pipeline's loop says how many
        self._switch = switch
        self._class = type(scheduler)
        self._start = 0  # position in the schedule of the first evaluation that this request runs
        self._done: int | None = None  # evaluations that are over; None: no request, or steps are told by hand
        self._index: int | None = None  # the scheduler's own index after its last step

    def attach(self) -> None:
        self.scheduler.__class__ = _followed(self._class, self)
        for loop in self._loops:
            loop.__class__ = _announcing(type(loop), self)

    def detach(self) -> None:
        self.scheduler.__class__ = self._class
        for loop in self._loops:
            loop.__class__ = type(loop)._sage_patch_original
        self._mark_length(int)

    @property
    def in_place(self) -> bool:
        """Whether the pipeline still has the scheduler that is followed."""
        return getattr(self._pipeline, self._name, None) is self.scheduler

    def ignore_request(self) -> None:
        """Steps are told by hand until the scheduler begins another request."""
        self._done = None

    def before(self) -> None:
        """Any followed method is about to run. A pipeline may have wound its scheduler back to take a step again."""
        index = getattr(self.scheduler, "step_index", None)
        if self._done is None or self._index is None:
            return
        if index is None:
            self._done, self._index = 0, None
        elif index < self._index:
            self._done = max(0, self._done - (self._index - index))
            self._index = index

    def after(self, method: str, timestep: Any) -> None:
        """A method of the scheduler has run; timestep: what `scale_model_input` was given."""
        if method == "set_timesteps":
            self._done, self._index, self._told = 0, None, None
            self._timesteps = self.scheduler.timesteps
            self._start = self._begin_index()
            self._mark_length(_EarlierLength)
        elif self._done is None:
            return
        elif method == "step":
            place = self._place(timestep)
            self._done = self._done + 1 if place is None else max(0, place - self._start) + 1
            self._index = getattr(self.scheduler, "step_index", None)
        elif method == "set_begin_index":
            if self._done > 0:
                return
            self._start = self._begin_index()
        else:  # the timestep shows where the request starts, and which step is taken again, for another view, say
            place = self._place(timestep)
            if place is not None and self._done == 0:
                self._start = place
            elif place is not None:
                self._done = max(0, place - self._start)
        self._turn(self._done)

    def announce(self, num_evaluations: int) -> None:
        """The pipeline's loop says how many evaluations it runs, which may be fewer than the schedule has."""
        if self._done is not None:
            self._told = num_evaluations
            self._turn(self._done)

    def _turn(self, done: int) -> None:
        """Tell the switch which step runs after `done` evaluations."""
        order = getattr(self.scheduler, "order", 1)  # evaluations of one step
        length = self._length()
        if done >= length:
            return self._switch.leave()
        try:
            self._switch.enter(done // order, -(-length // order))
        except PolicyError as error:
            self._switch.leave(str(error))

    def _begin_index(self) -> int:
        return getattr(self.scheduler, "begin_index", None) or 0

    def _length(self) -> int:
        """Evaluations of this request. Pipelines that stop early say so in `_num_timesteps`, just before their loop."""
        if self._told is not None:
            return self._told
        length = len(self.scheduler.timesteps) - self._start
        told = vars(self._pipeline).get("_num_timesteps")
        return told if type(told) is int and 0 < told < length else length

    def _place(self, timestep: Any) -> int | None:
        """The position of a timestep in this request's schedule, None where it does not show."""
        place = _place(timestep, self.scheduler.timesteps)
        return place if place is not None else _place(timestep, self._timesteps)

    def _mark_length(self, kind: type[int]) -> None:
        """Tell the length that an earlier request left on the pipeline from the one that this request will set."""
        told = vars(self._pipeline).get("_num_timesteps")
        if isinstance(told, int):
            vars(self._pipeline)["_num_timesteps"] = kind(told)


class _EarlierLength(int):
    """A pipeline's `_num_timesteps` of an earlier request: the same number, and known to be old."""


def scheduler_problem(pipeline: Any, scheduler: Any) -> str | None:
    """Why the steps of this pipeline cannot be followed through its scheduler, or None."""
    name = type(scheduler).__name__
    missing = [n for n in ("set_timesteps", "step") if not callable(getattr(scheduler, n, None))]
    if missing:
        return f"{name} has no {' and no '.join(missing)}; patch the denoising model alone and use handle.step"
    if getattr(scheduler, "_sage_patch_followed", False):
        return (
            f"its {name} object is followed for another patched pipeline; give each its own: "
            "pipe.scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config)"
        )
    if runs_on_scheduler_copies(type(pipeline)):
        return f"{type(pipeline).__name__} runs on copies of its scheduler, and the steps of a copy are not seen"
    return None


def _loops(blocks: Any) -> list[Any]:
    """The denoising loops among the blocks of a modular pipeline: they know how much of the schedule they run."""
    inner = [loop for block in getattr(blocks, "sub_blocks", {}).values() for loop in _loops(block)]
    return [blocks, *inner] if callable(getattr(blocks, "loop_step", None)) else inner


def _announcing(cls: type, clock: StepClock) -> type:
    """A subclass of a loop's class, for one object, that says how long the loop is before each of its steps."""

    def loop_step(self: Any, components: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
        timesteps = getattr(state, "timesteps", None)
        if timesteps is not None and components is clock._pipeline:
            clock.announce(len(timesteps))
        return cls.loop_step(self, components, state, *args, **kwargs)  # type: ignore[attr-defined]

    def reduce(self: Any, protocol: int) -> Any:
        return _unfollowed, (cls, self.__dict__)

    body = {"loop_step": loop_step, "__reduce_ex__": reduce, "_sage_patch_original": cls, "__doc__": cls.__doc__}
    return type(cls.__name__, (cls,), body | {"__module__": cls.__module__, "__qualname__": cls.__qualname__})


def _followed(cls: type, clock: StepClock) -> type:
    """A subclass of a scheduler's class, for one object, whose methods tell the clock when they run."""

    def new(_: type, *args: Any, **kwargs: Any) -> Any:
        return cls(*args, **kwargs)  # who makes a scheduler from this one's class, by from_config, gets a plain one

    def reduce(self: Any, protocol: int) -> Any:
        return _unfollowed, (cls, self.__dict__)

    body: dict[str, Any] = {
        "__new__": new,
        "__reduce_ex__": reduce,
        "_sage_patch_followed": True,
        "__doc__": cls.__doc__,
    }
    body |= {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    for name in ("set_timesteps", "set_begin_index", "scale_model_input", "step"):
        if hasattr(cls, name):
            body[name] = _telling(name, getattr(cls, name), clock)
    return type(cls.__name__, (cls,), body)


def _telling(name: str, original: Callable, clock: StepClock) -> Callable:
    """The method, which also tells the clock. Pipelines read the signatures of these methods, so it keeps its own."""

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        clock.before()
        result = original(self, *args, **kwargs)
        clock.after(name, kwargs.get("timestep", args[1] if len(args) > 1 else None))
        return result

    return method


def _unfollowed(cls: type, state: dict[str, Any]) -> Any:
    """A copied or unpickled scheduler has its own class again."""
    scheduler: Any = object.__new__(cls)
    scheduler.__dict__.update(state)
    return scheduler


def _by_step(plan: Plan, num_steps: int) -> list[Mapping[str, Choice]]:
    """The choices by site name at every step of a request."""
    at = {step: variant.choices for variant in plan.variants(num_steps) for step in variant.steps}
    return [at[step] for step in range(num_steps)]


def _place(timestep: Any, timesteps: Any) -> int | None:
    """The position of an element that was taken out of a tensor, by where it lies in memory; None if it is a copy."""
    if not isinstance(timestep, Tensor) or not isinstance(timesteps, Tensor) or timestep.numel() != 1:
        return None
    if timestep.untyped_storage().data_ptr() != timesteps.untyped_storage().data_ptr():
        return None
    offset = timestep.storage_offset() - timesteps.storage_offset()
    stride = timesteps.stride(0)
    return offset // stride if 0 <= offset < len(timesteps) * stride else None
