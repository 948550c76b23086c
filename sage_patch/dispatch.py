"""How one attention call is run: described, chosen for, attended. Shared by the public function and the adapters.

attention.py words the errors of a user's call; here every call is already sound. The choice is made from static
facts before anything is launched: quantized, or exact with a counted reason, or refused with an error.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from sage_patch.args import Args, PageArgs, key_padding, scale_for
from sage_patch.backends import as_run, named, why_not
from sage_patch.kernels import crossover, ops, torch_private
from sage_patch.kernels.images import Kind
from sage_patch.kernels.plain import ends_within, in_layout, knows_autocast, visibility_of, without_autocast
from sage_patch.pages import Pages
from sage_patch.reasons import is_error
from sage_patch.recipes import EXACT, Call, ExactBackend, Limits, Recipe, UnsupportedCall
from sage_patch.reference.exact import exact_attention, exact_weights
from sage_patch.reference.quantize import hide
from sage_patch.reference.visibility import Visibility

Layout = Literal["HND", "NHD"]
_DTYPE_NAMES = {d: str(d).removeprefix("torch.") for d in (torch.float16, torch.bfloat16, torch.float32, torch.float64)}


@dataclass(frozen=True)
class Options:
    """Everything about a call but its three tensors, checked and in the core's own words.

    attn_mask: 4-D, bool or float, broadcastable to [B, Hq, q_len, kv_len].
    kv_starts, kv_lens: int32 [B], item b's keys are the kv_lens[b] from kv_starts[b] (None: 0) on; instead of
    attn_mask. With a window or causality either top_left holds, or all items' keys end at kv_len.
    left, right: keys seen on each side of the diagonal, -1 for no limit; causal is right=0. top_left: the diagonal
    starts at the first key instead of ending at the last. softcap 0: none. sinks: float [Hq].
    max_q_len, max_kv_len: of cu_seqlens' longest sequence, 0 where unknown; they decide what is too short.
    out_layout: in which layout the output's memory is contiguous.
    guard_rows: an exact call's rows without keys are 0. False: they are as torch's SDPA has them, so that the call is
    bit-equal to the one that it stands for.
    training: the flag of the module whose call this is. exact_backend: what computes the call if it runs exact.
    """

    attn_mask: Tensor | None = None
    kv_starts: Tensor | None = None
    kv_lens: Tensor | None = None
    scale: float | None = None
    left: int = -1
    right: int = -1
    top_left: bool = False
    softcap: float = 0.0
    sinks: Tensor | None = None
    dropout_p: float = 0.0
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    max_q_len: int = 0
    max_kv_len: int = 0
    return_lse: bool = False
    out_layout: Layout = "HND"
    guard_rows: bool = True
    training: bool = False
    exact_backend: ExactBackend = "torch"

    def scale_for(self, head_dim: int) -> float:
        """The softmax scale; the default is SDPA's own expression of the true head_dim."""
        return scale_for(self.scale, head_dim)

    def visibility(self, q_len: int, kv_len: int) -> Visibility:
        return visibility_of(q_len, kv_len, self.attn_mask, self.left, self.right, self.top_left)


def unify(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Under autocast a call takes autocast's dtype, float32 too, as SDPA's own autocast rule has it (float64 stays).
    Outside it mixed dtypes stay mixed and the call goes exact in their common dtype, out in query's dtype."""
    device = query.device.type
    if not knows_autocast(device) or not torch.is_autocast_enabled(device):
        return query, key, value
    dtype = torch.get_autocast_dtype(device)
    query, key, value = (x if x.dtype == torch.float64 else x.to(dtype) for x in (query, key, value))
    return query, key, value


def describe(query: Tensor, key: Tensor, value: Tensor, options: Options) -> Call:
    """The static facts of a call, for the envelope. Tensors are HND views."""
    same_dtype = query.dtype == key.dtype == value.dtype
    tensors = (query, key, value, options.attn_mask, options.sinks)
    batch, q_len, kv_len = query.shape[0], query.shape[2], key.shape[2]
    if options.cu_seqlens_q is not None and options.max_q_len and options.max_kv_len:
        batch = max(1, q_len // options.max_q_len)  # of sequences as long as the longest, no more work than there is
        q_len, kv_len = options.max_q_len, options.max_kv_len
    backend = ops.backend_for(query.device)
    row = named(backend)
    return Call(
        backend=backend,
        device=query.device.type,
        dtype=_DTYPE_NAMES.get(query.dtype, "other") if same_dtype else "mixed",
        head_dim=query.shape[-1],
        v_head_dim=value.shape[-1],
        num_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        q_len=q_len,
        kv_len=kv_len,
        is_causal=options.right == 0,
        top_left=options.top_left,
        mask=mask_kind(options),
        window=options.left >= 0 or options.right > 0,
        softcap=bool(options.softcap),
        sinks=options.sinks is not None,
        varlen=options.cu_seqlens_q is not None,
        return_lse=options.return_lse,
        dropout=options.dropout_p > 0,
        needs_grad=torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors),
        training=is_training(options.training),
        batch=batch,
        crossover=crossover.lengths(
            query.device.index, _width(query.shape[-1], value.shape[-1]), options.right == 0, options.exact_backend
        )
        if row is not None and row.is_compiled
        else (),
    )


def is_training(module_trains: bool) -> bool:
    """Whether this forward pass belongs to a training step, also where this very call needs no gradient.

    module_trains: the `training` flag of the module that calls. With gradients enabled it decides: the frozen part of a
    model in training is part of the loss. Without, the pass is inference, unless it runs inside of the forward of an
    autograd function: reentrant checkpointing computes it again with gradients, which must be those of this pass.
    Torch switches forward-mode differentiation off there, and nowhere else but in inference mode. What is being
    compiled cannot tell, so that the flag decides there too.
    """
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return module_trains
    return not (torch_private.forward_mode_is_on() or torch.is_inference_mode_enabled())


def mask_kind(options: Options) -> Literal["none", "lengths", "padding", "bool", "float"]:
    """`Call.mask` of these options."""
    mask = options.attn_mask
    if mask is None:
        return "none" if options.kv_lens is None else "lengths"
    if mask.dtype != torch.bool:
        return "float"
    return "bool" if key_padding(mask) is None else "padding"


def _width(head_dim: int, v_head_dim: int) -> int:
    """The head_dim whose break-even lengths count: more than 128 channels of V cost the kernel as much as 256 do."""
    return 256 if v_head_dim > 128 else head_dim


def choose(
    recipe: Recipe,
    call: Call,
    limits: Limits,
    on_unsupported: str = "exact",
    exact_reason: str = "policy",
    site: str = "",
) -> tuple[Recipe, str]:
    """(recipe that will run, reason): the recipe asked for, as the backend runs it, with an empty reason, or "exact"
    and why.

    exact_reason: what is counted when "exact" itself was asked for. site: named in the error. Raises UnsupportedCall
    where the recipe cannot run the call and `on_unsupported` is "error"; a call that is merely too short is never one.
    """
    if recipe.is_exact:
        return recipe, "needs_grad" if call.needs_grad else exact_reason
    recipe = as_run(recipe, call.backend, call.head_dim)
    reason = why_not(recipe, call, limits)
    if reason is None:
        return recipe, ""
    if on_unsupported == "error" and is_error(reason):
        place = f" at {site.partition('/')[2]}" if site else ""
        raise UnsupportedCall(
            f"recipe {recipe.name!r} cannot run this call{place} on {call.device}: {reason} "
            f"({call.num_heads} query and {call.num_kv_heads} kv heads, {call.q_len} queries, {call.kv_len} keys, "
            f'head_dim {call.head_dim}, {call.dtype}); use on_unsupported "exact", or the recipe "exact" here'
        )
    return EXACT, reason


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: Options,
    call: Call,
    recipe: Recipe,
    reason: str,
    site: str = "",
) -> tuple[Tensor, Tensor | None]:
    """Run one call as `choose` decided: HND views in, (out [B, Hq, q_len, Dv], lse or None) out.

    site: the counter key of the calling site.
    """
    if call.needs_grad or call.dropout:
        return _differentiable(query, key, value, options, reason, site)
    out, lse = ops.attend(query, key, value, arguments(query, options, recipe, reason, site))
    return out, lse if options.return_lse else None


def arguments(query: Tensor, options: Options, recipe: Recipe, reason: str, site: str = "") -> Args:
    """What the operator is told of a call."""
    o = options
    scale = o.scale if torch.compiler.is_compiling() else o.scale_for(query.shape[-1])
    return Args(
        o.attn_mask, o.kv_starts, o.kv_lens, o.sinks, o.cu_seqlens_q, o.cu_seqlens_k, scale,
        o.left, o.right, o.top_left, o.softcap, o.return_lse, o.out_layout, recipe.name, reason, site,
        o.guard_rows, o.exact_backend,
    )  # fmt: skip


def image_kind(key: Tensor, value: Tensor, groups: int, options: Options, recipe: Recipe) -> Kind | None:
    """The kind of image that keys and values [B, Hkv, tokens, D] under this recipe can be sent as; None: of masked
    keys, or where Q is smoothed, which takes the keys themselves. groups: query heads of a kv head."""
    if recipe.is_exact or recipe.smooth_q or options.attn_mask is not None or options.softcap:
        return None
    batch, heads, tokens, head_dim = key.shape
    return Kind((batch, heads, tokens, head_dim), value.shape[3], groups, key.dtype, key.device, recipe)


def attend_image(query: Tensor, image: Tensor, kind: Kind, options: Options, site: str) -> tuple[Tensor, Tensor | None]:
    """`attend` over the image of some keys and values, counted as any quantized call."""
    args = arguments(query, options, kind.recipe, "", site)
    with ops.beside(site, kind.recipe, query.device):
        return kind.attend(query, image, args)


def attend_with_weights(
    query: Tensor, key: Tensor, value: Tensor, options: Options, site: str
) -> tuple[Tensor, Tensor]:
    """Exact attention that also returns its weights [B, Hq, q_len, kv_len], counted "output_attentions"."""
    tick("output_attentions", site)
    visibility = options.visibility(query.shape[2], key.shape[2])
    seen = visibility.visible_keys(key.shape[1], key.device)
    key, value = hide(key, seen), hide(value, seen)
    scale = options.scale_for(query.shape[-1])
    with without_autocast(query.device):  # it would halve the precision of the scores
        weights = exact_weights(query, key, visibility, scale=scale, softcap=options.softcap, sinks=options.sinks)
    weights = weights.to(query.dtype)
    if options.dropout_p:
        weights = torch.nn.functional.dropout(weights, options.dropout_p)
    groups = query.shape[1] // value.shape[1]
    return torch.matmul(weights, value.repeat_interleave(groups, dim=1)), weights


def attend_pages(pages: Pages, query: Tensor, args: PageArgs, site: str) -> Tensor:
    """Attention of the last queries over a quantized cache, counted as quantized with the note "cache".

    Returns [B, Hq, q_len, D] in query's dtype.
    """
    ops.count_pages(site, pages.rotated, query.device)
    with without_autocast(query.device):
        out, _ = pages.attend(query.to(pages.dtype), args)
    return out.to(query.dtype)


def tick(reason: str, site: str) -> None:
    """Count one exact call that does not pass through the operator."""
    ops.count(ops.TICKET, "exact", reason, site)


def _differentiable(
    query: Tensor, key: Tensor, value: Tensor, options: Options, reason: str, site: str
) -> tuple[Tensor, Tensor | None]:
    """The exact path in plain PyTorch, for gradients and dropout: same speed and memory as unpatched."""
    tick(reason, site)
    pieces = [(slice(None), slice(None))]
    if options.cu_seqlens_q is not None and options.cu_seqlens_k is not None:
        q = ends_within(options.cu_seqlens_q, query.shape[2])
        k = ends_within(options.cu_seqlens_k, key.shape[2])
        pieces = [(slice(q[i], q[i + 1]), slice(k[i], k[i + 1])) for i in range(len(q) - 1)]
        # tokens before the first and after the last sequence see nothing
        nothing = slice(0, 0)
        pieces = [(slice(0, q[0]), nothing), *pieces, (slice(q[-1], None), nothing)]
    outs, lses = [], []
    for rows, cols in pieces:
        part = query[:, :, rows], key[:, :, cols], value[:, :, cols]
        # Autocast would turn the float32 products of softcap, sinks and LSE into half precision.
        with without_autocast(query.device):
            out, lse = exact_attention(
                *part,
                options.visibility(part[0].shape[2], part[1].shape[2]),
                scale=options.scale_for(query.shape[-1]),
                softcap=options.softcap,
                sinks=options.sinks,
                dropout_p=options.dropout_p,
                return_lse=options.return_lse,
                guard_rows=options.guard_rows,
            )
        outs.append(out)
        lses.append(lse)
    out = torch.cat(outs, dim=2) if len(outs) > 1 else outs[0]
    out = in_layout(out, options.out_layout)
    if not options.return_lse:
        return out, None
    return out, torch.cat([x for x in lses if x is not None], dim=2)
