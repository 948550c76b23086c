"""The metrics against hand-computed values, and the cases where a metric could lie."""

from __future__ import annotations

import math

import pytest
import torch

from sage_patch.evaluation import metrics
from sage_patch.evaluation.metrics import ExactWindow, TextComparison


def test_tensor_metrics_on_values_worked_out_by_hand() -> None:
    exact = torch.tensor([[3.0, 4.0], [0.0, 1.0]])
    actual = torch.tensor([[3.0, 4.0], [0.5, 1.0]])
    assert metrics.relative_l1(actual, exact) == pytest.approx(0.5 / 8)
    assert metrics.worst_row(actual, exact) == pytest.approx(0.5)
    assert metrics.cosine(actual, exact) == pytest.approx(26 / math.sqrt(26.25 * 26))
    assert metrics.sqnr(actual, exact) == pytest.approx(10 * math.log10(26 / 0.25))


def test_equal_tensors_are_perfect_and_zero_tensors_are_no_trap() -> None:
    x, zero = torch.randn(5, 7), torch.zeros(5, 7)
    for t in (x, zero):
        assert metrics.cosine(t, t) == pytest.approx(1)
        assert metrics.relative_l1(t, t) == metrics.worst_row(t, t) == 0
        assert metrics.sqnr(t, t) == math.inf
    assert metrics.relative_l1(x, zero) == metrics.worst_row(x, zero) == math.inf
    assert metrics.cosine(zero, x) == 0


def test_one_bad_row_shows_in_worst_row_only() -> None:
    exact = torch.ones(1000, 8)
    actual = exact.clone()
    actual[17] = -1
    assert metrics.relative_l1(actual, exact) < 0.01
    assert metrics.worst_row(actual, exact) == 2


def test_nan_is_never_reported_as_good() -> None:
    bad = torch.tensor([[1.0, math.nan]])
    for metric in (metrics.cosine, metrics.relative_l1, metrics.worst_row, metrics.sqnr):
        assert math.isnan(metric(bad, torch.ones(1, 2)))


def test_greedy_agreement_counts_up_to_the_first_difference() -> None:
    assert metrics.greedy_agreement([1, 2, 3, 4], [1, 2, 9, 4]) == 0.5
    assert metrics.greedy_agreement([1, 2], [1, 2, 3, 4]) == 0.5
    assert metrics.greedy_agreement([], []) == metrics.greedy_agreement([5], [5]) == 1


def test_text_comparison_against_the_definition() -> None:
    torch.manual_seed(0)
    windows, tokens, vocab = 3, 300, 50  # more tokens than one chunk
    exact = torch.randn(windows, tokens, vocab)
    other = exact + 0.3 * torch.randn_like(exact)
    text = torch.randint(vocab, (windows, tokens))
    comparison = TextComparison()
    for i in range(windows):
        comparison.add(other[i], ExactWindow(exact[i], text[i]))
    found = comparison.summary()

    log_p, log_q = exact.double().log_softmax(-1), other.double().log_softmax(-1)
    assert found["kl"] == pytest.approx(float((log_p.exp() * (log_p - log_q)).sum(-1).mean()), rel=1e-5)
    assert found["top1"] == pytest.approx(float((exact.argmax(-1) == other.argmax(-1)).double().mean()))
    nll_p = -log_p[:, :-1].gather(2, text[:, 1:, None]).mean(1).flatten()
    nll_q = -log_q[:, :-1].gather(2, text[:, 1:, None]).mean(1).flatten()
    assert found["ppl_exact"] == pytest.approx(float(nll_p.mean().exp()), rel=1e-6)
    assert found["ppl"] == pytest.approx(float(nll_q.mean().exp()), rel=1e-6)
    assert found["ppl_change"] == pytest.approx(float((nll_q.mean() - nll_p.mean()).exp()) - 1, rel=1e-4)
    delta = nll_q - nll_p
    assert found["delta_nll"] == pytest.approx(float(delta.mean()), rel=1e-5)
    assert found["delta_nll_2se"] == pytest.approx(2 * float(delta.std()) / math.sqrt(windows), rel=1e-5)
    assert found["logit_rel_l1"] == pytest.approx(
        sum(metrics.relative_l1(other[i], exact[i]) for i in range(windows)) / windows, rel=1e-5
    )


def test_identical_logits_give_zero_and_one() -> None:
    comparison = TextComparison()
    for _ in range(2):
        logits = torch.randn(10, 20)
        comparison.add(logits.clone(), ExactWindow(logits, torch.randint(20, (10,))))
    found = comparison.summary()
    assert (found["kl"], found["top1"], found["ppl_change"], found["delta_nll"]) == (0, 1, 0, 0)
    assert found["logit_cosine"] == pytest.approx(1)


def test_a_tiny_divergence_is_measured_and_not_rounded_away() -> None:
    torch.manual_seed(0)
    exact = 8 * torch.randn(200, 5000)
    other = exact + 0.02 * torch.randn_like(exact)
    comparison = TextComparison()
    comparison.add(other, ExactWindow(exact, torch.zeros(200, dtype=torch.long)))
    log_p, log_q = exact.double().log_softmax(-1), other.double().log_softmax(-1)
    expected = float((log_p.exp() * (log_p - log_q)).sum(-1).mean())
    assert 1e-5 < expected < 1e-3
    assert comparison.kl[0] == pytest.approx(expected, rel=0.01)


def test_broken_logits_are_not_reported_as_good() -> None:
    exact = torch.randn(10, 20)
    comparison = TextComparison()
    broken = exact.clone()
    broken[3, 3] = math.nan
    comparison.add(broken, ExactWindow(exact, torch.randint(20, (10,))))
    assert math.isnan(comparison.kl[0]) and math.isnan(comparison.logit_rel_l1[0])


def test_mismatched_shapes_are_refused() -> None:
    tokens = torch.zeros(4, dtype=torch.long)
    with pytest.raises(ValueError, match="the exact ones"):
        TextComparison().add(torch.zeros(4, 5), ExactWindow(torch.zeros(4, 6), tokens))
    with pytest.raises(ValueError, match="tokens"):
        ExactWindow(torch.zeros(5, 6), tokens)
