"""Where a quantized call would be slower than exact attention, it goes exact: the rule, the table, and its file."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from sage_patch.backends import why_not
from sage_patch.dispatch import choose
from sage_patch.kernels import build, crossover
from sage_patch.policy import Policy
from sage_patch.recipes import NO_LIMITS, RECIPES, Call, Limits, parse_recipe

ROOT = Path(__file__).parents[1]
SAGE2 = parse_recipe("sage2")
CALL = Call(
    "sm90", "cuda", "bfloat16", 128, 128, 32, 32, 2048, 2048, batch=4, crossover=((SAGE2.name, ((128, 2048),)),)
)

BOTH = ((SAGE2.name, ((128, 2048), (32, 3072))),)

DEFAULTS = Limits()


def reason(limits: Limits = DEFAULTS, **changes: object) -> str | None:
    return why_not(SAGE2, CALL._replace(**changes), limits)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, None),
        ({"q_len": 2047}, "short"),
        ({"kv_len": 2047}, "short"),
        ({"batch": 1}, "short"),  # a quarter of the measured work
        ({"batch": 1, "q_len": 4096, "kv_len": 4096}, None),
        ({"batch": 1, "num_heads": 8, "q_len": 4096, "kv_len": 4096}, "short"),
        ({"batch": 1, "num_heads": 8, "q_len": 8192, "kv_len": 8192}, None),
        ({"q_len": 1}, "decode"),  # the older reasons come first
        ({"kv_len": 64}, "short_kv"),
        ({"q_len": 64, "head_dim": 300}, "head_dim"),  # and what the kernel cannot do at any length
        ({"q_len": 64, "backend": "reference"}, None),  # a card's table is about that card
        ({"q_len": 64, "crossover": ()}, None),
        ({"q_len": 1 << 20, "kv_len": 1 << 20, "crossover": ((SAGE2.name, ((128, crossover.NEVER),)),)}, "short"),
        # one item of 32 heads was measured as well: each point holds for calls with as much work
        ({"batch": 1, "crossover": BOTH}, "short"),
        ({"batch": 1, "q_len": 3072, "kv_len": 3072, "crossover": BOTH}, None),
        ({"batch": 1, "num_heads": 8, "q_len": 4096, "kv_len": 4096, "crossover": BOTH}, "short"),
        ({"batch": 1, "num_heads": 8, "q_len": 6144, "kv_len": 6144, "crossover": BOTH}, None),
        ({"crossover": BOTH}, None),
        ({"batch": 1, "q_len": 3072, "kv_len": 3072, "crossover": ((SAGE2.name, ((32, crossover.NEVER),)),)}, "short"),
    ],
)
def test_short_calls_go_exact_with_a_reason(changes: dict, expected: str | None) -> None:
    assert reason(**changes) == expected


def test_lengths_that_a_user_chose_win() -> None:
    assert reason(NO_LIMITS, q_len=16, kv_len=16) is None
    assert reason(Policy(min_kv_len=128).limits, q_len=64, kv_len=128) is None
    assert reason(Policy().limits, q_len=64, kv_len=128) == "short"
    assert reason(Policy(quantize_fp32=True).limits, q_len=64, kv_len=128) == "short"


def test_short_is_never_an_error() -> None:
    short = CALL._replace(q_len=512)
    assert choose(SAGE2, short, Limits(), "error") == (RECIPES["exact"], "short")


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [
        ({1024: 0.8, 2048: 1.2, 4096: 1.3}, 1536),  # 1448 by the interpolation, rounded up
        ({1024: 0.8, 2048: 1.0}, 2048),
        ({1024: 0.999, 2048: 1.5}, 1280),
        ({1024: 1.1, 2048: 0.9, 4096: 1.3}, 2560),  # the last length that is slower counts
        ({1024: 1.1, 2048: 1.2}, 1024),
        ({1024: 1.1, 2048: 0.99}, None),
    ],
)
def test_break_even(ratios: dict[int, float], expected: int | None) -> None:
    assert crossover.break_even(ratios) == expected


@pytest.mark.parametrize(
    ("many", "few", "expected"),
    [
        ({1024: 0.9, 2048: 1.1}, {2048: 0.9, 4096: 1.1}, {"32": 3072, "128": 1536}),
        (
            {1024: 1.1, 2048: 1.2},
            {2048: 0.9, 4096: 1.1},
            {"32": 3072, "128": 1536},
        ),  # the work of 1,024 would be 2,048's
        ({1024: 0.9, 4096: 1.1}, {1024: 1.1, 2048: 1.2}, {"32": 2048, "128": 2048}),  # fewer heads never need less
        ({1024: 1.1, 2048: 1.2}, {2048: 0.8, 4096: 0.9}, {"32": None, "128": 4096}),
        ({1024: 0.8, 2048: 0.9}, {2048: 1.1}, {"32": None, "128": None}),
    ],
)
def test_measured_points_agree(many: dict, few: dict, expected: dict) -> None:
    assert crossover.points({128: many, 32: few}) == expected
    assert crossover.points({128: many}) == crossover.break_even(many)


def test_the_exact_peer_is_the_fastest_and_the_slower_way_of_measuring_counts() -> None:
    row = {
        "head_dim": 128,
        "is_causal": False,
        "kv_len": 1024,
        "sage2_op": 600.0,
        "sdpa_cudnn": 500.0,
        "sdpa_fa2": 300.0,
    }
    assert crossover.from_rows([row], "")["head_dims"]["128"]["full"] == {"qk_int8_pv_fp8": 1024}
    assert "head_dims_fa3" not in crossover.from_rows([row], "")
    burst = row | {"burst": {"sage2_op": 600.0, "sdpa_cudnn": 620.0}}
    assert crossover.from_rows([burst], "")["head_dims"]["128"]["full"] == {"qk_int8_pv_fp8": None}
    with_fa3 = crossover.from_rows([row | {"fa3_bf16": 650.0}], "")
    assert with_fa3["head_dims"]["128"]["full"] == {"qk_int8_pv_fp8": 1024}
    assert with_fa3["head_dims_fa3"]["128"]["full"] == {"qk_int8_pv_fp8": None}
    few = crossover.from_rows([row, row | {"crossover_heads": 32, "kv_len": 2048}], "")
    assert crossover.look_up(few, 128, False) == (("qk_int8_pv_fp8", ((128, 1024), (32, 2048))),)


def test_the_packaged_table_is_what_the_recorded_results_give() -> None:
    cards = crossover.read(build.HERE / "crossover.json")
    for card in cards.values():
        files = re.findall(r"docs/results/\S+\.json", card["measured"])
        rows = [row for name in files for row in json.loads((ROOT / name).read_text())["rows"]]
        made = crossover.from_rows(rows, "")
        assert not files or all(card[part] == made[part] for part in crossover.PARTS.values() if part in card)
    for name, head_dim, causal in ((n, d, c) for n in cards for d in (32, 64, 80, 128) for c in (False, True)):
        found = dict(crossover.look_up(cards[name], head_dim, causal))
        assert set(found) == {"qk_int8_pv_fp8", "qk_int8_pv_fp16"}
        generic = dict(crossover.look_up(cards["default"], head_dim, causal))
        assert all(256 <= found[r][0][1] <= generic[r][0][1] for r in found)
    assert crossover.look_up(cards["default"], 257, False) == ()
    assert dict(crossover.look_up(cards["NVIDIA H200"], 256, True)) == {"qk_int8_pv_fp8": ((128, 27392),)}


def test_a_measurement_of_the_users_own_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    packaged = crossover.card_of("some other Hopper")
    row = {"head_dim": 128, "is_causal": False, "sdpa_cudnn": 500.0, "sdpa_fa2": None}
    rows = [row | {"kv_len": n, "sage2_op": op} for n, op in ((512, 400.0), (1024, 600.0))]
    crossover.write(crossover.user_table(), "some other Hopper", crossover.from_rows(rows, "here"))
    assert crossover.look_up(crossover.card_of("some other Hopper"), 128, False) == (("qk_int8_pv_fp8", ((128, 768),)),)
    assert crossover.card_of("yet another") == packaged
    # another head_dim joins what is there
    crossover.write(crossover.user_table(), "some other Hopper", crossover.from_rows([rows[1] | {"head_dim": 64}], ""))
    assert set(crossover.card_of("some other Hopper")["head_dims"]) == {"64", "128"}


@pytest.mark.parametrize("text", ["", "[]", '{"cards": {"x": {}}}', '{"cards": 3}'])
def test_a_broken_table_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(crossover.TableError, match="t.json.*remove it"):
        crossover.read(tmp_path / "t.json")
