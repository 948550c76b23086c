"""Predicts bytes on the wire and time of one attention layer whose sequence is split over cards: docs/scaling.md.

Plain arithmetic, nothing is run: python scripts/scaling.py. Every number it prints is predicted.
"""

from __future__ import annotations

from typing import NamedTuple

# Rates that are assumed, not measured here: attention in operations a second, links in bytes a second and direction.
INT8_RATE, HALF_RATE = 850e12, 600e12
NVLINK, NETWORK = 400e9, 45e9
HOST = 8  # cards that NVLink joins
SENT_8 = 0.51  # bytes of an image (INT8 keys, E4M3 values, scales) relative to 16-bit keys and values


class Model(NamedTuple):
    name: str
    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    causal: bool


MODELS = (
    Model("Wan-14B", 75_600, 40, 40, 128, 40, False),
    Model("HunyuanVideo", 118_800, 24, 24, 128, 60, False),
    Model("Llama-70B, 1M tokens", 1_048_576, 64, 8, 128, 80, True),
)


def row(model: Model, cards: int, ulysses: int, ring: int, tensor: int) -> str:
    """A row of the table: MB that a card sends a layer in 16 bits and with images, and ms a layer of each."""
    heads, kv_heads = model.heads / tensor, max(model.kv_heads / tensor, 1)
    local = model.tokens / (ulysses * ring)
    token = 2 * model.head_dim  # bytes of a head's token in 16 bits
    leaving = (ulysses - 1) / ulysses
    turns = 2 * local * heads * token * leaving  # Q and the output
    shared = 2 * local * kv_heads * token * leaving  # K and V to the ranks that have their heads
    # around the ring: all tokens of a Ulysses group, with its rank's heads
    passed = 2 * (local * ulysses) * (kv_heads / ulysses) * token * (ring - 1)
    work = 4 * model.tokens**2 * model.head_dim * model.heads / cards / (2 if model.causal else 1)
    inner, outer = NVLINK, (NVLINK if cards <= HOST else NETWORK)
    times = []
    for rate, factor in ((HALF_RATE, 1.0), (INT8_RATE, 1.0), (INT8_RATE, SENT_8)):
        exchange = (turns + factor * shared) / inner
        # the ring's bytes travel while the card attends
        times.append(exchange + max(work / rate, factor * passed / outer))
    sent = [(turns + f * (shared + passed)) / 1e6 for f in (1.0, SENT_8)]
    cells = [model.name, cards, f"{ulysses} x {ring} x {tensor}", *(f"{x:,.0f}" for x in sent)]
    return "| " + " | ".join(map(str, [*cells, *(f"{1e3 * t:,.1f}" for t in times)])) + " |"


def table() -> str:
    head = (
        "| model | cards | Ulysses x ring x TP | MB sent, 16 bits | MB sent, 8 bits "
        "| ms, exact | ms, quantized, 16 bits sent | ms, quantized, 8 bits sent |"
    )
    rows = [head, "|---|---|---|---|---|---|---|---|"]
    for model in MODELS:
        tensor = 8 if model.kv_heads < model.heads else 1
        for cards in (8, 16, 32, 64):
            if tensor == 8:
                splits = [(1, cards // 8, 8)]
            else:
                splits = [(8, cards // 8, 1), (2, cards // 2, 1)]
            rows += [row(model, cards, u, r, t) for u, r, t in splits]
    return "\n".join(rows)


if __name__ == "__main__":
    print(table())
