"""A plain eager call skips the dispatcher; whoever needs to see an operator still sees one. Both count and agree."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sage_patch.args import Args, plain
from sage_patch.dispatch import Options, attend, describe
from sage_patch.kernels import ops
from sage_patch.recipes import EXACT

ARGS = plain(0.125, recipe="qk_int8_pv_fp8")._replace(out_layout="NHD", site="here")


class Seen(TorchDispatchMode):
    """Collects the names of the operators that run inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_the_shortcut_is_the_operator() -> None:
    q, k, v = (torch.randn(2, 2, n, 64, generator=torch.Generator().manual_seed(n)).half() for n in (40, 150, 150))
    direct, no_lse = ops.attend(q, k, v, ARGS)
    through, empty = ops.attention(q, k, v, *ARGS)
    assert torch.equal(direct, through) and direct.stride() == through.stride()
    assert no_lse is None and empty.numel() == 0
    assert list(ops.counts("here").values()) == [2]


def test_modes_transforms_and_profilers_see_the_operator() -> None:
    q = torch.randn(1, 2, 40, 64).half()
    with Seen() as seen:
        ops.attend(q, q, q, ARGS)
    assert "sage_patch.attention.default" in seen.names
    with torch.profiler.profile() as profile:
        ops.attend(q, q, q, ARGS)
    assert "sage_patch::attention" in {event.key for event in profile.key_averages()}
    assert ops.attend(q.to("meta"), q.to("meta"), q.to("meta"), ARGS)[0].device.type == "meta"


def test_the_schema_is_the_list_of_arguments() -> None:
    assert str(ops.attention._schema) == (
        "sage_patch::attention(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, Tensor? kv_starts, "
        "Tensor? kv_lens, Tensor? sinks, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, float? scale, SymInt left, "
        "SymInt right, bool top_left, float softcap, bool return_lse, str out_layout, str recipe, str reason, "
        'str site, bool guard_rows=True, str exact_backend="torch") -> (Tensor, Tensor)'
    ).replace("SymInt", "int")
    assert [a.name for a in ops.attention._schema.arguments[3:]] == list(Args._fields)


def test_a_call_passes_every_option_under_its_own_name(monkeypatch) -> None:
    """Each argument of its own value, so that no two can change places."""
    seen: list[Args] = []

    def attend_instead(query, key, value, args):
        seen.append(args)
        return query, query

    monkeypatch.setattr(ops, "attend", attend_instead)
    tensors = {name: torch.zeros(2) for name in Args._fields[:6]}
    options = Options(
        **tensors,
        scale=3.0,
        left=4,
        right=5,
        top_left=True,
        softcap=6.0,
        return_lse=True,
        out_layout="NHD",
        exact_backend="fa3",
    )
    q = torch.zeros(1, 1, 4, 8)
    attend(q, q, q, options, describe(q, q, q, Options()), EXACT, "why", "where")
    told = {name: getattr(options, name) for name in (*Args._fields[:13], "guard_rows", "exact_backend")}
    assert seen[0]._asdict() == told | {"recipe": "exact", "reason": "why", "site": "where"}


def test_one_variable_moves_every_cache(monkeypatch, tmp_path):
    from sage_patch.kernels import build, crossover

    monkeypatch.setenv("SAGE_PATCH_CACHE", str(tmp_path))
    assert build.cache_dir() == tmp_path and crossover.user_table().parent == tmp_path
    monkeypatch.delenv("SAGE_PATCH_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert build.cache_dir() == tmp_path / "x" / "sage_patch"
