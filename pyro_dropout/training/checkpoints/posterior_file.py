"""Saving a trained model and guide, and loading them into the same ones; a file holds data only, never code."""

import errno
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path

import pyro
import torch
from torch import Tensor, nn

from pyro_dropout.errors import DifferentModelError, PyroDropoutError
from pyro_dropout.generative.networks import BayesianNet
from pyro_dropout.generative.process_state import one_at_a_time
from pyro_dropout.generative.registration import met_by
from pyro_dropout.generative.trial_run import holders_of, owner_of
from pyro_dropout.guides.laplace import AutoLaplace
from pyro_dropout.guides.summary import ignored_inputs, note_training
from pyro_dropout.protocols import Record
from pyro_dropout.training.checkpoints.fingerprint import told_guides, told_layers
from pyro_dropout.training.checkpoints.safe_files import FULL, MAKE_ROOM
from pyro_dropout.training.checkpoints.tensor_file import read_tensors, write_tensors

_REMEDIES = dict.fromkeys(FULL, MAKE_ROOM) | dict.fromkeys(
    (errno.EACCES, errno.EPERM, errno.EROFS), "Give a file in a folder that you may write to"
)
ROOTS = ("model.", "guide.", "store.", "called.")  # what the names of tensors begin with
_SHOWN = 8  # the most differences that an error lists


@one_at_a_time
def save(path: str | Path, model: object, guide: object, extra: Mapping[str, object] | None = None) -> None:
    """Write all tensors of a model and its guide to a file.

    The file is safetensors with a SHA-256 for every tensor, written to a temporary file and renamed when complete.

    Args:
        path: the file; its folder must exist.
        model: a module, such as a ``BayesianNet``; of a plain function, the parameters in Pyro's store that ``fit``, a
            guide of this package or ``SVI`` has met, networks registered with ``pyro.module`` included.
        guide: its guide, which has seen the model.
        extra: anything else to save that JSON can hold.

    Example:
        >>> import pathlib, tempfile, torch, pyro_dropout as pdrop
        >>> def pair(seed):
        ...     torch.manual_seed(seed)
        ...     model = pdrop.BayesianNet(torch.nn.Linear(2, 1))
        ...     return model, pdrop.AutoDropout(model, keep=0.9)
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "posterior.safetensors"
        >>> trained, fresh = pair(0), pair(1)
        >>> pdrop.save(path, *trained, extra={"trained on": "Monday"})
        >>> pdrop.load(path, *fresh)
        {'trained on': 'Monday'}
        >>> torch.equal(trained[1].mean()["weight"], fresh[1].mean()["weight"])
        True
    """
    tensors, identity = tensors_of(model, guide), identity_of(model, guide)
    if extra is not None and not isinstance(extra, Mapping):
        raise PyroDropoutError(f"extra must be a dict writable as JSON; got {type(extra).__name__} {extra!r}.")
    try:
        told = {"ignores": ignored_inputs(guide), "extra": dict(extra or {})}
        write_tensors(path, tensors, {"kind": "posterior", **identity, **told})
    except TypeError as cause:
        raise PyroDropoutError(f"extra must be writable as JSON: {cause}.") from None
    except OSError as cause:
        advice = _REMEDIES.get(cause.errno or 0, "Give a file in a folder that exists")
        raise PyroDropoutError(f"{str(path)!r} cannot be written: {cause.strerror or cause}. {advice}.") from None


@one_at_a_time
def load(path: str | Path, model: object, guide: object) -> Record:
    """Load a file into a model and its guide, which must be built as those that it was saved from.

    The whole file is checked before the first tensor is changed. Settings of a guide, a prior or a likelihood (keep, a
    length-scale, a fixed τ) and the layers of the network, activations included, must be the same as in the file;
    trained parameters, running statistics and prior widths that were found from data are loaded.

    Args:
        path: a file that ``save`` wrote.
        model: the model to load into.
        guide: its guide.

    Returns:
        The ``extra`` that was saved with it.

    Example:
        >>> import pathlib, tempfile, torch, pyro_dropout as pdrop
        >>> model = pdrop.BayesianNet(torch.nn.Linear(2, 1))
        >>> guide = pdrop.AutoDropout(model)
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "posterior.safetensors"
        >>> pdrop.save(path, model, guide)
        >>> before = guide.mean()["weight"]
        >>> x, y = torch.ones(4, 2), torch.ones(4, 1)
        >>> history = pdrop.fit(model, guide, x, y, steps=3, compile=False, progress=False)
        >>> _ = pdrop.load(path, model, guide)
        >>> torch.equal(guide.mean()["weight"], before)
        True
    """
    tensors, facts = read_tensors(path)
    own = {name.removeprefix("guide."): value for name, value in tensors.items() if name.startswith("guide.")}
    with guide.room_for(own) if isinstance(guide, AutoLaplace) else nullcontext():
        check_identity(path, facts, tensors, model, guide)
    put(tensors, model, guide)
    for path_to, module in model.named_modules() if isinstance(model, nn.Module) else ():
        if isinstance(module, BayesianNet):  # prior widths that the file's model had found from data are no settings
            names = {name: f"prior_scale/{name.replace('.', '/')}" for name in module.sites}
            free = {n: b for n, b in names.items() if _joined("model", path_to, b) not in facts.get("told", [])}
            module.set_prior_scales({name: module.get_buffer(buffer) for name, buffer in free.items()})
            if set(free) - set(module.learned):
                module.take_in_full()
    note_training(guide, "", ignores=str(facts.get("ignores", "")))
    extra: Record = facts.get("extra", {})
    return extra


def tensors_of(model: object, guide: object, names: Sequence[str] = ()) -> dict[str, Tensor]:
    """Return the parameters and buffers of both, by name, and those of the networks that they run.

    A plain function has its parameters in Pyro's store: those that it was seen to meet, and those among ``names``.
    """
    if getattr(guide, "prototype_trace", "none") is None:
        raise PyroDropoutError(
            f"{type(guide).__name__} has not seen its model's sites yet: call it once with the model's arguments first."
        )
    owners = {"model": owner_of(model), "guide": owner_of(guide)}
    found = {
        f"{root}.{name}": tensor
        for root, part in owners.items()
        if isinstance(part, nn.Module)
        for name, tensor in (*part.named_parameters(), *part.named_buffers())
    }
    known = {id(tensor) for tensor in found.values()}
    store = pyro.get_param_store()._params
    met = met_by(*owners.values()) | {name: store[name] for name in names if name in store}
    found |= {f"store.{name}": tensor for name, tensor in met.items() if id(tensor) not in known}
    for number, module in enumerate(holders_of(model, guide)):
        own = module._buffers.items()
        found |= {f"called.{number}.{name}": t for name, t in own if t is not None and id(t) not in known}
    if not found and not names:
        raise PyroDropoutError(
            "there is nothing to save: neither model nor guide is a module with tensors, and neither was trained"
            " with fit. Parameters of plain functions are in Pyro's store: use pyro.get_param_store().save(path)."
        )
    return found


def identity_of(model: object, guide: object) -> Record:
    """Return the classes of a model and a guide, the layers, the guide's settings, and which tensors are settings."""
    parts = {"model": model, "guide": guide, "likelihood": getattr(model, "likelihood", None)}
    kinds = {name: type(part).__name__ for name, part in parts.items()}
    told = {"guide": told_guides(guide), "told": sorted(settings_of(model, guide))}
    return {"kinds": kinds, "layers": told_layers(model), **told}


def settings_of(model: object, guide: object) -> set[str]:
    """Return the names of the buffers that are settings: a guide's, and those of a model's prior and likelihood."""
    learned = getattr(guide, "learned_buffers", ())
    own = guide.named_buffers() if isinstance(guide, nn.Module) else ()
    names = {f"guide.{name}" for name, _ in own if name not in learned}
    if isinstance(model, nn.Module):
        fixed = [name for name, _ in model.named_buffers() if "likelihood." in name]
        # The offset of counts is found from data, as the mean and the spread of other targets are.
        names |= {f"model.{name}" for name in fixed if not name.endswith("likelihood.offset")}
        for path, module in model.named_modules():
            found = module.found_widths() if isinstance(module, BayesianNet) else ()
            sites = vars(module).get("sites")
            for name in module._buffers:  # the standard deviation of a prior, as BayesianNet or DeepGP names it
                of_site = isinstance(sites, Mapping) and name.endswith("_std") and name.removesuffix("_std") in sites
                if name not in found and (name.startswith("prior_scale/") or of_site):
                    names.add(_joined("model", path, name))
    return names


def _joined(*parts: str) -> str:
    return ".".join(filter(None, parts))


def _here(tensors: Mapping[str, Tensor], model: object, guide: object) -> dict[str, Tensor]:
    """Return the tensors of this model and guide that a file may hold."""
    names = [name.removeprefix("store.") for name in tensors if name.startswith("store.")]
    return tensors_of(model, guide, names)


def check_identity(
    path: str | Path, facts: Record, tensors: Mapping[str, Tensor], model: object, guide: object
) -> None:
    """Raise an error that lists what differs, unless a file belongs to this model and guide."""
    here, own = _here(tensors, model, guide), identity_of(model, guide)
    told = set(own["told"]) & set(facts.get("told", []))
    wrong = _other_values(facts.get("kinds", {}), own["kinds"]) + _only_on_one_side(tensors, here)
    for name in (name for name in here if name in tensors):
        mine, theirs = here[name].detach(), tensors[name]
        if mine.shape != theirs.shape:
            wrong.append(f"{name}: {tuple(theirs.shape)} in the file, {tuple(mine.shape)} here")
        elif mine.dtype != theirs.dtype:
            wrong.append(f"{name}: {theirs.dtype} in the file, {mine.dtype} here")
        elif name in told and not torch.equal(mine.cpu(), theirs):
            wrong.append(f"{name}: {_short(theirs)} in the file, {_short(mine)} here")
    wrong += _other_values(facts.get("guide", {}), own["guide"])
    there: dict[str, Record] = facts.get("layers", {})
    wrong += _only_on_one_side(there, own["layers"])
    for name, layer in ((name, layer) for name, layer in own["layers"].items() if name in there):
        if there[name]["kind"] != layer["kind"]:
            wrong.append(f"{name}: {there[name]['kind']} in the file, {layer['kind']} here")
        else:  # a setting may be one that only one version of torch has
            wrong += _other_values(there[name], layer, f"{name}.")
    if wrong:
        more = f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        functions = any(name.startswith(("store.", "called.")) and name not in here for name in tensors)
        run = " What plain functions train is known when they have run: call fit(..., steps=1) before." * functions
        raise DifferentModelError(
            f"{Path(path).name} belongs to another model or guide: {'; '.join(wrong[:_SHOWN])}{more}. Build them as"
            f" they were when it was written.{run}"
        )


def _only_on_one_side(theirs: Mapping[str, object], mine: Mapping[str, object]) -> list[str]:
    missing = [f"{name}: not in the file" for name in mine if name not in theirs]
    return missing + [f"{name}: only in the file" for name in theirs if name not in mine]


def _other_values(theirs: Mapping[str, object], mine: Mapping[str, object], prefix: str = "") -> list[str]:
    both = (name for name in theirs if name in mine and theirs[name] != mine[name])
    return [f"{prefix}{name}: {theirs[name]} in the file, {mine[name]} here" for name in both]


def _short(tensor: Tensor) -> str:
    return f"{tensor.flatten()[0].item():.6g}" if tensor.numel() == 1 else f"{tensor.numel()} numbers"


def put(tensors: Mapping[str, Tensor], model: object, guide: object) -> None:
    """Copy tensors, by name, into a model and a guide."""
    with torch.no_grad():
        for name, tensor in _here(tensors, model, guide).items():
            tensor.copy_(tensors[name])
