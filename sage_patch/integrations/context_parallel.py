"""Attention whose sequence is split over devices: diffusers' Ulysses, ring and unified modes under a site's recipe.

Ulysses exchanges tokens for heads: each rank attends over all tokens with some of the heads. A ring passes keys and
values on while each rank attends with its own queries. Unified does the first within a group and the second between.

Queries and outputs travel in 16 bits. Keys and values are quantized once, where they are, and travel as images of INT8
and E4M3 with their scales and means (kernels/images.py), each rank's tokens a part of its own; masked keys travel in 16
bits. Parts are merged by their log-sum-exp, which is of the true scores whatever mean a part's keys were smoothed with.
What runs is decided before anything is sent, from facts that all ranks share. A call of n parts counts n times.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sage_patch.dispatch import Options, attend, attend_image, choose, describe, image_kind, tick, unify
from sage_patch.integrations.sdpa import RUNNING
from sage_patch.integrations.tags import SiteTag
from sage_patch.recipes import Call, Recipe


@dataclass(frozen=True)
class Group:
    """The ranks of one direction of the mesh, and who of them this process is. One rank: nothing is sent."""

    group: Any = None
    size: int = 1
    rank: int = 0

    @classmethod
    def of(cls, mesh: Any, size: int) -> Group:
        if size == 1:
            return cls()
        group = mesh.get_group()
        return cls(group, size, dist.get_rank(group))

    def peer(self, step: int) -> int:
        """The rank in the world of who stands `step` places on."""
        return dist.get_global_rank(self.group, (self.rank + step) % self.size)

    def lengths(self, mine: list[int], uneven: bool, device: torch.device) -> list[list[int]]:
        """Everybody's list of lengths; asked for only where they may differ."""
        if self.size == 1 or not uneven:
            return [mine] * self.size
        sent = torch.tensor(mine, dtype=torch.int64, device=device)
        found = [torch.empty_like(sent) for _ in range(self.size)]
        dist.all_gather(found, sent, group=self.group)
        return torch.stack(found).tolist()  # type: ignore[no-any-return]

    def exchange(self, pieces: list[Tensor], sizes: list[int]) -> list[Tensor]:
        """Bytes pieces[r] to rank r; returns what each sent here, of the sizes that are known."""
        if self.size == 1:
            return pieces
        sent = torch.cat(pieces)
        found = sent.new_empty(sum(sizes))
        dist.all_to_all_single(found, sent, sizes, [p.numel() for p in pieces], group=self.group)
        return list(found.split(sizes))


@dataclass(frozen=True)
class Split:
    """How one call is split: lengths by rank of the Ulysses group, heads by the rank that attends with them."""

    ulysses: Group
    ring: Group
    q_lens: list[int]
    kv_lens: list[int]
    ring_kv_lens: list[list[int]]  # kv_lens of each rank of the ring
    ring_q_lens: list[list[int]]
    kv_heads: list[int]
    groups: int  # query heads of a kv head

    @property
    def q_heads(self) -> list[int]:
        return [n * self.groups for n in self.kv_heads]

    def to_heads(self, x: Tensor, heads: list[int], lengths: list[int]) -> Tensor:
        """[B, H, this rank's tokens, D] -> [B, this rank's heads, tokens of the group, D]."""
        if self.ulysses.size == 1:
            return x
        mine = heads[self.ulysses.rank]
        shapes = [(x.shape[0], mine, n, x.shape[3]) for n in lengths]
        return torch.cat(self._exchange(list(x.split(heads, dim=1)), shapes), dim=2)

    def to_tokens(self, x: Tensor) -> Tensor:
        """The way back of queries' outputs."""
        if self.ulysses.size == 1:
            return x
        mine = self.q_lens[self.ulysses.rank]
        shapes = [(x.shape[0], n, mine, x.shape[3]) for n in self.q_heads]
        return torch.cat(self._exchange(list(x.split(self.q_lens, dim=2)), shapes), dim=1)

    def _exchange(self, pieces: list[Tensor], shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        dtype = pieces[0].dtype
        found = self.ulysses.exchange([as_bytes(p) for p in pieces], [size_of(s, dtype) for s in shapes])
        return [from_bytes(x, dtype, shape) for x, shape in zip(found, shapes, strict=True)]


def as_bytes(x: Tensor) -> Tensor:
    return x.contiguous().flatten().view(torch.uint8)


def from_bytes(x: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return x.view(dtype).view(shape)


def size_of(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize


def attend_split(
    tag: SiteTag,
    config: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    scale: float | None,
) -> Tensor | None:
    """Attention of this rank's queries [B, H, tokens, D] over the keys of all ranks, as diffusers' context parallel
    config says it is split; None: exact, counted, and to be computed by diffusers as if nothing were patched.

    attn_mask: of this rank's keys, [B or 1, 1, 1, tokens], or None. Raises UnsupportedCall as `dispatch.choose`.
    """
    split = _split(config, query, key)
    query, key, value = unify(query, key, value)
    options = Options(
        attn_mask=attn_mask, scale=scale, dropout_p=dropout_p, out_layout="NHD", guard_rows=False,
        training=RUNNING.training, return_lse=split.ring.size > 1,
    )  # fmt: skip
    recipe, reason, call = _choose(tag, split, query, key, value, options)
    if recipe.is_exact:
        tick(reason, tag.key)
        return None
    query = split.to_heads(query, split.q_heads, split.q_lens)
    whole: Part | None = None
    for part in _parts(split, query, key, value, options, recipe, call, tag.key):
        whole = merge(whole, part)
    out = query.new_zeros(*query.shape[:3], value.shape[3]) if whole is None else whole[0].to(query.dtype)
    return split.to_tokens(out)


def _parts(
    split: Split, query: Tensor, key: Tensor, value: Tensor, options: Options, recipe: Recipe, call: Call, site: str
) -> Iterator[Part]:
    """Attention of this rank's queries and heads over the keys of one rank after the other."""
    ring, mine = split.ring, split.kv_heads[split.ulysses.rank]
    kind = image_kind(key, value, split.groups, options, recipe)
    if kind is not None:
        # One image for each rank that attends with its heads, and then one from each rank for the heads of this one.
        batch, _, _, head_dim = key.shape
        pieces = [
            kind._replace(shape=(batch, heads, key.shape[2], head_dim)).quantize(k, v)
            for heads, k, v in zip(
                split.kv_heads, key.split(split.kv_heads, 1), value.split(split.kv_heads, 1), strict=True
            )
        ]
        kinds = [[kind._replace(shape=(batch, mine, n, head_dim)) for n in lengths] for lengths in split.ring_kv_lens]
        held = split.ulysses.exchange(pieces, [of.size() for of in kinds[ring.rank]])
        sizes = [[of.size() for of in row] for row in kinds]
        for source, images in _around(ring, held, sizes):
            for of, image in zip(kinds[source], images, strict=True):
                if of.shape[2] and query.shape[2]:
                    yield attend_image(query, image, of, replace(options, return_lse=True), site)
        return
    key, value = (split.to_heads(x, split.kv_heads, split.kv_lens) for x in (key, value))
    masks = _masks(split, options.attn_mask)
    shapes = [[(*x.shape[:2], sum(lens), x.shape[3]) for x in (key, value)] for lens in split.ring_kv_lens]
    sizes = [[size_of(shape, key.dtype) for shape in pair] for pair in shapes]
    for source, pair in _around(ring, [as_bytes(key), as_bytes(value)], sizes):
        k, v = (from_bytes(x, key.dtype, shape) for x, shape in zip(pair, shapes[source], strict=True))
        if k.shape[2] and query.shape[2]:
            yield attend(query, k, v, replace(options, attn_mask=masks[source]), call, recipe, "", site)


Part = tuple[Tensor, Tensor | None]  # out [B, H, tokens, D] and its log-sum-exp [B, H, tokens]


def merge(whole: Part | None, part: Part) -> Part:
    """Attention over the keys of both, in float32; `whole` None: of no keys yet. Rows that see no key stay 0, -inf."""
    if whole is None:
        return part
    (out, lse), (more, more_lse) = whole, part
    assert lse is not None and more_lse is not None
    both = torch.logaddexp(lse, more_lse)
    base = torch.where(torch.isneginf(both), 0.0, both)
    weights = (torch.exp(x - base)[..., None] for x in (lse, more_lse))
    return out.float() * next(weights) + more.float() * next(weights), both


def can_split(config: Any, query: Tensor, key: Tensor, value: Tensor, attn_mask: Any, enable_gqa: bool) -> bool:
    """Whether `attend_split` knows a call's form, tensors [B, H, tokens, D]; the rest is left to diffusers. Compiled
    graphs are, too."""
    if config is None or torch.compiler.is_compiling():
        return False
    if not query.dim() == key.dim() == value.dim() == 4 or key.shape[:3] != value.shape[:3]:
        return False
    if query.shape[0] != key.shape[0] or key.shape[1] < config.ulysses_degree or query.shape[1] % key.shape[1]:
        return False
    if query.shape[1] != key.shape[1] and not enable_gqa:
        return False
    return attn_mask is None or (attn_mask.dim() == 4 and attn_mask.shape[1:] == (1, 1, key.shape[2]))


def _split(config: Any, query: Tensor, key: Tensor) -> Split:
    ulysses = Group.of(config._ulysses_mesh, config.ulysses_degree)
    ring = Group.of(config._ring_mesh, config.ring_degree)
    uneven, device = config.ulysses_anything or config.ring_anything, query.device
    mine = ulysses.lengths([query.shape[2], key.shape[2]], uneven, device)
    q_lens, kv_lens = ([pair[i] for pair in mine] for i in (0, 1))
    everybody = ring.lengths(q_lens + kv_lens, uneven, device)
    n = ulysses.size
    each, more = divmod(key.shape[1], n)
    kv_heads = [each + (r < more) for r in range(n)]
    return Split(
        ulysses, ring, q_lens, kv_lens, [x[n:] for x in everybody], [x[:n] for x in everybody],
        kv_heads, query.shape[1] // key.shape[1],
    )  # fmt: skip


def _choose(
    tag: SiteTag, split: Split, query: Tensor, key: Tensor, value: Tensor, options: Options
) -> tuple[Recipe, str, Call]:
    """What runs, from numbers that are the same on all ranks: the longest queries of the ring, all keys, and the heads
    of the rank that has most."""
    call = describe(query, key, value, options)._replace(
        num_heads=split.q_heads[0],
        num_kv_heads=split.kv_heads[0],
        q_len=max(sum(lens) for lens in split.ring_q_lens),
        kv_len=sum(sum(lens) for lens in split.ring_kv_lens),
    )
    recipe, reason = choose(tag.recipe, call, tag.limits, tag.on_unsupported, tag.exact_reason, tag.key)
    return recipe, reason, call


def _masks(split: Split, mask: Tensor | None) -> list[Tensor | None]:
    """The masks of the keys that each rank of the ring starts with."""
    if mask is None:
        return [None] * split.ring.size
    for group, lengths in ((split.ulysses, split.kv_lens), (split.ring, [sum(x) for x in split.ring_kv_lens])):
        shapes = [(mask.shape[0], 1, 1, n) for n in lengths]
        found = group.exchange([as_bytes(mask)] * group.size, [size_of(s, mask.dtype) for s in shapes])
        parts = [from_bytes(x, mask.dtype, s) for x, s in zip(found, shapes, strict=True)]
        if group is split.ulysses:
            mask = torch.cat(parts, dim=-1)
    return list(parts)


def _around(ring: Group, held: list[Tensor], sizes: list[list[int]]) -> Iterator[tuple[int, list[Tensor]]]:
    """(rank of the ring, its bytes), this rank's own first; the next are under way meanwhile. sizes: of all."""
    if ring.size == 1:
        yield 0, held
        return
    sent = torch.cat(held)
    for step in range(ring.size):
        source = (ring.rank - step) % ring.size
        works: list[Any] = []
        coming = sent
        if step + 1 < ring.size:
            coming = sent.new_empty(sum(sizes[source - 1]))
            ways = ((dist.isend, sent, 1), (dist.irecv, coming, -1))
            operations = [dist.P2POp(op, x, ring.peer(to), ring.group) for op, x, to in ways if x.numel()]
            works = dist.batch_isend_irecv(operations) if operations else []
        yield source, list(sent.split(sizes[source]))
        for work in works:
            work.wait()
        sent = coming
