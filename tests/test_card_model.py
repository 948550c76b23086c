"""What is predicted for cards: beside what was measured and published, and what the product makes of it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from sage_patch.cards import model as card_model
from sage_patch.cards import table as cards
from sage_patch.cli import app
from sage_patch.evaluation import card_tables
from sage_patch.evaluation.calibration.choose import COST_MODELS, ChoiceError, cost_model
from sage_patch.kernels import crossover, ops
from sage_patch.recipes import RECIPES

ROOT = Path(__file__).parent.parent
FP8, FP16 = RECIPES["qk_int8_pv_fp8"], RECIPES["qk_int8_pv_fp16"]
PUBLISHED = [(n, k, v) for n, row in cards.table()["published"].items() if n != "about" for k, v in row.items()]


@pytest.fixture(autouse=True)
def no_table_of_a_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SAGE_PATCH_CACHE", str(tmp_path))


@pytest.mark.parametrize(("name", "kernel", "tops"), PUBLISHED)
def test_published_speeds_are_near_what_is_predicted(name: str, kernel: str, tops: float) -> None:
    card = cards.named(name)
    if kernel == "fa2":
        assert card_model.exact_tops(card, 128) == pytest.approx(tops, rel=0.1)
        return
    pv, sums = kernel.split("/")
    found = card_model.tops(card, 128, RECIPES[f"qk_int8_pv_{pv}"], sums)
    assert found is not None and found.low <= found.likely <= found.high
    # Theirs are other kernels, and GeForce runs above its data sheet's clock.
    assert 0.85 * found.low <= tops <= 1.2 * found.high


def test_the_sums_of_the_table_are_those_that_are_predicted_to_be_faster() -> None:
    for card in cards.cards():
        if not card.sms or card.capability not in card_model.ARCHITECTURES:
            continue
        for recipe in (FP8, FP16):
            each = {s: card_model.tops(card, 128, recipe, s) for s in ("fp32", "fp16")}
            if None in each.values():
                continue
            chosen = "fp16" if recipe.pv in card.fp16_sums else "fp32"
            assert each[chosen].likely == max(found.likely for found in each.values()), (card.name, recipe.name)


def test_no_kernel_leaves_a_scheduler_with_one_warp() -> None:
    for architecture, shared in (("86", 100), ("89", 100), ("120", 100), ("80", 164), ("100", 228), ("110", 228)):
        for kernel in card_model.kernels()[architecture]:
            assert card_model.warps_a_scheduler(kernel, shared, architecture) >= 2, (architecture, kernel)


def test_gains_rise_with_length_and_break_even_is_where_they_are_one() -> None:
    card = cards.named("RTX 4090")
    found = [card_model.gain(card, 128, FP8, length) for length in card_model.LENGTHS]
    likely = [gain.likely for gain in found]
    assert likely == sorted(likely) and 1.5 < likely[0] < likely[-1] < 3
    assert all(gain.low < gain.likely < gain.high for gain in found)
    length = card_model.predicted_break_even(card, 128, FP8)
    assert length is not None
    at, before = (card_model.gain(card, 128, FP8, n, card_model.CROSSOVER_HEADS).likely for n in (length, length - 256))
    assert before < 1 <= at


def test_the_product_takes_twice_the_predicted_length_and_never_where_there_is_no_gain() -> None:
    entry = crossover.card_of("NVIDIA GeForce RTX 4090")
    assert entry["measured"].startswith("predicted, never timed on this card")
    predicted = card_model.predicted_break_even(cards.named("RTX 4090"), 128, FP8)
    assert entry["head_dims"]["128"]["full"][FP8.name] == max(2 * predicted, 1024)
    assert crossover.card_of("NVIDIA B200")["head_dims"]["128"]["full"][FP16.name] is None  # never
    assert crossover.card_of("NVIDIA H100 80GB HBM3") == crossover.card_of(
        "a card that nobody knows"
    )  # the generic one


def test_what_is_not_known_is_not_predicted() -> None:
    assert card_model.gain(cards.named("GeForce RTX 40, others"), 128, FP8, 8192) is None
    assert card_model.gain(cards.named("A100 80GB"), 128, FP8, 8192) is None  # no FP8
    assert card_model.gain(cards.named("H100"), 128, FP8, 8192) is None  # measured instead
    assert card_model.gain(cards.named("RTX 4090"), 128, RECIPES["qk_int4_pv_fp8"], 8192) is None
    assert card_model.break_even_lengths("NVIDIA Novel 9000") is None


def test_docs_and_table_hold_what_their_sources_say() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/update_cards.py", "--check"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


# The command


def invoke(*words: str) -> SimpleNamespace:
    """The command's exit code, and what it printed, with single spaces."""
    done = CliRunner().invoke(app, ["plan", *words])
    return SimpleNamespace(exit_code=done.exit_code, output=re.sub(" +", " ", done.output))


def test_plan_of_a_card_alone() -> None:
    found = invoke("--card", "RTX 4090")
    assert found.exit_code == 0, found.output
    for words in (
        "default recipe | qk_int8_pv_fp8", "fp8 in fp16, fp16 in fp16",
        "Gain by length: predicted, never timed on this card", "| qk_int8_pv_fp8 | from",
        "2K | 4K | 8K | 16K | 32K | 64K | 128K",
    ):  # fmt: skip
        assert words in found.output, words
    old = invoke("--card", "Tesla T4").output
    assert "every call runs exact" in old and "no kernels for compute capability 7.5" in old
    ampere = invoke("--card", "A100-SXM4-80GB").output
    assert "exact (no_fp8)" in ampere and "no_fp8: this card's tensor cores have no FP8" in ampere
    assert "exact (never faster)" in invoke("--card", "B200").output
    assert "Gain by length: measured\n" in invoke("--card", "H200").output
    assert "measured on an H200, predicted, never timed on this card" in invoke("--card", "H100").output
    assert "Gain" not in invoke("--card", "RTX 4070 SUPER").output


def test_plan_of_a_model_on_a_card() -> None:
    config = str(ROOT / "configs" / "tiny.yaml")
    found = invoke(config, "--meta", "--set", "policy.recipe=sage2", "--card", "A100 40GB")
    assert found.exit_code == 0, found.output
    assert "on A100 40GB" in found.output and "sage2: qk_int8_pv_fp16" in found.output
    assert "head_dim 128: quantized from" in found.output and "Gain by length: predicted" in found.output
    assert "qk_int8_pv_fp16, 128" in found.output and "qk_int8_pv_fp16, 64" not in found.output
    asked = invoke(config, "--meta", "--card", "A100 40GB").output  # FP8 by its name
    assert "qk_int8_pv_fp8: exact (no_fp8)" in asked and "no_fp8: this card's tensor cores have no FP8" in asked
    assert "exact (no_kernel_for_cuda)" in invoke(config, "--meta", "--card", "V100").output


def test_plan_says_what_it_needs() -> None:
    unknown, nothing = invoke("--card", "RTX 4O90"), invoke()
    assert unknown.exit_code == 2 and "unknown card 'RTX 4O90'; nearest: \"RTX 4090\"" in unknown.output
    assert nothing.exit_code == 2 and "plan needs a run configuration" in nothing.output


# Calibration


def test_calibration_prices_the_card_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 0)
    assert cost_model("auto", cpu) is COST_MODELS["hopper"] is cost_model("H100", cpu)
    model = cost_model("RTX 4090", cpu)
    assert model.card == "RTX 4090" and "never timed on this card" in model.source
    assert model.ladder == ("qk_int8_pv_fp8", "qk_int8_pv_fp16", "exact")
    assert cost_model("L40S", cpu).ladder == ("qk_int8_pv_fp8", "qk_int8_pv_fp16", "exact")
    with pytest.raises(ChoiceError, match="unknown; nearest"):
        cost_model("RTX 4O90", cpu)
    monkeypatch.setattr(ops, "backend_for", lambda device: "mma")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA GeForce RTX 4090")
    assert cost_model("auto", cuda) == model
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA Novel 9000")
    assert cost_model("auto", cuda) is COST_MODELS["hopper"]
    with pytest.raises(ChoiceError, match="no kernels run on a T4"):
        cost_model("T4", cpu)


def test_the_file_of_measured_gains_is_read_as_such() -> None:
    measured = json.loads(cards.TABLE.read_text())["measured"]
    given = card_tables.gains(cards.named("H200"), FP8, 128)
    assert given is not None and given.label == "measured"
    assert given.by_length[8192] == f"{measured['gain']['128'][FP8.name]['8192']:.2f}"
