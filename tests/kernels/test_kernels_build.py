"""The build, without a GPU: nothing spills or serializes, the machine code holds what it should and no more."""

from __future__ import annotations

import collections
import dataclasses
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from filelock import FileLock

from sage_patch import backends
from sage_patch.kernels import build, driver, library, toolchain
from sage_patch.recipes import UnsupportedCall
from zoo import machine_code

ROOT = Path(__file__).resolve().parents[2]
NEEDS_NVCC = pytest.mark.nvcc
NEEDS_NINJA = pytest.mark.skipif(build.find_ninja() is None, reason="no ninja")
# Instructions of the main loop (one 64 x 128 tile): budget and expected tensor-core instructions.
LOOPS = {  # head_dim of the images, FP16 PV, channels of V: budget, tensor-core instructions
    (128, 0, 128): (436, {"IGMMA.64x128x32": 4, "QGMMA.64x136x32": 4}),
    (128, 0, 96): (416, {"IGMMA.64x128x32": 3, "QGMMA.64x104x32": 4}),
    (64, 0, 64): (397, {"IGMMA.64x128x32": 2, "QGMMA.64x72x32": 4}),
    (128, 1, 128): (514, {"IGMMA.64x128x32": 4, "HGMMA.64x128x16": 8}),
    (256, 0, 128): (510, {"IGMMA.64x128x32": 14, "QGMMA.64x136x32": 4}),  # six or eight steps of 32 channels
    (64, 1, 64): (471, {"IGMMA.64x128x32": 2, "HGMMA.64x64x16": 8}),
}
# With another exponent the loop also holds the exact way and the look for a tile's least scores, which few tiles take.
MORE = {0: 0, 1: 270, 2: 180}


@pytest.fixture(scope="module")
def built() -> Path:
    """Of the wheel, for every card."""
    return machine_code.wheel_library()


@NEEDS_NVCC
def test_loads_and_says_what_it_holds(built: Path) -> None:
    lib = library._open(str(built))
    assert lib.sage2_version() == library.VERSION and lib.sage2_cuda_version() >= 12090
    assert (
        library.architectures(lib) == list(build.architectures()) == built.stem.removeprefix("libsage2-sm").split("-")
    )


@NEEDS_NVCC
def test_the_wheels_library_holds_every_card(built: Path) -> None:
    """Each unit's machine code for each architecture that it names, without local memory, and the newest one's PTX."""
    listed = machine_code.cuobjdump(built, "-lelf", "-lptx")
    held = collections.Counter(re.findall(r"(?:\.(sm_\w+)\.cubin|\.(sm_\w+\.ptx))", listed))
    want = collections.Counter({(f"sm_{name}", ""): 1 for name in build.architectures().values()})  # an empty one
    for mark in build.units().values():
        for name in build.architectures().values() if mark == ("all",) else mark:
            want[f"sm_{name}", ""] += 1
            want["", f"sm_{name}.ptx"] += name == build.LATER
    assert held == +want


@NEEDS_NVCC
def test_the_wheels_library_fits_old_systems(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script that builds it checks what it needs; an ordinary build on a new system needs more."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import wheel_library

    assert wheel_library.problems(built) == []
    monkeypatch.setattr(wheel_library, "NEWEST", {name: (2,) for name in wheel_library.NEWEST})
    monkeypatch.setattr(wheel_library, "MAY_NEED", {"libc.so.6"})
    monkeypatch.setattr(wheel_library, "LARGEST", 1000)
    said = "\n".join(wheel_library.problems(built))
    assert (
        re.search(r"needs libstdc\+\+.so.6", said)
        and "needs memcpy of GLIBC_2.14" in said
        and "1000 are wanted" in said
    )


@NEEDS_NVCC
@pytest.mark.parametrize("version", ("3.11", "3.12", "3.13", "3.14"))
def test_the_wheels_library_loads_in_every_python(built: Path, version: str) -> None:
    """With nothing but the interpreter: no torch, no site-packages."""
    python = shutil.which(f"python{version}")
    if python is None or subprocess.run([python, "-c", ""], capture_output=True).returncode:
        pytest.skip(f"no Python {version}")
    command = [python, "-I", "-S", str(ROOT / "scripts" / "load_library.py"), str(built)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert said.startswith(f"Python {version}.") and f"architectures {list(map(int, build.architectures()))}" in said


@NEEDS_NVCC
def test_exports_only_the_contract(built: Path) -> None:
    nm = shutil.which("nm")
    if nm is None:
        pytest.skip("no nm")
    out = subprocess.run([nm, "-D", "--defined-only", str(built)], capture_output=True, text=True, check=True).stdout
    names = {line.split()[-1] for line in out.splitlines()}
    header = "".join((build.source_dir() / name).read_text() for name in ("sage2.h", "sage2_pages.h"))
    assert names == set(re.findall(r"^SAGE2_API .*?(\w+)\(", header, re.MULTILINE))


def _build_in(cache: str) -> str:
    import os

    os.environ["XDG_CACHE_HOME"] = cache
    return str(build.build(["90"]))


@NEEDS_NVCC
def test_processes_build_once(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three processes, an empty cache; the compiler is a stub that counts its runs."""
    _stub_nvcc(tmp_path, f"""echo run >> {tmp_path}/runs; sleep 0.2; echo x > "$out" """)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with multiprocessing.get_context("fork").Pool(3) as pool:
        paths = pool.map(_build_in, [str(tmp_path / "cache")] * 3)
    assert len(set(paths)) == 1 and Path(paths[0]).is_file()
    compiled = [name for name, mark in build.units().items() if mark == ("all",) or "90a" in mark]
    assert (tmp_path / "runs").read_text().count("run") == len(compiled) + 1


def test_a_unit_is_compiled_for_what_it_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A second family is its files: units of one, of the other, and of all."""
    for name, mark in (("fwd_a.cu", "90a"), ("fwd_b.cu", "80 89"), ("api.cu", "all")):
        (tmp_path / name).write_text(f"// What it is.\n// Architectures: {mark}\n")
    monkeypatch.setattr(build, "source_dir", lambda: tmp_path)
    assert build.architectures() == {"80": "80", "89": "89", "90": "90a"}

    def targets(*wanted: str) -> dict[str, list[str]]:
        text = build._ninja_file(Path("nvcc"), tmp_path, build._check_architectures(wanted), "lib.so")
        held = "\\,".join(wanted)
        assert f"'-DSAGE2_ARCHITECTURES={held}' " in text
        found = re.findall(r"build (\w+)\.cu\.o: .*\n  targets = (.*)", text)
        assert f"link {' '.join(f'{unit}.cu.o' for unit, _ in found)}\n" in text
        return {unit: re.findall(r",code=(\w+)", options) for unit, options in found}

    assert targets("90") == {"fwd_a": ["sm_90a"], "api": ["sm_90a"]}
    assert targets("89") == {"fwd_b": ["sm_89"], "api": ["sm_89"]}
    everything = {"fwd_a": ["sm_90a"], "fwd_b": ["sm_80", "sm_89"], "api": ["sm_80", "sm_89", "sm_90a"]}
    assert targets("80", "89", "90") == everything
    (tmp_path / "new.cu").write_text("// no word of it\n")
    with pytest.raises(build.BuildError, match="new.cu does not say what it is compiled for"):
        build.units()


def test_the_library_is_that_of_the_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A library of the package serves what its name says it holds; another device has one built, once."""
    for name in ("90-120", "80-86-90-120"):
        (tmp_path / f"libsage2-sm{name}.so").touch()
    monkeypatch.setattr(build, "HERE", tmp_path)
    monkeypatch.setattr(build, "build", lambda architectures: Path(f"built-{'-'.join(architectures)}.so"))
    assert build.find_library("90").name == build.find_library("120").name == "libsage2-sm90-120.so"
    assert (
        build.find_library("86").name == "libsage2-sm80-86-90-120.so" and build.find_library("89").name == "built-89.so"
    )

    opened: list[str] = []
    monkeypatch.setattr(library, "_open", lambda path: opened.append(Path(path).name) or Path(path).stem)
    held = {"libsage2-sm90-120": ["90", "120"], "built-89": ["89"]}
    monkeypatch.setattr(library, "architectures", held.__getitem__)
    monkeypatch.setattr(library, "_by_architecture", {})
    monkeypatch.setattr(library, "_by_device", {})
    monkeypatch.setattr(torch.cuda, "get_device_capability", [(9, 0), (8, 9), (12, 1), (7, 5)].__getitem__)
    family = dataclasses.replace(backends.BACKENDS["sm90"], architectures={(8, 9): "89", (12, 1): "120"})
    monkeypatch.setattr(backends, "BACKENDS", {"sm90": backends.BACKENDS["sm90"], "other": family})
    found = [library.of_device(index) for index in (0, 1, 2, 0, 1, 2)]
    assert found[:3] == [("libsage2-sm90-120", 90), ("built-89", 89), ("libsage2-sm90-120", 121)] == found[3:]
    assert opened == ["libsage2-sm90-120.so", "built-89.so"]
    with pytest.raises(UnsupportedCall, match=r"cuda:3 has.* 7\.5; kernels exist for 8\.9, 9\.0, 12\.1"):
        library.of_device(3)


def test_errors_say_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(build.BuildError, match="architecture 75.*sm_90a"):
        build.build(["sm_75"])
    monkeypatch.setattr(build, "find_nvcc", lambda: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(build.BuildError, match="nvcc was found.*Install"):
        build.build(["90"])


def _stub_nvcc(folder: Path, body: str) -> None:
    """A compiler in folder/bin that does what the shell text says with the path `$out`."""
    stub = folder / "bin" / "nvcc"
    stub.parent.mkdir()
    stub.write_text(f"""#!/bin/sh
if [ "$1" = --version ]; then echo "release 0.0, V0.0.1"; exit; fi
while [ $# -gt 0 ]; do [ "$1" = -o ] && out=$2; shift; done
{body}
""")
    stub.chmod(0o755)


@NEEDS_NINJA
def test_a_killed_build_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed in the middle: no library; the next build, of whatever, removes its folder and is right."""
    cache = tmp_path / "cache"
    _stub_nvcc(tmp_path, f'if [ -e {tmp_path}/fast ]; then echo x > "$out"; else touch {tmp_path}/started; sleep 9; fi')
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    killed = multiprocessing.get_context("fork").Process(target=_build_in, args=(str(cache),))
    killed.start()
    while not (tmp_path / "started").exists():
        assert killed.is_alive()
        time.sleep(0.02)
    os.kill(killed.pid or 0, signal.SIGKILL)
    killed.join()
    folder = cache / "sage_patch"
    assert [p.name[:6] for p in folder.iterdir() if p.suffix != ".lock"] == ["build-"]
    (tmp_path / "fast").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    path = build.build(["89"])  # another library than the killed one
    assert path.read_text() == "x\n"
    assert sorted(p.suffix for p in folder.iterdir()) == [".lock", ".lock", ".log", ".so"]


def test_the_folder_of_a_running_build_stays(tmp_path: Path) -> None:
    """Its lock is held; a folder whose lock nobody holds was left, and goes. Everything else stays."""
    for name in ("build-held-1a", "build-left-2b", "libsage2-x", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "api.cu.o").write_text("x")
    with FileLock(tmp_path / "held.lock"):
        build._sweep(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_dir()) == ["build-held-1a", "libsage2-x", "other"]


@NEEDS_NINJA
def test_a_build_says_what_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    """On stderr: a first call that compiles is not silent. One that finds a library is."""
    _stub_nvcc(tmp_path, 'echo x > "$out"')
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("SAGE_PATCH_CACHE", str(tmp_path / "cache"))
    build.build(["89"])
    said = capfd.readouterr()
    assert said.out == "" and re.search(r"compiling the CUDA kernels for sm_89, once, .*\n.*that took", said.err)
    build.build(["89"])
    assert capfd.readouterr() == ("", "")


def test_a_compiler_from_pip_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip install 'sage-patch[build]': nvidia/cu13 in site-packages, the newest one; a toolkit of the machine first."""
    for release in ("cu12", "cu13"):
        packages = tmp_path / "site" / "nvidia" / release
        (packages / "lib").mkdir(parents=True)
        (packages / "lib" / "libcudart_static.a").touch()
        _stub_nvcc(packages, "")
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "path", [str(tmp_path / "nowhere"), str(tmp_path / "site")])
    monkeypatch.setattr(toolchain, "USUAL", tmp_path / "nowhere")
    found = toolchain.find_nvcc()
    assert found == tmp_path / "site" / "nvidia" / "cu13" / "bin" / "nvcc"
    assert toolchain.link_flags(found) == [f"-L{found.parents[1] / 'lib'}"]
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert toolchain.nvcc_version(found) == "0.0.1"
    _stub_nvcc(tmp_path, "")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    found = toolchain.find_nvcc()
    assert found == tmp_path / "bin" / "nvcc" and toolchain.link_flags(found) == []


def test_the_driver_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """An older driver is an error that says which one is needed; a newer one and no driver at all are not."""
    for has in (13000, 13010, 14000, None):
        monkeypatch.setattr(driver, "cuda_version", lambda has=has: has)
        driver.check(13000)
    monkeypatch.setattr(driver, "cuda_version", lambda: 12080)
    driver.check(12090)  # machine code runs on every driver of its major version
    with pytest.raises(driver.DriverError, match=r"CUDA 13.0, which needs NVIDIA driver 580.* CUDA 12.8 at most"):
        driver.check(13000)


def test_log_gate() -> None:
    assert (
        build.check_log(
            "ptxas info    : Function properties for f\n"
            "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
        )
        == []
    )
    bad = build.check_log(
        "ptxas info    : Function properties for f\n"
        "    8 bytes stack frame, 4 bytes spill stores, 4 bytes spill loads\n"
        "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized\n"
    )
    assert len(bad) == 2 and "f:" in bad[0] and "C7510" in bad[1]


@NEEDS_NVCC
def test_workspace_and_refusals(built: Path) -> None:
    lib = library._open(str(built))

    def workspace(*shape: int, pv: str = "fp8", flags: tuple[str, ...] = (), capability: int = 90) -> int:
        names = ("batch", "heads", "kv_heads", "q_len", "kv_len", "head_dim", "v_head_dim")
        facts = library.FACTS.pack(
            size=library.SIZE, capability=capability, recipe=library.PV[pv], scale=1.0,
            flags=sum(library.FLAGS[f] for f in flags), left=-1, right=-1, **dict(zip(names, shape, strict=True)),
        )  # fmt: skip
        return library.workspace_bytes(lib, facts + library.POINTERS.pack())

    shape = (4, 32, 8, 4096, 4096, 128, 128)
    for pv, per_channel in (("fp8", 2), ("fp16", 3)):
        size = workspace(*shape, pv=pv)
        images = 4 * 8 * 4096 * 128 * per_channel
        assert images <= size <= images + (1 << 20)
        assert workspace(*shape, pv=pv, flags=("INT4",)) == size
        smoothed = workspace(*shape, pv=pv, flags=("INT4", "SMOOTH_Q"))
        assert smoothed - size == 4 * 32 * 64 * (4096 + 128) * 4  # a number a key and the means, of every 64 rows
    refused: tuple[tuple[tuple[int, ...], dict, type[Exception], str], ...] = (
        ((1, 2, 2, 4, 4, 257, 257), {}, UnsupportedCall, "head_dim 257"),
        ((1, 2, 2, 4, 4, 129, 129), {"pv": "fp16"}, UnsupportedCall, "head_dim 129"),
        ((1, 2, 2, 4, 4, 129, 129), {"flags": ("INT4",)}, UnsupportedCall, "head_dim 129"),
        ((1, 2, 2, 4, 4, 192, 128), {"flags": ("SMOOTH_Q",)}, UnsupportedCall, "head_dim 192"),
        (
            (1 << 10, 1 << 10, 1, 2048, 1 << 19, 64, 64),
            {"flags": ("SMOOTH_Q",)},
            UnsupportedCall,
            "too large",
        ),
        ((1, 2, 2, 4, 4, 64, 65), {}, UnsupportedCall, "v_head_dim 65"),
        ((1, 3, 2, 4, 4, 64, 64), {}, ValueError, "multiple of kv_heads"),
        ((0, 2, 2, 4, 4, 64, 64), {}, ValueError, "positive"),
        (
            (1, 2, 2, 4, 4, 64, 64),
            {"capability": 75},
            library.KernelError,
            "7.5: this library holds kernels for 8.0, 8.6",
        ),
    )
    for shape, options, kind, message in refused:
        with pytest.raises(kind, match=message) as found:
            workspace(*shape, **options)
        assert type(found.value) is kind


@NEEDS_NVCC
def test_machine_code_of_hopper(built: Path) -> None:
    seen = set()
    for function in machine_code.functions(built, "90a").values():
        code = [(int(m[1], 16), m[2]) for m in re.finditer(r"/\*([0-9a-f]{4,})\*/\s+(.*?);\s+/\*", function)]
        assert not [t for _, t in code if re.match(r"(@!?U?P\d+ )?(LDL|STL)\b", t)], "local memory"
        name = re.search(r"attentionILi(\d+)ELb(\d)ELNS_6FamilyE(\d)ELi(\d+)ELNS_8ExponentE(\d)", function[:300])
        if name is None:
            pages = re.search(r"attendILi(\d+)ELb", function[:300])  # attention over a cache's pages
            expected = sum(LOOPS[int(pages[1]), 0, int(pages[1])][1].values()) if pages else 0
            assert sum("GMMA" in t for _, t in code) == expected
            continue
        key, family, exponent = (int(name[1]), int(name[2]), int(name[4])), int(name[3]), int(name[5])
        assert not [t for _, t in code if re.search(r"\b[IHQ]MMA\.", t)], "a tensor-core instruction of an older family"
        if family > 1:  # two copies of a tile's work: whole, and partly hidden or with changed logits
            assert sum("GMMA" in t for _, t in code) == 2 * sum(LOOPS[key][1].values())
            continue
        if family:  # rotated: the dense family's loop but for the load of Q, and all channels of Q K under a narrow V
            scores = LOOPS[(128, 0, 128) if key == (128, 0, 96) else key][1]["IGMMA.64x128x32"]
            weights = sum(n for kind, n in LOOPS[key][1].items() if kind != "IGMMA.64x128x32")
            assert sum("GMMA" in t for _, t in code) == 2 * (scores + weights)
            continue
        seen.add((key, exponent))
        index = {a: i for i, (a, _) in enumerate(code)}
        loops = []
        for i, (address, text) in enumerate(code):
            jump = re.search(r"BRA.*0x([0-9a-f]+)", text)
            if jump and int(jump[1], 16) < address and int(jump[1], 16) in index:
                body = [t for _, t in code[index[int(jump[1], 16)] : i + 1]]
                if any("IGMMA" in t for t in body):
                    loops.append(body)
        body = min(loops, key=len)
        budget, expected = LOOPS[key][0] + MORE[exponent], LOOPS[key][1]
        assert len(body) <= budget, f"main loop of {key}: {len(body)} instructions, budget {budget}"
        counts = collections.Counter(m[0] for t in body for m in [re.search(r"[IQH]GMMA\.\d+x\d+x\d+", t)] if m)
        assert dict(counts) == expected
        assert sum("VIMNMX3" in t for t in body) >= 28 and sum("MUFU.EX2" in t for t in body) == 66
        if exponent:  # a multiply-add an element, and no conversion of it
            assert sum(bool(re.match(r"IMAD R", t)) for t in body) >= 64
            assert sum("I2FP" in t for t in body) == 64 + 2 * 2 and not [t for t in body if re.search(r"\bF2I\b", t)]
    assert seen == {(key, e) for key in LOOPS for e in MORE if not (key[1] and e)}
