"""The reasons for which a call runs exact: the word that is counted, and the sentence that a person reads.

The words are stable: counters, results files and tests match them. A word that ends in "*" stands for all that begin
like it ("dtype_*" for dtype_float32), and `{}` in its sentence for the rest of the word.

Standard library only, as recipes.py, which hands the words out.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Reason(NamedTuple):
    """sentence: what a person reads. is_error: a policy with `on_unsupported: error` refuses such a call; where it does
    not, exact is what was asked for, or what is fastest."""

    sentence: str
    is_error: bool = True


NOTE_CACHE = "cache"  # beside a quantized recipe, not a reason: the call attended to the pages of a quantized cache

REASONS: dict[str, Reason] = {
    # asked for
    "policy": Reason("the policy says exact for this site", False),
    "output_attentions": Reason("the caller asked for the attention weights, which only exact attention has"),
    # not worth it
    "decode": Reason("one query row over a 16-bit cache: reading the cache is the whole cost", False),
    "short_q": Reason("fewer query rows than the policy's min_q_len", False),
    "short_kv": Reason("fewer keys than the policy's min_kv_len", False),
    "short": Reason("below the length from which this card is faster quantized (sage-patch bench --crossover)", False),
    "empty": Reason("there is no query row, no key, or no channel", False),
    # what the call needs
    "needs_grad": Reason("calls that may need gradients run exact: use torch.no_grad() or torch.inference_mode()"),
    "training": Reason("part of a training step: in training mode, or checkpointed; call model.eval() to quantize"),
    "dropout": Reason("attention dropout is on: call model.eval() to quantize"),
    "dtype_float32": Reason("float32 stays exact: load with dtype=torch.bfloat16, or set quantize_fp32 in the policy"),
    "dtype_mixed": Reason("query, key and value differ in dtype"),
    "dtype_*": Reason("inputs of {} cannot be quantized: float16 and bfloat16 can"),
    "head_dim": Reason("heads are wider than the kernels take for this recipe"),
    "v_head_dim": Reason("values are wider than the kernels take beside these keys"),
    "variant": Reason("nothing computes this variant of the recipe here; most variants exist on a CPU, for ablations"),
    "no_fp8": Reason("this card's tensor cores have no FP8: choose a recipe with FP16 P and V"),
    "rank": Reason("the tensors are not [batch, heads, tokens, head_dim]"),
    "nested": Reason("nested tensors, which torch's own function takes"),
    "broadcast": Reason("query, key and value differ in batch or heads, which torch's own function repeats"),
    "causal_mask": Reason("a mask and is_causal at once, which torch's own function judges"),
    "mask_float": Reason("an additive mask, which costs the kernels more than torch"),
    "mask_block": Reason("a block mask of flex attention, which only flex attention reads"),
    "context_parallel": Reason("the sequence is split over devices in a form that only diffusers' own code takes"),
    "function_mode": Reason("a torch function mode of diffusers waits for this very call, to change its result"),
    "argument_*": Reason("the call has the argument {}, which only its original function understands"),
    "processor_replaced": Reason("another processor than at apply(), for good or for one request, runs its own code"),
    "no_kernel_for_*": Reason("no quantized kernel runs on this {} device yet: sage-patch env names those there are"),
    # over a quantized cache
    "cache_materialized": Reason("the model itself computes with the cached keys, which were dequantized for it"),
    "position_bias": Reason("a learned position bias, which attention over the cache's pages does not add"),
    "indices": Reason("the model selects keys by index, which attention over the cache's pages does not"),
    "varlen": Reason("packed sequences, which attention over the cache's pages does not read"),
    "mask_shape": Reason("the mask is of another length than the cache's keys"),
    "batch": Reason("the queries' batch is another than the cache's"),
}  # fmt: skip


def lookup(word: str) -> tuple[str, Reason]:
    """(the rest of a word with "*", its reason). Raises KeyError for a word that is in no row."""
    if word in REASONS:
        return "", REASONS[word]
    for stem, reason in REASONS.items():
        if stem.endswith("*") and word.startswith(stem[:-1]):
            return word[len(stem) - 1 :], reason
    raise KeyError(f"{word!r} is no reason that sage_patch counts: add it to sage_patch/reasons.py")


def sentence(word: str) -> str:
    """What a person reads for a word."""
    rest, reason = lookup(word)
    return reason.sentence.format(rest)


def is_error(word: str) -> bool:
    """Whether `on_unsupported: error` refuses a call with this reason."""
    return lookup(word)[1].is_error


def legend(words: Iterable[str]) -> list[str]:
    """One line `word: sentence` for each different word, in the order of the table."""
    order = list(REASONS)
    place = {word: next(i for i, stem in enumerate(order) if REASONS[stem] is lookup(word)[1]) for word in words}
    return [f"{word}: {sentence(word)}" for word in sorted(place, key=lambda w: (place[w], w))]
