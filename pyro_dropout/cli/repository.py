"""``pyro-dropout reproduce``, ``datasets`` and ``info``: the experiments, their data, and what is installed here."""

import platform
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer

from pyro_dropout.cli import options
from pyro_dropout.cli.terminal import PROGRAM, answer

FLOORS = (
    "mathematics",
    "generative",
    "guides",
    "training",
    "prediction",
    "judging",
    "references",
    "tables",
    "datasets",
    "comparison",
    "sklearn",
    "cli",
)

REPRODUCE_HELP = (
    "Run one of the experiments with options of its own; without a name, list them."
    "\n\nThe scripts live in the folder [bold]models[/] of the repository."
    + options.examples("reproduce", "reproduce co2 --quick", "reproduce uci --help")
)
DATASETS_HELP = (
    "List the experiments' data and where they are found, or download them."
    "\n\nData come from the folder that PYRO_DROPOUT_DATA names; without it they are bundled with the package or made"
    " by it." + options.examples("datasets", "datasets --download data --only yacht,mnist")
)
INFO_HELP = (
    "Say what is installed here: versions, the device that commands use by default, threads, the parts of the library."
    + options.examples("info", "info --json")
)


def reproduce(
    name: Annotated[str | None, typer.Argument(help="Of the experiment.")] = None,
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[OPTIONS OF ITS OWN]...", help="Such as --quick.")
    ] = None,
) -> None:
    """Run one of the experiments with options of its own; without a name, list them."""
    from pyro_dropout.cli.scripts import about, scripts
    from pyro_dropout.cli.scripts import reproduce as run

    if name is not None:
        run(name, arguments or [])
        return
    found = scripts()
    width = max(map(len, found))
    print("\n".join(f"{name.ljust(width)}  {about(path)}" for name, path in found.items()))


def datasets(
    download: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Fetch what can be fetched into this folder.")
    ] = None,
    only: Annotated[list[str] | None, typer.Option(metavar="NAMES", help="Fetch only these: a,b,c.")] = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """List the experiments' data and where they are found, or download them."""
    from pyro_dropout.cli.scripts import beside_the_scripts

    collection, fetching = beside_the_scripts("collection"), beside_the_scripts("download")
    names = options.listed(only) or None
    if download is None:
        if names is not None:
            raise typer.BadParameter("it goes with --download FOLDER.", param_hint="'--only'")
        rows = [_described(collection, name) for name in ("co2", "solar", *collection.UCI_NAMES, "mnist")]
        shown = [("name", "size", "found"), *rows]
        widths = [max(len(row[k]) for row in shown) for k in range(2)]
        lines = [f"{a.ljust(widths[0])}  {b.ljust(widths[1])}  {c}" for a, b, c in shown]
        answer({"datasets": [dict(zip(shown[0], row, strict=True)) for row in rows]}, as_json, lines)
        return
    for name in names or ():
        if name not in fetching.DOWNLOADS:
            raise typer.BadParameter(f"{name!r} is not among {', '.join(fetching.DOWNLOADS)}.", param_hint="'--only'")
    if download.exists() and not download.is_dir():
        raise typer.BadParameter(f"{str(download)!r} is a file.", param_hint="'--download'")
    new = fetching.download(download, names, progress=not quiet)
    said = f"{len(new)} files fetched, the others were there. To use them: export {collection.VARIABLE}={download}"
    answer({"folder": download, "fetched": [str(path) for path in new]}, as_json, [said, fetching.NOT_FETCHED])


def _described(collection: Any, name: str) -> tuple[str, str, str]:
    """Return a data set's name, size and source; what is wrong with it, where it cannot be read."""
    from pyro_dropout.mathematics.errors import PyroDropoutError

    try:
        if name in collection.UCI_NAMES:
            table = collection.uci(name)
            size = f"{len(table.x)} rows, {table.x.shape[1]} inputs, {len(table.train_rows)} splits"
            return name, size, table.source
        if name == "mnist":
            images = collection.mnist()
            return name, f"{len(images.x)} + {len(images.test_x)} images", images.source
        series = collection.co2_paper() if name == "co2" else collection.solar()
        return name, f"{len(series.x)} + {len(series.test_x)} points", series.source
    except PyroDropoutError as mistake:
        return name, "", f"not readable: {mistake}"


def info(as_json: options.Json = False) -> None:
    """Say what is installed here."""
    facts = {**_versions(), "floors": {floor: _modules(floor) for floor in FLOORS}}
    answer(facts, as_json, [report()])


def report() -> str:
    """Return the whole account: versions first, then the floors, then where to go on.

    Example:
        >>> report().splitlines()[0].split()[0]
        'pyro_dropout'
    """
    versions = {name: str(what) for name, what in _versions().items()}
    floors = {floor: f"{len(_modules(floor))} modules" for floor in FLOORS}
    lines = [f"{name:<13} {what}" for name, what in (versions | floors).items()]
    lines.insert(len(versions), "")
    return "\n".join([*lines, "", f"To compare posterior approximations: {PROGRAM} compare --help"])


def _versions() -> dict[str, Any]:
    import torch

    return {
        "pyro_dropout": version("pyro-dropout"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "pyro": version("pyro-ppl"),
        "arviz": version("arviz"),
        "device": _device(),
        "threads": torch.get_num_threads(),
    }


def _device() -> str:
    """Return where commands compute unless --device says otherwise, in words."""
    import torch

    place = options.place("auto")
    if place.type == "cuda":
        return f"cuda ({torch.cuda.get_device_name(place)})"
    return "cpu (--device mps for the GPU)" if torch.backends.mps.is_available() else "cpu"


def _modules(floor: str) -> list[str]:
    folder = Path(__file__).parents[1] / floor
    files = (path.relative_to(folder).with_suffix("") for path in folder.rglob("*.py"))
    return sorted(".".join(path.parts) for path in files if not path.name.startswith("_"))
