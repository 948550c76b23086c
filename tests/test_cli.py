"""The commands on the shipped tiny model: what they print, what they write, and how they fail."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner, Result

import sage_patch
from sage_patch import cli, terminal
from sage_patch.config import ConfigError, load_policy, load_run_config
from sage_patch.evaluation import environment, metrics, run, tables
from sage_patch.evaluation.evaluate import check_targets
from sage_patch.kernels import build, ops
from sage_patch.kernels.build import BuildError

ROOT = Path(__file__).parent.parent
TINY = str(ROOT / "configs" / "tiny.yaml")
SMALL = ["--set", "task.windows=2", "--set", "task.window_tokens=192", "--set", "task.max_new_tokens=6"]


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, list(arguments))


@pytest.fixture(scope="module")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Path]:
    folder = tmp_path_factory.mktemp("run")
    targets = "targets={policy: {max_kl: 1, min_top1: 0.5, max_ppl_change: 0.5}}"
    prompt = 'task.prompts=["It is", "' + "She was very glad to see him, and said so at once. " * 20 + '"]'
    rules = "policy.rules=[{layers: {last: 2}, recipe: exact, reason: kept exact}]"
    more = ["--set", targets, "--set", prompt, "--set", rules]
    return invoke("run", TINY, *SMALL, *more, "--output", str(folder)), folder


def test_help_is_fast_and_loads_no_torch() -> None:
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "sage_patch", "--help"],
        capture_output=True, text=True, cwd=ROOT, check=True,
    )  # fmt: skip
    assert time.perf_counter() - start < 10  # a busy machine; alone it takes a quarter of a second
    assert all(word in done.stdout for word in ("run", "plan", "env", "Exit codes"))
    assert not any(f"| {module}\n" in done.stderr for module in ("torch", "transformers", "pydantic"))


def test_the_version_is_printed() -> None:
    result = CliRunner().invoke(cli.app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"sage-patch {sage_patch.__version__}\n")


@pytest.mark.parametrize("command", ["run", "evaluate", "calibrate", "bench", "ablate", "report"])
def test_every_command_that_fills_a_folder_calls_it_output(command: str) -> None:
    assert "--output" in CliRunner().invoke(cli.app, [command, "--help"]).output


def test_run_writes_results_that_hold_everything(small_run: tuple[Result, Path]) -> None:
    result, folder = small_run
    assert result.exit_code == 0, result.output
    found = json.loads((folder / "results.json").read_text())
    assert [row["name"] for row in found["rows"]] == [
        "policy", "qk_int8_pv_fp16", "qk_int4_pv_fp8", "qk_int4_pv_fp8:smooth=none"
    ]  # fmt: skip
    policy, fp16, int4, int4_raw = (row["metrics"] for row in found["rows"])
    assert 0 < fp16["kl"] < policy["kl"] < int4["kl"] < int4_raw["kl"]
    assert policy["ppl_exact"] == int4["ppl_exact"]  # one unpatched model
    assert {"date", "command", "environment", "config", "model", "plan", "unpatched", "targets"} <= set(found)
    assert found["passed"] and len(found["targets"]) == 3
    assert len(found["plan"]) == len(found["rows"][0]["outputs"]) == 8
    assert sorted(p.name for p in folder.iterdir()) == ["results.json", "results.md"]


def test_the_run_counts_every_call_of_the_policy(small_run: tuple[Result, Path]) -> None:
    found = json.loads((small_run[1] / "results.json").read_text())
    calls = {(c["site"], c["recipe"], c["reason"]): c["calls"] for c in found["rows"][0]["calls"]}
    names = [r["name"] for r in found["plan"]]
    assert calls == {(n, "qk_int8_pv_fp8", ""): 2 for n in names[:6]} | {(n, "exact", "policy"): 2 for n in names[6:]}
    generation = found["rows"][0]["prompt_calls"]
    quantized = [c for c in generation if c["recipe"] != "exact"]
    assert {c["site"] for c in quantized} == set(names[:6])  # the long prompt
    assert {c["reason"] for c in generation if c["recipe"] == "exact"} >= {"decode", "policy"}


def test_the_tables_say_it_plainly(small_run: tuple[Result, Path]) -> None:
    result, folder = small_run
    kept = (folder / "results.md").read_text()
    printed, unpadded = (re.sub(r"[ -]+", " ", text).strip() for text in (result.stdout, kept))
    assert printed in unpadded
    assert "model.layers.{0-5}.self_attn | 6 | self | 2 q, 1 kv x 128 | qk_int8_pv_fp8" in kept
    assert "model.layers.{6-7}.self_attn | 2 | self | 2 q, 1 kv x 128 | exact" in kept
    assert "exact x2 (policy x2)" in kept
    assert "reference backend" in kept and "slower than the unpatched model" in kept
    assert "Generated text, side by side" in kept and "It is" in kept
    assert "\x1b" not in kept
    assert "wrote" in result.stderr and "results.json" in result.stderr


def test_a_missed_target_is_shown_and_fails_the_run(tmp_path: Path) -> None:
    result = invoke(
        "run", TINY, *SMALL, "--set", "compare=[]", "--set", "targets.policy.max_kl=1e-9", "--output", str(tmp_path)
    )
    assert result.exit_code == 1
    assert "MISSED" in result.stdout and "1 of 1 targets missed" in result.stderr
    assert json.loads((tmp_path / "results.json").read_text())["passed"] is False


def test_plan_prints_the_resolved_table_without_weights() -> None:
    result = invoke("plan", TINY, "--meta", "--set", "policy.rules=[{layers: -1, recipe: exact, reason: last}]")
    assert result.exit_code == 0, result.output
    unpadded = re.sub(" +", " ", result.stdout)
    assert "| model.layers.{0-6}.self_attn | 7 | self | 2 q, 1 kv x 128 | qk_int8_pv_fp8 | |" in unpadded
    assert "| model.layers.7.self_attn | 1 | self | 2 q, 1 kv x 128 | exact | 1 |\n\n1: last" in unpadded


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "nowhere.yaml"], "error: cannot read nowhere.yaml: No such file or directory"),
        (["plan", TINY, "--set", "policy.recpe=exact"], 'policy.recpe: unknown key "recpe"; nearest: "recipe"'),
        (["run", TINY, "--set", "model.meta=true"], "measuring needs weights"),
        (["run", TINY, "--set", "task.window_tokens=4096"], "the model reads at most 2048 tokens"),
        (["run", TINY, "--set", "task.windows=9999"], "take fewer or shorter windows, or a longer text"),
        (["plan", TINY, "--meta", "--set", 'policy.rules=[{match: "*.attn", recipe: exact}]'],
         'rule 1 ("*.attn") matched no site; nearest: "model.layers.0.self_attn"'),
        (["plan", TINY, "--meta", "--set", "policy.rules=[{steps: 0-3, recipe: exact}]"],
         'rule 1 ("*", steps 0-3) names denoising steps, and this model has none'),
        (["run", TINY, "--set", "model.device=cuda:99"], "model.device is cuda:99, and there are"),
        (["run", TINY, "--output", "/proc/nowhere"], "error: [Errno 2]"),
    ],
)  # fmt: skip
def test_errors_are_one_message_with_exit_code_2(arguments: list[str], message: str, tmp_path: Path) -> None:
    more = ["--set", f"output={tmp_path}"] if arguments[:2] == ["run", TINY] else []
    result = invoke(*arguments, *more)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.output and not isinstance(result.exception, ValueError)


def test_a_fault_of_our_own_is_not_hidden(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken(*_: Any) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr(run, "run", broken)
    result = invoke("run", TINY, "--output", str(tmp_path))
    assert isinstance(result.exception, ValueError)


def test_ctrl_c_leaves_no_file_and_the_model_unpatched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupt(self: Any, *_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(metrics.TextComparison, "add", interrupt)
    result = invoke("run", TINY, *SMALL, "--output", str(tmp_path))
    assert result.exit_code == 130
    assert "interrupted; nothing was written" in result.stderr
    assert not list(tmp_path.iterdir())


def test_a_results_file_appears_whole_or_not_at_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text("old")
    monkeypatch.setattr(tables.os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        tables.write_whole(tmp_path / "results.json", "new")
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("results.json", "old")]


def test_env_prints_versions_and_passes_its_self_test() -> None:
    start = time.perf_counter()
    result = invoke("env", "--json")
    assert time.perf_counter() - start < 10
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert facts["packages"]["torch"] and facts["cpu"]["cores"]
    on_cpu = {t["recipe"]: t["result"] for t in facts["self_test"] if t["device"] == "cpu"}
    assert len(on_cpu) == 5 and set(on_cpu.values()) == {"ok"}
    assert "Self-test" in invoke("env").stdout


def test_env_prints_its_table_where_no_kernel_can_be_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card, and no compiler: who runs `env` there wants to read just that."""

    def no_compiler(*args: Any, **kwargs: Any) -> Any:
        raise BuildError("the kernels must be compiled and no nvcc was found; install one")

    monkeypatch.setattr(environment, "sage_attention", no_compiler)
    monkeypatch.setattr(build, "find_nvcc", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(environment, "_cuda_device", lambda i: {"name": "a card", "capability": "9.0", "memory_gib": 1})
    monkeypatch.setattr(ops, "backend_for", lambda device: "sm90" if device.index == 0 else "none")
    monkeypatch.setattr(environment, "_devices", lambda: ["cpu"])
    result = invoke("env")
    assert result.exit_code == 0, result.output
    assert re.search(r"nvcc *\| *not found", result.stdout)
    assert re.search(r"cuda:1 kernels *\| *no kernels for this card", result.stdout)
    assert "unavailable: the kernels must be compiled and no nvcc was found" in result.stdout


def test_tables_fit_a_narrow_terminal() -> None:
    rows = [
        {"name": f"blocks.{i}.attn", "index": i, "role": "self", "heads": 8, "kv_heads": 8, "head_dim": 64,
         "recipe": "exact" if i == 2 else "sage2", "steps": "first 2: exact", "reason": "because"}
        for i in range(5)
    ]  # fmt: skip
    table = tables.plan_table(rows)
    assert [r[0] for r in table.rows] == ["blocks.{0-1,3-4}.attn", "blocks.2.attn"]
    console = Console(width=72, force_terminal=True, record=True, file=io.StringIO())
    tables.show([table], console)
    drawn = console.export_text()
    assert max(len(line) for line in drawn.split("\n")) <= 72
    assert all(word in drawn for word in ("exact", "sage2", "first 2", "because"))


def test_not_a_number_is_null_in_json_and_meets_no_target() -> None:
    assert tables.plain({"a": [float("nan"), float("inf"), 1.5, 2, None, True]}) == {
        "a": [None, None, 1.5, 2, None, True]
    }
    config = load_run_config(TINY, ["targets.policy.max_kl=1"])
    rows = [{"name": "policy", "metrics": {"kl": float("nan"), "top1": 1.0, "ppl_change": 0.0}, "unavailable": {}}]
    assert [t["met"] for t in check_targets(config, rows)["targets"]] == [False]


def test_a_policy_file_can_be_used_by_program_and_by_run(tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text("version: 1\nrecipe: qk_int8_pv_fp16\nquantize_fp32: true\n")
    config = load_run_config(TINY, [f"policy={tmp_path / 'p.yaml'}"])
    assert config.policy.build() == load_policy(tmp_path / "p.yaml")


def test_an_output_that_is_a_file_is_refused_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("x")
    with pytest.raises(ConfigError, match="the output must be a folder, and .*taken is a file"):
        terminal.output_folder(tmp_path / "taken")


def test_plan_of_a_folder_or_hub_id_without_a_run_file(monkeypatch):
    """A model by its place, a policy by its name; built from the configs alone."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # else the last case waits for a hub
    text = invoke("plan", "--model", str(ROOT / "tests/assets/lm-tiny-d128"), "--policy", "qk_int8_pv_fp16")
    assert text.exit_code == 0 and "qk_int8_pv_fp16" in text.stdout and "model.layers." in text.stdout
    video = invoke("plan", "--model", str(ROOT / "tests/assets/wan-doom-d128"), "--policy", "wan")
    assert video.exit_code == 0 and "attn2" in video.stdout and "too short to gain" in " ".join(video.stdout.split())
    for wrong in (("plan",), ("plan", "configs/tiny.yaml", "--model", "x")):
        refused = invoke(*wrong)
        assert refused.exit_code == 2 and "--model with a hub id or folder; one of the two" in refused.output
    gone = invoke("plan", "--model", "nobody/nothing")
    assert gone.exit_code == 2 and "nobody/nothing is no folder here" in gone.output
