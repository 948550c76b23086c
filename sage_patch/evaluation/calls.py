"""Attention calls of a real model: captured in bounded memory, cut to size, and computed again under any recipe."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sage_patch.evaluation.metrics import errors
from sage_patch.kernels import ops
from sage_patch.kernels.plain import visibility_of
from sage_patch.recipes import parse_recipe
from sage_patch.reference.attention import quantized_attention
from sage_patch.reference.exact import exact_attention

MIN_KV_LEN = 128  # fewer keys are not captured: they run exact under every policy that does not say otherwise
MAX_WORK = 1 << 23  # heads x query rows x keys of a call that are scored; of longer calls some rows and heads are
ROWS = 128  # query rows are taken in whole blocks of so many, because a block shares its smoothing


@dataclass
class Capture:
    """Calls kept while a model ran, in bounded memory: tensors on the CPU, and the band they were attended under.

    At most `per_site` calls of a site, evenly spread over all that it made (None keeps all), and at most `limit_bytes`
    of tensors together. seen counts every call, short those with fewer than `MIN_KV_LEN` keys or with one query row,
    over_limit those that found no memory left.
    """

    source: str
    per_site: int | None = None
    limit_bytes: int = 1 << 30
    seen: int = 0
    short: int = 0
    over_limit: int = 0
    used: int = 0
    _sites: dict[str, list[ops.ObservedCall]] = field(default_factory=dict)
    _strides: dict[str, tuple[int, int]] = field(default_factory=dict)  # site -> (calls seen, every how many is kept)

    @property
    def calls(self) -> list[ops.ObservedCall]:
        """What was kept, by site in the order of their first calls."""
        return [c for kept in self._sites.values() for c in kept]

    def observe(self, call: ops.ObservedCall) -> None:
        """To be given to `ops.observe`."""
        self.seen += 1
        if call.key.shape[2] < MIN_KV_LEN or call.query.shape[2] < 2:
            self.short += 1
            return
        site = site_of(call)
        number, stride = self._strides.get(site, (0, 1))
        self._strides[site] = number + 1, stride
        if number % stride:
            return
        size = _bytes(call)
        if self.used + size > self.limit_bytes:
            self.over_limit += 1
            return
        self.used += size
        tensors = {n: getattr(call, n).detach().to("cpu", copy=True) for n in ("query", "key", "value")}
        mask = None if call.attn_mask is None else call.attn_mask.detach().cpu()
        kept = self._sites.setdefault(site, [])
        kept.append(call._replace(site=site, attn_mask=mask, **tensors))
        if self.per_site is not None and len(kept) > self.per_site:
            self.used -= sum(_bytes(c) for c in kept[1::2])
            del kept[1::2]
            self._strides[site] = number + 1, 2 * stride


@contextmanager
def capturing(source: str, per_site: int | None = None, limit_bytes: int = 1 << 30) -> Iterator[Capture]:
    """Keep Q, K and V of the attention calls of patched models inside the with-block."""
    capture = Capture(source, per_site, limit_bytes)
    with ops.observe(capture.observe), torch.no_grad():
        yield capture


def site_of(call: ops.ObservedCall) -> str:
    """The name of the site that made an observed call, without its handle's."""
    return call.site.partition("/")[2]


def score(call: ops.ObservedCall, recipe: str) -> dict[str, float]:
    """`metrics.errors` of one call under a recipe, against exact attention."""
    return errors(compute(call, recipe), compute(call, "exact"))


def compute(call: ops.ObservedCall, recipe: str) -> Tensor:
    """The call's output [B, Hq, q_len, Dv] in float32 under a recipe of the reference backend."""
    visibility = visibility_of(
        call.query.shape[2], call.key.shape[2], call.attn_mask, call.left, call.right, call.top_left
    )
    tensors = (call.query.float(), call.key.float(), call.value.float())
    chosen = parse_recipe(recipe)
    if chosen.is_exact:
        return exact_attention(*tensors, visibility, scale=call.scale)[0]
    return quantized_attention(*tensors, visibility, chosen, scale=call.scale)[0]


def part_of(call: ops.ObservedCall, max_work: int = MAX_WORK) -> ops.ObservedCall:
    """At most `max_work` scores of a call: its first batch item, whole blocks of query rows, then fewer heads.

    All keys stay, because smoothing and scales see them. Under a diagonal the rows next to its anchor are taken, which
    keeps it where it is; else the blocks are evenly spread.
    """
    heads, q_len, kv_heads, kv_len = *call.query.shape[1:3], *call.key.shape[1:3]
    groups = heads // kv_heads
    kept_kv = max(1, min(kv_heads, max_work // (groups * kv_len * min(q_len, 2 * ROWS))))
    blocks = max(1, max_work // (kept_kv * groups * kv_len * ROWS))
    kv = torch.arange(kept_kv) * kv_heads // kept_kv
    q = (kv[:, None] * groups + torch.arange(groups)).flatten()
    rows = _rows(q_len, blocks, call.left >= 0 or call.right >= 0, call.top_left)

    def picked(tensor: Tensor, chosen: Tensor, tokens: Tensor | None) -> Tensor:
        device = tensor.device
        tensor = tensor[:1] if tensor.shape[1] == 1 and len(chosen) > 1 else tensor[:1, chosen.to(device)]
        return tensor if tokens is None or tensor.shape[2] == 1 else tensor[:, :, tokens.to(device)]

    mask = None if call.attn_mask is None else picked(call.attn_mask, q, rows)
    query, key, value = picked(call.query, q, rows), picked(call.key, kv, None), picked(call.value, kv, None)
    return call._replace(query=query, key=key, value=value, attn_mask=mask)


def _rows(q_len: int, blocks: int, has_diagonal: bool, top_left: bool) -> Tensor:
    whole = -(-q_len // ROWS)
    if blocks >= whole:
        return torch.arange(q_len)
    if has_diagonal:
        return torch.arange(blocks * ROWS) if top_left else torch.arange(q_len - blocks * ROWS, q_len)
    chosen = torch.arange(blocks) * (q_len // ROWS) // blocks
    return (chosen[:, None] * ROWS + torch.arange(ROWS)).flatten()


def _bytes(call: ops.ObservedCall) -> int:
    return sum(t.numel() * t.element_size() for t in (call.query, call.key, call.value))
