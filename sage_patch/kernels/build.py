"""Builds the CUDA library from the packaged sources, once per content, and finds a built one.

No torch, no Python ABI: plain nvcc objects linked into one shared library with the static CUDA runtime.
A prebuilt `libsage2*.so` beside this file is preferred. Otherwise the library is built into a user cache
under a name that hashes sources, flags and compiler; a file lock makes several processes build once, and an
atomic rename makes the result appear whole or not at all.

Every unit names the architectures that it is compiled for, in a line `// Architectures: 90a` or `all`; so a family of
kernels comes with its files.

The build refuses machine code that is slower than it looks: register spills, local memory, or tensor-core
instructions that ptxas had to serialize.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from sage_patch.errors import SagePatchError

HERE = Path(__file__).resolve().parent
FLAGS = ("-O3", "-std=c++17", "-Xcompiler=-fPIC,-fvisibility=hidden", "-Xptxas=-v")
LINK_FLAGS = ("-shared", "-cudart=static", "-Xlinker=--exclude-libs,ALL")
_MARK = re.compile(r"^// Architectures: (.+)$", re.MULTILINE)
_SERIALIZED = ("C7508", "C7510", "C7511", "C7512", "C7513", "C7514", "C7519")


class BuildError(SagePatchError, RuntimeError):
    """The library could not be built; the message says what was asked for, what was found, and what to do."""


def source_dir() -> Path:
    """Where the CUDA sources are: inside an installed package, or at the root of a checkout."""
    for path in (HERE / "cuda_kernels", HERE.parents[1] / "cuda_kernels"):
        if (path / "sage2.h").is_file():
            return path
    raise BuildError(
        f"the CUDA sources are missing: looked for sage2.h in {HERE / 'cuda_kernels'} and "
        f"{HERE.parents[1] / 'cuda_kernels'}; reinstall the package"
    )


def units() -> dict[str, tuple[str, ...]]:
    """The .cu files and the architectures that each names, as nvcc writes them ("90a"); ("all",): those of any build.

    Raises BuildError for a file that names none.
    """
    found = {}
    for path in sorted(source_dir().glob("*.cu"), reverse=True):  # the attention kernels take longest and start early
        mark = _MARK.search(path.read_text(encoding="utf-8"))
        if mark is None:
            raise BuildError(
                f'{path} does not say what it is compiled for: add a line "// Architectures: 90a", or "all"'
            )
        found[path.name] = tuple(mark[1].split())
    return found


def architectures() -> dict[str, str]:
    """What kernels exist for: the number that users and error messages say -> what nvcc is told, {"90": "90a"}."""
    named = sorted({a for names in units().values() for a in names} - {"all"}, key=_number)
    return {str(_number(name)): name for name in named}


def _number(architecture: str) -> int:
    return int(architecture.rstrip("af"))


def _targets(unit: tuple[str, ...], architectures: Sequence[str]) -> list[str]:
    """nvcc's options for one unit in a build for these architectures, as nvcc writes them; empty: it takes no part."""
    taken = architectures if unit == ("all",) else [a for a in architectures if a in unit]
    return [f"-gencode=arch=compute_{a},code=sm_{a}" for a in taken]


def cache_dir() -> Path:
    """Where built libraries, measured crossovers and converted models are kept: $SAGE_PATCH_CACHE, or sage_patch in
    the user's cache folder."""
    given = os.environ.get("SAGE_PATCH_CACHE")
    return Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "sage_patch"


def find_nvcc() -> Path | None:
    """nvcc of $CUDA_HOME, of the PATH, of the usual install location, or of the pip packages of this Python."""
    homes = [os.environ[v] for v in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(v)]
    candidates = [Path(h) / "bin" / "nvcc" for h in homes]
    on_path = shutil.which("nvcc")
    if on_path:
        candidates.append(Path(on_path))
    candidates.append(Path("/usr/local/cuda/bin/nvcc"))
    for entry in sys.path:
        candidates.extend(sorted(Path(entry or ".").glob("nvidia/cu*/bin/nvcc"), reverse=True))
    return next((c for c in candidates if c.is_file() and os.access(c, os.X_OK)), None)


def find_ninja() -> Path | None:
    found = shutil.which("ninja")
    if found:
        return Path(found)
    with contextlib.suppress(ImportError):
        import ninja

        path = Path(ninja.BIN_DIR) / "ninja"
        if path.is_file():
            return path
    return None


def nvcc_version(nvcc: Path) -> str:
    out = subprocess.run([str(nvcc), "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"V(\d+\.\d+\.\d+)", out)
    return found.group(1) if found else out.strip()


def prebuilt(architecture: str) -> Path | None:
    """A library beside this file, such as libsage2-sm90-100.so; one whose name says nothing holds what it can."""
    for path in sorted(HERE.glob("libsage2*.so")):
        held = re.fullmatch(r"libsage2-sm([\d-]+)", path.stem)
        if held is None or architecture in held[1].split("-"):
            return path
    return None


def _check_architectures(wanted: Sequence[str]) -> tuple[str, ...]:
    """The architectures as nvcc writes them, of names such as 90, 9.0, sm_90 and sm_90a."""
    known = architectures()
    numbers = tuple(dict.fromkeys(a.lower().removeprefix("sm_").rstrip("af").replace(".", "") for a in wanted))
    unknown = [n for n in numbers if n not in known]
    if not numbers or unknown:
        raise BuildError(
            f"cannot build for architecture {', '.join(unknown) or '(none)'}: kernels exist for "
            f"{', '.join('sm_' + name for name in known.values())}"
        )
    return tuple(known[n] for n in numbers)


def content_key(architectures: Sequence[str], version: str) -> str:
    digest = hashlib.sha256(repr((tuple(architectures), FLAGS, LINK_FLAGS, version)).encode())
    for path in sorted(source_dir().iterdir()):
        if path.suffix in (".cu", ".cuh", ".h"):
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:20]


def check_log(log: str) -> list[str]:
    """What ptxas reported that must not ship: spills, local memory, serialized tensor-core instructions."""
    bad = []
    name = "?"
    for line in log.splitlines():
        entry = re.search(r"(?:Compiling entry function|Function properties for) '?(\w+)", line)
        if entry:
            name = entry.group(1)
        memory = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line)
        if memory and any(int(g) for g in memory.groups()):
            bad.append(f"{name}: {memory.group(0)}")
        bad.extend(line.strip() for code in _SERIALIZED if code in line)
    return bad


def _ninja_file(nvcc: Path, sources: Path, architectures: Sequence[str], output: str) -> str:
    held = "\\,".join(str(_number(a)) for a in architectures)  # nvcc itself takes a plain comma for the end of a macro
    flags = " ".join((*FLAGS, f"'-DSAGE2_ARCHITECTURES={held}'"))
    everything = " ".join(_targets(("all",), architectures))
    lines = [
        "ninja_required_version = 1.5",
        f"rule compile\n  command = {nvcc} -c $targets {flags} $in -o $out",
        f"rule link\n  command = {nvcc} {everything} {' '.join(LINK_FLAGS)} $in -o $out",
    ]
    objects = []
    for unit, named in units().items():
        targets = _targets(named, architectures)
        if targets:
            source = str(sources / unit).replace(" ", "$ ")
            lines.append(f"build {unit}.o: compile {source}\n  targets = {' '.join(targets)}")
            objects.append(f"{unit}.o")
    lines.append(f"build {output}: link {' '.join(objects)}")
    return "\n".join(lines) + "\n"


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    with open(path, "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(handle, fcntl.LOCK_UN)


def build(architectures: Sequence[str], out: Path | str | None = None) -> Path:
    """Build (or find in the cache) the library for these architectures. `out`: also copy it there."""
    names = _check_architectures(architectures)
    nvcc = find_nvcc()
    if nvcc is None:
        raise BuildError(
            f"the kernels for {', '.join('sm_' + n for n in names)} must be compiled and no nvcc was found "
            "(looked in $CUDA_HOME, $PATH, /usr/local/cuda and the nvidia packages of this Python). "
            "Install the CUDA toolkit 13 (or 12.9), or a wheel that holds a prebuilt library, or use CPU."
        )
    ninja = find_ninja()
    if ninja is None:
        raise BuildError("the kernels must be compiled and ninja was not found: pip install ninja")
    key = content_key(names, nvcc_version(nvcc))
    cache = cache_dir()
    cache.mkdir(parents=True, exist_ok=True)
    library = cache / f"libsage2-{key}.so"
    if not library.is_file():
        with _lock(cache / f"{key}.lock"):
            if not library.is_file():  # another process may have built it while we waited
                _build_locked(nvcc, ninja, names, cache, library)
    if out is not None:
        target = Path(out)
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_suffix(f".{os.getpid()}.tmp")
        shutil.copyfile(library, partial)
        os.replace(partial, target)
        return target
    return library


def build_prebuilt(wanted: Sequence[str], out: Path | str | None = None) -> str:
    """Build a library to ship, and say in one line what was built, where, and in how many seconds.

    wanted: none for all that kernels exist for. out: a folder (the file is named for the architectures), a file ending
    in .so, or None: beside this package's kernels, where it is preferred over a build of one's own. Raises BuildError
    as `build` does, and for another file name; OSError where it cannot be written.
    """
    names = _check_architectures(wanted or list(architectures()))
    target = HERE if out is None else Path(out)
    if target.suffix == ".so":
        pass
    elif target.suffix and not target.is_dir():
        raise BuildError(f"cannot write the library to {target}: give a folder, or a file name that ends in .so")
    else:
        target = target / f"libsage2-sm{'-'.join(str(_number(n)) for n in names)}.so"
    started = time.monotonic()
    path = build(names, target)
    return (
        f"built {path} for {', '.join('sm_' + n for n in names)}: {path.stat().st_size / 1e6:.1f} MB, "
        f"{time.monotonic() - started:.1f} s"
    )


def _sweep(cache: Path) -> None:
    """Remove the folders of builds that were killed: those in which nothing was written for an hour."""
    for folder in cache.glob("build-*"):
        with contextlib.suppress(OSError):  # another process may sweep too
            if time.time() - folder.stat().st_mtime > 3600:
                shutil.rmtree(folder, ignore_errors=True)


def _build_locked(nvcc: Path, ninja: Path, names: Sequence[str], cache: Path, library: Path) -> None:
    _sweep(cache)
    with tempfile.TemporaryDirectory(prefix="build-", dir=cache) as tmp:
        work = Path(tmp)
        (work / "build.ninja").write_text(_ninja_file(nvcc, source_dir(), names, library.name))
        run = subprocess.run([str(ninja), "-C", tmp, "-v"], capture_output=True, text=True)
        log = run.stdout + run.stderr
        (cache / f"{library.stem}.log").write_text(log)
        if run.returncode != 0:
            raise BuildError(
                f"nvcc {nvcc} failed to build for {', '.join('sm_' + n for n in names)}; the end of its "
                f"output (all of it: {cache / (library.stem + '.log')}):\n" + log[-3000:]
            )
        bad = check_log(log)
        if bad:
            raise BuildError(
                "the compiler produced slow code (spills, local memory or serialized tensor-core "
                f"instructions) with {nvcc}; use CUDA 13.0, which this source was tuned for:\n" + "\n".join(bad)
            )
        os.replace(work / library.name, library)


def find_library(architecture: str) -> Path:
    """The library to load for an architecture: the one that came with the package, if its name says that it holds it,
    else the cached or freshly built one."""
    return prebuilt(architecture) or build([architecture])
