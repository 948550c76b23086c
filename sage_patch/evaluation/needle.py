"""The needle test: a number hidden in real text and asked for at its end, over lengths of the text and depths in it.

A model that cannot find it unpatched says nothing about a patch. So every figure of a patched model stands beside the
unpatched model's own, and their agreement at the answer's tokens counts whether the answer is right or not.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from sage_patch.errors import ModelError
from sage_patch.patch import device_of

LENGTHS = (256, 512, 1024)  # tokens, those that the model can read
_FACT, _AFTER = "\n\nThe secret number is", ". Remember it: it will be asked for.\n\n"
_QUESTION = "\n\nWhat is the secret number? The secret number is"


@dataclass(frozen=True)
class Needle:
    """tokens [1, length], of which the last `answer` ones are the number that the model should say by itself."""

    length: int
    depth: float
    tokens: Tensor
    answer: int


@dataclass(frozen=True)
class Found:
    """What a model says at the answer's tokens.

    top: its likeliest tokens. right: the greedy answer is the number. mrr: mean of 1 / rank of the right tokens (1 is
    best). log_likelihood: of the right tokens, mean, in nats.
    """

    length: int
    depth: float
    top: tuple[int, ...]
    right: bool
    mrr: float
    log_likelihood: float


def needles(
    tokenizer: Any, text: str, lengths: Sequence[int] | None, depths: Sequence[float], seed: int, longest: int | None
) -> list[Needle]:
    """One for each length and depth, with a number of six digits that the seed decides.

    lengths: None takes those of LENGTHS that the model reads. longest: tokens that it reads at most. Raises ModelError
    for a length that it cannot read, or that does not hold the question.
    """
    if lengths is None:
        lengths = [n for n in LENGTHS if longest is None or n <= longest]

    def tokens(part: str) -> list[int]:
        return list(tokenizer(part, add_special_tokens=False, verbose=False)["input_ids"])

    filler, draw = tokens(text), random.Random(seed)
    made = []
    for length in lengths:
        if longest is not None and length > longest:
            raise ModelError(f"evaluate.needle_lengths has {length}, and the model reads at most {longest} tokens")
        for depth in depths:
            answer = tokens(f" {draw.randrange(10**5, 10**6)}")
            fact, question = [*tokens(_FACT), *answer, *tokens(_AFTER)], [*tokens(_QUESTION), *answer]
            room = length - len(fact) - len(question)
            if room < 0:
                least = len(fact) + len(question)
                raise ModelError(f"evaluate.needle_lengths has {length}, and fact and question alone take {least}")
            around = (filler * (room // max(1, len(filler)) + 1))[:room]
            place = round(depth * room)
            whole = [*around[:place], *fact, *around[place:], *question]
            made.append(Needle(length, depth, torch.tensor([whole]), len(answer)))
    return made


@torch.no_grad()
def ask(model: nn.Module, made: Sequence[Needle], tick: Callable[[int], None] = lambda n: None) -> list[Found]:
    """What the model, patched or not, says to each: one forward pass a needle, read at the answer's positions."""
    device = device_of(model)
    found = []
    for number, needle in enumerate(made):
        tick(number)
        tokens = needle.tokens.to(device)
        logits = model(input_ids=tokens, use_cache=False).logits[0, -needle.answer - 1 : -1].float()
        right = tokens[0, -needle.answer :]
        wanted = logits.gather(1, right[:, None])
        rank = 1 + (logits > wanted).sum(1)
        top = logits.argmax(1)
        found.append(
            Found(
                length=needle.length,
                depth=needle.depth,
                top=tuple(top.tolist()),
                right=bool((top == right).all()),
                mrr=float((1 / rank).double().mean()),
                log_likelihood=float((wanted[:, 0] - logits.logsumexp(1)).double().mean()),
            )
        )
    return found


def summary(patched: Sequence[Found], exact: Sequence[Found]) -> dict[str, float]:
    """Of both over all needles: right (share), mrr, log_likelihood; and agreement, the share of equal top tokens."""
    same = [a == e for p, x in zip(patched, exact, strict=True) for a, e in zip(p.top, x.top, strict=True)]
    figures = {"agreement": fmean(same)}
    for name, rows in (("", patched), ("_exact", exact)):
        for figure in ("right", "mrr", "log_likelihood"):
            figures[figure + name] = fmean(float(getattr(r, figure)) for r in rows)
    return figures
