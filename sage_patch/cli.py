"""The command line: run | plan | evaluate | calibrate | ablate | report | bench | build | env.

Heavy imports happen inside the commands, so that --help is fast.

Exit codes: 0 done, 1 a target was missed or the self-test failed, 2 an error in what was asked for, 130 interrupted.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from sage_patch import __version__, cli_kernels
from sage_patch.terminal import clean_errors, command_line, console_of, output_folder, progress_on, say, written

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
    with clean_errors():
        from sage_patch.config import load_run_config

        loaded = load_run_config(config, set_ or [])
        folder = output_folder(output or Path(loaded.output))

        from sage_patch.evaluation import media
        from sage_patch.evaluation import run as running
        from sage_patch.evaluation.results_tables import results_tables, write_results
        from sage_patch.evaluation.tables import show

        console = console_of()
        with progress_on(console) as progress:
            results, gallery = running.run(loaded, command_line(), progress, say)
            files = media.write_gallery(folder, gallery) if gallery is not None else []
        tables = results_tables(results)
        files += write_results(folder, results, tables)  # last: where they are, all is there
        show(tables, console)
        say(f"{results['seconds']:.0f} s; wrote {written(files)}")
        _fail_if_missed(results["targets"])


@app.command()
def plan(
    config: Annotated[
        Path | None, typer.Argument(help="A run configuration (YAML), such as configs/quickstart.yaml.")
    ] = None,
    set_: Overrides = None,
    meta: Annotated[
        bool, typer.Option("--meta", help="Build the model without weights, from its config alone.")
    ] = False,
    model: Annotated[
        str | None, typer.Option(metavar="ID", help="In place of a run configuration: a hub id or folder; no weights.")
    ] = None,
    policy: Annotated[
        str, typer.Option(metavar="NAME", help="With --model: a recipe, a shipped policy such as wan, or a file.")
    ] = "sage2",
    card: Annotated[
        str | None,
        typer.Option(metavar="NAME", help='A GPU that need not be here, such as "RTX 4090": what would run there.'),
    ] = None,
) -> None:
    """Show which recipe every attention site would get, without running the model; or what a card runs."""
    with clean_errors():
        from sage_patch.cards.table import named
        from sage_patch.config import ConfigError, load_policy, load_run_config
        from sage_patch.evaluation.card_tables import card_tables, plan_on
        from sage_patch.evaluation.tables import plan_table, show

        row = named(card) if card is not None else None
        if row is not None and config is None and model is None:
            show(card_tables(row), console_of())
            return

        if (config is None) == (model is None):
            raise ConfigError(
                "plan needs a run configuration (YAML), or --model with a hub id or folder; one of the two"
            )
        loaded = load_run_config(config, [*(set_ or []), *(["model.meta=true"] if meta else [])]) if config else None
        wanted = loaded.policy.build() if loaded is not None else load_policy(policy)

        from sage_patch.evaluation.models import load_pipeline, load_text_model, load_weightless
        from sage_patch.patch import plan as resolve_plan

        console = console_of()
        with progress_on(console) as progress:
            progress("loading the model", 0, 1)
            if loaded is None:
                built = load_weightless(str(model))
            else:
                text = loaded.task.kind == "text"
                built = load_text_model(loaded.model)[0] if text else load_pipeline(loaded.model)
        rows = resolve_plan(built, wanted).rows()
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
    with clean_errors("finished parts are in results.json, and the same command continues after them"):
        from sage_patch.config import load_run_config

        loaded = load_run_config(config, set_ or [])
        folder = output_folder(output or Path(loaded.output) / "evaluate")

        from sage_patch.evaluation.evaluate import evaluate as evaluate_run
        from sage_patch.evaluation.results_tables import results_tables, write_results
        from sage_patch.evaluation.tables import show

        console = console_of()
        with progress_on(console) as progress:
            results = evaluate_run(loaded, command_line(), folder, progress, say, fresh)
        tables = results_tables(results)
        files = write_results(folder, results, tables)
        show(tables, console)
        say(f"{results['seconds']:.0f} s; wrote {written(files)}")
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
    with clean_errors("no policy was written; what was measured is kept, and the same command goes on from it"):
        from sage_patch.config import load_run_config, policy_to_yaml
        from sage_patch.evaluation.calibration.targets import parse_targets

        loaded = load_run_config(config, set_ or [])
        targets = parse_targets(target or [], loaded.task.kind)
        folder = output_folder(Path(output) if output is not None else Path(loaded.output))
        path = out if out is not None else folder / "policy.yaml"
        if path.exists():
            say(f"{path} is there already and will be replaced by the policy that is found; --out names another file")

        from sage_patch.evaluation.calibration import search as calibration
        from sage_patch.evaluation.calibration import tables as calibrate_tables
        from sage_patch.evaluation.calibration.choose import cost_model
        from sage_patch.evaluation.judge import judge_for
        from sage_patch.evaluation.tables import show

        say(
            f"budget {budget_minutes:g} min: every rung scored at every site, then at most {calibration.MAX_RUNS} full "
            f"runs; what is measured is kept in {folder / calibration.STATE_NAME}"
        )
        console = console_of()
        with progress_on(console) as progress:
            judge = judge_for(loaded, progress)
            model = cost_model(card, judge.device)
            found = calibration.calibrate(
                judge, targets, loaded.policy.build(), model, folder, deadline, command_line()
            )
        tables = calibrate_tables.calibrate_tables(found.results)
        show(tables, console)
        files = calibrate_tables.write_calibration(folder, path, found, tables, policy_to_yaml(found.policy))
        say(f"{found.results['seconds']:.0f} s; wrote {', '.join(map(str, files))}")


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
    with clean_errors():
        from sage_patch.config import load_run_config

        loaded = load_run_config(config, set_ or [])
        folder = output_folder(output or Path(loaded.output))

        from sage_patch.evaluation.ablation import ablate_model, write_ablation

        console = console_of()
        with progress_on(console) as progress:
            found = ablate_model(loaded, config.stem, progress, jobs, per_site, site, head)
        files = write_ablation(folder, command_line(), {config.stem: found})
        console.file.write(files[1].read_text())
        say(f"wrote {written(files)}")


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
    with clean_errors():
        from sage_patch.config import load_policy
        from sage_patch.evaluation.report.build import write_report

        policies = {path: load_policy(path) for path in files if path.suffix in (".yaml", ".yml")}
        results = [path for path in files if path not in policies]
        say(f"wrote {written(write_report(results, policies, output, title, command_line()))}")


app.command()(cli_kernels.bench)
app.command()(cli_kernels.build)
app.command()(cli_kernels.env)


def main() -> None:
    """The console script."""
    app()


def _fail_if_missed(targets: list[dict[str, Any]]) -> None:
    missed = [t for t in targets if not t["met"]]
    if missed:
        say(f"{len(missed)} of {len(targets)} targets missed")
        raise typer.Exit(1)
