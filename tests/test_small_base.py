"""The base needs torch alone: what else is missing, package by package, and on a system without POSIX.

Each case is a process of its own in which imports of the named packages fail as if they were not installed.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from sage_patch.extras import EXTRAS

ROOT = Path(__file__).resolve().parents[1]
BLOCK = "import sys\nsys.modules.update(dict.fromkeys({gone!r}))\n"  # None there: not installed, whoever asks
ATTEND = """
import torch, sage_patch
q = torch.randn(1, 2, 160, 64, dtype=torch.bfloat16)
assert sage_patch.sage_attention(q, q, q).shape == q.shape and sage_patch.stats()["quantized"] == 1
"""
PLAIN_MODULE = """
import torch.nn.functional as F
class Block(torch.nn.Module):
    def forward(self, x):
        return F.scaled_dot_product_attention(x, x, x)
model = torch.nn.Sequential(Block(), Block()).eval()
with sage_patch.applied(model, sage_patch.Policy(rules=[sage_patch.Rule(match="0", recipe="exact")])) as handle:
    with torch.no_grad():
        model(q)
    assert handle.stats()["quantized"] == 1, handle.report()
"""
# What is only there for other uses than attention and patching a model with a policy written in Python.
OPTIONAL = sorted({*EXTRAS, "accelerate", "huggingface_hub", "numpy", "ninja", "tqdm", "gguf", "peft", "tokenizers"})


def run(code: str, gone: list[str], expect: int = 0) -> str:
    program = BLOCK.format(gone=gone) + code
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == expect, done.stderr[-3000:]
    return done.stdout + done.stderr


def test_attention_and_patching_need_torch_alone():
    run(ATTEND + PLAIN_MODULE, OPTIONAL)


def test_the_shim_needs_torch_alone():
    run("import sage_patch; sage_patch.compat.install(); import sageattention; sageattention.sageattn", OPTIONAL)


def test_without_one_package_after_the_other():
    """An absent extra is felt by its own use only. One process imports torch, and a child of it each case."""
    run(
        f"""
import os, sys, traceback, torch
for package in {OPTIONAL!r}:
    child = os.fork()
    if child == 0:
        sys.modules[package] = None
        try:
            import sage_patch
            for name in ("sage_attention", "apply", "plan", "Policy", "stats"):
                getattr(sage_patch, name)
            sage_patch.sage_attention(*[torch.zeros(1, 1, 130, 16, dtype=torch.bfloat16)] * 3)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, package
""",
        [],
    )


@pytest.mark.parametrize(
    ("code", "package", "message"),
    [
        ("import sage_patch.integrations.comfyui", "yaml", "the node for ComfyUI needs yaml, .*'sage-patch[policy]'"),
        ("sage_patch.load_policy", "pydantic", "sage_patch.load_policy needs pydantic, .*'sage-patch[policy]'"),
        ("sage_patch.load_policy('wan')", "yaml", "sage_patch.load_policy needs yaml, .*'sage-patch[policy]'"),
        ("sage_patch.patch.policy_of('wan')", "yaml", "reading a policy needs yaml, .*'sage-patch[policy]'"),
        (
            "sage_patch.QuantizedCache",
            "transformers",
            "QuantizedCache needs transformers, .*'sage-patch[transformers]'",
        ),
    ],
)
def test_what_is_missing_is_said_with_the_extra_that_brings_it(code, package, message):
    said = run(f"import sage_patch, sage_patch.patch\n{code}", [package], expect=1)
    assert re.search(message.replace("[", r"\["), said), said
    assert "MissingPackage" in said


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_the_command_says_what_it_needs(package):
    code = "import sys\nsys.argv = ['sage-patch', 'env']\nfrom sage_patch.__main__ import main\nmain()"
    said = run(code, [package], expect=1 if package == "typer" else 2)
    assert f"needs {package}, which is not installed: pip install 'sage-patch[cli]'" in said
    assert "Traceback" not in said


def test_loading_models_says_what_it_needs(tmp_path):
    code = """
from sage_patch.evaluation.models import load_pipeline, load_text_model
from sage_patch.schema import ModelSpec
for load, package in ((load_text_model, "transformers"), (load_pipeline, "diffusers")):
    try:
        load(ModelSpec(path="some/model"))
    except ImportError as error:
        assert f"needs {package}, which is not installed: pip install 'sage-patch[{package}]'" in str(error), error
    else:
        raise AssertionError(package)
"""
    run(code, ["transformers", "diffusers"])


def test_importing_and_attending_load_nothing_more():
    """And importing alone takes no time: the loaded modules say so on every machine, a clock would not."""
    code = """
import sys
before = set(sys.modules)
import sage_patch
assert len(set(sys.modules) - before) < 60
import torch
before = set(sys.modules)
"""
    loaded = f"more = {set(OPTIONAL)!r} & (set(sys.modules) - before)\nassert not more, more"
    run(code + ATTEND + loaded, [])


# What only POSIX has: modules, and names of modules that Windows has too.
POSIX_MODULES = ["fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "posix", "syslog"]
WINDOWS = """
import os, select, signal, socket
for module, names in {signal: ["SIGALRM", "SIGHUP", "SIGKILL", "SIGUSR1", "alarm", "setitimer", "pthread_kill"],
        os: ["fork", "getuid", "geteuid", "killpg", "setsid", "uname", "sched_getaffinity", "getpgid", "mkfifo"],
        select: ["poll", "epoll"], socket: ["AF_UNIX"]}.items():
    for name in names:
        if hasattr(module, name):
            delattr(module, name)
"""


def test_every_module_imports_and_the_cpu_computes_without_posix():
    """torch and the hubs are imported first: what they need of POSIX is theirs."""
    names = sorted(
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in (ROOT / "sage_patch").rglob("*.py")
        if path.name != "__main__.py"
    )
    others = "torch, torch._dynamo, transformers, transformers.cache_utils, diffusers, pydantic, yaml, typer, rich"
    code = f"import {others}, rich.progress, rich.table, filelock, subprocess, tempfile, numpy, PIL.Image\n"
    imports = f"import importlib\nfor name in {names!r}:\n    importlib.import_module(name)\n"
    program = code + WINDOWS + BLOCK.format(gone=POSIX_MODULES) + imports + ATTEND
    run(program, [])
