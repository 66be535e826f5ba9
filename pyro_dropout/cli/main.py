"""The command ``pyro-dropout``: its subcommands, exit codes and error messages.

Exit codes: 0 success; 1 nothing could be computed; 2 invalid input; 130 interrupted; 143 stopped by SIGTERM.
"""

import errno
import logging
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from pyro_dropout.cli import benchmark as cli_benchmark
from pyro_dropout.cli import compare as cli_compare
from pyro_dropout.cli import fit as cli_runs
from pyro_dropout.cli import options as cli_options
from pyro_dropout.cli import predict as cli_predict
from pyro_dropout.cli import repository as cli_data
from pyro_dropout.cli.terminal import PROGRAM, Terminated, complain, plain_warnings, terminable
from pyro_dropout.training.checkpoints.safe_files import FULL, MAKE_ROOM

HELP = (
    "Compare posterior approximations of neural networks, fit one, and predict with it."
    "\n\nExit codes: 0 success; 1 nothing could be computed; 2 invalid input, with one line on stderr; 130 interrupted;"
    " 143 stopped by SIGTERM."
    + cli_options.examples(
        "compare", "fit houses.csv --target price --out run", "predict run new.csv --plot predictions.png", "resume run"
    )
)


class Plain:
    """A command whose flags show no type: Typer would write <bool> behind each, that of --help included."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, as Typer shows them."""
        found: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for each in found:
            if getattr(each, "is_flag", False):
                each.metavar = ""
        return found


class Command(Plain, TyperCommand):
    """A command."""


class Commands(Plain, TyperGroup):
    """The command group; errors are printed as one line without a traceback."""

    def invoke(self, ctx: Any) -> object:
        """Run a command."""
        try:
            with plain_warnings():
                return super().invoke(ctx)
        except KeyboardInterrupt as stop:
            complain(f"interrupted{stop.args[0] if stop.args else '; nothing was written.'}")
            raise typer.Exit(130) from None
        except OSError as mistake:
            if mistake.errno == errno.EPIPE:
                raise
            said = f"{mistake.filename}: {mistake.strerror}" if mistake.filename else str(mistake)
            complain(f"{said}. {MAKE_ROOM}." if mistake.errno in FULL else said)
            raise typer.Exit(2) from None
        except (typer.Exit, typer.Abort):  # these are RuntimeErrors
            raise
        except (ValueError, MemoryError, RuntimeError) as mistake:
            from torch import OutOfMemoryError

            from pyro_dropout.errors import DivergedError, PyroDropoutError

            said, code = str(mistake), 1
            if isinstance(mistake, MemoryError | OutOfMemoryError) or "can't allocate memory" in said:  # on the CPU
                said = said or "out of memory; use fewer --samples, or mini-batches (--batch-size)."
            elif isinstance(mistake, PyroDropoutError):
                code = 1 if isinstance(mistake, DivergedError) else 2
            else:  # a bug, whose traceback is shown
                raise
            complain(said)
            raise typer.Exit(code) from None

    def main(self, args: Sequence[str] | None = None, *rest: Any, standalone_mode: bool = True, **more: Any) -> object:
        """Run with these arguments and exit with the code; with ``standalone_mode=False``, return it."""
        # torch reads this on import, which no command has done yet. Threads that spin at the end of every short loop
        # take CPU time from each other and from other programs: on a busy machine that doubled the time of a step.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        # On machines without a GPU it warns about CUDA's folder, which is irrelevant here.
        logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
        given = list(sys.argv[1:] if args is None else args) or ["--help"]
        more["standalone_mode"] = False
        try:
            with terminable():
                code = super().main(given, *rest, **more)
        except Terminated as stop:
            complain("stopped by SIGTERM before there was anything to keep. The same command starts again.")
            code = stop.code
        except Exception as mistake:
            # A usage error; the module of its class differs between versions.
            if not hasattr(mistake, "format_message"):
                raise
            complain(mistake.format_message())
            code = 2
        if standalone_mode:
            sys.exit(code or 0)
        return code or 0


app = typer.Typer(
    cls=Commands,
    name=PROGRAM,
    help=HELP,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)


def _print_version(asked: bool) -> bool:
    if asked:
        print(f"{PROGRAM} {version('pyro-dropout')}")
        raise typer.Exit
    return asked


@app.callback()
def _root(
    show_version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Take the options that stand before a command."""


for _command, _help in (
    (cli_compare.compare, cli_compare.HELP),
    (cli_benchmark.benchmark, cli_benchmark.HELP),
    (cli_runs.fit, cli_runs.FIT_HELP),
    (cli_predict.predict, cli_predict.HELP),
    (cli_runs.resume, cli_runs.RESUME_HELP),
    (cli_data.reproduce, cli_data.REPRODUCE_HELP),
    (cli_data.datasets, cli_data.DATASETS_HELP),
    (cli_data.info, cli_data.INFO_HELP),
):
    # The options of an experiment stand after its name, and are its own.
    _how = {"allow_interspersed_args": False} if _command is cli_data.reproduce else {}
    app.command(cls=Command, help=_help, context_settings=_how)(_command)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    Example:
        >>> from pyro_dropout.cli.main import main
        >>> main(["info", "--json"])  # doctest: +ELLIPSIS
        {"pyro_dropout": ...
        0
    """
    code: int = app(args=None if argv is None else list(argv), prog_name=PROGRAM, standalone_mode=False)
    return code
