"""The import rules: arrows point down only, and `import sage_patch` stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "sage_patch"
FILES = sorted(PACKAGE.rglob("*.py"))

# What each part may import of this package, besides itself.
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "extras": set(),
    "reasons": set(),
    "recipes": set(),
    "args": set(),
    "backends": {"recipes"},
    "cards": {"recipes"},
    "yamltext": set(),
    "figures": set(),
    "names": set(),
    "policy": {"names", "recipes"},
    "schema": {"figures", "policy", "recipes"},
    "config": {"schema", "policy", "recipes", "yamltext"},
    "reference": {"recipes", "args"},
    # the reference only in plain.py: see below
    "kernels": {"recipes", "backends", "args", "cards", "reference"},
    "pages": {"args", "backends", "reference", "kernels"},
    "page_ops": {"args", "backends", "reasons", "recipes", "reference", "kernels"},
    "static_pages": {"args", "backends", "reference", "kernels", "pages", "page_ops"},
    "dispatch": {"recipes", "backends", "args", "reference", "kernels", "pages"},
    "arguments": {"recipes", "kernels"},
    "attention": {"args", "arguments", "dispatch", "recipes", "reference", "kernels"},
    "compat": {"arguments", "attention", "dispatch", "recipes"},
    "fingerprint": {"policy"},
    "integrations": {
        "dispatch",
        "attention",
        "pages",
        "static_pages",
        "policy",
        "recipes",
        "backends",
        "args",
        "kernels",
        "config",
        "extras",
    },
    "handle": {"integrations", "kernels", "policy"},
    "patch": {
        "handle",
        "config",
        "extras",
        "integrations",
        "fingerprint",
        "cards",
        "dispatch",
        "attention",
        "kernels",
        "policy",
        "recipes",
    },
    "evaluation": {
        "config",
        "cards",
        "patch",
        "extras",
        "fingerprint",
        "dispatch",
        "attention",
        "kernels",
        "reference",
        "backends",
        "args",
        "schema",
        "figures",
        "names",
        "integrations",  # steps.py alone: see below
        "policy",
        "recipes",
    },
    "cli": {
        "cli_kernels",
        "terminal",
        "cards",
        "evaluation",
        "patch",
        "config",
        "policy",
        "recipes",
        "kernels",
        "extras",
    },
    "cli_kernels": {"terminal", "cards", "evaluation", "kernels", "recipes", "extras"},
    "terminal": {"evaluation", "config", "extras"},
    "__main__": {"cli", "extras"},
    "_hook": {"integrations"},
    "": {
        "_hook",
        "attention",
        "compat",
        "extras",
        "dispatch",
        "config",
        "handle",
        "integrations",
        "patch",
        "policy",
        "recipes",
    },  # __init__: lazily
}
STANDARD_LIBRARY_ONLY = {"backends", "cards", "errors", "extras", "figures", "names", "policy", "reasons", "recipes"}
EVERYWHERE = {"errors", "reasons"}  # words that every part may say
MAY_IMPORT_HUGGING_FACE = {
    "integrations/configurations",
    "integrations/transformers",
    "integrations/diffusers",
    "evaluation/models",
    "evaluation/weights",
}
# Have subclasses of transformers' own, and are imported by each other and the lazy names in __init__ alone.
SUBCLASSES_HUGGING_FACE = {"integrations/quantized_cache", "integrations/static_cache"}
HUGGING_FACE = {"transformers", "diffusers"}


def part_of(path: Path) -> str:
    """The top-level part a file belongs to: "reference", "policy", "" for __init__.py itself."""
    first = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return "" if first == "__init__" else first


def module_of(path: Path) -> str:
    return str(path.relative_to(PACKAGE).with_suffix(""))


def imports(path: Path) -> list[tuple[str, bool]]:
    """Every module a file imports, and whether at module level (type-checking blocks are not run, so not there)."""
    found = []

    def visit(node: ast.AST, top: bool) -> None:
        for child in ast.iter_child_nodes(node):
            inner = top and not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
                inner = False
            if isinstance(child, ast.Import):
                found.extend((alias.name, top) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{path}: imports are written in full"
                base = child.module or ""
                found.extend((f"{base}.{a.name}" if base == "sage_patch" else base, top) for a in child.names)
            visit(child, inner)

    visit(ast.parse(path.read_text(encoding="utf-8")), True)
    return found


def test_every_part_has_a_rule() -> None:
    assert {part_of(p) for p in FILES} <= set(MAY_IMPORT)


def test_the_rules_have_no_cycle() -> None:
    done: set[str] = set()
    while len(done) < len(MAY_IMPORT):
        ready = {part for part, below in MAY_IMPORT.items() if part not in done and below <= done}
        assert ready, f"a cycle among {set(MAY_IMPORT) - done}"
        done |= ready


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_arrows_point_down_only(path: Path) -> None:
    allowed = MAY_IMPORT[part_of(path)] | {part_of(path)} | EVERYWHERE
    for name, _ in imports(path):
        package, _, rest = name.partition(".")
        if package == "sage_patch" and rest != "__version__":
            assert rest.partition(".")[0] in allowed, f"{module_of(path)} imports {name}"
            if part_of(path) == "evaluation" and rest.startswith("integrations"):
                assert rest == "integrations.steps", f"{module_of(path)} imports {name}"
        if part_of(path) in STANDARD_LIBRARY_ONLY:
            assert name.split(".")[0] in {*sys.stdlib_module_names, "sage_patch"}, f"{module_of(path)} imports {name}"


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_hugging_face_is_imported_in_few_places_and_inside_functions(path: Path) -> None:
    for name, top in imports(path):
        if module_of(path) in SUBCLASSES_HUGGING_FACE:
            continue
        if name.removeprefix("sage_patch.").replace(".", "/") in SUBCLASSES_HUGGING_FACE:
            assert part_of(path) == "" and not top, f"{module_of(path)} imports {name}"
        if name.split(".")[0] in HUGGING_FACE:
            assert module_of(path) in MAY_IMPORT_HUGGING_FACE, f"{module_of(path)} imports {name}"
            assert not top, f"{module_of(path)} imports {name} at module level"


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_only_kernels_know_ctypes_and_only_plain_knows_the_reference(path: Path) -> None:
    for name, _ in imports(path):
        if name.split(".")[0] == "ctypes":
            assert part_of(path) == "kernels", f"{module_of(path)} imports {name}"
        if part_of(path) == "kernels" and name.startswith("sage_patch.reference"):
            assert module_of(path) == "kernels/plain", f"{module_of(path)} imports {name}"


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_the_package_loads_neither_torch_nor_hugging_face() -> None:
    run("import sys, sage_patch; assert not {'torch', 'transformers', 'diffusers'} & set(sys.modules)")


def test_planning_a_policy_needs_no_torch() -> None:
    run(
        "import sys\nfrom sage_patch import Policy, load_policy\nfrom sage_patch.policy import resolve\n"
        "resolve(load_policy({'recipe': 'exact'}), [])\nassert 'torch' not in sys.modules"
    )


def test_using_the_package_initialises_no_cuda() -> None:
    run("import torch, sage_patch\nsage_patch.apply, sage_patch.sage_attention\nassert not torch.cuda.is_initialized()")


def test_every_public_name_is_there() -> None:
    import sage_patch

    assert all(getattr(sage_patch, name) is not None for name in sage_patch.__all__)
