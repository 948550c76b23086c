"""torch.compile after apply(): full graphs, no graph a layer, compiled calls are counted."""

from __future__ import annotations

import pytest
import torch
from test_diffusers import MODELS, build, run
from torch._dynamo.testing import CompileCounterWithBackend

import sage_patch
from sage_patch.policy import Policy, Rule
from tiny import EVERYTHING, EXACT


def compiled(name: str, how: str, backend: str, policy: Policy | None) -> tuple[int, torch.Tensor, list]:
    """(graphs, output, counters) of a tiny model compiled as one graph, or one graph a block class."""
    torch._dynamo.reset()
    model, inputs = build(name)
    counter = CompileCounterWithBackend(backend)
    handle = sage_patch.apply(model, policy) if policy is not None else None
    if how == "full":
        model.compile(backend=counter, fullgraph=True)
    else:
        model.compile_repeated_blocks(backend=counter, fullgraph=True)
    out = run(model, inputs)
    return counter.frame_count, out, handle.rows() if handle is not None else []


@pytest.mark.parametrize(
    "how, name", [(h, n) for h in ("full", "regional") for n in MODELS if (h, n) != ("regional", "sd3")]
)
def test_full_graphs_as_many_as_unpatched(how, name):
    """fullgraph=True works, no layer makes a graph of its own, and compiled calls are counted for the whole model."""
    model, inputs = build(name)
    with sage_patch.applied(model, EVERYTHING) as handle:
        eager = run(model, inputs)
        sites = len(handle.plan.sites)
    unpatched = compiled(name, how, "eager", None)[0]
    graphs, out, rows = compiled(name, how, "aot_eager", EVERYTHING)
    assert graphs == unpatched
    assert torch.allclose(out, eager, atol=1e-5)
    assert [(r["site"], r["recipe"], r["calls"]) for r in rows] == [("*", "qk_int8_pv_fp8", sites)]


def test_layers_with_two_recipes_make_one_graph_more_not_one_a_layer():
    rules = [Rule(match="blocks.0.*", recipe="exact")]
    policy = Policy(quantize_fp32=True, min_q_len=1, min_kv_len=1, rules=rules)
    graphs, _, rows = compiled("wan", "regional", "eager", policy)
    assert graphs == 2
    assert {(r["recipe"], r["calls"]) for r in rows} == {("exact", 2), ("qk_int8_pv_fp8", 2)}


@pytest.mark.slow
def test_inductor_compiles_a_wan_block():
    model, inputs = build("wan")
    with sage_patch.applied(model, EVERYTHING) as handle:
        eager = run(model, inputs)
        model.compile_repeated_blocks(fullgraph=True)
        assert torch.allclose(run(model, inputs), eager, atol=1e-4)
        assert ("*", 4) in {(r["site"], r["calls"]) for r in handle.rows()}


def test_a_processor_that_filters_arguments_by_signature_still_gets_its_own():
    """Attention.forward drops keywords that the processor's signature does not name; compiled code does so too."""
    from diffusers.models.attention_processor import Attention, AttnProcessor2_0

    class Scaled(AttnProcessor2_0):
        def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, temb=None, factor=1.0):
            query = attn.to_q(hidden_states).unflatten(-1, (2, 8)).transpose(1, 2)
            return factor * torch.nn.functional.scaled_dot_product_attention(query, query, query).flatten(2)

    attention = Attention(16, heads=2, dim_head=8, processor=Scaled())
    hidden = torch.randn(1, 9, 16)
    with torch.no_grad(), sage_patch.applied(attention, EXACT):
        single, double = attention(hidden), attention(hidden, factor=2.0)
        assert torch.equal(double, 2 * single)
        attention.compile(backend="eager", fullgraph=True)
        assert torch.allclose(attention(hidden, factor=2.0), double, atol=1e-6)
