"""The commands about kernels and cards: bench, build, env."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from sage_patch.terminal import clean_errors, command_line, console_of, output_folder, progress_on, say


def bench(
    preset: Annotated[
        str, typer.Option(help="kernels, lengths, cudnn_fp8, models, smoke.  [default: kernels, or all given below]")
    ] = "",
    head_dims: Annotated[str, typer.Option(metavar="D,...", help="Head dimensions, up to 256.")] = "",
    lengths: Annotated[str, typer.Option(metavar="N,...", help="Sequence lengths.")] = "",
    masks: Annotated[str, typer.Option(metavar="MASK,...", help="full, causal")] = "full,causal",
    recipes: Annotated[
        str, typer.Option(metavar="RECIPE,...", help="Recipes that a kernel computes, and variants of them.")
    ] = "qk_int8_pv_fp8,qk_int8_pv_fp16",
    batch: Annotated[int, typer.Option(min=0, help="0: as many as make batch x heads 128, fewer above 8192.")] = 0,
    heads: Annotated[int, typer.Option(min=0, help="Query heads; 0: 32.")] = 0,
    kv_heads: Annotated[int, typer.Option(min=0, help="Key and value heads; 0: as many as query heads.")] = 0,
    peers: Annotated[
        str, typer.Option(metavar="NAME,...", help="Others to time, where installed; none.  [default: all]")
    ] = "",
    budget: Annotated[
        float, typer.Option("--budget", metavar="SECONDS", help="Leave shapes out, the least important first.")
    ] = 300.0,
    crossover: Annotated[
        bool, typer.Option("--crossover", help="Measure from which length quantizing pays on this card.")
    ] = False,
    table: Annotated[
        Path | None, typer.Option(help="Write the card's crossover lengths here, not into the user's cache.")
    ] = None,
    gate: Annotated[
        Path | None, typer.Option(help="A bench.json: fail where a ratio to a peer is lower than there.")
    ] = None,
    gate_percent: Annotated[float, typer.Option(min=0, help="By how much it may be lower.")] = 5.0,
    output: Annotated[
        Path | None, typer.Option("--output", "--out", help="Folder for bench.json and the like; --share: a file.")
    ] = None,
    plot: Annotated[bool, typer.Option(help="Draw bench.png.")] = True,
    share: Annotated[bool, typer.Option("--share", help="Write a small file for others (docs/cards.md).")] = False,
    read: Annotated[Path | None, typer.Option(metavar="FILE", help="Check and print a file of --share.")] = None,
) -> None:
    """Time the compiled kernels on this GPU, as a burst and sustained, beside other attention kernels."""
    if share or read is not None:
        _share(read, output)
        return
    with clean_errors():
        from sage_patch.evaluation.bench import command, measure, plans
        from sage_patch.evaluation.bench import gate as gates

        plan_ = plans.plan(
            preset_name=preset,
            head_dims=plans.numbers("--head-dims", head_dims),
            lengths=plans.numbers("--lengths", lengths),
            masks=masks.split(","),
            heads={"batch": batch, "num_heads": heads, "num_kv_heads": kv_heads},
            recipes=plans.names(recipes),
            peers=peers.split(",") if peers else [],
            is_crossover=crossover,
            seconds=budget,
            note={"command": command_line()},
        )
        recorded = gates.read(gate) if gate is not None else None
        measure.require_gpu()
        folder = output_folder(output) if output is not None else None
        console = console_of()
        with progress_on(console, loads_models=False) as progress:
            result = measure.run(plan_, progress, say)
        command.show_and_write(result, plan_, console, say, folder, table, plot)
        if recorded is not None and not command.passes(result, recorded, gate_percent, say):
            raise typer.Exit(1)


def _share(read: Path | None, output: Path | None) -> None:
    """bench --share and bench --read."""
    with clean_errors():
        from sage_patch.evaluation.bench import share as sharing
        from sage_patch.evaluation.tables import show

        console = console_of()
        with progress_on(console, loads_models=False) as progress:
            found, path = sharing.run(read, output, progress)
        show([sharing.share_table(found)], console)
        if path is not None:
            say(f"wrote {path}")


def build(
    arch: Annotated[
        list[str] | None, typer.Option(metavar="CC", help="Compute capability, such as 90; may be given several times.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="A folder or a .so file.  [default: beside the package, where it is preferred]")
    ] = None,
) -> None:
    """Compile the CUDA kernels into one library, for a wheel or a machine without nvcc."""
    with clean_errors():
        from sage_patch.kernels.build import build_prebuilt

        typer.echo(build_prebuilt(arch or [], out))


def env(
    json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print versions and devices, and test the numerics of every recipe on every device."""
    with clean_errors():
        from sage_patch.evaluation.environment import environment, kernels, self_test

        facts: dict[str, Any] = environment() | {"self_test": self_test()}
        facts["kernels"] = kernels()  # after the test, which loads them
        if json_:
            typer.echo(json.dumps(facts, indent=1))
        else:
            _print_environment(facts)
        if any(t["result"] == "wrong" for t in facts["self_test"]):
            raise typer.Exit(1)


def _print_environment(facts: dict[str, Any]) -> None:
    from sage_patch.evaluation.tables import Table, show

    cpu, cuda = facts["cpu"], facts["cuda"]
    rows = [(name, version or "not installed") for name, version in facts["packages"].items()]
    rows += [("python", facts["python"]), ("system", facts["system"])]
    rows += [("cpu", f"{cpu['name']}, {cpu['cores']} cores, torch uses {cpu['threads']}")]
    rows += [("cuda", cuda["version"] or "this torch is built without it")]
    rows += [
        (f"cuda:{i}", f"{d['name']}, sm_{d['capability'].replace('.', '')}, {d['memory_gib']} GiB")
        for i, d in enumerate(cuda["devices"])
    ]
    held = facts["kernels"]
    rows += [("nvcc", held["nvcc"] or "not found"), ("ninja", held["ninja"] or "not found")]
    for found in held["devices"]:
        none = "no kernels for this card: its calls run exact"
        rows += [
            (f"{found['device']} kernels", f"{found['backend']}, {found['library']}" if found["backend"] else none)
        ]
    rows += list(facts["variables"].items())
    tests = [
        (
            t["device"],
            t["recipe"],
            "" if t["error"] is None else f"{t['error']:.5f}",
            "none" if t["bound"] is None else f"{t['bound']:g}",
            t["result"],
        )
        for t in facts["self_test"]
    ]
    show(
        [
            Table("Environment", ("<what", "<value"), tuple(rows)),
            Table(
                "Self-test: relative L1 error against float64",
                ("<device", "<recipe", "error", "bound", "<result"),
                tuple(tests),
            ),
        ],
        console_of(),
    )
