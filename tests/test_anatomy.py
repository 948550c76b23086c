"""What anatomy.json says of a head is what the head does, and it names the sites that it can show."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sage_patch.config import load_run_config
from sage_patch.evaluation.anatomy import AnatomyError, anatomy
from sage_patch.evaluation.models import load_text_model
from sage_patch.evaluation.outliers import figures, outliers
from sage_patch.kernels import ops
from sage_patch.kernels.plain import visibility_of
from sage_patch.reference.exact import exact_weights
from tiny import captured

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def calls() -> list[ops.ObservedCall]:
    model, tokenizer = load_text_model(load_run_config(ROOT / "configs/tiny.yaml").model)
    text = (ROOT / "tests/assets/heldout.txt").read_text()[:6000]
    ids = tokenizer(text, return_tensors="pt").input_ids[:, :480]
    return captured(model, lambda: model(ids, use_cache=False))[:3]


def a_call(groups: int = 2, kv_len: int = 192) -> ops.ObservedCall:
    """A call with grouped heads and an outlier channel in K, of another length than its queries."""
    torch.manual_seed(0)
    query, key, value = (
        torch.randn(1, 2 * groups, 160, 32),
        torch.randn(1, 2, kv_len, 32),
        torch.randn(1, 2, kv_len, 32),
    )
    key[..., 3] += 15
    return ops.ObservedCall("a.site", query, key, value, None, 32**-0.5, -1, -1, False)


def table(lines: list[str]) -> torch.Tensor:
    return torch.tensor([[int(v) for v in line.split()] for line in lines]) * 1e-5


def test_the_exact_map_is_the_attention_weights_added_up_in_bins(calls):
    found = anatomy(calls, "model.layers.1.self_attn", 1)
    call = calls[1]
    weights = exact_weights(call.query, call.key, visibility_of(480, 480, None, -1, 0, False), scale=call.scale)
    expected = weights[0, 1].reshape(96, 5, 96, 5).sum(-1).mean(1)  # 480 tokens in 96 bins of 5
    got = table(found["maps"]["exact"])
    assert got.shape == (96, 96) and float((got - expected).abs().max()) <= 0.51e-5
    assert found["causal"] and (found["q_len"], found["kv_len"], found["heads"]) == (480, 480, 2)
    for lines in found["maps"].values():
        assert float((table(lines).sum(-1) - 1).abs().max()) < 2e-3  # E4M3 keeps a row's sum that well


def test_smoothing_repairs_int4_and_int8_is_closer_still(calls):
    errors = anatomy(calls)["errors"]
    exact, naive, repaired, int8 = (e["misplaced"] for e in errors)
    assert exact == 0 and naive > 1.3 * repaired and repaired > 3 * int8
    assert [e["rel_l1"] for e in errors[1:]] == sorted((e["rel_l1"] for e in errors), reverse=True)[:3]


def test_the_chosen_head_is_the_one_that_is_damaged_most(calls):
    found = anatomy(calls)
    others = [anatomy(calls, c.site, h)["errors"][1]["rel_l1"] for c in calls for h in range(2)]
    assert found["errors"][1]["rel_l1"] == max(others)


def test_keys_channels_are_measured_at_the_head_that_serves_the_query_head():
    captured = a_call()
    found = anatomy([captured], head=3)
    key = captured.key[0, 1]  # query heads 2 and 3 read it
    assert found["key"]["largest"] == pytest.approx(key.abs().amax(0).tolist(), rel=1e-3)
    assert found["key"]["largest_smoothed"] == pytest.approx((key - key.mean(0)).abs().amax(0).tolist(), rel=1e-3)
    assert found["key"]["int4_step"] > 3 * found["key"]["int4_step_smoothed"]
    assert not found["causal"] and len(found["maps"]["exact"]) == 96


def test_groups_are_the_thread_layout_of_the_tensor_core():
    groups = anatomy([a_call()])["groups"]
    assert groups["key"] == [n % 8 // 2 for n in range(128)]
    for row, group in enumerate(groups["query"]):
        assert [r for r in range(128) if groups["query"][r] == group] == [row - row % 16 + row % 8 + d for d in (0, 8)]


def test_an_unknown_site_or_head_is_refused_with_what_there_is(calls):
    with pytest.raises(AnatomyError, match="captured were model.layers.0.self_attn, model.layers.1"):
        anatomy(calls, "model.layers.9.self_attn")
    with pytest.raises(AnatomyError, match="head 2 is not among 0 to 1"):
        anatomy(calls, head=2)


def test_outliers_of_made_keys():
    """Known by construction: one large channel that smoothing takes away, and one that only rotation spreads."""
    call = a_call()
    key = call.key.clone()
    key[:, 1, :, 7] *= 20
    rows = outliers([call._replace(key=key)] * 2)
    assert [(r["site"], r["kv_head"]) for r in rows] == [("a.site", 0), ("a.site", 1)]
    constant, varying = rows
    assert constant["given"]["ratio"] > 5 and constant["smoothed"]["ratio"] < 2
    assert varying["smoothed"]["ratio"] > 10 > 3 > varying["rotated"]["ratio"]
    assert varying["smoothed"]["energy"] > 0.8 > 0.1 > varying["rotated"]["energy"]
    assert varying["smoothed"]["kurtosis"] > 10 > 5 > varying["rotated"]["kurtosis"]


def test_figures_of_zeros_and_of_like_channels():
    assert figures(torch.zeros(5, 64)) == {"ratio": 1.0, "kurtosis": 0.0, "energy": 0.0}
    assert figures(torch.ones(5, 64)) == {"ratio": 1.0, "kurtosis": 1.0, "energy": 1 / 32}
