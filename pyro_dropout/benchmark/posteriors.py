"""What can be entered into a benchmark: guides, functions, networks of other libraries, and draws in files.

However a posterior is entered, it ends as draws of the weights, which are checked against the sites of the model.
"""

import copy
import hashlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pyro import poutine
from safetensors.torch import load_file
from torch import Tensor, nn

from pyro_dropout.comparison.standard_models import kept
from pyro_dropout.errors import DivergedError, PyroDropoutError, ShapeError
from pyro_dropout.generative.model_call import ModelCall, is_network, signature_of
from pyro_dropout.generative.observed_sites import trace_of
from pyro_dropout.generative.process_state import forked
from pyro_dropout.mathematics.checks import describe, did_you_mean
from pyro_dropout.prediction.weight_draws import latent_draws, latent_sites
from pyro_dropout.protocols import Posterior, Weights
from pyro_dropout.registry import guide_names, resolve_guide
from pyro_dropout.training.checkpoints.safe_files import check_regular

_FILES = (".npz", ".safetensors")
_ENTERED = "a registered guide's name, MODULE:NAME or FILE.py:NAME, or a .npz or .safetensors file of draws"
_RETURNED = (
    "a posterior with sample_weights(n), draws {site: (S, ...)}, a list of state dicts, a laplace-torch object, or a"
    " trained Pyro guide"
)


@dataclass(frozen=True)
class Entry:
    """One posterior approximation that takes part.

    Attributes:
        name: of its rows.
        what: where it came from.
        make: builds a guide from a model; or, where ``trains`` is False, a posterior from a model, its data and the
            name of the problem.
        trains: whether the benchmark trains what is made, with the settings of the suite.
        method: how networks predict with it, "mc" or "linearised"; a posterior may have its own ``method``.
        code: a fingerprint of the code or the file that it is from; "" if it has none, and then it always runs again.
        given: what ``entry_of`` made it of.
    """

    name: str
    what: str
    make: Callable[..., Any]
    trains: bool
    method: str = "mc"
    code: str = ""
    given: object = None


# --- what is given ----------------------------------------------------------------------------------------------------


def entry_of(given: object, name: str = "") -> Entry:
    """Return the entry of a word of the command line, or of an object.

    Args:
        given: a registered guide's name; "module:name" or "file.py:name"; a file with draws, or a folder with one for
            each problem; a guide's class or a function ``model -> guide``; a function ``(model, data) -> posterior``;
            or a posterior that is there already.
        name: of its rows; by default as it was given.

    Example:
        >>> from pyro.infer.autoguide import AutoNormal
        >>> entry_of(AutoNormal).trains, entry_of("mean-field").name, entry_of(lambda model, data: None, "mine").trains
        (True, 'mean-field', False)
    """
    if isinstance(given, str | Path):
        return replace(_named(str(given), name), given=given)
    if not isinstance(given, type) and (_is_laplace(given) or isinstance(given, _POSTERIORS)):
        kind = type(given).__name__
        return Entry(name or kind, kind, lambda model, data, problem: given, trains=False, given=given)
    if not callable(given):
        raise PyroDropoutError(f"a benchmark takes {_ENTERED}, a guide's class, or {_RETURNED}; got {describe(given)}.")
    own: Callable[..., Any] = given
    called = getattr(own, "__name__", type(own).__name__)
    trains = _takes_model_only(own, called)
    make = own if trains else lambda model, data, problem: own(model, data)
    return Entry(name or called, called, make, trains, code=_code_of(own), given=given)


def _named(text: str, name: str) -> Entry:
    """Return the entry of a word of the command line."""
    place, colon, attribute = text.rpartition(":")
    if text in guide_names():
        known = resolve_guide(text)

        def make(model: Any) -> Any:
            return known.make(model, kept(model) if is_network(model) else lambda site: 0.9)

        return Entry(name or text, f"guide {known.name}", make, True, known.method, _code_of(known.guide))
    if colon and attribute.isidentifier():
        found = _imported(place, attribute)
        code = _code_of(found, *([Path(place)] if place.endswith(".py") else []))
        return replace(entry_of(found, name or attribute), what=text, code=code)
    path = Path(text)
    files = [path] if path.suffix in _FILES else [each for kind in _FILES for each in sorted(path.glob(f"*{kind}"))]
    if not files:
        meant = did_you_mean(text, guide_names())
        raise PyroDropoutError(f"unknown posterior {text!r}; give {_ENTERED}, or a folder of such files.{meant}")
    for each in files:
        check_regular(each, "give a file with draws.")
    code = hashlib.sha256(b"".join(each.read_bytes() for each in files)).hexdigest()

    def read(model: Any, data: Any, problem: str) -> Draws:
        found = [each for each in files if path in files or each.stem == problem]
        if not found:
            raise PyroDropoutError(f"{text!r} has no file {problem}.npz or {problem}.safetensors.")
        return Draws(_read(found[0]))

    return Entry(name or path.stem, text, read, trains=False, code=code)


def _imported(place: str, attribute: str) -> object:
    """Return ``attribute`` of a module, or of a Python file; modules in the current folder are found too."""
    before = list(sys.path)
    try:
        if place.endswith(".py"):
            check_regular(place, "write FILE.py:NAME.")
            path = Path(place).resolve()
            sys.path.append(str(path.parent))
            spec = spec_from_file_location(re.sub(r"\W", "_", str(path)), path)
            assert spec is not None
            assert spec.loader is not None
            module = sys.modules[spec.name] = module_from_spec(spec)
            spec.loader.exec_module(module)
        else:
            sys.path.append(os.getcwd())  # which is not there in a command
            module = import_module(place)
    except PyroDropoutError:
        raise
    except Exception as cause:  # whatever is wrong with a stranger's module
        raise PyroDropoutError(f"{place!r} cannot be imported. {type(cause).__name__}: {cause}") from cause
    finally:
        sys.path[:] = before
    found: object = getattr(module, attribute, None)
    if found is None:
        raise PyroDropoutError(f"{place!r} has no {attribute!r}.{did_you_mean(attribute, list(vars(module)))}")
    return found


def _takes_model_only(make: Callable[..., Any], name: str) -> bool:
    """Whether what makes a posterior takes the model alone; raise unless it takes that, or the model and the data."""
    known = signature_of(make)
    needed = [each for each in known.parameters.values() if each.default is each.empty] if known else []
    places = [each for each in needed if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    if len(places) not in (1, 2) or any(each.kind is each.KEYWORD_ONLY for each in needed):
        raise PyroDropoutError(
            f"{name} must take (model), and return a guide, or (model, data), and return a posterior; it takes {known}."
        )
    return len(places) == 1


def _read(path: Path) -> Weights:
    """Return the tensors in a file, {site: (S, ...)}; no code in it is run."""
    try:
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as found:
                return {name: torch.as_tensor(found[name]) for name in found}
        return load_file(path)
    except Exception as cause:
        raise PyroDropoutError(f"{str(path)!r} cannot be read as draws {{site: (S, ...)}}. {cause}") from None


def _code_of(made: Any, *files: Path) -> str:
    """Return a fingerprint of a function or class: its name, its settings, and its source file; "" without one."""
    inner = getattr(made, "func", made)  # of a partial
    source = inner if inspect.isfunction(inner) or isinstance(inner, type) else type(inner)
    settings = [getattr(made, each, None) for each in ("args", "keywords", "__defaults__", "__kwdefaults__")]
    settings += [each.cell_contents for each in getattr(inner, "__closure__", None) or ()]
    try:
        paths = [Path(inspect.getsourcefile(source) or ""), *files]
        code = [
            f"{source.__module__}.{source.__qualname__} {settings}".encode(),
            *(path.read_bytes() for path in paths),
        ]
        return hashlib.sha256(b"".join(code)).hexdigest()
    except (OSError, TypeError):
        return ""


# --- what is returned -------------------------------------------------------------------------------------------------


class Draws:
    """A posterior that is known by its draws, {site: (S, ...)}."""

    def __init__(self, draws: Mapping[str, Any]) -> None:
        self.draws = {str(name): torch.as_tensor(value) for name, value in draws.items()}
        counts = {len(value) if value.dim() else 0 for value in self.draws.values()}
        if len(counts) != 1 or counts == {0}:
            shapes = {name: tuple(value.shape) for name, value in self.draws.items()}
            raise ShapeError(f"draws must be {{site: (S, ...)}} with the same S ≥ 1 at every site; got {shapes}.")
        self.count = counts.pop()

    def sample_weights(self, n: int) -> Weights:
        """Return n of the draws, evenly spaced; all of them if there are fewer."""
        rows = torch.linspace(0, self.count - 1, min(n, self.count)).round().long()
        return {name: value[rows] for name, value in self.draws.items()}


def from_state_dicts(networks: Sequence[Mapping[str, Tensor] | nn.Module]) -> Draws:
    """Return the posterior that an ensemble of trained networks is: every member is as probable as any other.

    Args:
        networks: their state dicts, or the networks; the names of the weights may have a prefix such as "module.".

    Example:
        >>> import torch
        >>> from pyro_dropout.benchmark import from_state_dicts
        >>> nets = [torch.nn.Linear(2, 1).state_dict() for _ in range(5)]
        >>> from_state_dicts(nets).sample_weights(3)["weight"].shape
        torch.Size([3, 1, 2])
    """
    dicts = [dict(each.state_dict() if isinstance(each, nn.Module) else each) for each in networks]
    if not dicts:
        raise PyroDropoutError("the list of state dicts is empty; give at least one trained network.")
    for number, each in enumerate(dicts):
        shapes = [{name: tuple(value.shape) for name, value in one.items()} for one in (each, dicts[0])]
        if shapes[0] != shapes[1]:
            raise ShapeError(f"state dict {number} is of another network than the first: {shapes[0]}, not {shapes[1]}.")
    return Draws({name: torch.stack([each[name].detach() for each in dicts]) for name in dicts[0]})


class FromLaplace:
    """The posterior of a laplace-torch object, for all weights, a subnetwork or the last layer.

    It is read linearised, as laplace-torch does by default; ``method="mc"`` draws the weights.

    Args:
        laplace: anything with ``sample(n)``, flat draws of the parameters in their order, and ``model``.
        method: "linearised" or "mc".

    Example:
        >>> import torch
        >>> from types import SimpleNamespace
        >>> from pyro_dropout.benchmark import FromLaplace
        >>> like = SimpleNamespace(model=torch.nn.Linear(2, 1), sample=lambda n: torch.zeros(n, 3))
        >>> {name: tuple(draws.shape) for name, draws in FromLaplace(like).sample_weights(5).items()}
        {'weight': (5, 1, 2), 'bias': (5, 1)}
    """

    def __init__(self, laplace: Any, method: str = "linearised") -> None:
        self.laplace, self.method = laplace, method

    def sample_weights(self, n: int) -> Weights:
        """Return n draws, {name: (n, ...)}."""
        return self._named(self.laplace.sample(n).detach())

    def mean(self) -> Weights:
        """Return the point at which the approximation was made."""
        return {name: value[0] for name, value in self._named(self.laplace.mean.detach().unsqueeze(0)).items()}

    def _named(self, flat: Tensor) -> Weights:
        """Return flat draws by name; weights that are no part of them stay as they are."""
        own = {name: value for name, value in self.laplace.model.named_parameters() if value.requires_grad}
        last = getattr(self.laplace.model, "last_layer", None)
        drawn = list(own)
        if sum(value.numel() for value in own.values()) != flat.shape[-1] and isinstance(last, nn.Module):
            inside = {id(value) for value in last.parameters()}
            drawn = [name for name, value in own.items() if id(value) in inside]
        sizes = [own[name].numel() for name in drawn]
        if sum(sizes) != flat.shape[-1]:
            raise ShapeError(f"sample(n) gives {flat.shape[-1]} numbers a draw, and the model has {sum(sizes)}.")
        points = {name: value.detach().expand(len(flat), *value.shape) for name, value in own.items()}
        parts = zip(drawn, flat.split(sizes, -1), strict=True)
        return points | {name: part.reshape(-1, *own[name].shape) for name, part in parts}


def _is_laplace(given: object) -> bool:
    return callable(getattr(given, "sample", None)) and isinstance(getattr(given, "model", None), nn.Module)


def as_posterior(found: object) -> Any:
    """Return what a function returned as something that can be drawn from; raise if it is nothing of that kind."""
    if isinstance(found, Mapping):
        return Draws(found)
    if isinstance(found, list | tuple) and all(isinstance(each, Mapping | nn.Module) for each in found):
        return from_state_dicts(found)
    if not isinstance(found, Posterior) and _is_laplace(found):
        return FromLaplace(found)
    if not isinstance(found, Posterior) and not callable(found):
        raise PyroDropoutError(f"a function of a model and its data must return {_RETURNED}; got {describe(found)}.")
    return found


_POSTERIORS = (Mapping, list, tuple, nn.Module, Posterior)


# --- draws ------------------------------------------------------------------------------------------------------------


def weights_of(posterior: Any, call: ModelCall, samples: int) -> Weights:
    """Return draws of all sites of a model, {site: (S, ...)}; raise if they are not draws of its posterior."""
    with torch.no_grad(), forked(), poutine.block():
        sites = {name: site["value"] for name, site in latent_sites(trace_of(call)).items()}
    with torch.no_grad():
        drawn = latent_draws(posterior, samples, call)
    if not isinstance(drawn, Mapping):
        raise PyroDropoutError(f"sample_weights(n) must return {{site: (n, ...)}}; got {describe(drawn)}.")
    starts = {name.removesuffix(first) for first in list(sites)[:1] for name in drawn if name.endswith(first)}
    prefixes = sorted(each for each in starts if each[-1:] in ("", ".") and {each + name for name in sites} <= {*drawn})
    if len(prefixes) > 1:
        raise PyroDropoutError(f"the posterior has the sites of the model several times, with the prefixes {prefixes}.")
    if not prefixes:
        missing, given = sorted({*sites} - {*drawn}), sorted(drawn)
        raise PyroDropoutError(
            f"the posterior has no draws of {', '.join(missing[:5])}; it has {', '.join(given[:5]) or 'none at all'}."
            " Is it for this model?"
        )
    found = {name: torch.as_tensor(drawn[prefixes[0] + name]).detach().to(value) for name, value in sites.items()}
    for name, value in found.items():
        own = tuple(sites[name].shape)
        if value.dim() == 0 or not len(value) or tuple(value.shape[1:]) != own:
            raise ShapeError(
                f"draws of {name!r} must have shape (S, {', '.join(map(str, own))}) for this model, with S ≥ 1; got"
                f" {tuple(value.shape)}. Is the posterior for this model?"
            )
        if not bool(value.isfinite().all()):
            raise DivergedError(f"draws of {name!r} are not numbers: {int((~value.isfinite()).sum())} of them.")
    if len({len(value) for value in found.values()}) > 1:
        raise ShapeError(f"all sites must have as many draws; got { {name: len(v) for name, v in found.items()} }.")
    return found


def linearised(model: Any, mean: Weights) -> Any:
    """Return a network whose outputs are f(x, m) + J(x) (w - m), around one value m of its weights."""

    def evaluate(weights: Weights, x: Any) -> Tensor:
        centre = {name: mean[name].to(value) for name, value in weights.items()}

        def moved(apart: Weights) -> Tensor:
            at, change = torch.func.jvp(lambda point: model.evaluate(point, x), (centre,), (apart,))[:2]
            f: Tensor = at + change
            return f

        f: Tensor = torch.func.vmap(moved)({name: value - centre[name] for name, value in weights.items()})
        return f

    own = copy.copy(model)
    own.evaluate = evaluate
    return own
