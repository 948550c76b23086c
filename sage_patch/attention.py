"""The functional face: `sage_attention` checks a user's call (see arguments.py) and runs it."""

from __future__ import annotations

import operator
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from sage_patch import arguments
from sage_patch.args import Args
from sage_patch.dispatch import Layout, Options, UnsupportedCall, attend, choose, describe, is_training, unify
from sage_patch.dispatch import arguments as to_operator
from sage_patch.kernels import ops, torch_private
from sage_patch.kernels.plans import PLANS
from sage_patch.recipes import AUTO, NO_LIMITS, Limits, parse_recipe

__all__ = ["UnsupportedCall", "sage_attention"]


def sage_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    tensor_layout: Layout = "HND",
    causal_align: Literal["bottom_right", "top_left"] = "bottom_right",
    window: int | tuple[int, int] | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    return_lse: bool = False,
    recipe: str | None = AUTO,
    on_unsupported: Literal["exact", "error"] = "exact",
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention with SDPA's arguments and meaning, quantized where the recipe can.

    query [B, Hq, q_len, D], key [B, Hkv, kv_len, D], value [B, Hkv, kv_len, Dv] ("HND"), or heads and tokens
    swapped ("NHD"); with cu_seqlens, packed [total, H, D]. Any strides; inputs are never written.

    attn_mask: bool (True = may attend) or float (added to the scaled scores), broadcastable to
        [B, Hq, q_len, kv_len]. It composes with is_causal and window. Integer masks are refused.
    is_causal: key j is seen by query i if j <= i + kv_len - q_len ("bottom_right", right for a KV cache), or
        j <= i ("top_left", torch SDPA's corner). The two agree when the lengths do.
    scale: default 1 / sqrt(D). enable_gqa: Hq may be a multiple of Hkv.
    window: an int W lets a query see the W keys ending with its own (with is_causal; both sides without);
        (left, right) counts keys on each side, -1 for no limit. None, 0 or negative: no window.
    softcap: scores become softcap * tanh(scores / softcap). sinks: float [Hq], one extra logit a head in the
        denominator. cu_seqlens_q, cu_seqlens_k: int [n + 1] cumulative lengths of packed sequences.
    return_lse: also return the natural-log sum of exponentials (sink included) of the true scaled scores,
        float32 [B, Hq, q_len] (packed: [Hq, total]).
    recipe: "sage2" or None (the device's default; short and one-row calls go exact), "exact", or a rung such as
        "qk_int8_pv_fp8" by name, which then runs at any length. on_unsupported: "exact" runs what the recipe
        cannot do on the exact path and counts why; "error" raises UnsupportedCall instead.

    Returns the output in query's dtype and layout, contiguous; a row that sees no key is 0 with lse -inf.
    Calls that need gradients or dropout run exact, also inside of reentrant checkpointing. Lengths in cu_seqlens that
    fall or leave the tensor are refused on a CPU; on other devices, where reading them would wait, they are kept in.
    Raises ValueError or TypeError naming the argument.
    """
    kind = None
    if not torch.compiler.is_compiling():
        kind = _kind(
            query, key, value, (attn_mask, sinks, cu_seqlens_q, cu_seqlens_k),
            (dropout_p, is_causal, enable_gqa, return_lse, scale, softcap, window),
            (tensor_layout, causal_align, AUTO if recipe is None else recipe, on_unsupported),
        )  # fmt: skip
        planned: ops.Planned | _Exact | None = None if kind is None else PLANS.get(kind)
        if planned is not None and not ops.is_watched():
            out, lse = planned.launch(query, key, value, (attn_mask, None, None, sinks, cu_seqlens_q, cu_seqlens_k))
            return (out, lse) if lse is not None else out
    given = query
    others = dict(attn_mask=attn_mask, sinks=sinks, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    arguments.check_tensors(query, key, value, others)
    for name, flag in (("is_causal", is_causal), ("enable_gqa", enable_gqa), ("return_lse", return_lse)):
        arguments.check_flag(name, flag)
    arguments.check_word("tensor_layout", tensor_layout, ("HND", "NHD"))
    arguments.check_word("causal_align", causal_align, ("bottom_right", "top_left"))
    arguments.check_word("on_unsupported", on_unsupported, ("exact", "error"))
    arguments.check_dropout(dropout_p)
    arguments.check_softcap(softcap)
    arguments.check_number("scale", 1.0 if scale is None else scale, " or None")
    left, right = arguments.band(window, is_causal)
    packed = cu_seqlens_q is not None or cu_seqlens_k is not None
    if packed:
        query, key, value, cu_seqlens_q, cu_seqlens_k = arguments.packed(
            query, key, value, attn_mask, cu_seqlens_q, cu_seqlens_k
        )
    else:
        arguments.check_rank(query, key, value)
        if tensor_layout == "NHD":
            query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    arguments.check_shapes(query, key, value, enable_gqa)
    mask = arguments.mask4(attn_mask, query, key)
    arguments.check_sinks(sinks, query.shape[1])
    recipe = arguments.recipe_name(recipe)

    options = Options(
        attn_mask=mask,
        scale=scale,
        left=left,
        right=right,
        top_left=causal_align == "top_left",
        softcap=softcap or 0.0,
        sinks=sinks,
        dropout_p=dropout_p,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        return_lse=bool(return_lse),
        out_layout="NHD" if packed else tensor_layout,
    )
    views = (query, key, value)
    query, key, value = unify(*views)
    call = describe(query, key, value, options)
    limits = Limits() if recipe == AUTO else NO_LIMITS
    chosen, reason = choose(parse_recipe(recipe), call, limits, on_unsupported)
    out, lse = attend(query, key, value, options, call, chosen, reason)
    if kind is not None and all(map(operator.is_, views, (query, key, value))):
        args = to_operator(query, options, chosen, reason)
        if not chosen.is_exact:
            found = ops.planned(query, key, value, args)
            if found is not None:
                PLANS.put(kind, found._replace(plan=found.plan.of_user(given, packed)))
        elif not packed:  # whose lengths are looked at each time
            PLANS.put(kind, _Exact(args._replace(attn_mask=None, sinks=None), tensor_layout == "NHD"))
    if packed:
        out = out[0].transpose(0, 1)
        lse = lse[0] if lse is not None else None
    elif tensor_layout == "NHD":
        out = out.transpose(1, 2)
    if return_lse:
        assert lse is not None
        return out, lse
    return out


class _Exact(NamedTuple):
    """A dense call that runs exact, and why. args: without its tensors."""

    args: Args
    is_nhd: bool

    def launch(
        self, query: Tensor, key: Tensor, value: Tensor, tensors: tuple[Tensor | None, ...]
    ) -> tuple[Tensor, Tensor | None]:
        """As the plans of kernels are launched."""
        if self.is_nhd:
            query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        mask = arguments.mask4(tensors[0], query, key)
        out, lse = ops.attend(query, key, value, self.args._replace(attn_mask=mask, sinks=tensors[3]))
        return out.transpose(1, 2) if self.is_nhd else out, lse if self.args.return_lse else None


_TENSORS = frozenset((Tensor, torch.nn.Parameter))


def _kind(
    query: Any, key: Any, value: Any, others: tuple[Any, ...], numbers: tuple[Any, ...], words: tuple[Any, ...]
) -> tuple[object, ...] | None:
    """What a call has in common with all that are decided alike: everything that is looked at for that. None: it has to
    be looked at each time.

    Types are asked because keys are compared by value: 1 is not a truth value, although it equals True. A training step
    is no such call (`choose`), so that it need not be told apart.
    """
    dropout_p, is_causal, enable_gqa, return_lse, scale, softcap, window = numbers
    if (
        not type(is_causal) is type(enable_gqa) is type(return_lse) is bool
        or type(dropout_p) is not float
        or dropout_p != 0.0
        or not (scale is None or type(scale) is float)
        or not (softcap is None or type(softcap) is float)
        or not (window is None or type(window) is int or (type(window) is tuple and {*map(type, window)} == {int}))
        or {*map(type, words)} != {str}
        or torch_private.is_seen()
    ):
        return None
    facts: list[object] = []
    learns = torch.is_grad_enabled()
    for x in (query, key, value, *[x for x in others if x is not None]):
        if type(x) not in _TENSORS or x.is_nested or x.layout is not torch.strided or (learns and x.requires_grad):
            return None
        facts += (x.shape, x.stride(), x.dtype, x.device)
    if not learns and is_training(False):
        return None
    device = "cuda" if query.is_cuda else "cpu"
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    return (*facts, *[x is None for x in others], numbers, words, autocast)
