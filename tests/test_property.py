"""Random combinations of arguments: the exact path against the oracle, the quantized recipes within their error."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from oracle import QUANTIZED, RECIPE_TOLERANCE, SINGLE, Tolerance, assert_attention_close, attention, measure
from sage_patch.attention import sage_attention

# A fixed set of examples: a failure here is a failure for everyone, and the run takes the same time every time.
RANDOM = settings(
    deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


class Problem:
    """One drawn call; prints as shapes, not as tensors."""

    def __init__(self, tensors: tuple[torch.Tensor, ...], options: dict, layout: str) -> None:
        self.tensors, self.options, self.layout = tensors, options, layout

    def __repr__(self) -> str:
        given = {n: f"{x.dtype} {list(x.shape)}" if isinstance(x, torch.Tensor) else x for n, x in self.options.items()}
        return f"{[list(x.shape) for x in self.tensors]} {self.tensors[0].dtype} {self.layout} {given}"

    def answer(self, recipe: str) -> tuple[torch.Tensor, torch.Tensor]:
        tensors = self.tensors
        if self.layout == "NHD":
            tensors = tuple(x.transpose(1, 2).contiguous() for x in tensors)
        out, lse = sage_attention(
            *tensors, **self.options, recipe=recipe, tensor_layout=self.layout, enable_gqa=True, return_lse=True
        )
        alone = sage_attention(*tensors, **self.options, recipe=recipe, tensor_layout=self.layout, enable_gqa=True)
        assert measure(alone, out).rel_l1 < (0.005 if recipe == "exact" else 1e-6)  # lse asked for or not
        return (out.transpose(1, 2) if self.layout == "NHD" else out), lse


@st.composite
def problems(draw: st.DrawFn, max_len: int = 200, smooth_softmax: bool = False) -> Problem:
    """smooth_softmax: scores stay of order one, so that the quantized recipes' stated error applies."""
    batch, kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    q_len, kv_len = draw(st.integers(1, max_len)), draw(st.integers(1, max_len))
    dim, v_dim = draw(st.sampled_from([8, 32, 40, 64, 96])), draw(st.sampled_from([8, 32, 64]))
    dtype = draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    heads = kv_heads * group

    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    query, key, value = (
        tensor(batch, h, n, d) for h, n, d in ((heads, q_len, dim), (kv_heads, kv_len, dim), (kv_heads, kv_len, v_dim))
    )
    options: dict = {}
    if draw(st.booleans()):
        options["is_causal"] = True
        options["causal_align"] = draw(st.sampled_from(["bottom_right", "top_left"]))
    side = st.integers(-1, max_len)
    options["window"] = draw(st.one_of(st.none(), st.integers(-2, max_len), st.tuples(side, side)))
    if draw(st.booleans()):
        options["softcap"] = draw(st.sampled_from([1.0, 5.0, 50.0]))
    if draw(st.booleans()):
        options["sinks"] = 3 * tensor(heads)
    if draw(st.booleans()):
        most = 1.5 if smooth_softmax else 20.0
        options["scale"] = draw(st.floats(0.01, most)) / math.sqrt(dim)
    kind = draw(st.sampled_from(["none", "bool", "float", "hiding float"]))
    if kind != "none":
        shape = [n if draw(st.booleans()) else 1 for n in (batch, heads, q_len, kv_len)]
        kept = torch.rand(shape, generator=generator) < draw(st.sampled_from([0.1, 0.5, 0.95]))
        mask = kept if kind == "bool" else tensor(*shape)
        if kind == "hiding float":
            mask = mask.masked_fill(~kept, -math.inf)
        options["attn_mask"] = mask if mask.dtype == torch.bool else mask.to(dtype)
        if draw(st.booleans()):
            options["attn_mask"] = options["attn_mask"].expand(batch, heads, q_len, kv_len)
    event(f"mask {kind}")
    tensors = (query.to(dtype), key.to(dtype), value.to(dtype))
    return Problem(tensors, options, draw(st.sampled_from(["HND", "NHD"])))


@given(problems())
@settings(RANDOM, max_examples=150)
def test_exact_is_the_oracle(problem: Problem) -> None:
    """float32 to its roundings, half precision to its own; lse to 1e-4 of its size; dead rows in the same places."""
    out, lse = problem.answer("exact")
    want, want_lse = attention(*problem.tensors, **problem.options)
    if out.dtype == torch.float32:  # scores of up to hundreds lose digits
        assert_attention_close(out, want, replace(SINGLE, rel_l1=1e-4, worst_row=1 - 1e-4))
    else:  # beside V, not beside the output: a sink may leave a row so little that float16 has no digits for it
        assert (out - want).abs().max() <= 2.0**-7 * problem.tensors[2].abs().max()
        assert not out[(want == 0).all(dim=-1)].any()
    assert torch.equal(torch.isneginf(lse), torch.isneginf(want_lse))
    assert torch.allclose(lse.double().nan_to_num(0, 0, 0), want_lse.nan_to_num(0, 0, 0), rtol=1e-4, atol=1e-4)


def stated(recipe: str) -> Tolerance:
    """The recipe's error over a whole call; a single row of few keys may do worse than one of 1,031."""
    tolerance = RECIPE_TOLERANCE[recipe]
    return replace(
        tolerance, worst_row=0.9 if "int8" in recipe else 0.3, origin=f"{tolerance.origin}; rows of few keys"
    )


@given(problems(smooth_softmax=True), st.sampled_from(QUANTIZED))
@settings(RANDOM, max_examples=250)
def test_quantized_is_within_its_error(problem: Problem, recipe: str) -> None:
    """Any combination of arguments, at scores of order one."""
    out, lse = problem.answer(recipe)
    want, want_lse = attention(*problem.tensors, **problem.options)
    assert torch.equal(torch.isneginf(lse), torch.isneginf(want_lse))
    assert_attention_close(out, want, stated(recipe), what=recipe)
    assert (lse - want_lse).nan_to_num(0, 0, 0).abs().max() < (0.15 if "int8" in recipe else 1.5)


@given(problems(max_len=40), st.sampled_from(["exact", *QUANTIZED]), st.integers(0, 2**20))
@settings(RANDOM, max_examples=100)
def test_what_is_hidden_from_all_changes_no_bit(problem: Problem, recipe: str, seed: int) -> None:
    """Keys that no row sees are overwritten with NaN and infinity: same output, same lse."""
    q, k, v = problem.tensors
    batch, kv_heads, kv_len = k.shape[:3]
    hidden = torch.rand(batch, 1, 1, kv_len, generator=torch.Generator().manual_seed(seed)) < 0.5
    given_mask = problem.options.get("attn_mask", torch.ones(1, 1, 1, 1, dtype=torch.bool))
    mask = given_mask & ~hidden if given_mask.dtype == torch.bool else given_mask.masked_fill(hidden, -math.inf)
    options = problem.options | {"attn_mask": mask}
    clean = Problem((q, k, v), options, problem.layout).answer(recipe)
    bad = hidden[:, :, 0, :, None]
    poisoned = (q, k.masked_fill(bad, math.nan), v.masked_fill(bad, math.inf))
    dirty = Problem(poisoned, options, problem.layout).answer(recipe)
    assert torch.equal(clean[0], dirty[0]) and torch.equal(clean[1], dirty[1])
