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
        ("", "is empty; it must be a mapping of keys to values, version: 1 at least"),
        ("# a remark\n", "is empty; it must be a mapping of keys to values, version: 1 at least"),
        ("rules:\n  - match: '*'\nversion: 1\n",
         "rules.0: changes nothing: give it a recipe, on_unsupported or a reason (line 2)"),
        ("version: [1\nrecipe: x\n",
         "not YAML: while parsing a flow sequence, expected ',' or ']', but got ':' (line 2)"),
        ("version: &a [*a]\n", "not read: a value refers to itself (line 1)"),
        ("version: 1\nrecipe: !!python/name:os.system {}\n",
         "not read: the tag !!python/name:os.system is not read; write the value alone (line 2)"),
        ("version: 1\nmin_q_len: !!int abc\n", "not read: the tag !!int is not read; write the value alone (line 2)"),
        ("version: 1\nrecipe: ! exact\n", "not read: the tag ! is not read; write the value alone (line 2)"),
        ("version: 1\nrecipe: ex\x07act\n", "not YAML: the character '\\x07' (line 2)"),
        ('version: 1\nrecipe: "\\U99999999"\n', "not YAML: an escape names no character (line 2)"),
        ('version: 1\nrecipe: "\\ud800"\n', "not read: text with half of a character (a lone surrogate) (line 2)"),
        ("version: 1\nmin_q_len: " + "9" * 5000, "not read: a number of 5000 digits (line 2)"),
        ("version: 1\n? [a]\n: 1\n", "not read: a key must be text (line 2)"),
        ("{1: 2, version: 1}", "1: a key must be text; got 1 (line 1)"),
        ("version: 1\nrecipe: {a: 1}\n", "recipe: must be text; got {'a': 1} (line 2)"),
        ("version: 1\nrules:\n - match: '{0} {x} %s'\n   recipe: '{0}'\n",
         "rules.0.recipe: unknown recipe '{0}'; known: sage2, exact, qk_int8_pv_fp16, qk_int8_pv_fp8, "
         "qk_int4_pv_fp16, qk_int4_pv_fp8 (line 4)"),
    ],
)  # fmt: skip
def test_wording(tmp_path: Path, text: str, message: str) -> None:
    assert policy_errors(tmp_path, text).removeprefix("p.yaml: ") == message


def test_nesting_and_aliases_have_limits(tmp_path: Path) -> None:
    deep = "not read: lists and mappings are nested more than 50 deep (line 2)"
    assert deep in policy_errors(tmp_path, "version: 1\nrules: " + "[" * 900 + "]" * 900)
    assert deep in policy_errors(tmp_path, "version: 1\nrules: " + "{a: " * 900 + "}" * 900)
    many = "not read: more than 20000 keys and values, aliases expanded (line 6)"
    sequences = "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 9))
    assert many in policy_errors(tmp_path, "version: 1\na0: &a0 [x, x, x, x, x, x, x, x]\n" + sequences)
    merges = "".join(f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}]}}\n" for i in range(1, 9))
    assert many in policy_errors(tmp_path, "version: 1\na0: &a0 {x: 1, y: 2, z: 3}\n" + merges)
    chain = "version: 1\na0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}]\n" for i in range(1, 99))
    assert "not read: aliases nest lists and mappings more than 50 deep (line 51)" in policy_errors(tmp_path, chain)
    assert "not read: the text has more than 200000 characters" in policy_errors(tmp_path, "#" * 200_001)
    text = "version: 1\nrules:\n - &a {match: '*', recipe: exact}\n - {<<: *a, layers: 0}\n - *a\n"
    assert len(load_policy(read_yaml(text).value).rules) == 3


def test_messages_are_short_whatever_the_file_holds(tmp_path: Path) -> None:
    for text in (f"? {'k' * 30_000}\n: 1\n", f"recipe: {'k' * 30_000}\n", f"rules: {['k' * 9000]}\n"):
        assert len(policy_errors(tmp_path, "version: 1\n" + text)) < 1000
    message = policy_errors(tmp_path, "version: 1\nrules: [" + "{recipe: x}, " * 500 + "]\n")
    assert message.startswith("p.yaml: 500 errors\n") and message.endswith("\n  and 460 more")
    assert 'unknown key "a\\x07b"' in policy_errors(tmp_path, 'version: 1\n"a\\x07b": 1\n')


@pytest.mark.parametrize("source", [None, 123, [], b"x.yaml", 1.5, Policy()])
def test_what_is_no_file_and_no_mapping_is_refused(source: object) -> None:
    kind = type(source).__name__
    with pytest.raises(ConfigError, match=f"load_policy takes the path of a YAML file or a mapping; got {kind}$"):
        load_policy(source)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"load_run_config takes the path of a YAML file; got {kind}$"):
        load_run_config(source)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["a\0b.yaml", "", ".", "missing.yaml", "~nobody-of-that-name/x.yaml", "x" * 9999])
def test_paths_that_lead_nowhere_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="cannot read|is no file"):
        load_policy(name)
    with pytest.raises(ConfigError, match="cannot read"):
        load_run_config(name)


def test_the_wrong_kind_of_file_is_named(folder: Path) -> None:
    (folder / "p.yaml").write_text("version: 1\nrecipe: exact\n")
    with pytest.raises(ConfigError, match="p.yaml: this is a policy file, and a run file .* belongs here: .*p.yaml"):
        load_run_config(folder / "p.yaml")
    with pytest.raises(ConfigError, match="run.yaml: this is a run file, and a policy file belongs here"):
        load_policy(folder / "run.yaml")
    assert "policy: run.yaml: this is a run file" in errors(folder, RUN, "policy=" + str(folder / "run.yaml")).replace(
        str(folder) + "/run.yaml: this", "run.yaml: this"
    )
    (folder / "results.json").write_text('{"schema": 1, "command": "x", "environment": {}}')
    for load in (load_policy, load_run_config):
        with pytest.raises(ConfigError, match="this is a results file"):
            load(folder / "results.json")


def test_a_policy_may_be_named_by_its_recipe_or_its_family(folder: Path) -> None:
    text = RUN.replace(RUN[RUN.index("policy:") : RUN.index("task:")], "policy: NAME\n")
    for name in ("sage2", "qk_int4_pv_fp8:smooth=none"):
        (folder / "run.yaml").write_text(text.replace("NAME", name))
        assert load_run_config(folder / "run.yaml").policy.build() == load_policy(name) == Policy(name)
    (folder / "run.yaml").write_text(text.replace("NAME", "wan"))
    wan = load_policy(ROOT / "configs" / "wan.yaml")
    assert load_run_config(folder / "run.yaml").policy.build() == load_policy("wan") == wan
    message = errors(folder, text.replace("NAME", "sage3"))
    assert 'sage3 is no file, no recipe and no policy that comes with the package; nearest: "sage2"' in message
    with pytest.raises(ConfigError, match="unknown variant 'smoth'"):
        load_policy("qk_int4_pv_fp8:smoth=none")


def test_an_empty_policy_file_is_refused_wherever_it_is_named(folder: Path) -> None:
    (folder / "empty.yaml").write_text("# nothing\n")
    text = RUN.replace(RUN[RUN.index("policy:") : RUN.index("task:")], "policy: empty.yaml\n")
    assert errors(folder, text).endswith(
        "bad.yaml: policy: is empty; it must be a mapping of keys to values, version: 1 at least (empty.yaml)"
    )


@pytest.mark.parametrize(
    ("written", "meant"), [("blocks", "layers"), ("name", "match"), ("skip", "recipe: exact"), ("step", "steps")]
)
def test_keys_that_people_guess_name_ours(tmp_path: Path, written: str, meant: str) -> None:
    message = policy_errors(tmp_path, f"version: 1\nrules:\n - {{{written}: 2, recipe: exact}}\n")
    assert message == f'p.yaml: rules.0.{written}: unknown key "{written}"; nearest: "{meant}" (line 3)'
    assert 'nearest: "recipe"' in policy_errors(tmp_path, "version: 1\ndefault: exact\n")


def test_patterns_and_numbers_of_a_run_are_worded(folder: Path) -> None:
    message = errors(folder, RUN.replace("path: lm", f"package: p, gguf: g, sha256: {'AB' * 32}"))
    assert f"model.sha256: must match ^[0-9a-f]{{64}}$; got '{'AB' * 32}' (line 2)" in message
    assert "targets.policy.max_kl: must be a finite number; got inf" in errors(folder, RUN.replace("3e-3", ".inf"))
    assert "model.path: cannot be a path" in errors(folder, RUN.replace("path: lm", 'path: "~\\0"'))
    with pytest.raises(ConfigError, match="overrides must be a list of texts"):
        load_run_config(folder / "run.yaml", "seed=3")


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
).filter(lambda rule: (rule.recipe, rule.on_unsupported, rule.reason) != (None, None, None))


POLICIES = st.builds(
    Policy,
    recipe=st.sampled_from(recipe_names()),
    min_kv_len=st.none() | st.integers(1, 9),
    exact_backend=st.sampled_from(["torch", "fa3"]),
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
