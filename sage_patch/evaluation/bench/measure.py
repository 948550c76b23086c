"""How fast the kernels are on this card, whole calls and kernels alone, beside their peers in the same run.

Speed in TOPS = 4 B H q_len kv_len D / t / 1e12, halved for causal calls. Random normal bf16 data; t is the median of
CUDA-event times, measured in rounds that visit every candidate in turn, so that clocks and heat hit all alike; the L2
cache is flushed before every launch of sequences below 8192 tokens. Every output is checked against float64.
"""

from __future__ import annotations

import math
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import torch
from torch import Tensor

from sage_patch.args import plain
from sage_patch.backends import CROSSOVER_HEADS, capabilities, named
from sage_patch.errors import SagePatchError
from sage_patch.evaluation.bench.peers import PACKAGES, PEERS, Run
from sage_patch.evaluation.environment import versions
from sage_patch.evaluation.metrics import errors
from sage_patch.kernels import crossover, library, ops
from sage_patch.recipes import DEFAULT_RECIPE, Recipe, UnsupportedCall, parse_recipe
from sage_patch.recipes import RECIPES as ALL_RECIPES

# recipe -> how its columns begin, the cheapest first
RECIPES = {recipe.name: recipe.column for recipe in reversed(ALL_RECIPES.values()) if recipe.column}
LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)
CROSSOVER_LENGTHS = (256, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
ROUNDS = 3
FLUSH_BELOW = 8192  # tokens; longer inputs do not fit the L2 cache anyway
_FLUSH_BYTES = 256 << 20
_CHECKED_ROWS = 512


class BenchError(SagePatchError, ValueError):
    """The benchmark cannot run here or was asked for something that is not there."""


@dataclass(frozen=True)
class Shape:
    """One call to be timed. batch 0: as many as make batch x heads 128 up to 8192 tokens, fewer above."""

    head_dim: int
    is_causal: bool
    length: int
    batch: int = 0
    num_heads: int = 32
    num_kv_heads: int = 0

    def columns(self) -> dict[str, Any]:
        """The shape as the first columns of its row."""
        fitting = min(CROSSOVER_HEADS, max(1, CROSSOVER_HEADS * 8192 // self.length))
        return {
            "head_dim": self.head_dim,
            "is_causal": self.is_causal,
            "q_len": self.length,
            "kv_len": self.length,
            "batch": self.batch or max(1, fitting // self.num_heads),
            "num_heads": self.num_heads,
            "num_kv_heads": self.num_kv_heads or self.num_heads,
        }


@dataclass(frozen=True)
class Plan:
    """What to measure. seconds: no new shape is begun after so many; milliseconds: of each candidate and round."""

    shapes: Sequence[Shape]
    recipes: Sequence[str] = tuple(RECIPES)
    peers: Sequence[str] = tuple(PEERS)
    seconds: float = 600.0
    milliseconds: float = 35.0
    note: dict[str, Any] = field(default_factory=dict)


def shapes(
    head_dims: Iterable[int] = (128, 64),
    lengths: Iterable[int] = LENGTHS,
    masks: Iterable[str] = ("full", "causal"),
    **heads: int,
) -> list[Shape]:
    """Every combination, by length first. masks: "full", "causal". heads: batch, num_heads, num_kv_heads of Shape.

    Raises BenchError for a head_dim beyond the kernels, a length below 1 or an unknown mask.
    """
    head_dims, lengths, masks = list(head_dims), list(lengths), list(masks)
    for what, found, allowed in (
        ("head_dims", [d for d in head_dims if not 1 <= d <= 256], "1 to 256"),
        ("lengths", [n for n in lengths if n < 1], "1 or more"),
        ("masks", [m for m in masks if m not in ("full", "causal")], "full and causal"),
    ):
        if found:
            raise BenchError(f"{what}: {', '.join(map(str, found))} cannot be measured; the kernels take {allowed}")
    return [Shape(d, m == "causal", n, **heads) for n in lengths for d in head_dims for m in masks]


def plan(
    *,
    head_dims: Sequence[int],
    lengths: Sequence[int],
    masks: Sequence[str],
    recipes: Sequence[str],
    heads: dict[str, int],
    **rest: Any,
) -> Plan:
    """A checked Plan; rest: its other fields. Raises BenchError naming what cannot be measured and what can."""
    for name in recipes:
        if name not in RECIPES:
            raise BenchError(f"recipes: {name!r} has no compiled kernel; there are {', '.join(RECIPES)}")
    num_heads, num_kv_heads = heads["num_heads"], heads["num_kv_heads"] or heads["num_heads"]
    if num_heads % num_kv_heads:
        raise BenchError(f"heads: {num_heads} query heads are no multiple of {num_kv_heads} key and value heads")
    return Plan(shapes(head_dims, lengths, masks, **heads), tuple(recipes), **rest)


def numbers(option: str, text: str) -> list[int]:
    """The whole numbers of "128,64". Raises BenchError naming the option."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise BenchError(f"{option} must be whole numbers with commas, such as 128,64; got {text!r}") from None


def require_gpu() -> None:
    """Raise BenchError unless the current device runs the compiled kernels."""
    if not torch.cuda.is_available():
        raise BenchError(
            f"bench times the compiled kernels and needs a CUDA device; torch {torch.__version__} sees none here. "
            "Run it on a machine with a Hopper GPU (sage-patch env prints what torch sees)"
        )
    device = torch.device("cuda", torch.cuda.current_device())
    backend = named(ops.backend_for(device))
    if backend is None or not backend.is_compiled:
        major, minor = torch.cuda.get_device_capability(device)
        raise BenchError(
            f"bench times the compiled kernels, which exist for compute capability {capabilities()}; {device} is "
            f"{torch.cuda.get_device_name(device)} with {major}.{minor}"
        )


def run(plan: Plan, progress: Callable[[str, int, int], None] = lambda *_: None) -> dict[str, Any]:
    """{"environment", "host_us_per_call", "rows", "cut_short"}: the plan measured on the current CUDA device.

    A row's value is null where a candidate could not run, with the reason under row["why_null"]. Raises BenchError
    without a GPU that has compiled kernels, and build.BuildError if the library can be neither found nor built.
    """
    require_gpu()
    library.prepare(None)
    started = time.monotonic()
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    rows: list[dict[str, Any]] = []
    result = {"environment": gpu_environment() | plan.note, "host_us_per_call": host_cost(), "rows": rows}
    for i, shape in enumerate(plan.shapes):
        if time.monotonic() - started > plan.seconds:
            return result | {"cut_short": f"{len(plan.shapes) - i} of {len(plan.shapes)} shapes left out"}
        mask = "causal" if shape.is_causal else "full"
        progress(f"timing, {shape.length} tokens, head_dim {shape.head_dim}, {mask}", i, len(plan.shapes))
        rows.append(measure(shape, plan, flush))
    return result


def measure(shape: Shape, plan: Plan, flush: Tensor, device: str = "cuda") -> dict[str, Any]:
    """One row: TOPS of every candidate, errors (cosine, relative L1, worst row) and the pre-processing's time."""
    row = shape.columns()
    generator = torch.Generator(device).manual_seed(shape.length)
    query, key, value = (
        torch.randn(row["batch"], heads, shape.length, shape.head_dim, generator=generator, device=device).bfloat16()
        for heads in (row["num_heads"], row["num_kv_heads"], row["num_kv_heads"])
    )
    candidates, why_null = _candidates(query, key, value, shape.is_causal, plan)
    sample = _Sample(query, key, value, shape.is_causal)
    found: dict[str, dict[str, float]] = {}
    for name in list(candidates):
        try:
            found[name] = sample.errors(candidates[name]())
        except Exception as error:  # a peer may fail in its own way, and the others still count
            why_null[name] = _reason(error)
            del candidates[name]
    cold = flush if shape.length < FLUSH_BELOW else None
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(ROUNDS):
        for name, candidate in candidates.items():
            times[name].append(median_ms(candidate, cold, plan.milliseconds))
    work = 4.0 * row["batch"] * row["num_heads"] * shape.length**2 * shape.head_dim / (2 if shape.is_causal else 1)
    for name in [*times, *why_null]:
        ms = statistics.median(times[name]) if name in times else None
        if name.endswith("_prepare"):
            row[f"{name}_us"] = None if ms is None else 1e3 * ms
        else:
            row[name] = None if ms is None else work / ms / 1e9
    checked = {name: e for name, e in found.items() if not name.endswith("_prepare")}
    return row | {"errors": checked, "why_null": why_null}


def crossover_card(result: dict[str, Any]) -> tuple[str, crossover.Card]:
    """(name of the card, its entry for the table of break-even lengths) from a result with short sequences.

    Raises BenchError if no row holds both a whole call and an exact peer.
    """
    rows, facts = result["rows"], result["environment"]
    how = f"{facts['date']}, torch {facts['packages']['torch']}, driver {facts['driver']}, bf16"
    card = crossover.from_rows(rows, how)
    if not card["head_dims"]:
        raise BenchError("no shape was timed both quantized and exact: give --lengths and more --seconds")
    return facts["device"], card


def median_ms(candidate: Callable[[], object], flush: Tensor | None, budget_ms: float) -> float:
    """Milliseconds of one run, the median of as many as fit into the budget (11 to 60), after a warm-up as long."""

    def event() -> Any:
        return torch.cuda.Event(enable_timing=True)

    def timed() -> tuple[Any, Any]:
        start, end = event(), event()
        start.record()
        candidate()
        end.record()
        return start, end

    candidate()
    first = timed()
    torch.cuda.synchronize()
    one = max(first[0].elapsed_time(first[1]), 0.01)
    for _ in range(min(100, int(budget_ms / 2 / one))):
        candidate()
    pairs = []
    for _ in range(max(11, min(60, int(budget_ms / one)))):
        if flush is not None:
            flush.zero_()
        pairs.append(timed())
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in pairs)


def host_cost() -> dict[str, float]:
    """Microseconds the host spends on one small call with an idle GPU: each layer of ours, and torch's own SDPA."""
    from sage_patch.attention import sage_attention

    q, k, v = (torch.randn(1, 2, 64, 64, device="cuda").bfloat16() for _ in range(3))
    args, recipe = plain(0.125, recipe=DEFAULT_RECIPE), parse_recipe(DEFAULT_RECIPE)
    call = library.Call(q, k, v, args, recipe)
    ways: dict[str, Callable[[], object]] = {
        "sage_attention": lambda: sage_attention(q, k, v, recipe=DEFAULT_RECIPE),
        "operator": lambda: ops.attention(q, k, v, *args),
        "library_forward": lambda: library.forward(q, k, v, args, recipe),
        "c_call": call.run,
        "torch_add": lambda: q + q,
        "sdpa_default": lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v),
    }
    return {name: _host_us(way) for name, way in ways.items()}


def gpu_environment() -> dict[str, Any]:
    """What the numbers depend on: card, driver, power limit, versions, date."""
    query = ["nvidia-smi", f"--id={torch.cuda.current_device()}", "--query-gpu=driver_version,power.limit"]
    try:
        smi = subprocess.run([*query, "--format=csv,noheader"], capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.TimeoutExpired):
        smi = ""
    driver, _, power = smi.strip().partition(", ")
    return {
        "device": torch.cuda.get_device_name(),
        "driver": driver or None,
        "power_limit": power or None,
        "cuda": torch.version.cuda,
        "packages": versions(PACKAGES),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }


class _Sample:
    """512 random query rows (of 4 random heads) of a call, attended in float64."""

    def __init__(self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> None:
        generator = torch.Generator().manual_seed(1)
        batch, heads, q_len, head_dim = query.shape
        groups = heads // key.shape[1]
        self.places = [
            (
                int(torch.randint(batch, (1,), generator=generator)),
                int(torch.randint(heads, (1,), generator=generator)),
                torch.randint(q_len, (_CHECKED_ROWS // 4,), generator=generator).to(query.device),
            )
            for _ in range(4)
        ]
        exact = []
        for b, h, rows in self.places:
            scores = query[b, h, rows].double() @ key[b, h // groups].double().T / math.sqrt(head_dim)
            if is_causal:
                hidden = torch.arange(key.shape[2], device=key.device) > rows[:, None]
                scores = scores.masked_fill(hidden, -math.inf)
            exact.append(torch.softmax(scores, -1) @ value[b, h // groups].double())
        self.exact = torch.stack(exact)

    def errors(self, out: Tensor) -> dict[str, float]:
        got = torch.stack([out[b, h].double()[rows] for b, h, rows in self.places])
        return errors(got, self.exact)


def _candidates(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool, plan: Plan
) -> tuple[dict[str, Run], dict[str, str]]:
    """(column -> function that runs it and returns the output, column -> why it cannot be made)."""
    found: dict[str, Run] = {}
    why_null: dict[str, str] = {}
    args = plain(1 / math.sqrt(query.shape[-1]), is_causal)
    for name in plan.recipes:
        recipe = parse_recipe(name)
        prefix = recipe.column
        try:
            call = library.Call(query, key, value, args, recipe)
        except UnsupportedCall as error:
            why_null |= {f"{prefix}_op": _reason(error), f"{prefix}_kernel": _reason(error)}
            continue
        call.prepare()

        def whole(recipe: Recipe = recipe) -> Tensor:
            return library.forward(query, key, value, args, recipe)[0]

        def kernel(call: library.Call = call) -> Tensor:
            call.forward()
            return call.out

        def prepare(call: library.Call = call) -> Tensor:
            call.prepare()
            return call.out

        found |= {f"{prefix}_op": whole, f"{prefix}_kernel": kernel, f"{prefix}_prepare": prepare}
    for name in plan.peers:
        try:
            found[name] = PEERS[name](query, key, value, is_causal)
        except Exception as error:
            why_null[name] = _reason(error)
    return found, why_null


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:300]


def _host_us(way: Callable[[], object]) -> float:
    for _ in range(50):
        way()
    times = []
    for _ in range(200):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(5):
            way()
        times.append((time.perf_counter() - start) / 5 * 1e6)
    return statistics.median(times)
