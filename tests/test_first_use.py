"""Kernels that are new to a card show that their numbers are right before they are used."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sage_patch import backends
from sage_patch.kernels import first_use, library, plain
from sage_patch.reference import pages as reference_pages

ROW = replace(backends.BACKENDS["reference"], name="unproven", is_proven=False)


def test_right_numbers_pass_for_every_recipe():
    seen = []

    def run(query, key, value, args, recipe):
        seen.append((recipe.name, args.right))
        return plain.forward(query, key, value, args, recipe)

    first_use.compare(ROW, run, "cpu")
    assert len(set(seen)) == 8 and len(seen) == 16  # four recipes, full and causal, two shapes


@pytest.mark.parametrize("wrong", [lambda x: x * 1.5, lambda x: x * float("nan"), torch.zeros_like])
def test_wrong_numbers_are_refused_with_what_was_found(wrong):
    def run(*given):
        out, lse = plain.forward(*given)
        return wrong(out), lse

    with pytest.raises(first_use.WrongNumbersError, match="unproven kernels give wrong numbers on cpu.*relative L1"):
        first_use.compare(ROW, run, "cpu")


def test_wrong_pages_are_refused(monkeypatch):
    right = reference_pages.attend
    monkeypatch.setattr(reference_pages, "attend", lambda *given: (right(*given)[0] * 1.5, None))
    with pytest.raises(first_use.WrongNumbersError, match="unproven kernels.*a quantized cache, head_dim 64, 300 rows"):
        first_use.compare(ROW, plain.forward, "cpu")


def test_a_new_card_is_looked_at_once_and_again_after_a_failure(monkeypatch):
    calls = []
    monkeypatch.setattr(library, "load_for", lambda architecture: f"library of {architecture}")
    monkeypatch.setattr(library, "_by_device", {})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (8, 9) if index else (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA GeForce RTX 4090")
    monkeypatch.setattr(library, "sums_in_fp16", set())

    def compare(backend, run, device):
        calls.append((backend.name, device))
        if len(calls) == 1:
            raise first_use.WrongNumbersError("no")

    monkeypatch.setattr(first_use, "compare", compare)
    assert library.of_device(0) == ("library of 90", 90) and not calls
    with pytest.raises(first_use.WrongNumbersError):
        library.of_device(1)
    assert library.of_device(1) == library.of_device(1) == ("library of 89", 89)
    assert calls == [("mma", "cuda:1")] * 2
    assert library.sums_in_fp16 == {(1, "fp8"), (1, "fp16")}  # as the table has it for this card
