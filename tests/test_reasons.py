"""Every reason that is counted has a sentence, and every error has the base."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from sage_patch import reasons
from sage_patch.errors import SagePatchError

PACKAGE = Path(__file__).parent.parent / "sage_patch"
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py")}
ANSWERS = re.compile(r"why_not|why_exact|no_gain|_beyond")  # functions that return a reason


def literals(node: ast.AST | None) -> Iterator[str]:
    """The texts an expression may be: constants, both sides of an if; "x" stands for what an f-string fills in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value:
        yield node.value
    elif isinstance(node, ast.JoinedStr) and isinstance(node.values[0], ast.Constant):
        yield f"{node.values[0].value}x"
    elif isinstance(node, ast.IfExp):
        yield from literals(node.body)
        yield from literals(node.orelse)


def counted_words() -> set[str]:
    """Every literal reason of the package: what an envelope returns, what `reason` is set to, what tick() is given."""
    found: set[str] = set()
    for tree in TREES.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and ANSWERS.search(node.name):
                for inner in ast.walk(node):
                    found.update(literals(inner.value) if isinstance(inner, ast.Return) else ())
            elif isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "reason":
                found.update(literals(node.value))
            elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("tick", "leave"):
                for given in node.args:
                    found.update(literals(given))
    return {word for word in found if re.fullmatch(r"[a-z_0-9]+", word)}


def test_every_counted_word_has_a_sentence() -> None:
    words = counted_words()
    assert {"short", "needs_grad", "argument_x", "no_kernel_for_x", "mask_block", "cache_materialized"} <= words
    for word in words:
        reasons.lookup(word)


def test_a_word_with_a_rest_reads_as_a_sentence() -> None:
    assert "float64" in reasons.sentence("dtype_float64")
    assert "{" not in "".join(reasons.sentence(word.replace("*", "x")) for word in reasons.REASONS)


def test_an_unknown_word_is_an_error() -> None:
    with pytest.raises(KeyError, match="add it to sage_patch/reasons.py"):
        reasons.lookup("nothing_like_it")


def test_the_legend_names_every_word_once() -> None:
    lines = reasons.legend(["short", "dtype_float64", "short", "dtype_float32"])
    assert [line.partition(":")[0] for line in lines] == ["short", "dtype_float32", "dtype_float64"]


def test_every_error_is_a_sage_patch_error_and_a_builtin() -> None:
    names = {"SagePatchError"}
    classes = [node for tree in TREES.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    errors = [c for c in classes if re.search(r"Error$|Missing$|^Unsupported", c.name) and c.name not in names]
    names |= {c.name for c in errors}
    assert len(errors) >= 15
    for error in errors:
        bases = [getattr(base, "id", "") for base in error.bases]
        assert bases[0] in names, f"{error.name} is no SagePatchError"
        assert bases[0] != "SagePatchError" or bases[1] in ("ValueError", "RuntimeError", "TypeError", "ImportError"), (
            error.name
        )
    assert issubclass(SagePatchError, Exception)
