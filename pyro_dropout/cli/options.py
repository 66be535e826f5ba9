"""The options that commands share, and their checks; importing this module does not import torch."""

from typing import Annotated, Any, Literal

import typer

from pyro_dropout.cli.terminal import PROGRAM
from pyro_dropout.registry import listed_guides

# Read from the source, so that --help need not import torch.
GUIDE_NAMES = tuple(entry.name for entry in listed_guides())
DEFAULT_GUIDES = tuple(entry.name for entry in listed_guides() if entry.compared)
_ALIASES = {entry.alias: entry.name for entry in listed_guides() if entry.alias}


def listed(values: list[str] | None) -> list[str]:
    """Return the names in a repeatable option whose values are comma-separated lists.

    Example:
        >>> listed(["a,b", "c"]), listed(None)
        (['a', 'b', 'c'], [])
    """
    return [name.strip() for value in values or [] for name in value.split(",") if name.strip()]


def guides_named(values: list[str] | None) -> list[str]:
    """Return the guides in ``--guides``; raise if one is unknown."""
    names = listed(values) or list(DEFAULT_GUIDES)
    return list(dict.fromkeys(checked_guide("--guides", name) for name in names))


def checked_guide(option: str, name: str) -> str:
    """Return the name of a guide that was given by name or alias, or raise an error of the command line."""
    name = _ALIASES.get(name, name)
    if name not in GUIDE_NAMES:
        raise typer.BadParameter(
            f"unknown guide {name!r}; choose from {', '.join(GUIDE_NAMES)}.", param_hint=repr(option)
        )
    return name


def place(device: str | None) -> Any:
    """Return the requested torch device after checking it; "auto" or None is a GPU if there is one, else the CPU.

    Example:
        >>> place("cpu"), place("auto") == place(None)
        (device(type='cpu'), True)
    """
    import torch

    from pyro_dropout.mathematics.checks import check_device

    if device is None or device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return check_device("--device", device)


def _positive(value: float | None) -> float | None:
    if value is not None and not 0 < value < float("inf"):
        raise typer.BadParameter(f"{value:g} is not a positive number.")
    return value


def count(value: int | None) -> int | None:
    """Return the value; raise a usage error unless it is at least 1."""
    if value is not None and value < 1:
        raise typer.BadParameter(f"{value} is not a whole number of at least 1.")
    return value


def _seed(value: int) -> int:
    if value < 0:
        raise typer.BadParameter(f"{value} is negative; a seed is a whole number of at least 0.")
    if value >= 2**32:
        raise typer.BadParameter(f"{value} is too large; a seed is a whole number below 2**32.")
    return value


def _share(value: float) -> float:
    if not 0 <= value < 1:
        raise typer.BadParameter(f"{value:g} does not lie in [0, 1).")
    return value


def _level(value: float) -> float:
    if not 0 < value < 1:
        raise typer.BadParameter(f"{value:g} does not lie strictly between 0 and 1.")
    return value


def _guide_completions(incomplete: str) -> list[str]:
    return [name for name in GUIDE_NAMES if name.startswith(incomplete)]


def _device_completions(incomplete: str) -> list[str]:
    return [name for name in ("auto", "cpu", "cuda", "mps") if name.startswith(incomplete)]


_READING, _TRAINING, _OUTPUT = "The table", "Computation", "Output"


def _option(*names: str, help: str, panel: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, **more)


Target = Annotated[
    str | None, _option(metavar="COLUMN", help="Column to predict; by default the last.", panel=_READING)
]
TaskName = Annotated[
    Literal["auto", "regression", "classification"],
    _option("--task", help="Type of the target; auto infers it from the values.", panel=_READING),
]
MissingName = Annotated[
    Literal["refuse", "drop", "mean"],
    _option(
        "--missing", help="On missing values: refuse the table, drop their rows, or fill in means.", panel=_READING
    ),
]
Categorical = Annotated[
    list[str] | None,
    _option(metavar="COLUMNS", help="Numeric columns to treat as categories: a,b,c.", panel=_READING),
]
Drop = Annotated[list[str] | None, _option(metavar="COLUMNS", help="Columns to ignore: a,b,c.", panel=_READING)]
HeldBack = Annotated[
    float, _option(metavar="SHARE", help="Fraction of the rows held back for testing.", panel=_READING, callback=_share)
]  # fmt: skip
Guides = Annotated[
    list[str] | None,
    _option(
        metavar="NAMES",
        help=f"Comma-separated, from {', '.join(GUIDE_NAMES)}; by default {', '.join(DEFAULT_GUIDES)}.",
        panel=_TRAINING,
        autocompletion=_guide_completions,
    ),
]
Guide = Annotated[
    str,
    _option(
        metavar="NAME", help=f"One of {', '.join(GUIDE_NAMES)}.", panel=_TRAINING, autocompletion=_guide_completions
    ),
]
Seeds = Annotated[int, _option(metavar="N", callback=count, help="Training runs per guide.", panel=_TRAINING)]
Width = Annotated[int, _option(metavar="N", callback=count, help="Hidden units of the network.", panel=_TRAINING)]
Steps = Annotated[int, _option(metavar="N", callback=count, help="Steps per training run.", panel=_TRAINING)]
LearningRate = Annotated[
    float, _option("--lr", metavar="RATE", help="Learning rate.", panel=_TRAINING, callback=_positive)
]
BatchSize = Annotated[
    int | None,
    _option(metavar="N", callback=count, help="Rows in a mini-batch; by default all.", panel=_TRAINING),
]
Seed = Annotated[int, _option(metavar="N", callback=_seed, help="Seed of all random numbers.", panel=_TRAINING)]
Device = Annotated[
    str | None,
    _option(
        metavar="NAME",
        help="Device: cpu, cuda, cuda:1, mps or auto (cuda if there is a GPU, else cpu).",
        panel=_TRAINING,
        autocompletion=_device_completions,
    ),
]
NoCompile = Annotated[
    bool, _option("--no-compile", help="Skip compilation: starts sooner, runs slower.", panel=_TRAINING)
]
Every = Annotated[
    int | None,
    _option(metavar="N", callback=count, help="Steps between checkpoints; by default one per minute.", panel=_TRAINING),
]
Samples = Annotated[int, _option(metavar="N", callback=count, help="Weight draws per prediction.", panel=_TRAINING)]
Level = Annotated[float, _option(metavar="P", help="Probability of the interval.", panel=_OUTPUT, callback=_level)]
Json = Annotated[bool, _option("--json", help="Print one JSON object and nothing else.", panel=_OUTPUT)]
Quiet = Annotated[bool, _option("--quiet", "-q", help="Hide the progress bar.", panel=_OUTPUT)]


def examples(*lines: str) -> str:
    """Return shell commands as the end of a help text, one per line."""
    return "\n\n\b\nExamples:\n" + "\n".join(f"  {PROGRAM} {line}" for line in lines)
