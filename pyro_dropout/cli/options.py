"""The options that commands share, and their checks; importing this module does not import torch."""

import csv
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from pyro_dropout.cli.terminal import PROGRAM
from pyro_dropout.registry import listed_guides
from pyro_dropout.tabular.limits import LARGEST, SEEDS

if TYPE_CHECKING:
    import torch

# Read from the source, so that --help need not import torch.
GUIDE_NAMES = tuple(entry.name for entry in listed_guides())
DEFAULT_GUIDES = tuple(entry.name for entry in listed_guides() if entry.compared)
_ALIASES = {entry.alias: entry.name for entry in listed_guides() if entry.alias}
HAS_MEMBERS = {entry.name for entry in listed_guides() if "members" in entry.options}


def listed(values: list[str] | None) -> list[str]:
    """Return the names in a repeatable option whose values are comma-separated lists; names with commas are quoted.

    Example:
        >>> listed(["a,b", "c"]), listed(None), listed(['"a, b", c'])
        (['a', 'b', 'c'], [], ['a, b', 'c'])
    """
    names = (name.strip() for row in csv.reader(values or [], skipinitialspace=True) for name in row)
    return [name for name in names if name]


def numbers(option: str, values: list[str] | None) -> tuple[float, ...]:
    """Return the numbers in a repeatable option; raise if one is none.

    Example:
        >>> numbers("--quantiles", ["0.1,0.9", "0.5"])
        (0.1, 0.9, 0.5)
    """
    found = []
    for each in listed(values):
        try:
            found.append(float(each))
        except ValueError:
            raise refusal(
                option, f"{each!r} is not a number; write numbers with points, separated by commas."
            ) from None
    return tuple(found)


def refusal(option: str, message: str) -> typer.BadParameter:
    """Return a usage error that names the option."""
    return typer.BadParameter(message, param_hint=f"'{option}'")


def guides_named(values: list[str] | None) -> list[str]:
    """Return the guides in ``--guides``; raise if one is unknown."""
    names = listed(values) or list(DEFAULT_GUIDES)
    return list(dict.fromkeys(checked_guide("--guides", name) for name in names))


def checked_guide(option: str, name: str) -> str:
    """Return the name of a guide that was given by name or alias, or raise an error of the command line."""
    name = _ALIASES.get(name, name)
    if name not in GUIDE_NAMES:
        raise refusal(option, f"unknown guide {name!r}; choose from {', '.join(GUIDE_NAMES)}.")
    return name


def checked_members(guides: list[str], members: int | None) -> int | None:
    """Return the number of members; raise if it was given and no guide is an ensemble."""
    if members is not None and not set(guides) & HAS_MEMBERS:
        raise refusal("--members", f"only an ensemble has members, not {', '.join(guides)}.")
    return members


def place(device: str | None) -> "torch.device":
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


def _share(value: float) -> float:
    if not 0 <= value < 1:
        raise typer.BadParameter(f"{value:g} does not lie in [0, 1).")
    return value


def _level(value: float) -> float:
    if not 0 < value < 1:
        raise typer.BadParameter(f"{value:g} does not lie strictly between 0 and 1.")
    return value


def _guides(incomplete: str) -> list[str]:
    """Return the guides whose names begin so, for a shell."""
    return [name for name in ("auto", *GUIDE_NAMES) if name.startswith(incomplete)]


FORMATS = "a CSV or Parquet file"
FILES = "A CSV or Parquet file; - for standard input."
TABLES = (
    "Separators, decimal commas, percent and currency signs, and dates are recognised from whole columns and named in"
    " the output; a column that may be read in two ways is refused with the flag to add. Missing values are filled in,"
    " and columns that cannot be used (identifiers, free text, constants) are left out, by name."
)
table_option = partial(typer.Option, rich_help_panel="The table")
computing_option = partial(typer.Option, rich_help_panel="Computation")
output_option = partial(typer.Option, rich_help_panel="Output")
number_option = partial(computing_option, metavar="N", min=1, max=LARGEST)

Target = Annotated[str | None, table_option(metavar="COLUMN", help="Column to predict; by default the last.")]
TaskName = Annotated[
    Literal["auto", "regression", "classification"],
    table_option("--task", help="Type of the target; auto infers it from the values."),
]
MissingName = Annotated[
    Literal["auto", "refuse", "drop"],
    table_option(
        "--missing", help="On missing values: fill in means and mark them, refuse the table, or drop their rows."
    ),
]
Categorical = Annotated[
    list[str] | None, table_option(metavar="COLUMNS", help="Columns of numbers that are categories: a,b,c.")
]
Drop = Annotated[list[str] | None, table_option(metavar="COLUMNS", help="Columns to ignore: a,b,c.")]
Keep = Annotated[
    list[str] | None,
    table_option(metavar="COLUMNS", help="Columns to use although they look like identifiers or free text: a,b,c."),
]
DecimalMark = Annotated[
    Literal["point", "comma"] | None,
    table_option("--decimal", help="Decimal mark of columns that may be read in two ways: is 1,200 large or small?"),
]
TextEncoding = Annotated[
    str | None,
    table_option("--encoding", metavar="NAME", help="Encoding of a CSV file that is not Unicode, such as latin-1."),
]
Separator = Annotated[
    Literal["comma", "semicolon", "tab", "pipe"] | None,
    table_option("--separator", help="Separator of a CSV file; by default what splits its header."),
]
HeldBack = Annotated[
    float, table_option(metavar="SHARE", callback=_share, help="Fraction of the rows held back for testing.")
]
_LISTED = f"Comma-separated, from {', '.join(GUIDE_NAMES)}; by default {', '.join(DEFAULT_GUIDES)}."
Guides = Annotated[list[str] | None, computing_option(metavar="NAMES", help=_LISTED, autocompletion=_guides)]
ChosenGuide = Annotated[
    str,
    computing_option(
        "--guide",
        metavar="NAME",
        help=f"One of {', '.join(GUIDE_NAMES)}; auto chooses on the held-back rows.",
        autocompletion=_guides,
    ),
]
ScaleName = Annotated[
    Literal["auto", "plain", "log", "logit", "count"],
    computing_option(
        "--scale",
        help="Scale of a numeric target: log for positive numbers, logit for proportions, count for whole numbers.",
    ),
]
_NOISE = "Noise of a numeric target: the same for all rows, or learned from the inputs."
NoiseName = Annotated[Literal["auto", "constant", "by-input"], computing_option("--noise", help=_NOISE)]
Members = Annotated[
    int | None,
    number_option(help="Members of an ensemble; by default 8 with --guide auto, 32 for ensemble, 16 for others."),
]
Seeds = Annotated[int, number_option(help="Training runs per guide.")]
OwnWidth = Annotated[
    int | None, number_option("--width", help="Hidden units; by default 50, and fewer for more than 500 inputs.")
]
OwnSteps = Annotated[
    int | None, number_option("--steps", help="Training steps; by default 1200, and 2000 for a given guide.")
]
OwnRate = Annotated[
    float | None,
    computing_option(
        "--lr",
        metavar="RATE",
        callback=_positive,
        help="Learning rate; by default 0.05, falling to zero, and 0.01 for a given guide.",
    ),
]
BatchSize = Annotated[
    int | None, number_option(help="Rows in a mini-batch; by default all, up to 2,048, and otherwise 1,024.")
]
Seed = Annotated[int, computing_option(metavar="N", min=0, max=SEEDS - 1, help="Seed of all random numbers.")]
Device = Annotated[
    str | None,
    computing_option(
        metavar="NAME",
        help="Device: cpu, cuda, cuda:1, mps or auto (cuda if there is a GPU, else cpu).",
    ),
]
NoCompile = Annotated[
    bool, computing_option("--no-compile/--compile", help="Skip compilation: starts sooner, runs slower.")
]
Every = Annotated[int | None, number_option(help="Steps between checkpoints; by default one per minute.")]
Samples = Annotated[int, number_option(help="Weight draws per prediction.")]
SAMPLES = 500  # the default of --samples
Thresholds = Annotated[
    list[str] | None,
    output_option("--threshold", metavar="NUMBERS", help="Also write P(target > t) for each: 100,200."),
]
Quantiles = Annotated[
    list[str] | None,
    output_option("--quantiles", metavar="LEVELS", help="Also write these quantiles of the target: 0.1,0.5,0.9."),
]
Level = Annotated[float, output_option(metavar="P", callback=_level, help="Probability of the interval.")]
Json = Annotated[bool, output_option("--json", help="Print one JSON object and nothing else.")]
Quiet = Annotated[bool, output_option("--quiet", "-q", help="Hide the progress bar.")]


def examples(*lines: str) -> str:
    """Return shell commands as the end of a help text, one per line."""
    return "\n\n\b\nExamples:\n" + "\n".join(f"  {PROGRAM} {line}" for line in lines)
