"""Modules of no library: whatever calls torch's attention by name is patched like a library's model, and what calls it
otherwise, or calls another function, is named."""

from __future__ import annotations

import copy
import pickle
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sage_patch
import zoo.plain as zoo
from sage_patch.integrations.intercept import is_patched
from sage_patch.integrations.transformers import OwnAttentionError
from sage_patch.policy import Policy, Rule, Span
from tiny import EVERYTHING, EXACT, relative_l1, text_model
from zoo.plain import unreached

SITES = {
    "gpt": {f"transformer.h.{i}.attn": ("self", 4, 16, i, 3) for i in range(3)},
    "vit": {f"blocks.{i}.attn": ("self", 2, 32, i, 2) for i in range(2)},
    "video": {f"blocks.{i}.{r}_attn": (r, 2, 32, i, 2) for i in range(2) for r in ("self", "cross")},
    "picture": {f"double_blocks.{i}": ("joint", 2, 32, i, 2) for i in range(2)}
    | {f"single_blocks.{i}": ("self", 2, 32, i, 2) for i in range(2)},
    "processors": {f"layers.{i}": ("self", 2, 32, i, 2) for i in range(2)},
}


def recipes(handle: sage_patch.Handle) -> dict[tuple[str, str], int]:
    found: dict[tuple[str, str], int] = {}
    for row in handle.rows():
        key = row["recipe"], row["reason"]
        found[key] = found.get(key, 0) + row["calls"]
    return found


@pytest.mark.parametrize("kind", zoo.KINDS)
def test_a_plain_model_is_patched_and_reverted(kind):
    """Exact bit-equal, all calls quantized and counted, every site described, and afterwards nothing is left."""
    model, inputs = zoo.build(kind)
    reference, keys = zoo.outputs(model, inputs), list(model.state_dict())
    before = {name: (type(m), dict(vars(m))) for name, m in model.named_modules()}
    with sage_patch.applied(model, EXACT) as handle:
        assert torch.equal(zoo.outputs(model, inputs), reference)
        assert recipes(handle) == {("exact", "policy"): zoo.calls(kind)}
        found = {s.name: (s.role, s.num_heads, s.head_dim, s.index, s.depth) for s in handle.plan.sites}
        assert found == SITES[kind]
        assert "not patched" not in handle.report()
    with sage_patch.applied(model, EVERYTHING) as handle:
        got = zoo.outputs(model, inputs)
        assert not torch.equal(got, reference) and relative_l1(got, reference) < 0.1
        assert recipes(handle) == {("qk_int8_pv_fp8", ""): zoo.calls(kind)}
        assert list(model.state_dict()) == keys
    assert {name: (type(m), dict(vars(m))) for name, m in model.named_modules()} == before
    assert all(type(m) is before[name][0] for name, m in model.named_modules())
    assert torch.equal(zoo.outputs(model, inputs), reference)


@pytest.mark.parametrize("kind", zoo.KINDS)
def test_copies_and_pickles_keep_the_plan_and_their_own_counts(kind):
    model, inputs = zoo.build(kind)
    reference = zoo.outputs(model, inputs)
    with sage_patch.applied(model, EVERYTHING) as handle:
        patched = zoo.outputs(model, inputs)
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), pickle.loads(pickle.dumps(model, 0))):
            assert torch.equal(zoo.outputs(other, inputs), patched)
        assert recipes(handle) == {("qk_int8_pv_fp8", ""): zoo.calls(kind)}
    assert torch.equal(zoo.outputs(model, inputs), reference)
    assert torch.equal(zoo.outputs(other, inputs), patched)


@pytest.mark.parametrize("kind", zoo.KINDS)
def test_compiled_as_one_graph(kind):
    model, inputs = zoo.build(kind)
    plain = torch.compile(copy.deepcopy(model), backend="aot_eager", fullgraph=True)
    reference = zoo.outputs(plain, inputs)
    for policy, recipe in ((EXACT, "exact"), (EVERYTHING, "qk_int8_pv_fp8")):
        torch._dynamo.reset()
        with sage_patch.applied(model, policy) as handle:
            eager = zoo.outputs(model, inputs)
            compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
            for _ in range(2):
                assert torch.allclose(zoo.outputs(compiled, inputs), eager, atol=1e-5)
            rows = [(r["recipe"], r["calls"]) for r in handle.rows() if r["site"] == "*"]
            assert rows == [(recipe, 2 * zoo.calls(kind))]
    assert torch.equal(zoo.outputs(plain, inputs), reference)


def test_compiled_code_of_an_unpatched_model_is_not_taken_for_a_patched_one():
    """They share their source. With graph breaks, a helper function is compiled on its own, apart from its module."""
    (plain, inputs), (model, _) = zoo.build("video"), zoo.build("video")
    torch._dynamo.reset()
    for block in (*plain.blocks, *model.blocks):
        block.self_attn.norm_k.register_forward_hook(lambda *_: torch._dynamo.graph_break())
        block.cross_attn.norm_k.register_forward_hook(lambda *_: torch._dynamo.graph_break())
    compiled = torch.compile(plain, backend="eager")
    reference = zoo.outputs(compiled, inputs)
    with sage_patch.applied(model, EVERYTHING) as handle:
        got = zoo.outputs(torch.compile(model, backend="eager"), inputs)
        assert sum(recipes(handle).values()) == 4 and not torch.equal(got, reference)
        assert torch.equal(zoo.outputs(compiled, inputs), reference)
    assert torch.allclose(zoo.outputs(model, inputs), reference, atol=1e-5)


def test_policies_by_name_layer_and_role():
    model, inputs = zoo.build("video")
    rules = [
        Rule(role="cross", recipe="exact", reason="text"),
        Rule(layers=Span.parse(1), recipe="qk_int8_pv_fp16"),
        Rule(match="blocks.1.cross*", recipe="exact"),
    ]
    with sage_patch.applied(model, Policy(quantize_fp32=True, min_q_len=1, min_kv_len=1, rules=rules)) as handle:
        zoo.outputs(model, inputs)
        assert {(r["site"], r["recipe"]) for r in handle.rows()} == {
            ("blocks.0.self_attn", "qk_int8_pv_fp8"),
            ("blocks.0.cross_attn", "exact"),
            ("blocks.1.self_attn", "qk_int8_pv_fp16"),
            ("blocks.1.cross_attn", "exact"),
        }


def test_policies_by_step_with_a_loop_of_ones_own():
    model, inputs = zoo.build("picture")
    policy = Policy(quantize_fp32=True, min_q_len=1, min_kv_len=1, rules=[Rule(steps=Span.parse(0), recipe="exact")])
    with sage_patch.applied(model, policy) as handle:
        with pytest.raises(sage_patch.UnsupportedCall, match=r"handle\.step"):
            zoo.outputs(model, inputs)
        for step in range(2):
            handle.step(step, 2)
            zoo.outputs(model, inputs)
        assert recipes(handle) == {("exact", "policy"): 4, ("qk_int8_pv_fp8", ""): 4}


def test_training_runs_exact_with_the_same_gradients():
    gradients = []
    for policy in (None, EVERYTHING):
        model, inputs = zoo.build("gpt")
        handle = sage_patch.apply(model, policy) if policy is not None else None
        model(**inputs).square().mean().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    assert recipes(handle) == {("exact", "needs_grad"): 3}
    assert torch.equal(*gradients)


def test_hooks_of_accelerate_before_apply():
    """They keep the old forward as an attribute of the module: the patch reaches it there."""
    from accelerate import cpu_offload
    from accelerate.hooks import remove_hook_from_submodules

    model, inputs = zoo.build("vit")
    reference = zoo.outputs(model, inputs)
    cpu_offload(model, execution_device=torch.device("cpu"))
    for policy in (EXACT, EVERYTHING):
        with sage_patch.applied(model, policy) as handle:
            assert torch.equal(zoo.outputs(model, inputs), reference) == (policy is EXACT)
            assert sum(recipes(handle).values()) == 2
        assert torch.equal(zoo.outputs(model, inputs), reference)
    handle = sage_patch.apply(model, EVERYTHING)
    remove_hook_from_submodules(model)
    handle.revert()
    assert torch.equal(zoo.outputs(model, inputs), reference)
    assert not any(is_patched(m) for m in model.modules())


@pytest.mark.parametrize("first", ["hooks", "apply"])
@pytest.mark.parametrize("kind", ["leaf_level", "block_level"])
def test_group_offload_of_diffusers_before_and_after_apply(kind, first):
    """Its registry of hooks keeps the old forward: the patch reaches it there too, and takes itself away."""
    from diffusers.hooks import HookRegistry, apply_group_offloading

    model, inputs = zoo.build("picture")  # the blocks, which hooks are put on, attend themselves
    reference, cpu = zoo.outputs(model, inputs), torch.device("cpu")

    def offload() -> None:
        blocks = {"num_blocks_per_group": 1} if kind == "block_level" else {}
        apply_group_offloading(model, onload_device=cpu, offload_device=cpu, offload_type=kind, **blocks)

    for policy in (EXACT, EVERYTHING):
        if first == "hooks" and policy is EXACT:
            offload()
        with sage_patch.applied(model, policy) as handle:
            if first == "apply" and policy is EXACT:
                offload()
            assert torch.equal(zoo.outputs(model, inputs), reference) == (policy is EXACT)
            assert sum(recipes(handle).values()) == 4, handle.report()
        assert torch.equal(zoo.outputs(model, inputs), reference)
    handle = sage_patch.apply(model, EVERYTHING)
    for module in model.modules():
        registry = HookRegistry.check_if_exists_or_initialize(module)
        for name in list(registry.hooks):
            registry.remove_hook(name, recurse=False)
    handle.revert()
    assert torch.equal(zoo.outputs(model, inputs), reference)
    assert not any(is_patched(m) for m in model.modules())


def test_other_models_threads_and_calls_are_untouched():
    """A model of the same class, also inside of a patched call, and torch's function itself."""
    (patched, inputs), (other, _) = zoo.build("gpt"), zoo.build("gpt", seed=1)
    function, reference, inside = F.scaled_dot_product_attention, zoo.outputs(other, inputs), []
    with sage_patch.applied(patched, EVERYTHING) as handle:
        hook = patched.transformer.h[0].attn.c_attn.register_forward_hook(
            lambda *_: inside.append(zoo.outputs(other, inputs))
        )
        threads = [threading.Thread(target=zoo.outputs, args=(m, inputs)) for m in (patched, other) * 2]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        hook.remove()
        assert recipes(handle) == {("qk_int8_pv_fp8", ""): 6}
        assert F.scaled_dot_product_attention is function
    assert len(inside) == 2 and all(torch.equal(x, reference) for x in inside)


# --- ways to call attention


def attend_decorated(function):
    class Model(nn.Module):
        def forward(self, x):
            return function(x)

    return Model()


def helper(x):
    return F.scaled_dot_product_attention(x, x, x)


scaled_dot_product_attention = F.scaled_dot_product_attention


class ByItsOwnName(nn.Module):
    def forward(self, x):
        return scaled_dot_product_attention(x, x, x)


class StaticMethod(nn.Module):
    @staticmethod
    def attend(x):
        return F.scaled_dot_product_attention(x, x, x)

    def forward(self, x):
        return self.attend(x)


class CalledBesideForward(nn.Module):
    """Its parent calls `attend`, never the module itself."""

    class Inner(nn.Module):
        def attend(self, x):
            return F.scaled_dot_product_attention(x, x, x)

        def forward(self, x):
            raise NotImplementedError

    def __init__(self):
        super().__init__()
        self.inner = self.Inner()

    def forward(self, x):
        return self.inner.attend(x)


@pytest.mark.parametrize(
    "model",
    [
        ByItsOwnName(),
        StaticMethod(),
        CalledBesideForward(),
        attend_decorated(helper),
        attend_decorated(torch.no_grad()(helper)),
        attend_decorated(torch.compile(helper, backend="eager")),
        attend_decorated(torch.compiler.disable(helper)),
    ],
    ids=["own name", "static", "beside forward", "closure", "no_grad", "torch.compile", "compiler.disable"],
)
def test_ways_that_are_reached(model):
    x = torch.randn(1, 2, 40, 16)
    reference = model.eval()(x)
    for policy in (EXACT, EVERYTHING):
        with sage_patch.applied(model, policy) as handle:
            got = model(x)
            assert torch.equal(got, reference) if policy is EXACT else 0 < relative_l1(got, reference) < 0.1
            assert sum(recipes(handle).values()) == 1
    assert torch.equal(model(x), reference)


@pytest.mark.parametrize("decorated", [torch.no_grad()(helper), torch.compile(helper, backend="eager")])
def test_decorated_helpers_are_reached_in_compiled_code(decorated):
    """Compilers look at the function inside a wrapper, not at what the wrapper calls."""
    model, x = attend_decorated(decorated).eval(), torch.randn(1, 2, 40, 16)
    with sage_patch.applied(model, EVERYTHING) as handle:
        eager = model(x)
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        assert torch.equal(compiled(x), eager)
        assert sum(recipes(handle).values()) == 2


@pytest.mark.parametrize(
    "cls, words",
    [
        (unreached.LocalImport, "scaled_dot_product_attention, but not by a name of its module"),
        (unreached.ThroughSuper, "scaled_dot_product_attention, but not by a name of its module"),
        (unreached.InAttribute, "scaled_dot_product_attention, but not by a name of its module"),
        (unreached.ThroughOps, "scaled_dot_product_attention, but not by a name of its module"),
        (unreached.DecoratedInC, "scaled_dot_product_attention, but not by a name of its module"),
        (unreached.CountsInAGlobal, "scaled_dot_product_attention, but not by a name of its module"),
        (unreached.WithFlash, "flash_attn_func"),
        (unreached.WithXformers, "memory_efficient_attention"),
        (unreached.WrittenOutAttention, "softmax"),
        (lambda: nn.MultiheadAttention(32, 2), "multi_head_attention_forward"),
        (lambda: nn.TransformerEncoderLayer(32, 2), "multi_head_attention_forward"),
    ],
)
def test_what_is_not_reached_is_refused_by_name(cls, words):
    """With the place, the class and what it calls; the model stays as it was."""
    model = nn.Sequential(nn.Linear(32, 32), cls())
    before = [type(m) for m in model.modules()]
    with pytest.raises(OwnAttentionError, match=r"in its own code \(\w+ at '1(\.self_attn)?': it calls " + words):
        sage_patch.apply(model)
    assert [type(m) for m in model.modules()] == before


def test_a_mixed_model_is_patched_and_the_rest_is_listed():
    inner, _ = zoo.build("processors")
    model = nn.Sequential(inner, unreached.LocalImport(), nn.TransformerEncoderLayer(32, 2))
    with sage_patch.applied(model, EXACT) as handle:
        report = handle.report()
    assert [s.name for s in handle.plan.sites] == ["0.layers.0", "0.layers.1"]
    assert "1: not patched, LocalImport computes attention in its own code (it calls scaled_dot" in report
    assert "2.self_attn: not patched, MultiheadAttention" in report


def test_a_package_that_is_preferred_over_torch_is_named_where_it_is_installed(monkeypatch):
    """Without it the fallback runs, which is reached."""
    model, x = unreached.FlashWithFallback().eval(), torch.randn(1, 40, 32)
    with sage_patch.applied(model, EVERYTHING) as handle:
        model(x)
        assert recipes(handle) == {("qk_int8_pv_fp8", ""): 1} and "also calls" not in handle.report()
    monkeypatch.setattr(unreached, "flash_attn_func", lambda q, k, v: q)
    with sage_patch.applied(type("FlashToo", (unreached.FlashWithFallback,), {})(), EVERYTHING) as handle:
        assert "also calls flash_attn_func, which is not patched" in handle.report()


def test_transformers_beside_plain_attention():
    """One model, both kinds of sites, in module order."""

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.eye, _ = zoo.build("vit")
            self.text = text_model()

        def forward(self, picture, ids):
            return self.eye(picture).sum() + self.text(ids).logits

    model, fed = Both().eval(), {"picture": torch.randn(1, 3, 32, 32), "ids": torch.arange(40)[None]}
    reference = zoo.outputs(model, fed)
    with sage_patch.applied(model, EXACT) as handle:
        assert torch.allclose(zoo.outputs(model, fed), reference, atol=1e-5)
        assert recipes(handle) == {("exact", "policy"): 4}
    names = [f"eye.blocks.{i}.attn" for i in range(2)] + [f"text.model.layers.{i}.self_attn" for i in range(2)]
    assert [s.name for s in handle.plan.sites] == names
    assert torch.equal(zoo.outputs(model, fed), reference)


class Calls(nn.Module):
    def forward(self, *args, **kwargs):
        return F.scaled_dot_product_attention(*args, **kwargs)


Q, ONE_ITEM, ONE_HEAD = torch.randn(2, 4, 40, 16), torch.randn(1, 4, 40, 16), torch.randn(2, 1, 40, 16)
SQUARE = torch.ones(40, 40, dtype=torch.bool)


@pytest.mark.parametrize(
    "args, reason",
    [
        ((Q[0], Q[0], Q[0]), "rank"),
        ((Q[None],) * 3, "rank"),
        ((Q, ONE_ITEM, ONE_ITEM), "broadcast"),
        ((Q, ONE_HEAD, ONE_HEAD), "broadcast"),
        ((Q, Q, Q, SQUARE, 0.0, True), "causal_mask"),
        ((torch.nested.as_nested_tensor([Q[0], Q[1]]),) * 3, "nested"),
    ],
)
def test_forms_of_torch_that_have_no_quantized_kernel_go_to_torch(args, reason):
    model = Calls()
    reference = model(*args)
    with sage_patch.applied(model, EVERYTHING) as handle:
        got = model(*args)
        assert recipes(handle) == {("exact", reason): 1}
    assert all(torch.equal(a, b) for a, b in zip(got, reference, strict=True))


def test_what_torch_refuses_is_refused_by_torch():
    """Fewer KV heads without enable_gqa."""
    model = Calls()
    with pytest.raises(RuntimeError) as plain:
        model(Q, Q[:, :2], Q[:, :2])
    for policy in (EXACT, EVERYTHING):
        with sage_patch.applied(model, policy), pytest.raises(RuntimeError) as patched:
            model(Q, Q[:, :2], Q[:, :2])
        assert str(patched.value) == str(plain.value)


def test_grouped_heads_run_quantized():
    model = Calls().eval()
    with sage_patch.applied(model, EVERYTHING) as handle:
        assert relative_l1(model(Q, Q[:, :2], Q[:, :2], enable_gqa=True), F.scaled_dot_product_attention(
            Q, Q[:, :2], Q[:, :2], enable_gqa=True)) < 0.1  # fmt: skip
        assert recipes(handle) == {("qk_int8_pv_fp8", ""): 1}
