"""What every command does at the terminal: its messages, its progress, the folder of its output, and clean errors."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from sage_patch.errors import SagePatchError
from sage_patch.extras import needed_for

if TYPE_CHECKING:
    from rich.console import Console

    from sage_patch.evaluation.judge import Progress


def command_line() -> str:
    """This process's command line, for results."""
    return shlex.join(["sage-patch", *sys.argv[1:]])


def output_folder(path: Path) -> Path:
    """The folder, made before the work and not after it. ConfigError if something else has the name."""
    from sage_patch.config import ConfigError

    if path.exists() and not path.is_dir():
        raise ConfigError(f"the output must be a folder, and {path} is a file")
    path.mkdir(parents=True, exist_ok=True)
    return path


def written(files: list[Path]) -> str:
    """The files' names, or where they are if they are many."""
    if len(files) <= 4:
        return ", ".join(map(str, files))
    return f"{len(files)} files to {files[0].parent}, {files[-1].name} and sheet.png among them"


def console_of() -> Console:
    from rich.console import Console

    return Console()


def say(text: str) -> None:
    typer.echo(text, err=True)


@contextmanager
def progress_on(console: Console, loads_models: bool = True) -> Iterator[Progress]:
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
                say(f"{label} ..." if kind.startswith("loading") else f"{kind} ...")

        yield line
        return

    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Bars(*columns, console=console, transient=True) as bars:
        bar = bars.add_task("starting", total=1)
        yield lambda label, done, total: bars.update(bar, description=label, completed=done, total=total)


@contextmanager
def clean_errors(interrupted: str = "nothing was written") -> Iterator[None]:
    """Errors that a person can act on become one message and exit code 2; Ctrl-C becomes 130."""
    try:
        with needed_for("this command"):
            yield
    except KeyboardInterrupt:
        say(f"interrupted; {interrupted}")
        raise typer.Exit(130) from None
    except SagePatchError as error:  # it tells what was asked, what was found and what to do
        say(f"error: {error}")
        raise typer.Exit(2) from None
    except OSError as error:
        say(f"error: {error}")
        raise typer.Exit(2) from None
