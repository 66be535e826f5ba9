"""``pyro-dropout reproduce``, ``datasets`` and ``info``: experiments, their data, and installed versions."""

import ast
import platform
import runpy
import sys
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from pyro_dropout.cli import options
from pyro_dropout.cli.terminal import PROGRAM, answer

REPRODUCE_HELP = (
    "Run one of the experiments; without a name, list them."
    "\n\nOptions after the name are passed to the experiment. The scripts are in the folder [bold]models[/] of the"
    " repository." + options.examples("reproduce", "reproduce co2 --quick", "reproduce uci --help")
)
DATASETS_HELP = (
    "List the experiments' data sets and their sources, or download them."
    "\n\nThe experiments read the folder that PYRO_DROPOUT_DATA names. If it is not set, they use data that are bundled"
    " with the package or made by formulas."
    + options.examples("datasets", "datasets --download data --only yacht,mnist")
)
INFO_HELP = (
    "Print what a report of an error needs: the installed versions, the compiler, the default device and the threads."
    + options.examples("info", "info --json")
)


def reproduce(
    name: Annotated[str | None, typer.Argument(help="Name of the experiment.")] = None,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[EXPERIMENT OPTIONS]...", help="Options of the experiment, such as --quick."),
    ] = None,
) -> None:
    """Run one of the experiments; without a name, list them."""
    from pyro_dropout.errors import PyroDropoutError

    found = _scripts()
    if name is None:
        width = max(map(len, found))
        about = {each: ast.get_docstring(ast.parse(path.read_text("utf-8"))) or "" for each, path in found.items()}
        print("\n".join(f"{each.ljust(width)}  {text.splitlines()[0]}" for each, text in about.items()))
        return
    if name not in found:
        raise PyroDropoutError(f"unknown experiment {name!r}; choose from {', '.join(found)}.")
    runpy.run_path(str(found[name]))["main"](list(arguments or []))


def _scripts() -> dict[str, Path]:
    """Return the experiments by name, from ``models`` next to the package or in the working directory.

    ``import experiments`` then finds the package next to them, as when Python runs a script.
    """
    from pyro_dropout.errors import PyroDropoutError

    for folder in (Path(__file__).parents[2] / "models", Path("models")):
        if (folder / "experiments" / "experiment.py").is_file():
            if str(folder.resolve()) not in sys.path:
                sys.path.append(str(folder.resolve()))
            return {path.stem: path for path in sorted(folder.glob("*.py"))}
    raise PyroDropoutError(
        "the scripts of the experiments are not installed with the package: they are in the folder 'models' of its"
        " repository. Run the command from the root of a checkout."
    )


def datasets(
    download: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Download all available data into this folder.")
    ] = None,
    only: Annotated[list[str] | None, typer.Option(metavar="NAMES", help="Download only these: a,b,c.")] = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """List the experiments' data sets and their sources, or download them."""
    _scripts()
    collection, fetching = (import_module(f"experiments.{name}") for name in ("collection", "download"))
    if download is None:
        if only is not None:
            raise options.refusal("--only", "requires --download FOLDER.")
        rows = [collection.described(name) for name in ("co2", "solar", *collection.UCI_NAMES, "mnist")]
        lines = [f"{name:<12} {size:<34} {found}" for name, size, found in [("name", "size", "found"), *rows]]
        answer({"datasets": [dict(zip(("name", "size", "found"), row, strict=True)) for row in rows]}, as_json, lines)
        return
    if download.exists() and not download.is_dir():
        raise options.refusal("--download", f"{str(download)!r} is a file.")
    new = fetching.download(download, options.listed(only) or None, progress=not quiet)
    said = f"{len(new)} files downloaded; the rest already exist. To use them: export {collection.VARIABLE}={download}"
    answer({"folder": download, "fetched": [str(path) for path in new]}, as_json, [said, fetching.NOT_FETCHED])


def info(as_json: options.Json = False) -> None:
    """Print what a report of an error needs: versions, compiler and device."""
    import torch

    from pyro_dropout.engines.in_c import compiler

    place = options.place("auto")
    device = "cpu (--device mps for the GPU)" if torch.backends.mps.is_available() else "cpu"
    facts: dict[str, object] = {
        "pyro_dropout": version("pyro-dropout"),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    facts |= {"pyro": version("pyro-ppl"), "arviz": version("arviz"), "threads": torch.get_num_threads()}
    facts["compiler"] = " ".join(compiler()) or "none, so that steps are not written as C"
    facts["device"] = f"cuda ({torch.cuda.get_device_name(place)})" if place.type == "cuda" else device
    lines = [f"{name:<13} {what}" for name, what in facts.items()]
    answer(facts, as_json, [*lines, "", f"To compare posterior approximations: {PROGRAM} compare --help"])
