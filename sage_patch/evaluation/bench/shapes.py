"""The calls that the benchmark times, most important first: kernels and their peers, published shapes, models' own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sage_patch.backends import CROSSOVER_HEADS
from sage_patch.errors import SagePatchError

LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)
CROSSOVER_LENGTHS = (512, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 16384)


class BenchError(SagePatchError, ValueError):
    """The benchmark cannot run here or was asked for something that is not there."""


@dataclass(frozen=True)
class Shape:
    """One call to be timed, and who is timed at it.

    batch 0: as many as make batch x heads 128 up to 8192 tokens, fewer above. recipes, peers: which of the plan's are
    timed here, None for all of them; of a recipe and its variants the first two. name: what it is called in tables.
    crossover_heads: of a row for the table of break-even lengths, the point that it belongs to.
    """

    head_dim: int
    is_causal: bool
    length: int
    batch: int = 0
    num_heads: int = 32
    num_kv_heads: int = 0
    recipes: tuple[str, ...] | None = None
    peers: tuple[str, ...] | None = None
    name: str = ""
    crossover_heads: int = 0

    def columns(self) -> dict[str, Any]:
        """The shape as the first columns of its row."""
        fitting = min(CROSSOVER_HEADS, max(1, CROSSOVER_HEADS * 8192 // self.length))
        found: dict[str, Any] = {
            "head_dim": self.head_dim,
            "is_causal": self.is_causal,
            "q_len": self.length,
            "kv_len": self.length,
            "batch": self.batch or max(1, fitting // self.num_heads),
            "num_heads": self.num_heads,
            "num_kv_heads": self.num_kv_heads or self.num_heads,
        }
        found |= {"name": self.name} if self.name else {}
        return found | ({"crossover_heads": self.crossover_heads} if self.crossover_heads else {})

    def __str__(self) -> str:
        row = self.columns()
        heads = str(row["num_heads"]) + (f":{row['num_kv_heads']}" if self.num_kv_heads else "")
        mask = "causal" if self.is_causal else "full"
        named = f"{self.name}, " if self.name else ""
        return f"{named}D {self.head_dim}, {mask}, {row['batch']} x {heads} heads, {self.length} tokens"


def grid(
    head_dims: Iterable[int] = (128, 64),
    lengths: Iterable[int] = LENGTHS,
    masks: Iterable[str] = ("full", "causal"),
    batch: int = 0,
    num_heads: int = 32,
    num_kv_heads: int = 0,
) -> list[Shape]:
    """Every combination, by length first. masks: "full", "causal". The rest as in Shape.

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
    return [
        Shape(d, m == "causal", n, batch, num_heads, num_kv_heads) for n in lengths for d in head_dims for m in masks
    ]


MAIN = ("sdpa_default", "fa3_bf16", "fa3_fp8_kernel")  # the peers that others are judged by
FP8 = "qk_int8_pv_fp8"  # and its variants


def _kernels() -> list[Shape]:
    """One item of 32 heads at the lengths that are asked about most, everything at three of them; then 128 heads."""
    one = [(128, False, 8192), (128, False, 32768), (128, True, 8192), (128, False, 4096), (128, True, 32768)]
    one += [(128, True, 4096), (64, False, 8192), (128, False, 2048), (128, True, 2048), (64, False, 32768)]
    everything = {(128, False, 8192), (128, False, 32768), (64, False, 8192)}
    found = [
        Shape(*shape, batch=1) if shape in everything else Shape(*shape, batch=1, recipes=(FP8,), peers=MAIN)
        for shape in one
    ]
    found += [Shape(256, m, 8192, batch=1, recipes=(FP8,), peers=MAIN[:2]) for m in (False, True)]
    found += [Shape(d, True, n, recipes=(FP8,), peers=MAIN) for d, n in ((128, 4096), (64, 8192))]
    found += [Shape(128, False, n, recipes=(FP8,), peers=MAIN) for n in (4096, 2048)]
    return found + [Shape(64, True, 8192, batch=1, recipes=(FP8,), peers=MAIN)]


def _cudnn_fp8() -> list[Shape]:
    """The shapes for which NVIDIA publishes cuDNN's FP8 attention on Hopper: 64 query and 8 kv heads, head_dim 128,
    1K to 128K tokens. 32K first: the length of the figures that are quoted (1,062 TOPS full, 1,042 causal)."""
    peers = ("cudnn_fp8_kernel", "fa3_fp8_kernel", "sdpa_default")
    lengths = (32768, 8192, 131072, 4096, 16384, 2048, 65536, 1024)
    return [
        Shape(128, m, n, batch=1, num_heads=64, num_kv_heads=8, recipes=(FP8,), peers=peers)
        for n in lengths
        for m in (False, True)
    ]


# Self-attention as the models call it: heads, head_dim and tokens of their configurations (diffusers 0.42, transformers
# 5.17) at a usual request. Sources: tests/zoo/architectures for all but MiniMax-H3.
_MODELS: tuple[tuple[str, int, bool, int, int, int], ...] = (
    ("Wan-2.1-14B, 720p, 81 frames", 128, False, 75600, 40, 40),
    ("Llama-3-8B prefill", 128, True, 8192, 32, 8),
    ("Flux-dev, 1024 px", 128, False, 4608, 24, 24),
    ("CogVideoX-5B, 480p, 49 frames", 64, False, 17776, 48, 48),
    ("Qwen-Image, 1328 px", 128, False, 7145, 24, 24),
    ("LTX-2, 768 x 512, 121 frames", 128, False, 6144, 32, 32),
    ("HunyuanVideo, 720p, 129 frames", 128, False, 119056, 24, 24),
    # 56 heads of 128: the defaults of MiniMaxH3Transformer3DModel; requests pack 30K to 314K tokens
    ("MiniMax-H3, 32K tokens", 128, False, 32768, 56, 56),
    ("Llama-3-8B prefill", 128, True, 32768, 32, 8),
    ("Llama-3-8B prefill", 128, True, 131072, 32, 8),
)


def _models() -> list[Shape]:
    return [
        Shape(d, causal, n, 1, heads, kv, (FP8,), MAIN[:2], name) for name, d, causal, n, heads, kv in _MODELS
    ]  # fmt: skip


def smoke() -> list[Shape]:
    """Small calls with everything that can be timed, to see that it all runs."""
    return [Shape(128, True, 2048, batch=1), Shape(64, False, 1024, batch=1, num_kv_heads=8)]


PRESETS = {"kernels": _kernels, "cudnn_fp8": _cudnn_fp8, "models": _models, "lengths": grid, "smoke": smoke}


def preset(name: str) -> list[Shape]:
    """The shapes of a preset. Raises BenchError naming those there are."""
    if name not in PRESETS:
        raise BenchError(f"preset {name!r} is none; there are {', '.join(PRESETS)}")
    return PRESETS[name]()


def crossover(head_dims: Iterable[int], lengths: Sequence[int], masks: Iterable[str]) -> list[Shape]:
    """For the table of break-even lengths: one item of 32 heads, and 128 heads up to 8192 tokens (batch 0 has fewer
    above), of each the longest sequences first."""
    shapes = [
        replace(shape, batch=batch, crossover_heads=batch * 32 or CROSSOVER_HEADS)
        for batch in (0, 1)
        for shape in grid(head_dims, lengths, masks)
        if batch or shape.length <= 8192
    ]
    return sorted(shapes, key=lambda s: (-s.head_dim, s.is_causal, s.crossover_heads, -s.length))
