"""`sage-patch calibrate`: targets, scores, the choice, its rules, the whole command, and every way it can go wrong."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from sage_patch import cli
from sage_patch.config import load_policy
from sage_patch.evaluation import checkpoint, evaluate, judge
from sage_patch.evaluation.calibration import search as calibrate
from sage_patch.evaluation.calibration import state as calibrate_state
from sage_patch.evaluation.calibration.choose import COST_MODELS, as_policy, cost, error, everywhere, upgrade_path
from sage_patch.evaluation.calibration.score import Group, bucket_of, buckets_of, score_sites
from sage_patch.evaluation.calibration.targets import TargetError, exact_misses, parse_targets
from sage_patch.evaluation.calls import ROWS, compute, part_of
from sage_patch.evaluation.judge import LADDER, Measured
from sage_patch.evaluation.steps import following
from sage_patch.kernels import ops
from sage_patch.kernels.ops import ObservedCall
from sage_patch.policy import AttentionSite, Policy, Rule, Span, resolve
from sage_patch.recipes import Limits
from tiny_pipelines import save_text_to_video

ROOT = Path(__file__).parent.parent
TINY = str(ROOT / "configs" / "tiny.yaml")
SMALL = [
    "--card",
    "ada",
    "--set",
    "task.windows=2",
    "--set",
    "task.window_tokens=384",
    "--set",
    "task.max_new_tokens=2",
]
TARGET = ["--target", "kl<=0.02"]


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, ["calibrate", *arguments])


# Targets


@pytest.mark.parametrize(
    ("text", "kind", "key", "bound"),
    [
        ("ppl<=+0.5%", "text", "ppl_change", 0.005),
        ("kl <= 3e-3", "text", "kl", 0.003),
        ("top1>=97%", "text", "top1", 0.97),
        ("agreement>=0.99", "text", "agreement", 0.99),
        ("psnr>=30", "image", "worst_psnr", 30.0),
        ("SSIM>=.95", "video", "worst_ssim", 0.95),
        ("speed>=1.2", "image", "speed", 1.2),
    ],
)
def test_targets_are_read_in_the_unit_of_the_figure(text: str, kind: str, key: str, bound: float) -> None:
    (target,) = parse_targets([text], kind)
    assert (target.figure.key, target.bound) == (key, pytest.approx(bound))
    assert target.met_by({key: bound}) and not target.met_by({key: float("nan")}) and not target.met_by({})


@pytest.mark.parametrize(
    ("texts", "kind", "message"),
    [
        ([], "text", "a calibration needs a target"),
        (["ppl"], "text", "cannot read the target 'ppl': write FIGURE<=BOUND"),
        (["ppl<=0.5"], "text", "ppl is a change in percent of the unpatched model's; write ppl<=+0.5%"),
        (["psn>=30"], "image", "unknown figure 'psn'; nearest: \"psnr\""),
        (["psnr>=30"], "text", "psnr is not measured by text tasks; text tasks take ppl<=+0.5%"),
        (["kl>=0.1"], "text", "so its bound is written kl<=BOUND"),
        (["ssim>=95"], "image", "ssim is a share, from 0 to 1 (or 0 % to 100 %); got 95"),
        (["psnr>=30%"], "image", "psnr is no share"),
        (["kl<=1", "kl<=2"], "text", "the target kl is given 2 times"),
    ],
)
def test_a_wrong_target_says_what_is_right(texts: list[str], kind: str, message: str) -> None:
    with pytest.raises(TargetError, match=".*") as caught:
        parse_targets(texts, kind)
    assert message in str(caught.value)


def test_a_target_that_the_unpatched_model_misses_is_known_without_a_run() -> None:
    assert exact_misses(parse_targets(["ppl<=-1%"], "text")) is not None
    assert exact_misses(parse_targets(["ppl<=0%", "kl<=0", "speed>=3"], "text")) is None


# Scores


@pytest.mark.parametrize(("steps", "sizes"), [(None, [1]), (1, [1]), (2, [2]), (3, [1, 1, 1]), (12, [3, 6, 3])])
def test_buckets_cover_every_step_once(steps: int | None, sizes: list[int]) -> None:
    buckets = buckets_of(steps)
    assert [len(b.steps) for b in buckets] == sizes
    assert [s for b in buckets for s in b.steps] == list(range(steps or 1))


def observed(q_len: int, kv_len: int, right: int) -> ObservedCall:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, q_len, 32, generator=generator)
    key, value = (torch.randn(2, 2, kv_len, 32, generator=generator) for _ in range(2))
    return ObservedCall("h1/site", query, key, value, None, 32**-0.5, -1, right, False)


@pytest.mark.parametrize("right", [-1, 0])
@pytest.mark.parametrize("recipe", ["exact", "qk_int4_pv_fp8"])
def test_a_part_of_a_call_is_computed_as_in_the_whole(right: int, recipe: str) -> None:
    """Whole blocks of rows next to the diagonal's anchor, all keys: every row equals that of the whole call."""
    call = observed(5 * ROWS, 6 * ROWS, right)
    part = part_of(call, max_work=2 * 2 * ROWS * 6 * ROWS)
    assert part.query.shape == (1, 2, 2 * ROWS, 32) and part.key.shape == (1, 1, 6 * ROWS, 32)
    rows = (
        torch.arange(3 * ROWS, 5 * ROWS)
        if right == 0
        else torch.cat([torch.arange(ROWS), 2 * ROWS + torch.arange(ROWS)])
    )
    whole = compute(call, recipe)[:1, :2, rows]
    assert torch.allclose(compute(part, recipe), whole, atol=1e-5)


def test_the_part_of_a_call_keeps_its_bound() -> None:
    call = observed(1000, 1000, -1)
    for max_work in (1 << 18, 1 << 20, 1 << 22):
        part = part_of(call, max_work)
        work = part.query.shape[1] * part.query.shape[2] * part.key.shape[2]
        assert work <= max(max_work, 2 * ROWS * 1000)
    assert part.query.shape == (1, *call.query.shape[1:])


class TenSteps:
    """As much of a scheduler as a request needs."""

    order = 1

    def set_timesteps(self, count: int) -> None:
        self.timesteps = list(range(count))

    def step(self) -> None:
        return None


class ExpertPair:
    """Two experts of a pipeline with a scheduler: `early` runs in steps 0 to 3 of 10, `late` in the others."""

    has_steps = True

    def __init__(self) -> None:
        self.model = SimpleNamespace(scheduler=TenSteps())

    def plan(self, policy: Policy) -> Any:
        return SimpleNamespace(sites=[AttentionSite("early"), AttentionSite("late")])

    def run_exact(self, inputs: int) -> None:
        for _ in range(inputs):
            self.model.scheduler.set_timesteps(10)
            for step in range(10):
                call = observed(ROWS, ROWS, -1)._replace(site="h1/early" if step < 4 else "h1/late")
                for observer in ops._OBSERVERS:
                    observer(call)
                self.model.scheduler.step()


def test_sites_are_scored_in_every_bucket_that_calls_them() -> None:
    """Also where the middle step of the bucket belongs to another expert; calls and work are counted once."""
    pair = ExpertPair()
    groups = score_sites(pair, ("qk_int4_pv_fp8",), buckets_of(10), Limits(), 2, lambda done: None)
    found = {(g.site, g.bucket): (g.calls, g.scored > 0, round(g.share, 3)) for g in groups}
    assert found["early", "first"] == (4, True, 0.2) and found["early", "middle"] == (4, True, 0.2)
    assert found["late", "middle"] == (8, True, 0.4) and found["late", "last"] == (4, True, 0.2)
    assert found["early", "last"] == (0, False, 0.0)


@pytest.mark.parametrize("first", [0, 4])
def test_buckets_are_told_by_the_clock_of_the_patch(first: int) -> None:
    """A request that begins in the middle of its schedule is shorter, and its first steps are `first`, as rules by step
    have it."""
    scheduler = FlowMatchEulerDiscreteScheduler()
    seen = []
    with following(SimpleNamespace(scheduler=scheduler)) as running:
        for _ in range(2):
            scheduler.set_timesteps(10)
            scheduler.set_begin_index(first)
            for t in scheduler.timesteps[first:]:
                seen.append((running.request, running.step, bucket_of(running, buckets_of(10)).name))
                scheduler.step(torch.zeros(1), t, torch.zeros(1))
    length = 10 - first
    names = [b.name for b in buckets_of(length) for _ in b.steps]
    assert seen == [(request, step, names[step]) for request in (1, 2) for step in range(length)]
    assert type(scheduler) is FlowMatchEulerDiscreteScheduler


def test_the_errors_of_sites_are_of_the_steps_that_run() -> None:
    """The late expert's first, fourth and last call are steps 4, 7 and 9, of which the rule keeps the first exact."""
    pair: Any = ExpertPair()
    policy = Policy(recipe="qk_int8_pv_fp8", rules=(Rule(steps=Span.parse({"first": 0.5}), recipe="exact"),))
    pair.plan = lambda policy: resolve(policy, [AttentionSite("early"), AttentionSite("late")], has_steps=True)
    pair.progress = lambda label, done, total: None
    calls = [{"site": site, "recipe": policy.recipe, "calls": n} for site, n in (("early", 4), ("late", 6))]
    results: dict[str, Any] = {"rows": [{"name": "policy", "calls": calls, "each": [{}]}]}
    evaluate._measure_sites(pair, policy, results)
    early, late = results["sites"]
    assert [c["step"] for c in late["calls"]] == [7, 9] and early["calls"] == []
    assert results["worst_site"] == "late"


# The choice


def group(site: str, share: float, errors: tuple[float, float, float], bucket: str = "all", because: str = "") -> Group:
    scores = {
        rung: {"cosine": 1 - e, "rel_l1": e, "worst_row": 2 * e, "quality": (1 - e) ** 2}
        for rung, e in zip(LADDER, errors, strict=False)
    }
    return Group(site, bucket, 1.0, share, 1, 1, {} if because else scores, because)


def test_cost_constants_are_those_of_the_recorded_benchmark() -> None:
    rows = json.loads((ROOT / "docs" / "results" / "kernels_h200.json").read_text())["rows"]
    for rung, column in (("qk_int8_pv_fp8", "sage2_op"), ("qk_int8_pv_fp16", "sage2_pv_fp16_op")):
        timed = [r for r in rows if r["q_len"] >= 8192 and r["head_dim"] in (64, 128) and r.get(column)]
        measured = statistics.median(r["sdpa_default"] / r[column] for r in timed)
        assert COST_MODELS["hopper"].relative[rung] == pytest.approx(measured, abs=0.005)


def test_a_rung_without_gain_on_a_card_is_not_on_its_ladder() -> None:
    assert COST_MODELS["hopper"].ladder == ("qk_int8_pv_fp8", "qk_int8_pv_fp16", "exact")
    assert COST_MODELS["ada"].ladder == LADDER


def test_the_path_rises_in_cost_and_falls_in_error_and_begins_with_the_worst_site() -> None:
    groups = [
        group("a", 0.5, (0.1, 0.01, 0.005)),
        group("b", 0.3, (0.4, 0.01, 0.005)),
        group("c", 0.2, (), because="short"),
    ]
    path = upgrade_path(groups, COST_MODELS["ada"])
    costs, errors = ([f(groups, c) for c in path] for f in (lambda g, c: cost(g, c, COST_MODELS["ada"]), error))
    assert costs == sorted(costs) and errors == sorted(errors, reverse=True)
    assert costs[0] == pytest.approx(0.8 * 0.34 + 0.2) and costs[-1] == pytest.approx(1) and errors[-1] == 0
    assert path[1]["b", "all"] == "qk_int8_pv_fp8" and path[1]["a", "all"] == "qk_int4_pv_fp8"
    assert all(c["c", "all"] == "exact" for c in path)


SITES = [
    AttentionSite(f"{stack}.{i}.{name}", stack, i, depth)
    for stack, depth in (("m.blocks", 5), ("m.single", 3))
    for i in range(depth)
    for name in ("attn1", "attn2")
] + [AttentionSite("m.pooler")]


@given(st.lists(st.sampled_from(LADDER), min_size=51, max_size=51), st.booleans())
@settings(max_examples=40)
def test_the_rules_say_what_was_chosen(rungs: list[str], alike: bool) -> None:
    """Grouped rules resolve to the choice at every site and step, in at most three plans."""
    buckets = buckets_of(10)
    groups = [group(s.name, 1 / 51, (0.3, 0.02, 0.01), b.name) for s in SITES for b in buckets]
    choice = {(g.site, g.bucket): rungs[i % 3 if alike else i] for i, g in enumerate(groups)}
    policy = as_policy(choice, groups, SITES, buckets, Policy(quantize_fp32=True), LADDER)
    plan = resolve(policy, SITES, has_steps=True)
    for bucket in buckets:
        for step in bucket.steps:
            assert all(plan.choice(s.name, step, 10).recipe == choice[s.name, bucket.name] for s in SITES)
    assert len(plan.variants(10)) <= 3 and policy.quantize_fp32
    if alike:
        assert len(policy.rules) <= 3  # not one a site


# The whole command


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Path]:
    folder = tmp_path_factory.mktemp("calibrated")
    return invoke(TINY, *SMALL, *TARGET, "--output", str(folder)), folder


def test_a_calibration_writes_a_policy_that_beats_the_single_rungs(calibrated: tuple[Result, Path]) -> None:
    result, folder = calibrated
    assert result.exit_code == 0, result.output
    assert result.stderr.startswith("budget 15 min: every rung scored at every site, then at most 12 full runs")
    found = json.loads((folder / "calibrate.json").read_text())
    cheapest = next(r for r in found["runs"] if r["name"] == "qk_int4_pv_fp8 everywhere")
    assert not cheapest["met"] and found["chosen"]["metrics"]["kl"] <= 0.02
    assert found["chosen"]["cost"] < found["best_single_rung"]["cost"]
    assert found["chosen"]["sites_below_exact"] == 8
    policy = load_policy(folder / "policy.yaml")
    record = policy.calibration
    assert record is not None and record.targets == ("kl<=0.02",) and record.card == "ada"
    assert record.achieved["kl"] == pytest.approx(found["chosen"]["metrics"]["kl"], rel=1e-4)
    assert all(rule.reason and rule.score for rule in policy.rules) and len(policy.rules) <= 4
    assert (folder / "policy.yaml").read_text().startswith("# Calibrated for kl<=0.02 on LlamaForCausalLM")
    assert {"cosine", "rel_l1", "worst_row", "quality"} == set(found["groups"][0]["scores"]["qk_int4_pv_fp8"])


def test_a_stale_policy_file_is_refused_by_a_run(calibrated: tuple[Result, Path], tmp_path: Path) -> None:
    text = (calibrated[1] / "policy.yaml").read_text()
    made = load_policy(calibrated[1] / "policy.yaml").calibration
    assert made is not None
    for hash_, code in ((made.model_hash, 0), ("0123456789abcdef-0123456789abcdef", 2)):
        (tmp_path / "p.yaml").write_text(text.replace(made.model_hash, hash_))
        result = CliRunner().invoke(cli.app, ["plan", TINY, "--set", f"policy={tmp_path / 'p.yaml'}"])
        assert result.exit_code == code, result.output
    assert "the policy is stale" in result.stderr and "calibrate again (" in result.stderr


def test_another_target_uses_what_was_measured(
    calibrated: tuple[Result, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loosest target is met by a run that is already there, so the model is not run at all."""
    monkeypatch.setattr(judge.TextJudge, "baseline", lambda self: pytest.fail("the model was run"))
    result = invoke(
        TINY, *SMALL, "--target", "kl<=9", "--output", str(calibrated[1]), "--out", str(calibrated[1] / "p.yaml")
    )
    assert result.exit_code == 0, result.output
    assert load_policy(calibrated[1] / "p.yaml").recipe == "qk_int4_pv_fp8"


def test_an_unreachable_target_says_how_far_it_got_and_overwrites_nothing(calibrated: tuple[Result, Path]) -> None:
    before = (calibrated[1] / "policy.yaml").read_text()
    result = invoke(TINY, *SMALL, "--target", "kl<=1e-9", "--output", str(calibrated[1]))
    assert result.exit_code == 2
    assert "kl<=1e-9 was not reached with any attention quantized" in result.stderr
    assert "qk_int8_pv_fp16 everywhere: kl 0.00" in result.stderr
    assert f"{calibrated[1] / 'policy.yaml'} is there already and will be replaced" in result.stderr
    assert (calibrated[1] / "policy.yaml").read_text() == before
    result = invoke(TINY, *SMALL, *TARGET, "--output", str(calibrated[1] / "policy.yaml"))
    assert result.exit_code == 2 and "the output must be a folder, and" in result.stderr


def test_a_speed_floor_is_predicted_on_a_cpu(calibrated: tuple[Result, Path]) -> None:
    place = ["--output", str(calibrated[1]), "--out", str(calibrated[1] / "fast.yaml")]
    result = invoke(TINY, *SMALL, "--target", "speed>=1.001", *place)
    assert result.exit_code == 0, result.output
    assert load_policy(calibrated[1] / "fast.yaml").calibration.achieved["speed"] >= 1.001  # type: ignore[union-attr]
    result = invoke(TINY, *SMALL, "--target", "speed>=50", *place)
    assert result.exit_code == 2 and "speed>=50 was not reached" in result.stderr


def test_an_interrupted_calibration_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[str] = []
    measure = judge.TextJudge.measure

    def interrupted(self: Any, name: str, *rest: Any) -> Any:
        if runs:
            raise KeyboardInterrupt
        runs.append(name)
        return measure(self, name, *rest)

    monkeypatch.setattr(judge.TextJudge, "measure", interrupted)
    first = invoke(TINY, *SMALL, *TARGET, "--output", str(tmp_path))
    assert first.exit_code == 130 and "the same command goes on from it" in first.stderr
    assert [p.name for p in tmp_path.iterdir()] == [calibrate_state.NAME]
    monkeypatch.setattr(
        judge.TextJudge, "measure", lambda self, name, *rest: (runs.append(name), measure(self, name, *rest))[1]
    )
    monkeypatch.setattr(calibrate, "score_sites", lambda *_: pytest.fail("the sites were scored again"))
    assert invoke(TINY, *SMALL, *TARGET, "--output", str(tmp_path)).exit_code == 0
    assert len(runs) == len(set(runs)) > 2  # nothing was measured twice
    assert json.loads((tmp_path / "calibrate.json").read_text())["reused"]["runs"] == 1


def test_another_setting_or_a_broken_file_costs_nothing_that_was_measured(tmp_path: Path) -> None:
    first = calibrate_state.open_state(tmp_path, {"task": 1})
    first.baseline = {"seconds": 1.0}
    first.save()
    assert calibrate_state.open_state(tmp_path, {"task": 1}).baseline == {"seconds": 1.0}
    assert calibrate_state.open_state(tmp_path, {"task": 2}).baseline == {}
    assert json.loads((tmp_path / "calibrate_state.previous.json").read_text())["baseline"] == {"seconds": 1.0}
    (tmp_path / calibrate_state.NAME).write_text('{"key": {"task"')
    assert calibrate_state.open_state(tmp_path, {"task": 2}).runs == {}


def test_a_full_disk_keeps_the_old_policy_and_what_was_measured(
    calibrated: tuple[Result, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text("version: 1\n")
    write = checkpoint.write_whole

    def full(path: Path, text: str) -> None:
        if path == policy:
            raise OSError(28, "No space left on device")
        write(path, text)

    monkeypatch.setattr(checkpoint, "write_whole", full)
    result = invoke(TINY, *SMALL, *TARGET, "--output", str(calibrated[1]), "--out", str(policy))
    assert result.exit_code == 2 and policy.read_text() == "version: 1\n"
    assert f"{policy} could not be written (No space left on device)" in result.stderr
    assert "what was measured before is kept in" in result.stderr


def test_a_model_without_sites_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "load_text_model", lambda spec: (torch.nn.Linear(2, 2), None))
    result = invoke(TINY, *SMALL, *TARGET, "--output", str(tmp_path))
    assert result.exit_code == 2 and "Linear has no attention site that sage_patch knows" in result.stderr


def test_agreement_of_continuations_that_run_exact_is_no_target(tmp_path: Path) -> None:
    """Short prompts are never quantized: their agreement is 1 whatever the rung, and proves nothing."""
    result = invoke(
        TINY, *SMALL, "--target", "agreement>=0.99", "--out", str(tmp_path / "p.yaml"), "--output", str(tmp_path)
    )
    assert result.exit_code != 0 and "give longer task.prompts" in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--set", "policy.quantize_fp32=false"], "call ran exact (dtype_float32); set policy.quantize_fp32"),
        (["--set", "policy.min_kv_len=9999"], "can be quantized (calls below 16 rows or 9999 keys)"),
        (["--card", "hoper"], '--card hoper: unknown; nearest: "hopper"'),
        (["--target", "ppl<=-1%"], "target 'ppl<=-1%' cannot be met: the unpatched model itself has ppl +0.00 %"),
        (["--target", "ppl<1%"], "cannot read the target 'ppl<1%'"),
    ],
)  # fmt: skip
def test_what_cannot_be_calibrated_is_one_message(more: list[str], message: str, tmp_path: Path) -> None:
    target = [] if "--target" in more else TARGET
    result = invoke(TINY, *SMALL, *target, *more, "--output", str(tmp_path))
    assert result.exit_code == 2 and message in result.stderr, result.output
    assert not (tmp_path / "policy.yaml").exists()


def measured(metrics: dict[str, float], took: float = 1.0) -> Measured:
    return Measured("x", "exact", metrics, {}, 1.0, 1.0, None, None, None, {}, {}, 1.0, [], took=took)


def test_the_budget_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No run is begun that is not expected to end in time; what was confirmed until then is what is written."""
    run = measured({"kl": 9.0}, took=1e9)
    monkeypatch.setattr(calibrate._Calibration, "_measure", lambda self, name, choice: run)
    result = invoke(TINY, *SMALL, *TARGET, "--output", str(tmp_path))
    assert result.exit_code == 2 and "(the budget of time is used up)" in result.stderr
    assert len(json.loads((tmp_path / calibrate_state.NAME).read_text())["runs"]) == 1


def test_a_pipeline_is_calibrated_by_steps(tmp_path: Path) -> None:
    save_text_to_video(tmp_path / "pipeline")
    (tmp_path / "run.yaml").write_text(
        "version: 1\n"
        "model: {path: ./pipeline, device: cpu, prompt_table: table.safetensors, latents_are_pixels: true}\n"
        "policy: {quantize_fp32: true, min_kv_len: 16}\n"
        "task: {kind: video, prompts: [run], steps: 4, height: 144, width: 128, num_frames: 17}\n"
    )
    result = invoke(str(tmp_path / "run.yaml"), "--target", "psnr>=45", "--output", str(tmp_path / "out"))
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "out" / "calibrate.json").read_text())
    assert [b["steps"] for b in found["buckets"]] == [[0], [1, 2], [3]]
    self_attention = [g for g in found["groups"] if g["site"].endswith("attn1")]
    assert {g["bucket"] for g in self_attention} == {"first", "middle", "last"} and all(
        g["scored"] for g in self_attention
    )
    shares = {g["bucket"]: g["share"] for g in self_attention if ".0." in g["site"]}
    assert shares["middle"] == pytest.approx(2 * shares["first"]) == pytest.approx(2 * shares["last"])
    assert sum(g["share"] for g in found["groups"]) == pytest.approx(1)
    assert found["chosen"]["metrics"]["worst_psnr"] >= 45


def test_a_single_rung_costs_what_its_card_says() -> None:
    groups = [group("a", 0.75, (0.1, 0.01, 0.005)), group("b", 0.25, (), because="short")]
    model = COST_MODELS["hopper"]
    assert cost(groups, everywhere(groups, "qk_int8_pv_fp8"), model) == pytest.approx(0.75 * 0.65 + 0.25)


def test_a_site_on_which_the_target_hinged_is_weighed_by_its_runs() -> None:
    """Where two neighbours on the path differ far more than their local errors, the next path upgrades that early."""
    groups = [group("a", 0.5, (0.2, 0.0, 0.0)), group("b", 0.5, (0.1, 0.0, 0.0))]
    above = {("a", "all"): LADDER[0], ("b", "all"): "exact"}

    class Part(calibrate._Calibration):
        def __init__(self) -> None:
            self.groups = groups

    def trial(choice: dict[tuple[str, str], str], ratio: float) -> Any:
        return calibrate._Trial(measured({}), choice, 1.0, 0, ratio <= 1, ratio)

    below = above | {("b", "all"): LADDER[0]}
    assert not Part()._reweigh(trial(below, 1.2), trial(above, 1.0))  # as the local errors say: 0.05 over 0.04
    assert Part()._reweigh(trial(below, 3.5), trial(above, 1.0))
    assert [g.sensitivity for g in groups] == [1.0, pytest.approx(10.0)]
    assert upgrade_path(groups, COST_MODELS["ada"])[1]["b", "all"] == LADDER[1]
