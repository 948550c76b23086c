"""How fast the kernels are on this card, whole calls and kernels alone, beside their peers in the same run.

Speed in TOPS = 4 B H q_len kv_len D / t / 1e12, halved for causal calls. Random normal bf16 data. Every figure is the
mean of a burst and of sustained calls from rest (timing.py), with clock and power beside it; inputs stay in the
L2 as far as they fit, where a model's previous layer would have left them. Every output is checked against float64.
"""

from __future__ import annotations

import math
import statistics
import subprocess
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import torch
from torch import Tensor

from sage_patch.args import plain
from sage_patch.backends import as_run, capabilities, named
from sage_patch.dispatch import Options, describe
from sage_patch.evaluation.bench.peers import BURST_ONLY, PACKAGES, PEERS, Run
from sage_patch.evaluation.bench.plans import Plan, column_of, expected_seconds, fitting, wanted
from sage_patch.evaluation.bench.shapes import BenchError, Shape
from sage_patch.evaluation.bench.timing import Figure, Monitor, device_id, measure
from sage_patch.evaluation.environment import versions
from sage_patch.evaluation.metrics import errors
from sage_patch.kernels import crossover as crossovers
from sage_patch.kernels import library, ops
from sage_patch.recipes import DEFAULT_RECIPE, Recipe, UnsupportedCall, parse_recipe

_CHECKED_ROWS = 512


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


def run(
    plan: Plan, progress: Callable[[str, int, int], None] = lambda *_: None, say: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """{"environment", "host_us_per_call", "rows", "cut_short"}: the plan measured on the current CUDA device.

    A row holds sustained TOPS by candidate, bursts under "burst", and under "card" clock and power during both; null
    where a candidate could not run, with the reason under "why_null". say: told which shapes are left out. Raises
    BenchError without a GPU that has compiled kernels, and build.BuildError if the library can be neither found nor
    built.
    """
    require_gpu()
    library.prepare(None)
    result: dict[str, Any] = {"environment": gpu_environment() | plan.note, "host_us_per_call": host_cost()}
    found: list[tuple[dict[str, Any], dict[str, Figure]]] = []
    shapes, left_out = fitting(plan)
    hopeless: set[tuple[int, bool, int]] = set()
    started = time.monotonic()
    with Monitor() as monitor:
        for i, shape in enumerate(shapes):
            point = shape.head_dim, shape.is_causal, shape.crossover_heads
            if point in hopeless:
                continue
            if time.monotonic() - started + expected_seconds(shape, plan) > plan.seconds:
                left_out.append(shape)
                continue
            progress(f"timing {shape}", i, len(shapes))
            found.append(measure_shape(shape, plan))
            torch.cuda.empty_cache()
            if plan.is_crossover and not _may_pay(found[-1][0]):
                hopeless.add(point)
    for row, figures in found:
        row["card"] = {
            name: {"burst": monitor.over(f.burst_span), "sustained": monitor.over(f.sustained_span)}
            for name, f in figures.items()
        }
    result["rows"] = [row for row, _ in found]
    if left_out:
        result["cut_short"] = f"left out for {plan.seconds:g} seconds: {'; '.join(map(str, left_out))}"
        say(result["cut_short"])
    return result


def _may_pay(row: dict[str, Any]) -> bool:
    """Whether some recipe is near enough to exact attention for a shorter sequence to be worth a look."""
    gains = (crossovers.ratio_to_best(row, op, crossovers.TORCH_PEERS) for op in crossovers.OPS.values())
    return any(gain is not None and gain > 0.9 for gain in gains)


def measure_shape(shape: Shape, plan: Plan, device: str = "cuda") -> tuple[dict[str, Any], dict[str, Figure]]:
    """(one row, its figures by candidate): TOPS, and errors (cosine, relative L1, worst row); of the pre-processing the
    microseconds of a burst."""
    row = shape.columns()
    generator = torch.Generator(device).manual_seed(shape.length)
    query, key, value = (
        torch.randn(row["batch"], heads, shape.length, shape.head_dim, generator=generator, device=device).bfloat16()
        for heads in (row["num_heads"], row["num_kv_heads"], row["num_kv_heads"])
    )
    candidates, why_null = _candidates(query, key, value, shape, plan)
    sample = _Sample(query, key, value, shape.is_causal)
    found: dict[str, dict[str, float]] = {}
    figures: dict[str, Figure] = {}
    for name, candidate in candidates.items():
        try:
            found[name] = sample.errors(candidate())
            is_sustained = name not in BURST_ONLY and not name.endswith("_prepare")
            figures[name] = measure(candidate, plan.timing, is_sustained)
        except Exception as error:  # a peer may fail in its own way, and the others still count
            why_null[name] = _reason(error)
    work = 4.0 * row["batch"] * row["num_heads"] * shape.length**2 * shape.head_dim / (2 if shape.is_causal else 1)
    burst = {}
    for name, figure in figures.items():
        if name.endswith("_prepare"):
            row[f"{name}_us"] = 1e3 * figure.burst_ms
            continue
        burst[name] = work / figure.burst_ms / 1e9
        if figure.sustained_ms is not None:
            row[name] = work / figure.sustained_ms / 1e9
    row |= dict.fromkeys(why_null)
    checked = {name: e for name, e in found.items() if not name.endswith("_prepare")}
    return row | {"burst": burst, "errors": checked, "why_null": why_null}, figures


def crossover_card(result: dict[str, Any]) -> tuple[str, crossovers.Card]:
    """(name of the card, its entry for the table of break-even lengths) from a result with short sequences.

    Raises BenchError if no row holds both a whole call and an exact peer.
    """
    rows, facts = result["rows"], result["environment"]
    how = f"{facts['date']}, torch {facts['packages']['torch']}, driver {facts['driver']}, bf16, bursts from rest"
    card = crossovers.from_rows(rows, how)
    if not card["head_dims"]:
        raise BenchError("no shape was timed both quantized and exact: give --lengths and a larger --budget")
    return facts["device"], card


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
    query = ["nvidia-smi", f"--id={device_id()}", "--query-gpu=driver_version,power.limit,clocks.max.sm"]
    try:
        smi = subprocess.run([*query, "--format=csv,noheader"], capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.TimeoutExpired):
        smi = ""
    driver, power, clock = (smi.strip().split(", ") + ["", "", ""])[:3]
    return {
        "device": torch.cuda.get_device_name(),
        "driver": driver or None,
        "power_limit": power or None,
        "clock_limit": clock or None,
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
    query: Tensor, key: Tensor, value: Tensor, shape: Shape, plan: Plan
) -> tuple[dict[str, Run], dict[str, str]]:
    """(column -> function that runs it and returns the output, column -> why it cannot be made)."""
    found: dict[str, Run] = {}
    why_null: dict[str, str] = {}
    args = plain(1 / math.sqrt(query.shape[-1]), shape.is_causal)
    recipes, peers = wanted(shape, plan)
    for name in recipes:
        backend = ops.backend_for(query.device)
        recipe, prefix = as_run(parse_recipe(name), backend, query.shape[-1]), column_of(name)
        try:
            _require(recipe, query, key, value)

            def whole(recipe: Recipe = recipe) -> Tensor:
                return library.forward(query, key, value, args, recipe)[0]

            found[f"{prefix}_op"] = whole
            if not plan.is_crossover:
                found |= _parts(library.Call(query, key, value, args, recipe), prefix, name == recipes[0])
        except UnsupportedCall as error:
            why_null |= {f"{prefix}_op": _reason(error), f"{prefix}_kernel": _reason(error)}
    for name in peers:
        try:
            found[name] = PEERS[name](query, key, value, shape.is_causal)
        except Exception as error:
            why_null[name] = _reason(error)
    return found, why_null


def _require(recipe: Recipe, query: Tensor, key: Tensor, value: Tensor) -> None:
    """Raise UnsupportedCall where the device's kernels do not compute the recipe."""
    backend = named(ops.backend_for(query.device))
    reason = (
        backend.why_not(recipe, describe(query, key, value, Options())) if backend is not None else "no_kernel_for_cuda"
    )
    if reason:
        raise UnsupportedCall(f"{recipe.name}: {reason}")


def _parts(call: library.Call, prefix: str, with_prepare: bool) -> dict[str, Run]:
    """The attention launch of a call alone, on what its pre-processing has left, and the pre-processing alone."""
    call.prepare()

    def kernel() -> Tensor:
        call.forward()
        return call.out

    def prepare() -> Tensor:
        call.prepare()
        return call.out

    return {f"{prefix}_kernel": kernel} | ({f"{prefix}_prepare": prepare} if with_prepare else {})


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
