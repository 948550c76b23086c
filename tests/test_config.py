"""Configuration files: what they accept, and that every error of a file is worded, placed and reported at once."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sage_patch.config import ConfigError, load_policy, load_run_config, policy_to_yaml
from sage_patch.policy import Policy, Rule, Span
from sage_patch.recipes import recipe_names
from sage_patch.schema import RunConfig
from sage_patch.yamltext import read_yaml, write_yaml

ROOT = Path(__file__).parent.parent

RUN = """\
version: 1
model: {path: lm, dtype: float32, device: cpu}
policy:
  recipe: qk_int8_pv_fp8
  rules:
    - {layers: {first: 1}, recipe: exact, reason: first layer}
task:
  kind: text
  prompts: [Hello]
  text: words.txt
  windows: 4
compare: [exact, "qk_int4_pv_fp8:smooth=none"]
targets:
  policy: {max_kl: 3e-3}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "lm").mkdir()
    (tmp_path / "words.txt").write_text("words")
    (tmp_path / "run.yaml").write_text(RUN)
    return tmp_path


def errors(folder: Path, text: str, *overrides: str) -> str:
    (folder / "bad.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_run_config(folder / "bad.yaml", overrides)
    return str(caught.value)


def policy_errors(tmp_path: Path, text: str) -> str:
    (tmp_path / "p.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_policy(tmp_path / "p.yaml")
    return str(caught.value).removeprefix(str(tmp_path) + "/")


def test_a_run_is_read_with_paths_relative_to_its_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    config = load_run_config(folder / "run.yaml")
    assert config.model.path == str(folder / "lm")
    assert config.task.text == str(folder / "words.txt")
    assert config.targets["policy"].max_kl == 0.003
    assert config.output == "/runs/run"
    assert config.policy.build() == Policy(
        "qk_int8_pv_fp8", rules=[Rule(layers=Span.parse({"first": 1}), recipe="exact", reason="first layer")]
    )


def test_the_policy_may_be_a_file_of_its_own(folder: Path) -> None:
    (folder / "p.yaml").write_text("version: 1\nrecipe: exact\nmin_kv_len: 64\n")
    text = RUN.replace(RUN[RUN.index("policy:") : RUN.index("task:")], "policy: p.yaml\n")
    (folder / "run.yaml").write_text(text)
    assert load_run_config(folder / "run.yaml").policy.build() == Policy("exact", min_kv_len=64)
    changed = load_run_config(folder / "run.yaml", ["policy.recipe=sage2"])
    assert changed.policy.build() == Policy("sage2", min_kv_len=64)
    (folder / "p.yaml").write_text("version: 1\nrecipe: exat\n")
    message = errors(folder, text)
    assert "policy.recipe: unknown recipe 'exat'; nearest: \"exact\" (line 2 of p.yaml)" in message
    assert "policy: cannot read" in errors(folder, text.replace("p.yaml", "q.yaml"))


def test_every_error_of_a_file_is_reported_at_once_with_its_path_and_line(folder: Path) -> None:
    text = (
        RUN.replace("dtype: float32", "dtyp: float32")
        .replace("recipe: exact,", "recipe: exat,")
        .replace("windows: 4", "windows: 4\n  windows: 5\n  max_new_tokens: many")
        .replace("policy: {max_kl", "polcy: {max_kl")
    )
    lines = errors(folder, text).split("\n")
    assert lines[0] == f"{folder}/bad.yaml: 5 errors"
    assert set(lines[1:]) == {
        '  model.dtyp: unknown key "dtyp"; nearest: "dtype" (line 2)',
        "  policy.rules.0.recipe: unknown recipe 'exat'; nearest: \"exact\" (line 6)",
        "  task.windows: given twice; the first is on line 11 (line 12)",
        "  task.max_new_tokens: must be a whole number; got 'many' (line 13)",
        '  targets.polcy: is not measured; nearest: "policy" (line 16)',
    }


def test_duplicate_keys_are_an_error_with_both_lines(tmp_path: Path) -> None:
    message = policy_errors(tmp_path, "version: 1\nrecipe: exact\nmin_kv_len: 8\nrecipe: sage2\n")
    assert message == "p.yaml: recipe: given twice; the first is on line 2 (line 4)"


@pytest.mark.parametrize("word", ["on", "off", "yes", "no", "True", '"true"', "1"])
def test_only_true_and_false_are_booleans(tmp_path: Path, word: str) -> None:
    message = policy_errors(tmp_path, f"version: 1\nquantize_fp32: {word}\n")
    assert "quantize_fp32: must be true or false; got" in message


def test_numbers_are_read_as_people_write_them() -> None:
    text = "[1e-3, 1.0e-3, .5, 010, -3, +4, 1:30, 2020-01-01, 0-3, 1_000, on]"
    assert read_yaml(text).value == [1e-3, 1e-3, 0.5, 10, -3, 4, "1:30", "2020-01-01", "0-3", "1_000", "on"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("recipe: exact\n", "version: is missing; write version: 1 (line 1)"),
        ("version: 2\n", "version: this release reads schema version 1; got 2 (line 1)"),
        ("version: 1\nrules: [{recpe: exact}]\n", 'rules.0.recpe: unknown key "recpe"; nearest: "recipe" (line 2)'),
        ("version: 1\nrules:\n - layers: 3-1\n",
         "rules.0.layers: the range 3 to 1 is empty; the first must not be after the last (line 3)"),
        ("version: 1\nrules:\n - role: slef\n", "rules.0.role: must be one of self, cross, joint; got 'slef' (line 3)"),
        ("version: 1\non_unsupported: fallback\n",
         "on_unsupported: must be one of exact, error; got 'fallback' (line 2)"),
        ("version: 1\nmin_q_len: 0\n", "min_q_len: must be at least 1; got 0 (line 2)"),
        ("version: 1\nmin_q_len: 1.5\n", "min_q_len: must be a whole number; got 1.5 (line 2)"),
        ("version: 1\nrules: exact\n", "rules: must be a list; got 'exact' (line 2)"),
        ("version: 1\nrecipe: qk_int4_pv_fp8:smoth=none\n",
         "recipe: recipe 'qk_int4_pv_fp8:smoth=none': unknown variant 'smoth'"
         '; nearest: "smooth", "smooth_v" (line 2)'),
        ("- 1\n", "must be a mapping of keys to values; got [1] (line 1)"),
        ("", "must be a mapping of keys to values; got nothing"),
        ("version: [1\nrecipe: x\n",
         "not YAML: while parsing a flow sequence, expected ',' or ']', but got ':' (line 2)"),
        ("version: &a [*a]\n", "not YAML: a value refers to itself"),
        ("version: 1\nrecipe: !!python/name:os.system {}\n",
         "not YAML: could not determine a constructor for the tag 'tag:yaml.org,2002:python/name:os.system' (line 2)"),
    ],
)  # fmt: skip
def test_wording(tmp_path: Path, text: str, message: str) -> None:
    assert policy_errors(tmp_path, text).removeprefix("p.yaml: ") == message


def test_unknown_task_kind_lists_the_known_ones_and_nothing_else(folder: Path) -> None:
    text = RUN.replace("kind: text", "kind: audio").replace("windows: 4", "seconds: 4")
    assert errors(folder, text).endswith("bad.yaml: task.kind: must be one of text, image, video; got 'audio' (line 8)")


def test_missing_files_and_sources_are_found_before_anything_is_loaded(folder: Path) -> None:
    message = errors(folder, RUN.replace("words.txt", "none.txt").replace("path: lm", "path: ./none"))
    assert f"model.path: no such folder: {folder}/none (line 2)" in message
    assert f"task.text: no such file: {folder}/none.txt (line 10)" in message
    assert "needs either path, or package and gguf" in errors(folder, RUN.replace("path: lm", "package: lm"))
    assert load_run_config_with_hub_id(folder).model.path == "org/name"
    with pytest.raises(ConfigError, match="cannot read .*nowhere.yaml: No such file"):
        load_run_config(folder / "nowhere.yaml")


def load_run_config_with_hub_id(folder: Path) -> RunConfig:
    (folder / "hub.yaml").write_text(RUN.replace("path: lm", "path: org/name"))
    return load_run_config(folder / "hub.yaml")


def test_overrides_are_yaml_values_and_their_paths_are_relative_to_the_shell(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "other.txt").write_text("x")
    monkeypatch.chdir(tmp_path / "sub")
    config = load_run_config(
        folder / "run.yaml",
        ["task.windows=8", "task.text=other.txt", "targets.policy.max_kl=1e-3", "policy.rules.0.recipe=sage2",
         "compare=[exact]", "policy.quantize_fp32=true", "output=out"],
    )  # fmt: skip
    assert (config.task.windows, config.targets["policy"].max_kl, config.compare) == (8, 1e-3, ["exact"])
    assert config.task.text == str(tmp_path / "sub" / "other.txt")
    assert config.output == str(tmp_path / "sub" / "out")
    assert config.policy.quantize_fp32 and config.policy.rules[0].recipe == "sage2"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("task.windos=8", 'task.windos: unknown key "windos"; nearest: "windows"'),
        ("task.windows", "an override is written a.b=value (--set task.windows)"),
        ("policy.rules.7.recipe=exact", "there is nothing of that name to set"),
        ("task.windows=[", "not YAML"),
        ("seed=off", "seed: must be a whole number; got 'off' (--set seed=off)"),
    ],
)
def test_bad_overrides_are_errors(folder: Path, override: str, message: str) -> None:
    assert message in errors(folder, RUN, override)


def test_mappings_are_accepted_and_checked_too() -> None:
    assert load_policy({"recipe": "exact"}) == Policy("exact")
    with pytest.raises(ConfigError, match='^policy: recpe: unknown key "recpe"; nearest: "recipe"$'):
        load_policy({"recpe": "exact"})


SPANS = st.sampled_from([3, -1, [0, 1, -2], "0-3", {"first": 2}, {"last": 0.1}, {"from": 2, "to": -2}, None])
RULES = st.builds(
    Rule,
    match=st.sampled_from(["*", "on", "1e-3", "*.attn1", "yes: no", "# x"]),
    layers=SPANS.map(lambda v: None if v is None else Span.parse(v)),
    steps=SPANS.map(lambda v: None if v is None else Span.parse(v)),
    role=st.sampled_from(["self", "cross", "joint", None]),
    recipe=st.sampled_from([*recipe_names(), "qk_int4_pv_fp8:smooth=none", None]),
    on_unsupported=st.sampled_from(["exact", "error", None]),
    reason=st.text("abc \n'\"#:-é~", max_size=20) | st.none(),
    score=st.dictionaries(st.sampled_from(["cosine", "rel_l1"]), st.floats(0, 1)) | st.none(),
)


POLICIES = st.builds(
    Policy,
    recipe=st.sampled_from(recipe_names()),
    min_kv_len=st.none() | st.integers(1, 9),
    rules=st.lists(RULES, max_size=4),
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(min_size=1), inner),
    max_leaves=8,
)


@given(POLICIES)
def test_a_policy_survives_the_round_trip_through_yaml(policy: Policy) -> None:
    document = read_yaml(policy_to_yaml(policy))
    assert not document.problems
    assert load_policy(document.value) == policy


def test_written_policies_are_for_people() -> None:
    policy = Policy("sage2", rules=[Rule(layers=Span.parse({"first": 2}), recipe="exact", score={"rel_l1": 1e-5})])
    assert policy_to_yaml(policy) == (
        "version: 1\nrecipe: sage2\nrules:\n  - layers: {first: 2}\n    recipe: exact\n    score: {rel_l1: 1.0e-05}\n"
    )


@given(VALUES)
def test_yaml_text_round_trip(value: object) -> None:
    document = read_yaml(write_yaml(value))
    assert document.value == value and not document.problems


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda p: p.name)
def test_shipped_configurations_are_valid(path: Path) -> None:
    """A run's file has a task; the others are policies. What a script makes first need not be there."""
    if "task" not in read_yaml(path.read_text()).value:
        load_policy(path)
    else:
        load_run_config(path, ["model.path=org/name"] if path.stem == "quickstart_unet" else [])


@pytest.mark.parametrize("text", ["\x85", "a\u2028b", "two\nlines\n", "tab\t", "\x07", " ", "on", "1e-3", "é"])
def test_awkward_texts_survive(text: str) -> None:
    """PyYAML folds the rarer line breaks of plain texts; a reason may hold anything."""
    value = {"reason": text, text: [text]}
    assert read_yaml(write_yaml(value)).value == value
