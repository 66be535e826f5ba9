"""The options of commands; those of a table and of its training are made from their settings, without torch."""

import csv
import functools
import inspect
from collections.abc import Callable
from dataclasses import Field, fields
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from pyro_dropout.cli.terminal import PROGRAM
from pyro_dropout.registry import listed_guides
from pyro_dropout.tables.settings import LARGEST, SEEDS, Reading, Training, Wanted, choices

if TYPE_CHECKING:
    import torch

# Read from the source, so that --help need not import torch.
GUIDE_NAMES = tuple(entry.name for entry in listed_guides())
DEFAULT_GUIDES = tuple(entry.name for entry in listed_guides() if entry.compared)
HAS_MEMBERS = {entry.name for entry in listed_guides() if "members" in entry.options}
TABLES = (
    "Separators, decimal commas, percent and currency signs, and dates are recognised from whole columns and named in"
    " the output; a column that may be read in two ways is refused with the flag to add. Missing values are filled in,"
    " and columns that cannot be used (identifiers, free text, constants) are left out, by name."
)

computing_option = partial(typer.Option, rich_help_panel="Computation")
output_option = partial(typer.Option, rich_help_panel="Output")
number_option = partial(computing_option, metavar="N", min=1, max=LARGEST)
Seed = Annotated[int, computing_option(metavar="N", min=0, max=SEEDS - 1, help="Seed of all random numbers.")]
Device = Annotated[
    str | None,
    computing_option(metavar="NAME", help="Device: cpu, cuda, cuda:1, mps or auto (cuda if there is a GPU, else cpu)."),
]
Every = Annotated[int | None, number_option(help="Steps between checkpoints; by default one per minute.")]
Json = Annotated[bool, output_option("--json", help="Print one JSON object and nothing else.")]
Quiet = Annotated[bool, output_option("--quiet", "-q", help="Hide the progress bar.")]
NoCompile = Annotated[
    bool,
    computing_option("--no-compile/--compile", help="Skip compilation: starts sooner, runs slower."),
]


def with_settings(*but: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of ``settings_of``, but for some; it gets those that were given as ``settings``."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        kinds = {Reading: "The table", Wanted: "Computation", Training: "Computation"}
        each_kind = [(each, panel) for kind, panel in kinds.items() for each in fields(kind)]
        shown = [(each, panel) for each, panel in each_kind if each.metadata.get("help") and each.name not in but]
        made = {each.name: _parameter(each, panel) for each, panel in shown}

        @functools.wraps(command)
        def called(no_compile: bool, **given: Any) -> None:
            options = {name: given.pop(name) for name in made} | {"compile": False if no_compile else None}
            lists = {name: listed(value) for name, value in options.items() if isinstance(value, list)}
            command(**given, settings=options | lists)

        rest = [each for name, each in inspect.signature(command).parameters.items() if name != "settings"]
        flag = inspect.Parameter("no_compile", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=NoCompile)
        found = [*made.values(), *(each.replace(kind=flag.kind) for each in rest), flag]
        called.__signature__ = inspect.Signature(found)  # type: ignore[attr-defined]
        return called

    return decorate


def _parameter(each: Field[Any], panel: str) -> inspect.Parameter:
    """Return an option of a command for a field of settings."""
    known, several = choices(each.type), isinstance(each.default, tuple)
    kind: Any = Literal[known] if known else list[str] if several else each.type
    default = None if several or each.name in ("steps", "lr") else each.default
    help = each.metadata["help"].replace("{guides}", ", ".join(GUIDE_NAMES))
    name = f"--{each.name.replace('_', '-')}"
    more: Any = {"metavar": each.metadata.get("metavar"), "rich_help_panel": panel}
    shown = typer.Option(name, help=help, autocompletion=_guides if each.name == "guide" else None, **more)
    kind = kind | None if default is None else kind
    return inspect.Parameter(
        each.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, shown]
    )


def _guides(incomplete: str) -> list[str]:
    """Return the guides whose names begin so, for a shell."""
    return [name for name in ("auto", *GUIDE_NAMES) if name.startswith(incomplete)]


def listed(values: list[str] | None) -> list[str]:
    """Return the names in a repeatable option whose values are comma-separated lists; names with commas are quoted."""
    names = (name.strip() for row in csv.reader(values or [], skipinitialspace=True) for name in row)
    return [name for name in names if name]


def numbers(option: str, values: list[str] | None) -> tuple[float, ...]:
    """Return the numbers in a repeatable option; raise if one is none."""
    try:
        return tuple(map(float, listed(values)))
    except ValueError as cause:
        raise refusal(option, f"{cause}; write numbers with points, separated by commas.") from None


def refusal(option: str, message: str) -> typer.BadParameter:
    """Return a usage error that names the option."""
    return typer.BadParameter(message, param_hint=f"'{option}'")


def place(device: str | None) -> "torch.device":
    """Return the requested torch device after checking it; "auto" or None is a GPU if there is one, else the CPU."""
    import torch

    from pyro_dropout.mathematics.checks import check_device

    if device is None or device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return check_device("--device", device)


def examples(*lines: str) -> str:
    """Return shell commands as the end of a help text, one per line."""
    return "\n\n\b\nExamples:\n" + "\n".join(f"  {PROGRAM} {line}" for line in lines)
