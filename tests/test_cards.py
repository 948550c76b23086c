"""Cards by name: the table, and what apply() does on a card of each kind, mocked."""

from __future__ import annotations

import re
import warnings
from types import SimpleNamespace

import pytest
import torch

import sage_patch
from sage_patch import Policy, backends, patch
from sage_patch.cards import table as cards
from sage_patch.dispatch import choose
from sage_patch.kernels import accumulators, crossover, library, ops, plain
from sage_patch.recipes import NO_LIMITS, RECIPES, Call, parse_recipe
from tiny import logits, text_model, tokens
from zoo.plain_library import INDEX, Recorder, in_place

FP8, FP16 = "qk_int8_pv_fp8", "qk_int8_pv_fp16"
# The name that the driver gives: compute capability, row of the table, default recipe ("": exact), sums in fp16, and
# whether long calls of head_dim 128 are quantized by default.
DEVICES = {
    "NVIDIA A100-SXM4-80GB": ((8, 0), "A100 80GB", FP16, (), True),
    "NVIDIA GeForce RTX 3090": ((8, 6), "RTX 3090", FP16, ("fp16",), True),
    "NVIDIA RTX A6000": ((8, 6), "RTX A6000", FP16, (), True),
    "Orin": ((8, 7), "Jetson AGX Orin", FP16, (), True),
    "NVIDIA L40S": ((8, 9), "L40S", FP8, (), True),
    "NVIDIA L4": ((8, 9), "L4", FP8, (), True),
    "NVIDIA GeForce RTX 4090": ((8, 9), "RTX 4090", FP8, ("fp8", "fp16"), True),
    "NVIDIA RTX 6000 Ada Generation": ((8, 9), "RTX 6000 Ada", FP8, (), True),
    "NVIDIA H100 80GB HBM3": ((9, 0), "H100", FP8, (), True),
    "NVIDIA H200": ((9, 0), "H200", FP8, (), True),
    "NVIDIA GH200 480GB": ((9, 0), "GH200", FP8, (), True),
    "NVIDIA B200": ((10, 0), "B200", FP16, (), False),
    "NVIDIA B300 SXM6 AC": ((10, 3), "B300", FP16, (), False),
    "NVIDIA Thor": ((11, 0), "Jetson AGX Thor", FP16, (), False),
    "NVIDIA GeForce RTX 5090": ((12, 0), "RTX 5090", FP8, ("fp8", "fp16"), True),
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": ((12, 0), "RTX PRO 6000 Blackwell", FP8, (), True),
    "NVIDIA GB10": ((12, 1), "GB10", FP8, (), True),
    "Tesla T4": ((7, 5), "T4", "", (), False),
    "Tesla V100-SXM2-16GB": ((7, 0), "V100", "", (), False),
    "NVIDIA Novel 9000": ((8, 9), None, FP8, (), True),  # no row: safe defaults
}


def as_counted(name: str) -> str:
    """The default recipe as calls are counted on a card: only Hopper's kernels have an exponent of their own."""
    capability, _, recipe, _, _ = DEVICES[name]
    return f"{recipe}:exp=exact" if recipe == FP8 and capability != (9, 0) else recipe


@pytest.fixture(autouse=True)
def no_table_of_a_user(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setenv("SAGE_PATCH_CACHE", str(tmp_path))
    accumulators.in_fp16.cache_clear()
    yield
    accumulators.in_fp16.cache_clear()


def on_card(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """CPU calls are chosen for as on this card, and computed by the reference."""
    backend = backends.find("cuda", DEVICES[name][0])
    monkeypatch.setattr(ops, "backend_for", lambda device: backend)
    stub = SimpleNamespace(prepare=lambda index: None, forward=plain.forward)
    monkeypatch.setattr(backends, "module", lambda path: stub)
    monkeypatch.setattr(
        crossover, "lengths", lambda index, dim, causal, *_: crossover.look_up(crossover.card_of(name), dim, causal)
    )


@pytest.mark.parametrize("name", DEVICES)
def test_the_table_has_what_it_should(name: str) -> None:
    capability, row, recipe, sums, _ = DEVICES[name]
    found = cards.find(name)
    assert (found and found.name) == row
    assert found is None or found.capability == capability
    assert accumulators.in_fp16(name) == sums
    call = Call(backends.find("cuda", capability), "cuda", "bfloat16", 64, 64, 4, 4, 4096, 4096)
    ran, reason = choose(parse_recipe("sage2"), call, NO_LIMITS)
    assert (ran.name, reason) == ((as_counted(name), "") if recipe else ("exact", "no_kernel_for_cuda"))


@pytest.mark.parametrize("name", DEVICES)
def test_apply_chooses_what_the_table_says(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    _, _, recipe, _, _ = DEVICES[name]
    on_card(monkeypatch, name)
    model = text_model("llama", "sdpa").to(torch.bfloat16)
    with sage_patch.applied(model, Policy(min_kv_len=1, min_q_len=1)) as handle:
        logits(model, tokens(1, 32))
        stats, rows = handle.stats(), handle.rows()
    assert {r["recipe"] for r in rows} == {as_counted(name) or "exact"}
    assert stats["quantized"] == (stats["calls"] if recipe else 0)


@pytest.mark.parametrize("name", DEVICES)
def test_long_calls_are_quantized_where_that_is_predicted_to_pay(name: str) -> None:
    capability, _, recipe, _, pays = DEVICES[name]
    lengths = crossover.look_up(crossover.card_of(name), 128, False)
    call = Call(backends.find("cuda", capability), "cuda", "bfloat16", 128, 128, 32, 32, 1 << 17, 1 << 17,
                crossover=lengths)  # fmt: skip
    ran, reason = choose(parse_recipe("sage2"), call, sage_patch.recipes.Limits())
    why = "" if pays else "short" if recipe else "no_kernel_for_cuda"
    assert (ran.name, reason) == (as_counted(name) if pays else "exact", why)


def test_variants_of_the_default_recipe_follow_the_card() -> None:
    recipe = parse_recipe("sage2:smooth=none")
    assert recipe == parse_recipe("qk_int8_pv_fp8:smooth=none") and recipe.without_fp8 is not None
    on = backends.of_device(recipe, "mma_fp16")
    assert on == parse_recipe("qk_int8_pv_fp16:smooth=none") and on.name == "qk_int8_pv_fp16:smooth=none"
    assert backends.of_device(recipe, "mma") is recipe is backends.of_device(recipe, "none")
    named = parse_recipe("qk_int8_pv_fp8")  # asked for by its own name: refused, not exchanged
    assert backends.of_device(named, "mma_fp16") is named and named.without_fp8 is None
    assert all(r.without_fp8 is None for r in RECIPES.values())


def test_a_card_without_a_row_is_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cards, "_said", set())
    monkeypatch.setattr(ops, "backend_for", lambda device: "mma")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA Novel 9000")
    devices = [torch.device("cuda", 0), torch.device("cpu")]
    (words,) = patch._words_on_cards(devices)
    assert "no card 'NVIDIA Novel 9000'" in words and "sums in fp32" in words and "--crossover" in words
    assert list(patch._words_on_cards(devices)) == []
    monkeypatch.setattr(ops, "backend_for", lambda device: "none")
    assert "every call will run exact" in next(iter(patch._words_on_cards(devices)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cards.unknown_once("NVIDIA L40S") is None


@pytest.mark.parametrize("chip", [c for c, row in cards.table()["chips"].items() if "peaks" in row])
def test_rates_are_those_of_the_data_sheets(chip: str) -> None:
    name, peaks = cards.table()["chips"][chip]["peaks"]
    card = cards.named(name)
    assert card.chip == chip and card.rates is not None
    for kind, tops in peaks.items():
        assert 2 * card.rates[kind] * card.sms * card.boost_ghz / 1e3 == pytest.approx(tops, rel=0.02), kind


def test_every_row_is_reached_by_its_own_name_and_has_kernels_for_its_capability() -> None:
    for card in cards.cards():
        assert cards.named(card.name).name == card.name
        re.compile(card.match)
        assert (backends.find("cuda", card.capability) == "none") == (card.capability < (8, 0))
    laptop = cards.find("NVIDIA GeForce RTX 4090 Laptop GPU")
    assert laptop is not None and laptop.fp16_sums == ("fp8", "fp16") and laptop.sms == 0  # others clocks and SMs
    assert cards.find("NVIDIA GeForce RTX 4070 SUPER").name == "GeForce RTX 40, others"


def test_an_unknown_name_gets_the_nearest_ones() -> None:
    with pytest.raises(cards.CardError, match="unknown card 'RTX 409O'; nearest: \"RTX 4090\""):
        cards.named("RTX 409O")
    assert cards.named(" geforce rtx 4090 ").name == cards.named("l40s").name.replace("L40S", "RTX 4090")


def test_what_a_user_measured_wins_over_the_table(tmp_path) -> None:
    name, path = "NVIDIA GeForce RTX 4090", crossover.user_table()
    assert accumulators.in_fp16(name) == ("fp8", "fp16")
    crossover.write(path, name, {"measured": "here", "head_dims": {}})
    accumulators.write(path, name, {"fp8": "fp32", "fp16": "fp16"}, "here")
    assert accumulators.in_fp16(name) == ("fp16",)
    crossover.write(path, "another", {"measured": "here", "head_dims": {}})  # keeps what it does not know
    accumulators.in_fp16.cache_clear()
    assert accumulators.in_fp16(name) == ("fp16",) and set(crossover.read(path)) == {name, "another"}


def test_the_flag_is_packed_for_the_card_and_the_type_of_p_v(monkeypatch: pytest.MonkeyPatch) -> None:
    packed: list[int] = []
    q = torch.zeros(1, 1, 8, 64, dtype=torch.float16)
    with in_place(Recorder()):
        for pv, sums in (("fp8", {(INDEX, "fp8")}), ("fp16", {(INDEX, "fp8")}), ("fp8", {(1, "fp8")})):
            monkeypatch.setattr(library, "sums_in_fp16", sums)
            call = library.Call(q, q, q, plain_args(), RECIPES[f"qk_int8_pv_{pv}"])
            packed.append(library.FACTS.unpack(call.args)["flags"])
    assert [flags & library.FLAGS["PV_FP16_SUMS"] for flags in packed] == [1024, 0, 0]


def plain_args():
    from sage_patch.args import plain as args

    return args(0.125)
