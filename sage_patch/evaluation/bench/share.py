"""A small file that says how fast this card is, for people who have no such card: written, and checked when read.

It holds what the numbers depend on and the numbers, and nothing about the machine or its user: texts are names of
cards, versions and candidates, without slashes.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from sage_patch.args import plain
from sage_patch.backends import find, why_not
from sage_patch.cards import table as cards
from sage_patch.errors import SagePatchError
from sage_patch.evaluation.bench import timing
from sage_patch.evaluation.bench.measure import require_gpu
from sage_patch.evaluation.environment import versions
from sage_patch.evaluation.tables import Table, write_whole
from sage_patch.kernels import library
from sage_patch.recipes import NO_LIMITS, RECIPES, Call

LENGTHS, HEAD_DIMS, HEADS = (1024, 4096, 16384), (128, 64), 32
TIMED = ("qk_int8_pv_fp8", "qk_int8_pv_fp16")
PEERS_HERE = ("sdpa", "fa2", "sageattention")
PACKAGES = ("sage-patch", "torch", "triton", "flash-attn", "sageattention")
_CHECKED_ROWS = 64
_LIKELY_ERROR = 2.0  # times a recipe's self_test_bound, on other numbers than the self-test's
_PEAK = 1.25  # of a data sheet's rate at its boost clock: cards run faster than that, but not much

Word = Annotated[str, Field(pattern=r"^[A-Za-z0-9 .+_()-]{1,80}$")]  # no path has such a form
Figure = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class ShareError(SagePatchError, ValueError):
    """A file that is none of `bench --share`, or says what cannot be."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Row(_Part):
    """One shape, batch 1. milliseconds: of whole calls, by candidate. ratios: of the speed of each recipe to each peer,
    "qk_int8_pv_fp8/sdpa". rel_l1: relative L1 error against float64 on sampled rows."""

    head_dim: Annotated[int, Field(ge=1, le=256)]
    is_causal: bool
    length: Annotated[int, Field(ge=1, le=1 << 20)]
    num_heads: Annotated[int, Field(ge=1, le=1024)]
    milliseconds: dict[Word, Figure]
    ratios: dict[Annotated[str, Field(pattern=r"^\w+/\w+$")], Figure]
    rel_l1: dict[Word, Figure]

    @model_validator(mode="after")
    def _is_whole(self) -> Row:
        where = f"head_dim {self.head_dim}, {self.length} tokens"
        expected = ratios(self.milliseconds)
        if set(expected) != set(self.ratios) or any(abs(self.ratios[k] / r - 1) > 0.02 for k, r in expected.items()):
            raise ValueError(f"{where}: the ratios do not follow from the times")
        for name, error in self.rel_l1.items():
            bound = RECIPES[name].self_test_bound if name in RECIPES else 0.2
            if bound is not None and error > _LIKELY_ERROR * bound:
                raise ValueError(f"{where}: {name} has an error of {error:g}, which no right kernel has")
        return self

    def tops(self, name: str) -> float:
        work = 4.0 * self.num_heads * self.length**2 * self.head_dim / (2 if self.is_causal else 1)
        return work / self.milliseconds[name] / 1e9


class Share(_Part):
    """The whole file. clocks_mhz: {"now", "max"} of the SMs after the measurement; sums: of P V, by its type."""

    schema_version: Literal[1]
    card: Word
    capability: Annotated[str, Field(pattern=r"^\d{1,2}\.\d$")]
    sms: Annotated[int, Field(ge=1, le=1024)]
    driver: Word | None
    clocks_mhz: dict[Literal["now", "max"], Annotated[int, Field(ge=1, le=10000)]]
    power_limit_w: Annotated[float, Field(gt=0, le=3000)] | None
    cuda: Word | None
    versions: dict[Word, Word | None]
    sums: dict[Literal["fp8", "fp16"], Literal["fp16", "fp32"]]
    date: Annotated[str, Field(pattern=r"^20\d\d-[01]\d-[0-3]\d$")]
    rows: Annotated[list[Row], Field(min_length=1, max_length=200)]

    @model_validator(mode="after")
    def _is_possible(self) -> Share:
        if find("cuda", _pair(self.capability)) == "none":
            raise ValueError(f"capability {self.capability}: there are no kernels that could have been timed")
        card = cards.find(self.card)
        if card is not None and card.capability != _pair(self.capability):
            raise ValueError(f"a {self.card} has compute capability {card.capability}, the file says {self.capability}")
        ghz = self.clocks_mhz.get("max", 4000) / 1e3
        rate = max((card.rates or {}).values(), default=0.0) if card is not None else 0.0
        most = 2 * (rate or 8192) * self.sms * ghz / 1e3 * _PEAK
        for row in self.rows:
            for name in row.milliseconds:
                if row.tops(name) > most:
                    raise ValueError(
                        f"head_dim {row.head_dim}, {row.length} tokens: {name} at {row.tops(name):.0f} TOPS is more "
                        f"than the {most:.0f} that {self.sms} SMs can do"
                    )
        return self


def _pair(capability: str) -> tuple[int, int]:
    major, minor = capability.split(".")
    return int(major), int(minor)


def ratios(milliseconds: dict[str, float]) -> dict[str, float]:
    """Speed of every recipe over every peer, by "recipe/peer"."""
    ours, peers = [n for n in milliseconds if n in RECIPES], [n for n in milliseconds if n not in RECIPES]
    return {f"{a}/{b}": milliseconds[b] / milliseconds[a] for a in ours for b in peers}


def measure(
    progress: Callable[[str, int, int], None] = lambda *_: None, how: timing.Timing = timing.FROM_REST
) -> Share:
    """Time the current card. Raises BenchError without a card that has kernels, BuildError without their library."""
    require_gpu()
    library.prepare(None)
    index = torch.cuda.current_device()
    facts = torch.cuda.get_device_properties(index)
    shapes = [(n, d, causal) for n in LENGTHS for d in HEAD_DIMS for causal in (False, True)]
    rows = []
    for i, (length, dim, causal) in enumerate(shapes):
        progress(f"timing, {length} tokens, head_dim {dim}, {'causal' if causal else 'full'}", i, len(shapes))
        rows.append(_row(length, dim, causal, (facts.major, facts.minor), how))
    smi = _smi(index)
    return Share(
        schema_version=1, card=_word(facts.name) or "unknown",
        capability=f"{facts.major}.{facts.minor}", sms=facts.multi_processor_count,
        driver=_word(smi.get("driver_version")), power_limit_w=_number(smi.get("power.limit")),
        clocks_mhz={
            name: int(value)  # type: ignore[misc]
            for name, key in (("now", "clocks.sm"), ("max", "clocks.max.sm")) if (value := _number(smi.get(key)))
        },
        cuda=_word(torch.version.cuda), versions={n: _word(v) for n, v in versions(PACKAGES).items()},
        sums={pv: "fp16" if (index, pv) in library.sums_in_fp16 else "fp32" for pv in ("fp8", "fp16")},  # type: ignore[misc]
        date=datetime.now(UTC).strftime("%Y-%m-%d"), rows=rows,
    )  # fmt: skip


def _row(length: int, dim: int, causal: bool, capability: tuple[int, int], how: timing.Timing) -> Row:
    generator = torch.Generator("cuda").manual_seed(length + dim)
    q, k, v = (torch.randn(1, HEADS, length, dim, generator=generator, device="cuda").bfloat16() for _ in range(3))
    candidates = _candidates(q, k, v, causal, capability)
    rows, exact = _exact_rows(q, k, v, causal)
    times, errors = {}, {}
    for name, run in candidates.items():
        try:
            got = run()[0, 0, rows].double()
        except Exception:  # a peer that is installed and does not run here is not a candidate
            if name in RECIPES:
                raise
            continue
        errors[name] = float(f"{float((got - exact).abs().sum() / exact.abs().sum()):.4g}")
        times[name] = float(f"{timing.measure(run, how, is_sustained=False).burst_ms:.4g}")
    return Row(
        head_dim=dim, is_causal=causal, length=length, num_heads=HEADS, milliseconds=times,
        ratios={name: round(ratio, 3) for name, ratio in ratios(times).items()}, rel_l1=errors,
    )  # fmt: skip


def _candidates(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, capability: tuple[int, int]
) -> dict[str, Callable[[], Tensor]]:
    found: dict[str, Callable[[], Tensor]] = {}
    dim = q.shape[-1]
    args = plain(1 / math.sqrt(dim), causal)
    call = Call(find("cuda", capability), "cuda", "bfloat16", dim, dim, HEADS, HEADS, q.shape[2], k.shape[2], causal)
    for name in TIMED:
        recipe = RECIPES[name]
        if why_not(recipe, call, NO_LIMITS) is None:
            found[name] = lambda recipe=recipe: library.forward(q, k, v, args, recipe)[0]  # type: ignore[misc]
    found["sdpa"] = lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    try:
        from flash_attn import flash_attn_func
    except ImportError:
        found["fa2"] = lambda: _flash(q, k, v, causal)
    else:
        turned = [x.transpose(1, 2) for x in (q, k, v)]
        found["fa2"] = lambda: flash_attn_func(*turned, causal=causal).transpose(1, 2)
    try:
        from sageattention import sageattn
    except ImportError:
        return found
    if not getattr(sageattn, "__module__", "").startswith("sage_patch"):  # ours under that name
        found["sageattention"] = lambda: sageattn(q, k, v, is_causal=causal)
    return found


def _flash(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """The FlashAttention-2 that comes with torch."""
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


def _exact_rows(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """(sampled rows of the first head, their attention in float64)."""
    rows = torch.linspace(0, q.shape[2] - 1, _CHECKED_ROWS, device=q.device).long()
    scores = q[0, 0, rows].double() @ k[0, 0].double().T / math.sqrt(q.shape[-1])
    if causal:
        scores = scores.masked_fill(torch.arange(k.shape[2], device=q.device) > rows[:, None], -math.inf)
    return rows, torch.softmax(scores, -1) @ v[0, 0].double()


def _smi(index: int) -> dict[str, str]:
    names = ("driver_version", "power.limit", "clocks.sm", "clocks.max.sm")
    query = ["nvidia-smi", f"--id={index}", f"--query-gpu={','.join(names)}", "--format=csv,noheader,nounits"]
    try:
        text = subprocess.run(query, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return {}
    values = [value.strip() for value in text.split(",")]
    return dict(zip(names, values, strict=True)) if len(values) == len(names) else {}


def _word(text: str | None) -> str | None:
    return re.sub(r"[^A-Za-z0-9 .+_()-]", " ", text)[:80] if text else None


def _number(text: str | None) -> float | None:
    try:
        return float(text) if text else None
    except ValueError:
        return None


def run(
    read_from: Path | None, path: Path | None, progress: Callable[[str, int, int], None]
) -> tuple[Share, Path | None]:
    """A file, checked, or this card, timed and written. path: where to, None for `default_path`. (it, where it is)."""
    if read_from is not None:
        return read(read_from), None
    found = measure(progress)
    path = path or default_path(found)
    write(path, found)
    return found, path


def write(path: Path, share: Share) -> None:
    write_whole(path, json.dumps(share.model_dump(), indent=1) + "\n")


def default_path(share: Share) -> Path:
    """sage-patch-NAME.json in the current folder."""
    return Path(f"sage-patch-{re.sub(r'[^A-Za-z0-9]+', '-', share.card).strip('-')}.json")


def read(path: Path) -> Share:
    """A checked file. Raises ShareError that names the file and everything that is wrong with it."""
    try:
        return Share.model_validate_json(path.read_text(encoding="utf-8"))
    except ValidationError as error:
        lines = [
            f"{'.'.join(map(str, e['loc'])) or 'the file'}: {e['msg'].removeprefix('Value error, ')}"
            for e in error.errors()[:10]
        ]
        raise ShareError(f"{path} is no file of sage-patch bench --share:\n" + "\n".join(lines)) from None
    except UnicodeDecodeError:
        raise ShareError(f"{path} is no file of sage-patch bench --share: it is not UTF-8 text") from None


def share_table(share: Share) -> Table:
    """Speeds over each peer, and errors."""
    pairs = sorted({name for row in share.rows for name in row.ratios})
    rows = [
        (
            f"{row.head_dim} {'causal' if row.is_causal else 'full'} {row.length}",
            *(f"{row.ratios[pair]:.2f}" if pair in row.ratios else "" for pair in pairs),
            *(f"{row.rel_l1[name]:.4f}" if name in row.rel_l1 else "" for name in TIMED),
        )
        for row in share.rows
    ]
    note = (
        f"{share.card}, {share.sms} SMs, driver {share.driver}, {share.power_limit_w} W, "
        + ", ".join(f"{name} {v}" for name, v in share.versions.items() if v)
        + f"; {share.date}. Ratios: speed over the peer's, whole calls. Errors: relative L1 against float64."
    )
    columns = ("<D, mask, tokens", *pairs, *(f"error, {name}" for name in TIMED))
    return Table("Speed and errors", columns, tuple(rows), note)
