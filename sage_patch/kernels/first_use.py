"""Kernels that never ran on a card of their kind are compared with the reference before their first call there.

A wrong number is worse than a slow one: a family whose tests ran elsewhere alone (`Backend.is_proven`) has to show, on
the device at hand and in a fraction of a second, that it computes what it should. library.py has no room for it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sage_patch import args as call_args
from sage_patch.args import Args, PageArgs
from sage_patch.backends import Backend, as_run, module
from sage_patch.errors import SagePatchError
from sage_patch.kernels import plain
from sage_patch.recipes import DEFAULT_RECIPE, EXACT, RECIPES, Call, Recipe

Run = Callable[[Tensor, Tensor, Tensor, Args, Recipe], tuple[Tensor, Tensor | None]]
_SHAPES = ((64, torch.float16, 300, 700), (128, torch.bfloat16, 257, 513))  # head_dim, dtype, q_len, kv_len


class WrongNumbersError(SagePatchError, RuntimeError):
    """Kernels compute something else than they should on this device; nothing is computed with them."""


def compare(backend: Backend, run: Run, device: str) -> None:
    """Run small calls of every recipe that the backend takes, full and causal, on `device`.

    Raises WrongNumbersError for one whose relative L1 error is beyond the recipe's self_test_bound, or not a number.
    """
    generator = torch.Generator().manual_seed(0)
    for head_dim, dtype, q_len, kv_len in _SHAPES:
        sizes = ((4, q_len), (2, kv_len), (2, kv_len))
        q, k, v = (torch.randn(1, *size, head_dim, generator=generator).to(dtype) for size in sizes)
        there = (q.to(device), k.to(device), v.to(device))
        name = str(dtype).removeprefix("torch.")
        call = Call(backend.name, backend.device, name, head_dim, head_dim, 4, 2, q_len, kv_len)
        for is_causal in (False, True):
            args = call_args.plain(head_dim**-0.5, is_causal)
            want = plain.forward(q.float(), k.float(), v.float(), args, EXACT)[0]
            for recipe in RECIPES.values():
                if recipe.is_exact or recipe.self_test_bound is None or backend.why_not(recipe, call) is not None:
                    continue
                ran = as_run(recipe, backend.name, head_dim)
                got = run(there[0], there[1], there[2], args, ran)[0].float().cpu()
                error = float((got - want).abs().sum() / want.abs().sum())
                _check(backend, device, error, recipe, f"head_dim {head_dim}, {'causal' if is_causal else 'full'}")
        if backend.pages is not None:
            _compare_pages(backend, device, q, k, v)


def _check(backend: Backend, device: str, error: float, recipe: Recipe, what: str) -> None:
    bound = recipe.self_test_bound
    if bound is not None and not error <= bound:
        raise WrongNumbersError(
            f"the {backend.name} kernels give wrong numbers on {device}: recipe {recipe.name}, {what}: relative L1 "
            f"error {error:.3g}, at most {bound} is right. They have not run on such a card before: please report "
            'this with the output of sage-patch env, and use the recipe "exact"'
        )


def _compare_pages(backend: Backend, device: str, q: Tensor, k: Tensor, v: Tensor) -> None:
    """A cache filled in two pieces; the queries of many tokens, and of the last one."""
    (batch, heads, tokens, head_dim), q_len = k.shape, q.shape[2]
    assert backend.pages is not None
    kernels = module(backend.pages)
    store = plain.one_slab(batch, heads, head_dim, k.dtype, device)
    for piece in (slice(0, tokens - 1), slice(tokens - 1, tokens)):
        kernels.append(store, k[:, :, piece].to(device), v[:, :, piece].to(device))
        store.length = piece.stop
    for rows in (min(q_len, tokens), 1):
        query = q[:, :, q_len - rows :]
        args = call_args.plain(head_dim**-0.5, True)
        want = plain.forward(query.float(), k.float(), v.float(), args, EXACT)[0]
        got = kernels.attend(store, query.to(device), PageArgs(scale=head_dim**-0.5))[0].float().cpu()
        error = float((got - want).abs().sum() / want.abs().sum())
        _check(backend, device, error, RECIPES[DEFAULT_RECIPE], f"a quantized cache, head_dim {head_dim}, {rows} rows")
