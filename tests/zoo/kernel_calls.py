"""Kernel calls as tests and scripts write them: keywords, recipes by name with other smoothing, either layout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from sage_patch.args import Args
from sage_patch.kernels import library
from sage_patch.recipes import Recipe, parse_recipe


class Extras(NamedTuple):
    """What the dense kernels do not know; other families take over. As in Args; key_padding: bool [batch or 1, kv_len],
    False: there is no such key."""

    attn_mask: Tensor | None = None
    key_padding: Tensor | None = None
    kv_starts: Tensor | None = None
    left: int = -1
    right: int = -1
    softcap: float = 0.0
    sinks: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None


def recipe_of(
    name: str, smooth_k: bool = True, smooth_v: bool = True, smooth_q: bool | None = None, rotated: bool | None = None
) -> Recipe:
    """smooth_q None: as the recipe has it. Rotation and exponents by integer arithmetic only where the name, or
    rotated, asks for them: the kernels' own tests say what they run."""
    recipe = parse_recipe(name)
    smooth = "k" * smooth_k if not (recipe.smooth_q if smooth_q is None else smooth_q) else "qk" if smooth_k else "q"
    turned = "rotate" not in recipe.open if rotated is None else rotated
    return replace(
        recipe,
        smooth=smooth or "none",
        smooth_v=smooth_v,
        rotate=recipe.rotate if turned and "rotate" not in recipe.open else "hadamard" if turned else "none",
        exp="exact" if "exp" in recipe.open else recipe.exp,
    )  # type: ignore[arg-type]


def arguments(
    *,
    scale: float,
    is_causal: bool = False,
    causal_top_left: bool = False,
    kv_lens: Tensor | None = None,
    recipe: str = "qk_int8_pv_fp8",
    return_lse: bool = False,
    out_layout: str = "HND",
    extras: Extras | None = None,
    **smooth: Any,
) -> tuple[Args, Recipe]:
    """What library.launch and library.Call take behind the tensors."""
    x = extras or Extras()
    mask = x.attn_mask if x.key_padding is None else x.key_padding[:, None, None]
    args = Args(
        mask, x.kv_starts, kv_lens, x.sinks, x.cu_seqlens_q, x.cu_seqlens_k, scale,
        x.left, 0 if is_causal else x.right, causal_top_left, x.softcap, return_lse, out_layout, recipe, "", "",
    )  # fmt: skip
    return args, recipe_of(recipe, **smooth)


def forward(
    query: Tensor, key: Tensor, value: Tensor, *, tensor_layout: str = "HND", **options: Any
) -> tuple[Tensor, Tensor | None]:
    """One call; its log-sum-exp is None unless it was asked for."""
    turned = tensor_layout == "NHD"
    tensors = [x.transpose(1, 2) if turned else x for x in (query, key, value)]
    out, lse = library.launch(*tensors, *arguments(**options))
    return out.transpose(1, 2) if turned else out, lse


def make_call(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> library.Call:
    """The call that `forward` would run, for launching its parts."""
    return library.Call(query, key, value, *arguments(**options))
