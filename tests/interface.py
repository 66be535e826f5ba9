"""What users may rely on, as text: ``python -m tests.interface > tests/interface.txt``, when a version is released.

Public names with their signatures, commands with their options, and the versions of the files that are written. A test
compares the code with ``interface.txt``, and asks for a line of the changelog for every difference.
"""

import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from functools import cached_property

import typer

import pyro_dropout as pd
from pyro_dropout.benchmark import result
from pyro_dropout.cli.main import app
from pyro_dropout.mathematics.checks import GONE_IN
from pyro_dropout.registry import FLOORS, guide_names
from pyro_dropout.tabular import run_folder
from pyro_dropout.training.checkpoints import tensor_file


def lines() -> list[str]:
    """The interface, a line for each thing."""
    moved = (f"pyro_dropout.{name}(until {GONE_IN}, now {place})" for name, place in sorted(pd._PLACES.items()))
    guides = (f"guide {name}" for name in sorted(guide_names()))
    files = [
        f"files of posteriors and checkpoints(format={tensor_file.FORMAT})",
        f"run folders(format={run_folder.FORMAT})",
        f"results of benchmarks(format={result.FORMAT})",
    ]
    return [*_names(), *moved, *guides, *_commands(), *files]


def differences(old: list[str], new: list[str]) -> set[str]:
    """The words that a changelog has to say: names that came or went, and arguments of which that is true."""
    before, after = ({_split(line)[0]: _split(line)[1] for line in text} for text in (old, new))
    words = {re.split(r"[ .]", name)[-1] for name in before.keys() ^ after.keys()}
    for name in before.keys() & after.keys():
        words |= {re.split(r"[=*]", each.strip("*"))[0] for each in before[name] ^ after[name]}
    return words - {"", "self", "/"}


def _split(line: str) -> tuple[str, set[str]]:
    """A line's name, and its arguments with their defaults."""
    name, _, rest = line.partition("(")
    return name, set(re.split(r", (?![^\[({]*[\])}])", rest.removesuffix(")"))) if rest else set()


def _names() -> Iterator[str]:
    """Each name of each room, with what a class has of its own; and each base class of theirs in the package, once."""
    bases: dict[str, type] = {}
    for room in ("", *FLOORS, "errors", "paper", "protocols", "registry"):
        place = importlib.import_module(f"pyro_dropout.{room}".rstrip("."))
        for name in sorted(getattr(place, "__all__", ())):
            thing = getattr(place, name)
            yield f"{place.__name__}.{name}{_signature(thing)}"
            if inspect.isclass(thing):
                yield from _members(f"{place.__name__}.{name}", thing)
                ours = [each for each in thing.__mro__[1:] if each.__module__.startswith("pyro_dropout")]
                bases.update({f"{each.__module__}.{each.__name__}": each for each in ours})
    for name, kind in sorted(bases.items()):
        yield from _members(name, kind)


def _members(name: str, kind: type) -> Iterator[str]:
    for key, member in sorted(vars(kind).items()):
        found = getattr(kind, key)
        own = isinstance(member, property | cached_property)
        if (own or getattr(found, "__module__", "").startswith("pyro_dropout")) and not key.startswith("_"):
            yield f"{name}.{key}{_signature(found) if callable(found) else ''}"


def _signature(thing: object) -> str:
    """The arguments with their defaults, without types, which say the same in other words from release to release."""
    if isinstance(thing, type) and issubclass(thing, BaseException | Warning):
        return ""
    try:
        found = inspect.signature(thing)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return ""
    plain = [each.replace(annotation=inspect.Parameter.empty) for each in found.parameters.values()]
    said = str(found.replace(parameters=plain, return_annotation=inspect.Signature.empty))
    return re.sub(r"<[^<>]*(<[^<>]*>[^<>]*)*>", "...", said)  # an object that has no literal


def _commands() -> Iterator[str]:
    group = typer.main.get_command(app)
    for name, command in sorted(group.commands.items()):  # type: ignore[attr-defined]
        yield f"pyro-dropout {name}"
        yield from (f"pyro-dropout {name} {each.opts[0]}" for each in command.params)


if __name__ == "__main__":
    sys.stdout.write("\n".join([f"pyro_dropout {pd.__version__}", *lines()]) + "\n")
