"""Builds the CUDA library from the packaged sources, once per content, and finds a built one.

No torch, no Python ABI: plain nvcc objects linked into one shared library with the static CUDA runtime.
A prebuilt `libsage2*.so` beside this file is preferred; the wheel has one for every card. Otherwise the library is
built into a user cache under a name that hashes sources, flags and compiler: by nvcc, or without it by NVRTC around a
library for other cards (nvrtc.py). A file lock makes several processes build
once, an atomic rename makes the result appear whole or not at all, and whoever holds the lock of a build knows that
the folder of an earlier one was left by a process that was killed.

Every unit names the architectures that it is compiled for, in a line `// Architectures: 90a` or `all`; so a family of
kernels comes with its files. The newest architecture's code comes with its PTX, which the driver compiles for cards
that are newer than this library.

The build refuses machine code that is slower than it looks: register spills, local memory, or tensor-core
instructions that ptxas had to serialize.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from filelock import FileLock, Timeout

from sage_patch.errors import SagePatchError
from sage_patch.kernels import nvrtc
from sage_patch.kernels.toolchain import find_ninja, find_nvcc, link_flags, nvcc_version

HERE = Path(__file__).resolve().parent
FLAGS = ("-O3", "-std=c++17", "--compress-mode=size", "-Xcompiler=-fPIC,-fvisibility=hidden", "-Xptxas=-v")
# Of CUDA's runtime: what takes a kernel goes through late_kernels.cu.
WRAPPED = (
    "__cudaRegisterFunction",
    "__cudaGetKernel",
    "cudaLaunchKernel",
    "cudaLaunchKernelExC",
    "cudaFuncSetAttribute",
    "cudaFuncGetAttributes",
)
LINK_FLAGS = ("-shared", "-cudart=static", "-Xlinker=--exclude-libs,ALL,--strip-all",
              *(f"-Xlinker=--wrap={name}" for name in WRAPPED))  # fmt: skip
LATER = "120"  # cards newer than every architecture here run its PTX
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
    targets = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in taken]
    return targets + [f"-gencode=arch=compute_{a},code=compute_{a}" for a in taken if a == LATER]


def cache_dir() -> Path:
    """Where built libraries, measured crossovers and converted models are kept: $SAGE_PATCH_CACHE, or sage_patch in
    the user's cache folder."""
    given = os.environ.get("SAGE_PATCH_CACHE")
    return Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "sage_patch"


def prebuilt(architecture: str) -> Path | None:
    """A library beside this file that holds an architecture, such as libsage2-sm90-100.so; one whose name says nothing
    holds what it can. Of several, the one that holds the fewest: one built here is preferred to the wheel's."""
    found = []
    for path in sorted(HERE.glob("libsage2*.so")):
        name = re.fullmatch(r"libsage2-sm([\d-]+)", path.stem)
        held = name[1].split("-") if name else [architecture]
        if architecture in held:
            found.append((len(held), path))
    return min(found)[1] if found else None


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
    given = [os.environ.get(name) for name in ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")]  # nvcc reads them
    digest = hashlib.sha256(repr((tuple(architectures), FLAGS, LINK_FLAGS, version, given)).encode())
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
        f"rule link\n  command = {nvcc} {everything} {' '.join((*LINK_FLAGS, *link_flags(nvcc)))} $in -o $out",
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


def build(architectures: Sequence[str], out: Path | str | None = None) -> Path:
    """Build (or find in the cache) the library for these architectures. `out`: also copy it there."""
    names = _check_architectures(architectures)
    if sys.platform != "linux":
        raise BuildError(f"the kernels can be compiled on Linux, not on {sys.platform}; there they compute on a CPU")
    nvcc = find_nvcc()
    if nvcc is None:
        raise BuildError(
            f"the kernels for {', '.join('sm_' + n for n in names)} must be compiled and no nvcc was found "
            "(looked in $CUDA_HOME, $PATH, /usr/local/cuda and the nvidia packages of this Python). "
            "Install the Linux wheel, which holds compiled kernels, or a compiler: pip install 'sage-patch[build]', or "
            "the CUDA toolkit 13 (or 12.9)."
        )
    ninja = find_ninja()
    if ninja is None:
        raise BuildError("the kernels must be compiled and ninja was not found: pip install ninja")
    key = content_key(names, nvcc_version(nvcc))
    cache = cache_dir()
    cache.mkdir(parents=True, exist_ok=True)
    library = cache / f"libsage2-{key}.so"
    if not library.is_file():
        with FileLock(cache / f"{key}.lock"):
            if not library.is_file():  # another process may have built it while we waited
                _sweep(cache)
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
    """Remove what killed builds left: folders and files whose build's lock nobody holds."""
    for left in cache.glob("build-*"):
        lock = cache / f"{left.name.split('-')[1]}.lock"
        with contextlib.suppress(Timeout), FileLock(lock, blocking=False):
            shutil.rmtree(left, ignore_errors=True)


def _build_locked(nvcc: Path, ninja: Path, names: Sequence[str], cache: Path, library: Path) -> None:
    what = _words(names)
    with tempfile.TemporaryDirectory(prefix=f"build-{library.stem.removeprefix('libsage2-')}-", dir=cache) as tmp:
        work = Path(tmp)
        (work / "build.ninja").write_text(_ninja_file(nvcc, source_dir(), names, library.name))
        status, log = _run_with_progress([str(ninja), "-C", tmp, "-v"], f"compiling {what}, once, with {nvcc}")
        (work / "log").write_text(log)
        os.replace(work / "log", cache / f"{library.stem}.log")
        if status != 0:
            raise BuildError(
                f"nvcc {nvcc} failed to build {what}; the end of its "
                f"output (all of it: {cache / (library.stem + '.log')}):\n" + log[-3000:]
            )
        bad = check_log(log)
        if bad:
            raise BuildError(
                "the compiler produced slow code (spills, local memory or serialized tensor-core "
                f"instructions) with {nvcc}; use CUDA 13.0, which this source was tuned for:\n" + "\n".join(bad)
            )
        os.replace(work / library.name, library)


def _words(names: Sequence[str]) -> str:
    return f"the CUDA kernels for {', '.join('sm_' + n for n in names)}"


def _run_with_progress(command: Sequence[str], what: str) -> tuple[int, str]:
    """(exit status, output) of a ninja command, with its progress. Does not outlive this process's Ctrl-C."""
    lines = []
    with (
        _progress(what) as at,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process,
    ):
        assert process.stdout is not None
        try:
            for line in process.stdout:
                lines.append(line)
                if done := re.match(r"\[(\d+)/(\d+)\]", line):
                    at(int(done[1]), int(done[2]))
        except BaseException:
            process.terminate()
            raise
    return process.returncode, "".join(lines)


@contextlib.contextmanager
def _progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """Say on stderr what is done inside, how far it is (by the function given: parts done, of how many), and how long
    it took: a first call takes a minute here, and a silent minute looks like a hang."""
    started, overwrite = time.monotonic(), sys.stderr.isatty()

    def at(done: int, of: int) -> None:
        if overwrite:
            seconds = time.monotonic() - started
            print(f"\rsage_patch: {done} of {of} files, {seconds:.0f} s", end="", file=sys.stderr, flush=True)

    print(f"sage_patch: {what} ...", file=sys.stderr, flush=True)
    yield at
    end = f"sage_patch: that took {time.monotonic() - started:.0f} s"
    print(f"\r{end}        " if overwrite else end, file=sys.stderr, flush=True)


def build_late(architecture: str, host: Path, compiler: Path) -> Path:
    """A copy of a library for other cards, with the kernels for this architecture beside it, compiled by NVRTC
    (nvrtc.py) or found in the cache. Raises BuildError."""
    (name,) = _check_architectures([architecture])
    what = f"{_words([name])}, once, with {compiler}"
    key = content_key([name], f"nvrtc {nvrtc.version(compiler)} {hashlib.sha256(host.read_bytes()).hexdigest()}")
    cache = cache_dir()
    cache.mkdir(parents=True, exist_ok=True)
    library = cache / f"libsage2-{key}.so"
    with FileLock(cache / f"{key}.lock"):
        if library.is_file():
            return library
        _sweep(cache)
        with tempfile.TemporaryDirectory(prefix=f"build-{key}-", dir=cache) as tmp:
            images = Path(tmp) / "images"
            images.mkdir()
            sources = [source_dir() / unit for unit, mark in units().items() if _targets(mark, [name])]
            sources = [source for source in sources if nvrtc.has_kernels(source)]
            logs = []
            try:
                with _progress(f"compiling {what}") as at:
                    for log in nvrtc.compile_units(compiler, sources, name, images):
                        logs.append(log)
                        at(len(logs), len(sources))
            except RuntimeError as error:
                raise BuildError(f"{compiler} failed to build {what}:\n{error}") from None
            if bad := check_log("\n".join(logs)):
                raise BuildError(f"{compiler} produced slow code (spills, local memory):\n" + "\n".join(bad))
            shutil.rmtree(library.with_suffix(""), ignore_errors=True)  # of a process killed between the next two
            os.replace(images, library.with_suffix(""))
            shutil.copyfile(host, Path(tmp) / "host")
            os.replace(Path(tmp) / "host", library)
    return library


def find_library(architecture: str) -> Path:
    """The library to load for an architecture: the one that came with the package, if its name says that it holds it,
    else one of the cache: compiled by nvcc, or where there is none, by NVRTC around a library for other cards."""
    found = prebuilt(architecture)
    if found is None and find_nvcc() is None:
        host, compiler = next(iter(sorted(HERE.glob("libsage2*.so"))), None), nvrtc.find_library()
        if host is not None and compiler is not None:
            return build_late(architecture, host, compiler)
    return found or build([architecture])
