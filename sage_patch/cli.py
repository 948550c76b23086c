"""The command line: run | plan | evaluate | calibrate | ablate | report | bench | build | env.

Heavy imports happen inside the commands, so that --help is fast.

Exit codes: 0 done, 1 a target was missed or the self-test failed, 2 an error in what was asked for, 130 interrupted.
"""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sage_patch import __version__
from sage_patch.errors import SagePatchError

if TYPE_CHECKING:
    from rich.console import Console

    from sage_patch.evaluation.judge import Progress

app = typer.Typer(
    name="sage-patch",
    help="Quantized attention for Hugging Face models: run it, plan it, see what ran where.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 done, 1 a target was missed or the self-test failed, 2 an error in what was asked for, "
    "130 interrupted.",
)

Config = Annotated[Path, typer.Argument(help="A run configuration (YAML), such as configs/quickstart.yaml.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="A.B=C", help="Override one value; may be given several times.")
]


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"sage-patch {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options that come before any command."""


@app.command()
def run(
    config: Config,
    set_: Overrides = None,
    output: Annotated[Path | None, typer.Option(help="Folder for results.json, results.md and what was drawn.")] = None,
) -> None:
    """Generate text, pictures or clips with the policy, and measure them beside the unpatched model."""
    with _clean_errors():
        from sage_patch.config import load_run_config

        loaded = load_run_config(config, set_ or [])
        folder = _folder(output or Path(loaded.output))

        from sage_patch.evaluation import media
        from sage_patch.evaluation import run as running
        from sage_patch.evaluation.results_tables import results_tables, write_results
        from sage_patch.evaluation.tables import show

        console = _console()
        with _progress(console) as progress:
            results, gallery = running.run(loaded, _command(), progress)
            files = media.write_gallery(folder, gallery) if gallery is not None else []
        tables = results_tables(results)
        files += write_results(folder, results, tables)  # last: where they are, all is there
        show(tables, console)
        _say(f"{results['seconds']:.0f} s; wrote {_written(files)}")
        _fail_if_missed(results["targets"])


@app.command()
def plan(
    config: Annotated[Path | None, typer.Argument(help="A run configuration (YAML): configs/tiny.yaml.")] = None,
    set_: Overrides = None,
    meta: Annotated[
        bool, typer.Option("--meta", help="Build the model without weights, from its config alone.")
    ] = False,
    card: Annotated[
        str | None,
        typer.Option(metavar="NAME", help='A GPU that need not be here, such as "RTX 4090": what would run there.'),
    ] = None,
) -> None:
    """Show which recipe every attention site would get, without running the model; or what a card runs."""
    with _clean_errors():
        from sage_patch.cards.table import named
        from sage_patch.config import ConfigError, load_run_config
        from sage_patch.evaluation.card_tables import card_tables, plan_on
        from sage_patch.evaluation.tables import plan_table, show

        row = named(card) if card is not None else None
        if row is not None and config is None:
            show(card_tables(row), _console())
            return
        if config is None:
            raise ConfigError("plan needs a run configuration (YAML), or --card with the name of a GPU")

        loaded = load_run_config(config, [*(set_ or []), *(["model.meta=true"] if meta else [])])

        from sage_patch.evaluation.models import load_pipeline, load_text_model
        from sage_patch.patch import plan as resolve_plan

        console = _console()
        with _progress(console) as progress:
            progress("loading the model", 0, 1)
            text = loaded.task.kind == "text"
            model = load_text_model(loaded.model)[0] if text else load_pipeline(loaded.model)
        rows = resolve_plan(model, loaded.policy.build()).rows()
        show([plan_table(rows)] if row is None else plan_on(row, rows), console)


@app.command()
def evaluate(
    config: Config,
    set_: Overrides = None,
    output: Annotated[
        Path | None, typer.Option(help="Folder for results.json and results.md.  [default: evaluate in output]")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure anew what results.json holds already.")] = False,
) -> None:
    """Quality and speed of the policy and its rivals beside the unpatched model; continues where it was stopped."""
    with _clean_errors("finished parts are in results.json, and the same command continues after them"):
        from sage_patch.config import load_run_config

        loaded = load_run_config(config, set_ or [])
        folder = _folder(output or Path(loaded.output) / "evaluate")

        from sage_patch.evaluation.evaluate import evaluate as evaluate_run
        from sage_patch.evaluation.results_tables import results_tables, write_results
        from sage_patch.evaluation.tables import show

        console = _console()
        with _progress(console) as progress:
            results = evaluate_run(loaded, _command(), folder, progress, _say, fresh)
        tables = results_tables(results)
        files = write_results(folder, results, tables)
        show(tables, console)
        _say(f"{results['seconds']:.0f} s; wrote {_written(files)}")
        _fail_if_missed(results["targets"])


@app.command()
def calibrate(
    config: Config,
    target: Annotated[
        list[str] | None,
        typer.Option(
            metavar="BOUND", help="Such as ppl<=+0.5%, kl<=0.003, psnr>=30, speed>=1.2; several may be given."
        ),
    ] = None,
    set_: Overrides = None,
    out: Annotated[
        Path | None, typer.Option(help="The policy file.  [default: policy.yaml in the output folder]")
    ] = None,
    budget_minutes: Annotated[float, typer.Option(min=0.1, help="Begin no run that would end later.")] = 15.0,
    card: Annotated[
        str,
        typer.Option(metavar="CARD", help='Whose speeds: hopper, ada, "L40S" ...  [auto: this GPU, else hopper]'),
    ] = "auto",
    output: Annotated[Path | None, typer.Option(help="Folder for calibrate.json and for what was measured.")] = None,
) -> None:
    """Find the cheapest policy that meets a target on the end result, and write it as a file."""
    deadline = time.monotonic() + 60 * budget_minutes
    with _clean_errors("no policy was written; what was measured is kept, and the same command goes on from it"):
        from sage_patch.config import load_run_config, policy_to_yaml
        from sage_patch.evaluation.calibration.targets import parse_targets

        loaded = load_run_config(config, set_ or [])
        targets = parse_targets(target or [], loaded.task.kind)
        folder = _folder(Path(output) if output is not None else Path(loaded.output))
        path = out if out is not None else folder / "policy.yaml"
        if path.exists():
            _say(f"{path} is there already and will be replaced by the policy that is found; --out names another file")

        from sage_patch.evaluation.calibration import search as calibration
        from sage_patch.evaluation.calibration import tables as calibrate_tables
        from sage_patch.evaluation.calibration.choose import cost_model
        from sage_patch.evaluation.judge import judge_for
        from sage_patch.evaluation.tables import show

        _say(
            f"budget {budget_minutes:g} min: every rung scored at every site, then at most {calibration.MAX_RUNS} full "
            f"runs; what is measured is kept in {folder / calibration.STATE_NAME}"
        )
        console = _console()
        with _progress(console) as progress:
            judge = judge_for(loaded, progress)
            model = cost_model(card, judge.device)
            found = calibration.calibrate(judge, targets, loaded.policy.build(), model, folder, deadline, _command())
        tables = calibrate_tables.calibrate_tables(found.results)
        show(tables, console)
        files = calibrate_tables.write_calibration(folder, path, found, tables, policy_to_yaml(found.policy))
        _say(f"{found.results['seconds']:.0f} s; wrote {', '.join(map(str, files))}")


@app.command()
def bench(
    head_dims: Annotated[str, typer.Option(metavar="D,...", help="Head dimensions, up to 256.")] = "128,64",
    lengths: Annotated[
        str | None, typer.Option(metavar="N,...", help="Sequence lengths.  [default: 1024 to 32768; crossover: 256 up]")
    ] = None,
    masks: Annotated[str, typer.Option(metavar="MASK,...", help="full, causal")] = "full,causal",
    recipes: Annotated[
        str, typer.Option(metavar="RECIPE,...", help="Recipes that a kernel computes.")
    ] = "qk_int8_pv_fp8,qk_int8_pv_fp16",
    batch: Annotated[int, typer.Option(min=0, help="0: as many as make batch x heads 128, fewer above 8192.")] = 0,
    heads: Annotated[int, typer.Option(min=1, help="Query heads.")] = 32,
    kv_heads: Annotated[int, typer.Option(min=0, help="Key and value heads; 0: as many as query heads.")] = 0,
    peers: Annotated[bool, typer.Option(help="Also time FlashAttention and cuDNN, where installed.")] = True,
    seconds: Annotated[float, typer.Option(help="Begin no new shape after so many seconds.")] = 600.0,
    crossover: Annotated[
        bool, typer.Option("--crossover", help="Measure from which length quantizing pays on this card.")
    ] = False,
    table: Annotated[
        Path | None, typer.Option(help="Write the card's crossover lengths here, not into the user's cache.")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "--out", help="A folder; --share: a file.")] = None,
    plot: Annotated[bool, typer.Option(help="Draw bench.png.")] = True,
    share: Annotated[bool, typer.Option("--share", help="Write a small file for others (docs/cards.md).")] = False,
    read: Annotated[Path | None, typer.Option(metavar="FILE", help="Check and print a file of --share.")] = None,
) -> None:
    """Time the compiled kernels on this GPU, beside other attention kernels."""
    if share or read is not None:
        _share(read, output)
        return
    with _clean_errors():
        from sage_patch.evaluation.bench import measure as benchmark
        from sage_patch.evaluation.bench.accumulators import measure_sums
        from sage_patch.evaluation.bench.tables import bench_tables, crossover_table, write_bench
        from sage_patch.evaluation.tables import show
        from sage_patch.kernels import crossover as crossovers

        numbers = benchmark.CROSSOVER_LENGTHS if crossover else benchmark.LENGTHS
        plan_ = benchmark.plan(
            head_dims=benchmark.numbers("--head-dims", head_dims),
            lengths=benchmark.numbers("--lengths", lengths) if lengths else numbers,
            masks=masks.split(","),
            recipes=recipes.split(","),
            heads={"batch": batch, "num_heads": heads, "num_kv_heads": kv_heads},
            peers=crossovers.EXACT_PEERS if crossover else tuple(benchmark.PEERS) if peers else (),
            seconds=seconds,
            note={"command": _command()},
        )
        benchmark.require_gpu()
        if output is not None:
            _folder(output)
        console = _console()
        with _progress(console, loads_models=False) as progress:
            result = benchmark.run(plan_, progress)
        show(bench_tables(result), console)
        if crossover:
            name, card = benchmark.crossover_card(result)
            path = table or crossovers.user_table()
            crossovers.write(path, name, card)
            show([crossover_table(name, card), *measure_sums(name, card["measured"], path)], console)
            _say(f"wrote {path}")
        if output is not None:
            _say(f"wrote {', '.join(map(str, write_bench(output, result, plot)))}")


def _share(read: Path | None, output: Path | None) -> None:
    """bench --share and bench --read."""
    with _clean_errors():
        from sage_patch.evaluation.bench import share as sharing
        from sage_patch.evaluation.tables import show

        console = _console()
        with _progress(console, loads_models=False) as progress:
            found, path = sharing.run(read, output, progress)
        show([sharing.share_table(found)], console)
        if path is not None:
            _say(f"wrote {path}")


@app.command()
def ablate(
    config: Config,
    set_: Overrides = None,
    jobs: Annotated[int, typer.Option(min=1, help="Windows, pictures or clips whose calls are captured.")] = 1,
    per_site: Annotated[int, typer.Option(min=1, help="Calls kept of a site, evenly spread over its calls.")] = 4,
    site: Annotated[
        str | None, typer.Option(help="The site to take apart.  [default: the one INT4 without smoothing damages most]")
    ] = None,
    head: Annotated[int | None, typer.Option(min=0, help="Its query head.  [default: likewise]")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "--out", help="Folder for ablation.json, ablation.md and anatomy.json.")
    ] = None,
) -> None:
    """What smoothing, scale granularity and the type of P and V buy on your model's own tensors."""
    with _clean_errors():
        from sage_patch.config import load_run_config

        loaded = load_run_config(config, set_ or [])
        folder = _folder(output or Path(loaded.output))

        from sage_patch.evaluation.ablation import ablate_model, write_ablation

        console = _console()
        with _progress(console) as progress:
            found = ablate_model(loaded, config.stem, progress, jobs, per_site, site, head)
        files = write_ablation(folder, _command(), {config.stem: found})
        console.file.write(files[1].read_text())
        _say(f"wrote {_written(files)}")


@app.command()
def report(
    files: Annotated[
        list[Path],
        typer.Argument(help="results.json, ablation.json, anatomy.json, bench.json, or a policy (YAML), in any order."),
    ],
    output: Annotated[Path, typer.Option("--output", "--out", help="Folder for index.html and report.md.")] = Path(
        "report"
    ),
    title: Annotated[str, typer.Option(help="The page's title.")] = "Quantized attention: what it costs and gains",
) -> None:
    """One page, without network, from any number of results files and policies."""
    with _clean_errors():
        from sage_patch.config import load_policy
        from sage_patch.evaluation.report.build import write_report

        policies = {path: load_policy(path) for path in files if path.suffix in (".yaml", ".yml")}
        results = [path for path in files if path not in policies]
        _say(f"wrote {_written(write_report(results, policies, output, title, _command()))}")


@app.command()
def build(
    arch: Annotated[
        list[str] | None, typer.Option(metavar="CC", help="Compute capability, such as 90; may be given several times.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="A folder or a .so file.  [default: beside the package, where it is preferred]")
    ] = None,
) -> None:
    """Compile the CUDA kernels into one library, for a wheel or a machine without nvcc."""
    with _clean_errors():
        from sage_patch.kernels.build import build_prebuilt

        typer.echo(build_prebuilt(arch or [], out))


@app.command()
def env(
    json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print versions and devices, and test the numerics of every recipe on every device."""
    with _clean_errors():
        from sage_patch.evaluation.environment import environment, self_test

        facts: dict[str, Any] = environment() | {"self_test": self_test()}
        if json_:
            typer.echo(json.dumps(facts, indent=1))
        else:
            _print_environment(facts)
        if any(t["result"] == "wrong" for t in facts["self_test"]):
            raise typer.Exit(1)


def main() -> None:
    """The console script."""
    app()


def _command() -> str:
    """This process's command line, for results."""
    return shlex.join(["sage-patch", *sys.argv[1:]])


def _folder(path: Path) -> Path:
    """The folder, made before the work and not after it. ConfigError if something else has the name."""
    from sage_patch.config import ConfigError

    if path.exists() and not path.is_dir():
        raise ConfigError(f"the output must be a folder, and {path} is a file")
    path.mkdir(parents=True, exist_ok=True)
    return path


def _fail_if_missed(targets: list[dict[str, Any]]) -> None:
    missed = [t for t in targets if not t["met"]]
    if missed:
        _say(f"{len(missed)} of {len(targets)} targets missed")
        raise typer.Exit(1)


def _written(files: list[Path]) -> str:
    """The files' names, or where they are if they are many."""
    if len(files) <= 4:
        return ", ".join(map(str, files))
    return f"{len(files)} files to {files[0].parent}, {files[-1].name} and sheet.png among them"


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
        _console(),
    )


def _console() -> Console:
    from rich.console import Console

    return Console()


def _say(text: str) -> None:
    typer.echo(text, err=True)


@contextmanager
def _progress(console: Console, loads_models: bool = True) -> Iterator[Progress]:
    """A progress bar on a terminal; elsewhere one line whenever another kind of work begins."""
    if loads_models:
        from sage_patch.evaluation.models import quiet_loading

        quiet_loading()
    if not console.is_terminal:
        seen = set()

        def line(label: str, done: int, total: int) -> None:
            kind = label.partition(",")[0]
            if kind not in seen and done < total:
                seen.add(kind)
                _say(f"{label} ..." if kind.startswith("loading") else f"{kind} ...")

        yield line
        return

    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Bars(*columns, console=console, transient=True) as bars:
        bar = bars.add_task("starting", total=1)
        yield lambda label, done, total: bars.update(bar, description=label, completed=done, total=total)


@contextmanager
def _clean_errors(interrupted: str = "nothing was written") -> Iterator[None]:
    """Errors that a person can act on become one message and exit code 2; Ctrl-C becomes 130."""
    try:
        yield
    except KeyboardInterrupt:
        _say(f"interrupted; {interrupted}")
        raise typer.Exit(130) from None
    except SagePatchError as error:  # it tells what was asked, what was found and what to do
        _say(f"error: {error}")
        raise typer.Exit(2) from None
    except OSError as error:
        _say(f"error: {error}")
        raise typer.Exit(2) from None
