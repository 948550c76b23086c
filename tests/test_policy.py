"""Policies: spans, which rule wins, and errors that say what was asked and what would have matched."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sage_patch.policy import AttentionSite, Plan, Policy, PolicyError, Rule, Span, resolve
from sage_patch.recipes import Limits


def sites(n: int = 4, stack: str = "blocks", parts: tuple[str, ...] = ("attn1",)) -> list[AttentionSite]:
    return [
        AttentionSite(f"{stack}.{i}.{part}", stack, i, n, "cross" if part == "attn2" else "self", 8, 2, 64)
        for i in range(n)
        for part in parts
    ]


def members(value: object, total: int) -> list[int]:
    span = Span.parse(value)
    return [i for i in range(total) if span.contains(i, total)]


@pytest.mark.parametrize(
    ("value", "expected", "text"),
    [
        (3, [3], "3"),
        (-1, [9], "-1"),
        ([0, 2, -1], [0, 2, 9], "0, 2, -1"),
        ("2-4", [2, 3, 4], "2-4"),
        ({"first": 2}, [0, 1], "first 2"),
        ({"last": 2}, [8, 9], "last 2"),
        ({"first": 0.25}, [0, 1, 2], "first 25%"),
        ({"last": 0.1}, [9], "last 10%"),
        ({"from": 4, "to": -3}, [4, 5, 6, 7], "4 to -3"),
        ({"from": 7}, [7, 8, 9], "7 to -1"),
        ({"to": 1}, [0, 1], "0-1"),
        ({"first": 99}, list(range(10)), "first 99"),
    ],
)
def test_span_members_text_and_round_trip(value: object, expected: list[int], text: str) -> None:
    span = Span.parse(value)
    assert members(value, 10) == expected
    assert str(span) == text
    assert Span.parse(span.written()) == span


def test_a_fraction_is_rounded_up_but_not_by_floating_point_noise() -> None:
    assert 0.07 * 100 > 7
    assert len(members({"first": 0.07}, 100)) == 7
    assert len(members({"last": 0.07}, 101)) == 8


@pytest.mark.parametrize(
    "value",
    [True, 1.5, None, "", "a-b", "3-1", "-1", [], [0.5], [True], {}, {"first": 0}, {"first": 1.5}, {"last": 1.0},
     {"from": 3, "to": 1}, {"from": "a"}, {"frist": 2}, {"first": True}],
)  # fmt: skip
def test_span_refuses_what_it_cannot_read(value: object) -> None:
    with pytest.raises(ValueError):
        Span.parse(value)


def test_counting_from_the_end_of_an_unknown_whole_is_an_error() -> None:
    assert Span.parse("0-3").contains(2, None)
    assert Span.parse({"first": 2}).contains(1, None)
    with pytest.raises(ValueError, match="last 2"):
        Span.parse({"last": 2}).contains(1, None)


def test_last_matching_rule_wins_per_field() -> None:
    plan = resolve(
        Policy(
            recipe="qk_int8_pv_fp8",
            rules=[
                Rule(layers=Span.parse([0, -1]), recipe="exact", reason="outer layers"),
                Rule("blocks.0.*", on_unsupported="error"),
                Rule("blocks.3.*", recipe="qk_int8_pv_fp16"),
            ],
        ),
        sites(),
    )
    first, middle, last = (plan.choice(f"blocks.{i}.attn1") for i in (0, 1, 3))
    assert (first.recipe, first.on_unsupported, first.reason, first.rule) == (
        "exact",
        "error",
        "outer layers",
        0,
    )
    assert (middle.recipe, middle.on_unsupported, middle.reason, middle.rule) == (
        "qk_int8_pv_fp8",
        "exact",
        "",
        None,
    )
    # A new recipe does not inherit the reason of the one it replaces.
    assert (last.recipe, last.reason, last.rule) == ("qk_int8_pv_fp16", "", 2)


def test_roles_and_layers_select_sites_of_their_own_stack() -> None:
    both = sites(2, "double") + sites(4, "single", ("attn1", "attn2"))
    plan = resolve(
        Policy(rules=[Rule(role="cross", recipe="exact"), Rule(layers=Span.parse(-1), recipe="exact")]), both
    )
    exact = {s.name for s in both if plan.choice(s.name).recipe == "exact"}
    crosses = {f"single.{i}.attn2" for i in range(4)}
    assert exact == crosses | {"double.1.attn1", "single.3.attn1"}


def test_site_outside_any_block_list_never_matches_a_layer_rule() -> None:
    lone = [AttentionSite("pooler.attn"), *sites()]
    plan = resolve(Policy(rules=[Rule(layers=Span.parse({"first": 9}), recipe="exact")]), lone)
    assert plan.choice("pooler.attn").recipe == "sage2"


def test_all_errors_of_a_policy_come_in_one_message() -> None:
    policy = Policy(
        recipe="sage3",
        rules=[
            Rule(recipe="exact"),
            Rule("blocks.*", recipe="exct"),
            Rule("*.attn2.*", steps=Span.parse("0-3"), recipe="exact"),
            Rule(layers=Span.parse(9), recipe="exact"),
            Rule(role="cross", recipe="exact"),
            Rule(),
        ],
    )
    with pytest.raises(PolicyError) as caught:
        resolve(policy, sites())
    assert str(caught.value).split("\n") == [
        "the policy: unknown recipe 'sage3'; nearest: \"sage2\"",
        'rule 2 ("blocks.*"): unknown recipe \'exct\'; nearest: "exact"',
        'rule 3 ("*.attn2.*", steps 0-3) names denoising steps, and this model has none',
        'rule 3 ("*.attn2.*", steps 0-3) matched no site; nearest: "blocks.0.attn1"',
        'rule 4 ("*", layers 9) matched no site; "blocks" has layers 0-3',
        'rule 5 ("*", role cross) matched no site; the sites named "*" have the role self',
        'rule 6 ("*") changes nothing: give it a recipe, on_unsupported or a reason',
    ]


def stepped(*rules: Rule) -> Plan:
    return resolve(Policy("qk_int8_pv_fp8", rules=rules), sites(), has_steps=True)


def test_steps_make_variants_over_the_request() -> None:
    plan = stepped(
        Rule(steps=Span.parse({"first": 2}), recipe="exact", reason="layout is decided here"),
        Rule(steps=Span.parse({"last": 0.1}), recipe="exact"),
    )
    exact, quantized = plan.variants(20)
    assert exact.steps == (0, 1, 18, 19)
    assert quantized.steps == tuple(range(2, 18))
    assert quantized.choices["blocks.1.attn1"].recipe == "qk_int8_pv_fp8"
    assert plan.choice("blocks.1.attn1", 19, 20).recipe == "exact"
    assert plan.choice("blocks.1.attn1").recipe == "qk_int8_pv_fp8"  # no step is running
    assert plan.rows()[0]["steps"] == "first 2: exact; last 10%: exact"
    assert plan.rows()[0]["reason"] == "first 2: layout is decided here"


INT8, FINER, ALL = "qk_int8_pv_fp8", "qk_int8_pv_fp16", Rule(recipe="exact")


def at(steps: object, recipe: str = "exact") -> Rule:
    return Rule(steps=Span.parse(steps), recipe=recipe)


@pytest.mark.parametrize(
    ("rules", "shown"),
    [
        ([at({"first": 2}), ALL], ""),  # the last rule that matches wins
        ([ALL, at({"first": 2})], ""),  # exact either way
        ([ALL, at({"first": 2}, INT8)], "first 2: qk_int8_pv_fp8"),
        ([at({"first": 2}, INT8)], ""),  # the policy's own recipe
        ([at({"first": 4}), at({"first": 2}, INT8)], "first 4: exact; first 2: qk_int8_pv_fp8"),
        ([at({"first": 2}, FINER), at({"first": 4})], "first 4: exact"),
        ([at({"first": 10}, FINER), at({"first": 0.5})], "first 10: qk_int8_pv_fp16; first 50%: exact"),
        ([at({"first": 2}), at({"first": 2})], "first 2: exact"),
        ([at("0-1"), at({"first": 2})], "first 2: exact"),
        ([at({"last": 0.05}, FINER), at({"first": 0.05})], "last 5%: qk_int8_pv_fp16; first 5%: exact"),
        ([at([3, 10**90])], f"3, {10**90}: exact"),
        ([at({"from": -3, "to": -2}), Rule(on_unsupported="error")], "-3 to -2: exact"),
    ],
)
def test_only_step_rules_that_change_what_runs_are_shown(rules: list[Rule], shown: str) -> None:
    assert stepped(*rules).rows()[0]["steps"] == shown


@given(st.lists(st.tuples(st.sampled_from([None, 0, -1, "1-3", {"first": 2}, {"last": 0.3}, {"first": 0.5}]),
                          st.sampled_from(["exact", INT8, FINER])), max_size=5),
       st.integers(1, 30))  # fmt: skip
def test_rules_that_are_not_shown_change_no_step(written: list[tuple[object, str]], num_steps: int) -> None:
    rules = [Rule(recipe=recipe) if steps is None else at(steps, recipe) for steps, recipe in written]
    plan = stepped(*rules)
    shown = str(plan.rows()[0]["steps"]).split("; ")
    less = stepped(*(r for r in rules if r.steps is None or f"{r.steps}: {r.recipe}" in shown))
    for step in range(num_steps):
        a, b = (p.choice("blocks.0.attn1", step, num_steps).recipe for p in (plan, less))
        assert a == b


def test_the_reason_of_a_rule_by_step_is_told_apart() -> None:
    plan = stepped(Rule(recipe="exact"), Rule(steps=Span.parse(0), recipe=INT8, reason="why the steps"))
    assert plan.rows()[0]["reason"] == "0: why the steps"
    plan = stepped(Rule(recipe="exact", reason="base"), Rule(steps=Span.parse(0), recipe=INT8, reason="why the steps"))
    assert plan.rows()[0]["reason"] == "base"


def test_too_many_distinct_plans_over_the_steps_is_an_error() -> None:
    plan = stepped(*(Rule(f"blocks.{i}.*", steps=Span.parse({"first": i + 1}), recipe="exact") for i in range(4)))
    with pytest.raises(PolicyError, match="5 plans over 20 steps; at most 3"):
        plan.variants(20)


def test_rows_hold_what_tables_show() -> None:
    row = resolve(Policy(), sites()).rows()[1]
    assert row == {
        "name": "blocks.1.attn1", "index": 1, "role": "self", "heads": 8, "kv_heads": 2, "head_dim": 64,
        "recipe": "sage2", "steps": "", "reason": "",
    }  # fmt: skip


def test_limits_fill_in_what_the_policy_leaves_open() -> None:
    assert Policy().limits == Limits()
    assert Policy(quantize_fp32=True).limits == Limits(16, 128, True, crossover=True)
    # a length that the user chose is the only one that counts
    assert Policy(min_kv_len=512, quantize_fp32=True).limits == Limits(16, 512, True, crossover=False)


@pytest.mark.parametrize("field", ["layers", "steps"])
def test_rules_in_python_take_the_written_forms_of_a_span(field: str) -> None:
    for written in (3, [0, -1], "0-3", {"first": 2}, {"last": 0.1}, {"from": 4, "to": -1}):
        assert Rule(**{field: written}, recipe="exact") == Rule(**{field: Span.parse(written)}, recipe="exact")
    with pytest.raises(ValueError, match=rf"^{field}: a text must be .*'first 2'; write 3, .*{{first: 2}}"):
        Rule(**{field: "first 2"}, recipe="exact")
    with pytest.raises(ValueError, match=rf"^{field}: cannot read 1.5; write"):
        Rule(**{field: 1.5}, recipe="exact")


def test_a_printed_plan_has_one_line_for_equal_sites() -> None:
    rules = [Rule(layers={"first": 2}, recipe="exact", reason="first blocks"), Rule(steps={"last": 1}, recipe=FINER)]
    text = str(resolve(Policy(INT8, rules=rules), sites(48, parts=("attn1", "attn2")), has_steps=True))
    assert [" ".join(line.split()) for line in text.splitlines()] == [
        "96 attention sites, policy qk_int8_pv_fp8",
        "blocks.{0-1}.attn1 x2 self exact last 1: qk_int8_pv_fp16 first blocks",
        "blocks.{0-1}.attn2 x2 cross exact last 1: qk_int8_pv_fp16 first blocks",
        "blocks.{2-47}.attn1 x46 self qk_int8_pv_fp8 last 1: qk_int8_pv_fp16",
        "blocks.{2-47}.attn2 x46 cross qk_int8_pv_fp8 last 1: qk_int8_pv_fp16",
    ]


def test_policies_are_values() -> None:
    rule = Rule(recipe="exact", score={"cosine": 0.99})
    assert hash(Policy(rules=[rule])) == hash(Policy(rules=(rule,)))
    assert Policy(rules=[rule]) == Policy(rules=(rule,)) != Policy()
