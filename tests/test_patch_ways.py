"""Ways to say what is wanted, and ways back: policies by name and file, with-blocks, lost handles, threads, wraps."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

import sage_patch
import zoo.plain as zoo
from sage_patch.config import ConfigError
from sage_patch.kernels import ops
from sage_patch.patch import PatchError
from sage_patch.policy import Policy, Rule, Span
from tiny import EVERYTHING, EXACT, logits, text_model, tokens

IDS = tokens(2, 40)


# --- policies


def test_a_policy_is_a_name_a_path_a_mapping_or_a_policy(tmp_path: Path):
    file = tmp_path / "policy.yaml"
    file.write_text("version: 1\nrecipe: qk_int8_pv_fp16\n")
    model = text_model()
    given = {"qk_int8_pv_fp16": "qk_int8_pv_fp16", str(file): "qk_int8_pv_fp16", "sage2": "sage2"}
    for policy, recipe in [*given.items(), (file, "qk_int8_pv_fp16"), ({"recipe": "exact"}, "exact"), (EXACT, "exact")]:
        with sage_patch.apply(model, policy) as handle:
            assert {handle.plan.choice(site.name).recipe for site in handle.plan.sites} == {recipe}
        assert sage_patch.plan(model, policy).policy.recipe == recipe
    assert sage_patch.plan(model).policy == Policy()


@pytest.mark.parametrize(
    "policy, error, words",
    [
        ("int9", ConfigError, "int9 is no file, no recipe and no policy that comes with the package"),
        ("missing.yaml", ConfigError, "cannot read .*missing.yaml: No such file"),
        (3, TypeError, "policy must be .* got int"),
        ([], TypeError, "policy must be .* got list"),
        ({"recipes": "exact"}, ValueError, "recipes"),
    ],
)
def test_what_is_no_policy_is_said(policy, error, words):
    model = text_model()
    with pytest.raises(error, match=words):
        sage_patch.apply(model, policy)
    assert model.config._attn_implementation == "sdpa"


def test_spans_are_public():
    assert sage_patch.Span is Span


# --- counts


def test_stats_sum_up_what_rows_list():
    model = text_model()
    rules = [Rule(layers=Span.parse(1), recipe="exact")]
    with sage_patch.apply(model, Policy(quantize_fp32=True, min_q_len=1, min_kv_len=1, rules=rules)) as handle:
        first, second = (site.name for site in handle.plan.sites)
        assert handle.stats()["sites"][first] == {"calls": 0, "quantized": 0, "exact": 0, "reasons": {}}
        logits(model, IDS)
        logits(model, IDS)
        stats = handle.stats()
    assert handle.stats() == stats == {
        "calls": 4,
        "quantized": 2,
        "exact": 2,
        "reasons": {"policy": 2},
        "sites": {
            first: {"calls": 2, "quantized": 2, "exact": 0, "reasons": {}},
            second: {"calls": 2, "quantized": 0, "exact": 2, "reasons": {"policy": 2}},
        },
    }  # fmt: skip
    assert sum(row["calls"] for row in handle.rows()) == 4


def test_stats_of_calls_without_apply():
    ops.reset_counts("")
    x = torch.randn(1, 2, 40, 16)
    sage_patch.sage_attention(x, x, x, recipe="exact")
    assert sage_patch.stats()["sites"] == {
        "sage_attention": {"calls": 1, "quantized": 0, "exact": 1, "reasons": {"policy": 1}}
    }
    assert [row["calls"] for row in sage_patch.rows()] == [1]


def test_stats_while_another_thread_counts():
    stop = threading.Event()

    def count() -> None:
        i = 0
        while not stop.is_set():
            ops.add_count(ops.CallKey(f"x{i % 5000}", "a", "b", "c"))
            i += 1

    thread = threading.Thread(target=count)
    thread.start()
    try:
        for _ in range(30):
            sage_patch.stats()
    finally:
        stop.set()
        thread.join()
        ops.reset_counts("x")


@pytest.mark.parametrize("dtype, words", [(torch.float32, "quantize_fp32"), (torch.bfloat16, "torch.no_grad")])
def test_the_report_says_what_to_do_about_calls_that_stayed_exact(dtype, words):
    model = text_model().to(dtype)
    with sage_patch.apply(model, {"min_q_len": 1, "min_kv_len": 1}) as handle:
        with torch.set_grad_enabled(dtype is torch.bfloat16):
            model(input_ids=IDS)
        assert words in handle.report()


# --- ways back


@pytest.mark.parametrize("kind", ["transformers", "plain"])
def test_a_model_whose_handle_is_lost_is_reverted(kind):
    model, run = (text_model(), lambda m: logits(m, IDS)) if kind == "transformers" else (zoo.build("gpt")[0], None)
    run = run or (lambda m: zoo.outputs(m, zoo.build("gpt")[1]))
    reference, classes = run(model), [type(m) for m in model.modules()]
    sage_patch.apply(model, EVERYTHING)
    gc.collect()
    assert not torch.equal(run(model), reference)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), model):
        sage_patch.revert(other)
        assert torch.equal(run(other), reference)
        assert [type(m) for m in other.modules()] == classes
        with pytest.raises(PatchError, match="is not patched"):
            sage_patch.revert(other)
    if kind == "transformers":
        assert model.config._attn_implementation == "sdpa"


def test_a_handle_knows_that_its_model_was_reverted():
    model = text_model()
    handle = sage_patch.apply(model, EVERYTHING)
    logits(model, IDS)
    sage_patch.revert(model)
    assert not handle.active and handle.stats()["calls"] == 2


def test_a_model_dropped_without_revert_takes_its_counters_along():
    """And is freed at once: neither the handle nor the counters keep it."""
    before = len(ops.counts())
    for keep_handle in (False, True):
        model = text_model()
        handle = sage_patch.apply(model, EVERYTHING)
        logits(model, IDS)
        gone = weakref.ref(model.model.layers[0].self_attn)
        if not keep_handle:
            del handle
        del model
        gc.collect()
        assert gone() is None
    assert handle.stats()["calls"] == 2
    handle.report()
    handle.revert()
    del handle
    gc.collect()
    assert len(ops.counts()) == before


def test_two_threads_that_apply_at_once():
    """One wins, the other gets the error of a patched model."""
    model = text_model()
    for _ in range(15):
        barrier, handles, errors = threading.Barrier(2), [], []

        def work(barrier=barrier, handles=handles, errors=errors) -> None:
            barrier.wait()
            try:
                handles.append(sage_patch.apply(model, EVERYTHING))
            except PatchError as error:
                errors.append(str(error))

        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(handles) == 1 and "already patched" in errors[0]
        handles[0].revert()
        assert model.config._attn_implementation == "sdpa"


def test_a_patch_that_is_bypassed_is_reported():
    model = text_model()
    with sage_patch.apply(model, EVERYTHING) as handle:
        logits(model, IDS)
        assert "bypass" not in handle.report()
        model.set_attn_implementation("eager")
        assert "2 sites from model.layers.0.self_attn on ask for attn_implementation 'eager'" in handle.report()
    assert model.config._attn_implementation == "sdpa"


# --- wrappers


def test_names_are_the_models_own_inside_wrappers():
    """Rules match whatever wraps the model or its blocks."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    policy = Policy(rules=[Rule(match="blocks.0.attn", layers=Span.parse({"first": 1}), recipe="exact")])
    expected = sage_patch.plan(zoo.build("vit")[0], policy)
    model, inputs = zoo.build("vit")
    model.blocks[0] = checkpoint_wrapper(model.blocks[0])
    model.blocks[1] = torch.compile(model.blocks[1], backend="eager")
    parallel = nn.DataParallel(model)
    assert sage_patch.plan(parallel, policy).sites == expected.sites
    with sage_patch.apply(parallel, EVERYTHING) as handle:
        zoo.outputs(model, inputs)
        assert handle.stats()["quantized"] == 2
        with pytest.raises(PatchError, match=r"already patched \(2 sites, first 'blocks.0.attn'\)"):
            sage_patch.apply(model)


def test_names_inside_distributed_wrappers(tmp_path: Path):
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model, inputs = zoo.build("gpt")
        expected = sage_patch.plan(model).sites
        parallel = nn.parallel.DistributedDataParallel(model)
        with sage_patch.apply(parallel, EVERYTHING) as handle:
            assert handle.plan.sites == expected
            zoo.outputs(parallel, inputs)
            assert handle.stats()["quantized"] == 3
    finally:
        dist.destroy_process_group()


def test_a_model_compiled_in_place_is_patched():
    """module.compile() and compiled blocks keep the module; only torch.compile(model) hides it, and is refused."""
    torch._dynamo.reset()
    model, inputs = zoo.build("vit")
    model.compile(backend="eager")
    reference = zoo.outputs(model, inputs)
    with sage_patch.apply(model, EVERYTHING) as handle:
        assert not torch.equal(zoo.outputs(model, inputs), reference)
        assert handle.stats()["quantized"] == 2
    assert torch.equal(zoo.outputs(model, inputs), reference)
