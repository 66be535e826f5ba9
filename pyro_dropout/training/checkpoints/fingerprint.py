"""A fingerprint of a training run, as JSON: what must be the same when it is resumed."""

import dataclasses
import hashlib

import torch
from torch import nn

from pyro_dropout.guides.base import SiteGuide
from pyro_dropout.guides.sites import row_layout
from pyro_dropout.protocols import Record
from pyro_dropout.training.optimisers import Schedule, Update, plain

_EVERY, _LAST = 1000, 10**7  # a schedule is sampled at each step up to the first, then ever more rarely
_NO_SETTINGS = ("training", "inplace")  # do not change what a layer computes
_NOT_Q = ("init", "init_scale", "start", "bias", "other")  # of a guide: where it starts, and what each site tells


def told_update(update: Update) -> Record:
    """Return what an optimiser does, so that two of a kind with different settings differ.

    For an ``Update``, a few of its steps and its schedule; for torch's, the options of its groups.
    """
    schedule = None if update.schedule is None else _told_schedule(update.schedule)
    if update.optimiser is not None:
        groups: Record = {}
        for k, group in enumerate(update.optimiser.param_groups):
            options: Record = {"params": len(group["params"])}
            groups[str(k)] = options
            for name, value in group.items():
                told = plain(value)
                if name != "params":  # what is not JSON is told by its class
                    options[name] = told if isinstance(told, str | int | float | list | dict | None) else _kind(told)
        own = {"schedule": schedule, "clip_norm": update.clip_norm}
        given = {name: value for name, value in own.items() if value is not None}
        return {"name": _kind(update.optimiser), "groups": groups, **given}
    bare = dataclasses.replace(update, schedule=None)
    p, state = [torch.ones(2)], bare.start([torch.ones(2)])
    seen: list[float] = []
    for t in (1.0, 2.0, 1000.0, 100_000.0):
        p, state = bare.step(p, [torch.tensor([0.3, -7.0])], state, torch.tensor(t), torch.tensor(float(bare.lr)))
        seen += p[0].tolist()
    return {"name": update.name, "clip_norm": update.clip_norm, "steps": seen, "schedule": schedule}


def _told_schedule(schedule: Schedule) -> str:
    """Return a digest of a schedule's values; one that ends, such as a table, is read up to its end."""
    steps, seen = list(range(_EVERY)), []
    while steps[-1] < _LAST:
        steps.append(steps[-1] * 11 // 10)
    for step in steps:
        try:
            value = float(schedule(torch.tensor(float(step), dtype=torch.float64)))
        except (IndexError, ValueError, RuntimeError) as end:
            seen.append(_kind(end))
            break
        seen.append(f"{value:.6e}")  # so few digits that two machines agree
    return hashlib.sha256(" ".join(seen).encode()).hexdigest()


def told_loss(loss: object, model: object = None) -> dict[str, str | int | float | bool]:
    """Return the class of a loss, with its settings; with a model, also whether its prior is tempered."""
    found = {name: value for name, value in vars(loss).items() if isinstance(value, str | int | float | bool)}
    heat = getattr(loss, "temperature", None)
    if callable(heat):
        found["temperature"] = _told_schedule(heat)
    elif heat == "auto":
        parts = model.modules() if isinstance(model, nn.Module) else ()
        tempered = any(getattr(getattr(part, "prior", None), "tempered", False) for part in parts)
        found["temperature"] = "auto" if tempered else 1.0
    return {"kind": _kind(loss)} | found


def told_layers(model: object) -> dict[str, dict[str, object]]:
    """Return the classes of all modules of a model by name, with the settings of torch's modules and ours.

    A third-party module may keep anything in its attributes, such as a count of its calls, so these are not settings.
    """
    found: dict[str, dict[str, object]] = {}
    for path, module in model.named_modules() if isinstance(model, nn.Module) else ():
        own = found[".".join(filter(None, ("model", path)))] = {"kind": _kind(module)}
        if type(module).__module__.split(".")[0] in ("torch", "pyro_dropout"):
            told = {key: _setting(value) for key, value in vars(module).items() if key not in _NO_SETTINGS}
            own |= {key: value for key, value in told.items() if value is not None and key[0] != "_"}
    return found


def told_guides(guide: object) -> dict[str, object]:
    """Return what makes q(w) and is in no tensor: settings that are words, and of each site its rows or its family."""
    found: dict[str, object] = {}
    for path, module in guide.named_modules() if isinstance(guide, nn.Module) else ():
        part = getattr(module, "template", module)  # what makes the members of an ensemble
        if not isinstance(part, SiteGuide):
            continue
        words = {name: value for name, value in vars(part).items() if isinstance(value, str) or name == "temperature"}
        own = {name: value for name, value in words.items() if name not in _NOT_Q and name[0] != "_"}
        for site in part._sites.values():
            q = {"weight": ("row_dim", row_layout(site).row_dim), "bias": ("bias", part.bias)}
            name, value = q.get(site.kind, ("other", part.other))
            own[f"{site.name}.{name}"] = value
        found |= {".".join(filter(None, ("guide", path, name))): value for name, value in own.items()}
    return found


def _setting(value: object) -> object:
    """Return an attribute as JSON, functions by their names; None where it is not a setting."""
    if type(value) in (str, int, float, bool):
        return value
    if isinstance(value, list | tuple):
        parts = [_setting(each) for each in value]
        return None if any(part is None for part in parts) else parts
    name = getattr(value, "__name__", None)
    return name if callable(value) and isinstance(name, str) else None


def _kind(value: object) -> str:
    return type(value).__name__
