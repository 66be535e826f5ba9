"""The problems of the benchmark by name: each a model, its data, what is asked about its posterior, and the reference.

A problem is a function in a file of ``benchmark/suite`` with the decorator ``problem``. Another package registers its
own by entry points that name their modules, in the group "pyro_dropout.problems"; its references are files too.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from pyro_dropout.benchmark.reference import Reference, load_reference
from pyro_dropout.errors import PyroDropoutError
from pyro_dropout.mathematics.checks import check_choice
from pyro_dropout.protocols import Record, Weights
from pyro_dropout.registry import import_all

Suite = Literal["small", "full"]
Kind = Literal["numbers", "classes", "parameters"]
Quantities = Callable[[Any, Weights], Tensor]
FOLDER = Path(__file__).parent / "data"


@dataclass(frozen=True, kw_only=True, repr=False)
class Problem:
    """One problem.

    Attributes:
        name: on the command line.
        title: in one line.
        about: what is hard here, in two sentences.
        suite: "small", or "full" for those that only the full suite has.
        held_out: whether nobody may tune on it.
        kind: "numbers" (f at test points), "classes" (their probabilities), or "parameters" of a program.
        make: returns a fresh model of a seed: a network, or any Pyro program.
        arguments: what the model is trained on.
        quantities: computes what is compared, (S, K) or (S, K, C), from a model and S draws of all its sites.
        x_test: where f is asked, (K, ...); None for "parameters".
        regions: 0 at the data, 1 in the gap, 2 outside, (K,); None where there is no such thing.
        held_out_rows: the test points that are used in the page only, (K,).
        labels: the names of the parameters.
        exact: whether the posterior is known exactly, as of a network that is linear in its weights.
        nuts: what its sampler is told otherwise, such as ``target_accept``.
        path: the file of the reference.

    Example:
        >>> import torch
        >>> from pyro_dropout import benchmark
        >>> gap = benchmark.problems()["gap"]
        >>> model, (x, y) = gap.make(0), gap.arguments
        >>> draws = {name: torch.zeros(7, *model.prior_of(name).event_shape) for name in model.sites}
        >>> gap.quantities(model, draws).shape, gap.reference.mean.shape, len(gap.x_test), gap.identified
        (torch.Size([7, 40]), torch.Size([40]), 40, False)
    """

    name: str
    title: str
    about: str
    suite: Suite
    held_out: bool
    kind: Kind
    make: Callable[[int], Any]
    arguments: tuple[Any, ...]
    quantities: Quantities
    x_test: Tensor | None = None
    regions: Tensor | None = None
    held_out_rows: Tensor | None = None
    labels: tuple[str, ...] = ()
    exact: bool
    nuts: Record
    path: Path

    def __repr__(self) -> str:
        return f"Problem({self.name!r}, {self.kind}, suite {self.suite!r})"

    @property
    def identified(self) -> bool:
        """Whether its weights are identified, so that their moments can be compared."""
        return self.exact or self.kind == "parameters"

    @property
    def data(self) -> dict[str, Tensor]:
        """All tensors that the reference depends on, by name."""
        given = {f"argument {k}": value for k, value in enumerate(self.arguments)}
        return given if self.x_test is None else given | {"x_test": self.x_test}

    @cached_property
    def reference(self) -> Reference:
        """The reference, read and checked when it is first asked for."""
        if not self.path.exists():
            raise PyroDropoutError(f"problem {self.name!r} has no reference yet; make it with: {self.command}")
        return load_reference(self.path, self.data)

    @property
    def command(self) -> str:
        """The command that makes the reference."""
        return f"python models/benchmark_references.py {self.name} --device cuda"


_PROBLEMS: dict[str, tuple[Callable[[], Record], Record]] = {}
Posed = Callable[[], Record]


def problem(
    name: str,
    *,
    title: str,
    about: str,
    kind: Kind,
    suite: Suite = "small",
    held_out: bool = False,
    exact: bool = False,
    nuts: Record | None = None,
    folder: Path | None = None,
) -> Callable[[Posed], Posed]:
    """Register a problem; a decorator of a function that returns the other attributes of ``Problem``, in a dict.

    Args:
        name: of the problem.
        title: in one line.
        about: what is hard here.
        kind: "numbers", "classes" or "parameters".
        suite: "full" if it takes too long for the small one.
        held_out: whether nobody may tune on it.
        exact: whether the posterior is known exactly.
        nuts: what its sampler is told otherwise.
        folder: where its reference lies, as ``NAME.safetensors``; by default in this package.

    Example:
        >>> import torch, pyro_dropout as pdrop
        >>> from pyro_dropout import benchmark
        >>> @benchmark.problem("slope", title="One weight", about="Nothing.", kind="parameters", suite="full")
        ... def slope():
        ...     model = pdrop.BayesianNet(torch.nn.Linear(1, 1, bias=False))
        ...     asked = lambda model, weights: weights["weight"].flatten(1)
        ...     return {"make": lambda seed: model, "arguments": (torch.eye(1), torch.eye(1)), "quantities": asked}
        >>> benchmark.missing_references("full")["slope"]
        'python models/benchmark_references.py slope --device cuda'
        >>> _ = benchmark.problems.__globals__["_PROBLEMS"].pop("slope")
    """
    for label, value, kinds in (("kind", kind, Kind), ("suite", suite, Suite)):
        check_choice(label, value, get_args(kinds))
    settings = {"title": title, "about": about, "kind": kind, "suite": suite, "held_out": held_out, "exact": exact}

    def register(posed: Posed) -> Posed:
        known = _PROBLEMS.get(name)
        if known is not None and (known[0].__module__, known[0].__qualname__) != (posed.__module__, posed.__qualname__):
            raise PyroDropoutError(f"a problem named {name!r} is registered already: {known[0].__qualname__}.")
        path = (FOLDER if folder is None else Path(folder)) / f"{name}.safetensors"
        _PROBLEMS[name] = posed, {"name": name, **settings, "nuts": nuts or {}, "path": path}
        return posed

    return register


def problems(suite: Suite = "small", *, unreferenced: bool = False) -> dict[str, Problem]:
    """Return the problems of a suite by name, those that have a reference; ``missing_references`` names the others.

    Args:
        suite: "small", or "full" for all.
        unreferenced: whether those without a reference are there too.

    Example:
        >>> from pyro_dropout import benchmark
        >>> line = benchmark.problems()["line"]
        >>> line, line.reference.how, line.reference.mean.shape
        (Problem('line', numbers, suite 'small'), 'exact', torch.Size([40]))
    """
    check_choice("suite", suite, get_args(Suite))
    import_all("benchmark/suite", "problems")
    asked = {name: each for name, each in _PROBLEMS.items() if suite in ("full", each[1]["suite"])}
    found: dict[str, Problem] = {}
    for name, (posed, settings) in asked.items():
        if unreferenced or settings["path"].exists():
            given = posed()
            x = given.get("x_test")
            rows = None if x is None else torch.arange(len(x)) % 2 == 1
            found[name] = Problem(**{"held_out_rows": rows, **settings, **given})
    return found


def missing_references(suite: Suite = "full") -> dict[str, str]:
    """Return the problems that have no reference yet, by name, each with the command that makes it.

    Example:
        >>> from pyro_dropout import benchmark
        >>> "line" in benchmark.missing_references()
        False
    """
    asked = problems(suite, unreferenced=True).items()
    return {name: each.command for name, each in asked if not each.path.exists()}
