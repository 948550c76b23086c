"""A backend is a row: a second family, made here, is chosen, counted, planned, timed and tested like the first."""

from __future__ import annotations

import json
import re
import sys
import types

import pytest
import torch
from torch import Tensor

import sage_patch
from sage_patch import Policy, backends
from sage_patch.args import Args
from sage_patch.backends import BACKENDS, Backend, why_not
from sage_patch.dispatch import choose
from sage_patch.evaluation.calibration.choose import cost_model
from sage_patch.evaluation.environment import self_test
from sage_patch.kernels import build, ops, plain
from sage_patch.pages import Pages
from sage_patch.recipes import LADDER, NO_LIMITS, RECIPES, Call, Recipe, UnsupportedCall
from tiny import logits, text_model, tokens

CALL = Call("twin", "cpu", "float16", 64, 64, 4, 2, 256, 256)


class Twin:
    """The reference under another name, which counts its calls and takes no head wider than 128."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, device: str = "cpu"):
        self.calls: list[tuple[Args, Recipe]] = []
        self.prepared: list[int | None] = []
        module = types.ModuleType("twin_kernels")
        module.prepare, module.forward = self.prepared.append, self.forward  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "twin_kernels", module)
        row = Backend(
            "twin", device, lambda _, call: "head_dim" if call.head_dim > 128 else None, kernels="twin_kernels",  # type: ignore[arg-type]
            no_gain=lambda _, call: "mask_float" if call.mask == "float" else None,
            architectures={(8, 6): "86", (8, 9): "89"} if device == "cuda" else {}, card="ada",
            rotates=lambda head_dim: True, has_exponents=True,
        )  # fmt: skip
        monkeypatch.setattr(backends, "BACKENDS", {"twin": row} | BACKENDS)
        for cached in (ops._cached_backend, backends.module):
            cached.cache_clear()

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, args: Args, recipe: Recipe
    ) -> tuple[Tensor, Tensor | None]:
        self.calls.append((args, recipe))
        return plain.forward(query, key, value, args, recipe)


@pytest.fixture(autouse=True)
def nothing_stays():
    yield
    ops._cached_backend.cache_clear()
    backends.module.cache_clear()


def test_a_second_family_runs_through_apply_stats_plan_and_env(monkeypatch: pytest.MonkeyPatch) -> None:
    model = text_model("llama", "sdpa")
    ids = tokens(1, 48)
    policy = Policy(quantize_fp32=True, min_kv_len=1, min_q_len=1)
    with sage_patch.applied(model, policy):
        expected = logits(model, ids)
    twin = Twin(monkeypatch)
    with sage_patch.applied(model, policy) as handle:
        assert torch.equal(logits(model, ids), expected)
        stats, plan = handle.rows(), handle.plan
    assert {(r["recipe"], r["backend"]) for r in stats} == {("qk_int8_pv_fp8", "twin")}
    assert [recipe for _, recipe in twin.calls] == [RECIPES["qk_int8_pv_fp8"]] * sum(r["calls"] for r in stats)
    assert twin.prepared and plan is not None
    rows = self_test()
    assert {(r["backend"], r["result"]) for r in rows if r["device"] == "cpu"} == {("twin", "ok")}
    assert {recipe.name for _, recipe in twin.calls} == set(RECIPES) - {"exact"}
    assert not Pages(1, 1, 64, torch.float32, "cpu").can_attend  # its row has no pages: stored, attended exactly


def test_its_own_rules_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    Twin(monkeypatch)
    recipe = RECIPES["qk_int8_pv_fp8"]
    assert why_not(recipe, CALL) is None
    assert why_not(recipe, CALL._replace(head_dim=256)) == "head_dim"
    assert why_not(recipe, CALL._replace(mask="float")) == "mask_float"
    assert why_not(recipe, CALL._replace(mask="float"), NO_LIMITS) is None
    with pytest.raises(UnsupportedCall, match="head_dim 256"):
        choose(recipe, CALL._replace(head_dim=256), NO_LIMITS, "error")


def test_it_is_chosen_by_the_cards_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    Twin(monkeypatch, "cuda")
    capabilities = [(9, 0), (8, 6), (8, 9), (7, 5)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", capabilities.__getitem__)
    devices = [torch.device("cuda", i) for i in range(4)]
    assert [ops.backend_for(d) for d in devices] == ["sm90", "twin", "twin", "none"]
    assert [cost_model("auto", d).card for d in devices] == ["hopper", "ada", "ada", "hopper"]
    assert [backends.architecture_of(c) for c in capabilities] == ["90", "86", "89", None]
    assert backends.capabilities() == "8.0, 8.6, 8.7, 8.9, 9.0, 10.0, 10.3, 11.0, 12.0, 12.1 and newer"
    assert ops.backend_for(torch.device("cpu")) == "reference"
    assert why_not(RECIPES["qk_int8_pv_fp8"], CALL._replace(backend="none", device="cuda")) == "no_kernel_for_cuda"


def test_rows_in_c_and_in_python_agree() -> None:
    """Capability and architecture of every row of backends.cu, and what its units are compiled for."""
    text = re.sub(r"#ifdef.*?#endif", "", (build.source_dir() / "backends.cu").read_text(), flags=re.DOTALL)
    rows = {(int(c), a) for c, a in re.findall(r"\{(\d+), (\d+), &\w+\}", text)}
    assert rows == {(10 * major + minor, a) for b in BACKENDS.values() for (major, minor), a in b.architectures.items()}
    assert set(build.architectures()) == {a for _, a in rows}


def test_newer_cards_run_the_newest_ptx() -> None:
    """FP16 P V alone, for their tensor cores may lack FP8 in mma.sync; older and unknown ones have no kernels."""
    text = (build.source_dir() / "backends.cu").read_text()
    assert f"kLater = {build.LATER};" in text and build.LATER in build.architectures()
    for capability in ((12, 2), (13, 0), (20, 3)):
        assert backends.find("cuda", capability) == "mma_fp16"
        assert backends.architecture_of(capability) == build.LATER
    for capability in ((7, 5), (8, 8), (9, 1), (11, 1)):
        assert backends.find("cuda", capability) == "none" and backends.architecture_of(capability) is None


def test_cards_without_wgmma(monkeypatch: pytest.MonkeyPatch) -> None:
    """FP8 where the tensor cores have it; pages everywhere."""
    cards = {
        (8, 0): "80", (8, 6): "86", (8, 7): "86", (8, 9): "89", (10, 0): "100", (10, 3): "100", (11, 0): "110",
        (12, 0): "120", (12, 1): "120",
    }  # fmt: skip
    fp8, fp16 = RECIPES["qk_int8_pv_fp8"], RECIPES["qk_int8_pv_fp16"]
    for capability, architecture in cards.items():
        name = backends.find("cuda", capability)
        assert name == ("mma" if capability in ((8, 9), (12, 0), (12, 1)) else "mma_fp16")
        assert backends.architecture_of(capability) == architecture and BACKENDS[name].pages
        call = CALL._replace(backend=name, device="cuda")
        assert why_not(fp16, call) is None
        assert why_not(fp8, call) == (None if name == "mma" else "no_fp8")
        assert why_not(fp16, call._replace(head_dim=256, v_head_dim=256)) is None
        assert why_not(RECIPES["qk_int4_pv_fp16"], call._replace(head_dim=256, v_head_dim=256)) == "head_dim"


@pytest.mark.parametrize("bits, pv", [(6, "fp16"), (16, "fp8"), (8, "int8"), (8, "none"), (0, "fp8")])
def test_what_nothing_computes_is_refused(bits: int, pv: str) -> None:
    with pytest.raises(ValueError, match=f"'new': nothing computes {bits}-bit Q and K with P and V in '{pv}'"):
        Recipe("new", bits, pv)  # type: ignore[arg-type]


def test_a_recipe_of_the_reference_alone_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six bits where a width is added: between INT4 and INT8 in precision, and never run by the Hopper kernel."""
    monkeypatch.setattr("sage_patch.recipes.QK_BITS", (4, 6, 8))
    six = Recipe("qk_int6_pv_fp16", 6, "fp16", smooth="qk", self_test_bound=0.07)
    monkeypatch.setitem(RECIPES, six.name, six)
    errors = {r["recipe"]: r for r in self_test() if r["device"] == "cpu"}
    assert errors[six.name]["result"] == "ok"
    assert errors["qk_int8_pv_fp16"]["error"] < errors[six.name]["error"] < errors["qk_int4_pv_fp16"]["error"] / 2
    assert why_not(six, CALL._replace(backend="sm90", device="cuda"), NO_LIMITS) == "variant"


def test_a_recipe_without_a_bound_fails_the_self_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RECIPES, "new", Recipe("new", 8, "fp16", smooth="k"))
    row = next(r for r in self_test() if r["recipe"] == "new" and r["device"] == "cpu")
    assert row["result"] == "wrong" and row["bound"] is None and row["error"] < 0.02
    from typer.testing import CliRunner

    from sage_patch.cli import app

    done = CliRunner().invoke(app, ["env", "--json"])
    assert done.exit_code == 1 and {"new"} == {
        t["recipe"] for t in json.loads(done.stdout)["self_test"] if t["result"] == "wrong"
    }


def test_what_follows_from_the_rows() -> None:
    from sage_patch.evaluation.bench.plans import RECIPES as TIMED
    from sage_patch.kernels.crossover import OPS

    assert LADDER == ("qk_int4_pv_fp8", "qk_int8_pv_fp8", "qk_int8_pv_fp16", "exact")
    assert list(TIMED.items()) == [("qk_int8_pv_fp8", "sage2"), ("qk_int8_pv_fp16", "sage2_pv_fp16")]
    assert OPS == {"qk_int8_pv_fp8": "sage2_op", "qk_int8_pv_fp16": "sage2_pv_fp16_op"}
