"""How far a quantized result is from the exact one: tensors, and next-token distributions of a language model.

The tensor metrics are SageAttention's (arXiv 2410.02367 and 2411.10958): cosine similarity and relative L1 on
flattened outputs; worst_row and sqnr see what an average over a whole tensor hides.

For language models perplexity alone is blind: errors that help one token and hurt another cancel in it. The mean
KL divergence per token and the top-1 agreement do not cancel, so they come first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import fmean, stdev

import torch
from torch import Tensor

_ROWS = 128  # tokens at a time: a vocabulary of 150,000 then needs 80 MB a buffer


def cosine(actual: Tensor, exact: Tensor) -> float:
    """<a, e> / (|a| |e|) over all elements; 1 is equal up to scale. Two zero tensors give 1."""
    a, e = actual.double().flatten(), exact.double().flatten()
    norm = a.norm() * e.norm()
    return float(a.norm() == e.norm()) if norm == 0 else float(a @ e / norm)


def relative_l1(actual: Tensor, exact: Tensor) -> float:
    """sum |a - e| / sum |e| over all elements; 0 is equal, infinite where only the exact tensor is zero."""
    return _ratio((actual.double() - exact.double()).abs().sum(), exact.double().abs().sum())


def worst_row(actual: Tensor, exact: Tensor) -> float:
    """The largest relative L1 error of any row along the last axis: one bad token cannot hide in a mean."""
    error = (actual.double() - exact.double()).abs().sum(-1).flatten()
    size = exact.double().abs().sum(-1).flatten()
    ratio = torch.where(error == 0, torch.zeros_like(error), error / size)
    return float(ratio.max())


def errors(actual: Tensor, exact: Tensor) -> dict[str, float]:
    """The errors of an attention output as results hold them: cosine, rel_l1 and worst_row."""
    return {
        "cosine": cosine(actual, exact),
        "rel_l1": relative_l1(actual, exact),
        "worst_row": worst_row(actual, exact),
    }


def sqnr(actual: Tensor, exact: Tensor) -> float:
    """Signal to quantization noise, 10 log10(sum e^2 / sum (a - e)^2), in dB; infinite where equal."""
    noise = (actual.double() - exact.double()).square().sum()
    signal = exact.double().square().sum()
    if noise == 0:
        return math.inf
    return float(10 * torch.log10(signal / noise))


def greedy_agreement(actual: list[int], exact: list[int]) -> float:
    """The share of the exact greedy continuation that comes before the first different token; 1 is identical.

    What follows a first difference continues another text, so it is not compared.
    """
    same = 0
    for a, e in zip(actual, exact, strict=False):
        if a != e:
            break
        same += 1
    longest = max(len(actual), len(exact))
    return same / longest if longest else 1.0


class ExactWindow:
    """The unpatched model's answer to one window of text, with what every comparison with it needs.

    logits [T, vocab] and tokens [T]; the probabilities are kept too, so it holds twice the logits' memory.
    """

    def __init__(self, logits: Tensor, tokens: Tensor):
        if logits.dim() != 2 or tokens.shape != logits.shape[:1]:
            raise ValueError(
                f"logits must be [T, vocab] and tokens [T]; got {list(logits.shape)}, {list(tokens.shape)}"
            )
        self.logits = logits.float()
        self.tokens = tokens
        self.lse = self.logits.logsumexp(-1)
        self.probabilities = (self.logits - self.lse[:, None]).exp_()
        self.top = self.logits.argmax(-1)
        self.nll = _nll(self.logits, self.lse, tokens)
        self.norm = math.sqrt(float(_row_dots(self.logits, self.logits).double().sum()))  # summed as `add` does
        self.l1 = float(self.logits.abs().sum(-1).double().sum())


@dataclass
class TextComparison:
    """Running comparison of next-token logits on paired windows of text. Call `add` once a window.

    Every token's distribution counts in KL and agreement; the negative log likelihood (NLL) of token t+1 under
    the distribution at t is averaged per window, so that the windows are the independent samples.
    """

    kl: list[float] = field(default_factory=list)  # mean per window, nats a token
    top1: list[float] = field(default_factory=list)  # mean per window
    nll_exact: list[float] = field(default_factory=list)
    nll: list[float] = field(default_factory=list)
    logit_cosine: list[float] = field(default_factory=list)
    logit_rel_l1: list[float] = field(default_factory=list)

    def add(self, logits: Tensor, exact: ExactWindow) -> None:
        """One window: the other model's logits [T, vocab].

        KL(exact || other) = sum_v p_v (log p_v - log q_v) = sum_v p_v (x_v - y_v) - lse(x) + lse(y), where x and y
        are the exact and the other logits, p and q their softmax.
        """
        if logits.shape != exact.logits.shape:
            raise ValueError(f"logits have the shape {list(logits.shape)}, the exact ones {list(exact.logits.shape)}")
        kl = agree = error = 0.0
        dot = square = 0.0
        lse = torch.empty_like(exact.lse)
        for start in range(0, len(logits), _ROWS):
            rows = slice(start, start + _ROWS)
            other, reference = logits[rows].float(), exact.logits[rows]
            lse[rows] = other.logsumexp(-1)
            difference = reference - other
            kl += float((_row_dots(exact.probabilities[rows], difference) - exact.lse[rows] + lse[rows]).double().sum())
            agree += int((other.argmax(-1) == exact.top[rows]).sum())
            dot += float(_row_dots(other, reference).double().sum())
            square += float(_row_dots(other, other).double().sum())
            error += float(difference.abs_().sum(-1).double().sum())
        self.kl.append(kl / len(logits))
        self.top1.append(agree / len(logits))
        self.nll.append(_nll(logits, lse, exact.tokens))
        self.nll_exact.append(exact.nll)
        self.logit_cosine.append(dot / (math.sqrt(square) * exact.norm))
        self.logit_rel_l1.append(error / exact.l1)

    def rows(self) -> list[dict[str, float]]:
        """The figures of every window by itself."""
        named = {"kl": self.kl, "top1": self.top1, "nll": self.nll, "nll_exact": self.nll_exact}
        return [dict(zip(named, values, strict=True)) for values in zip(*named.values(), strict=True)]

    def summary(self) -> dict[str, float]:
        """Means over the windows: kl (nats a token), top1 (share), ppl and ppl_exact, ppl_change (relative).

        delta_nll is the mean paired difference of NLL in nats a token, delta_nll_2se two standard errors of it
        over the windows: a difference smaller than that is not told from zero. kl_2se likewise.
        """
        deltas = [q - p for q, p in zip(self.nll, self.nll_exact, strict=True)]
        ppl, ppl_exact = math.exp(fmean(self.nll)), math.exp(fmean(self.nll_exact))
        return {
            "kl": fmean(self.kl),
            "kl_2se": _two_standard_errors(self.kl),
            "top1": fmean(self.top1),
            "ppl": ppl,
            "ppl_exact": ppl_exact,
            "ppl_change": ppl / ppl_exact - 1,
            "delta_nll": fmean(deltas),
            "delta_nll_2se": _two_standard_errors(deltas),
            "logit_cosine": fmean(self.logit_cosine),
            "logit_rel_l1": fmean(self.logit_rel_l1),
        }


def _two_standard_errors(values: list[float]) -> float:
    return 2 * stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def _row_dots(a: Tensor, b: Tensor) -> Tensor:
    return torch.linalg.vecdot(a, b)


def _nll(logits: Tensor, lse: Tensor, tokens: Tensor) -> float:
    """Mean over t of lse(logits_t) - logits_t[token t+1]."""
    chosen = logits[:-1].gather(1, tokens[1:, None])[:, 0].float()
    return float((lse[:-1] - chosen).double().mean())


def _ratio(error: Tensor, size: Tensor) -> float:
    return 0.0 if error == 0 else float(error / size)
