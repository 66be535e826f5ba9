"""Where the members of an ensemble start: at its anchor, at a new initialisation, or all where their guide starts."""

import copy
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from pyro_dropout.generative.model_call import is_network
from pyro_dropout.generative.random_state import seed_generators
from pyro_dropout.generative.trial_run import modules_of
from pyro_dropout.guides.anchors import anchored_start, centres
from pyro_dropout.guides.base import SiteGuide
from pyro_dropout.guides.sites import GuideSite
from pyro_dropout.guides.starts import Given
from pyro_dropout.mathematics.errors import PyroDropoutError
from pyro_dropout.protocols import PyroModel

Start = Literal["anchor", "fresh", "module"]
Make = Callable[[Any], SiteGuide]  # makes a member's guide from a model


def tensors_of(guide: SiteGuide) -> dict[str, Tensor]:
    """Return the parameters and the settings of a guide, by name."""
    return {name: value.detach() for name, value in (*guide.named_parameters(), *guide.named_buffers())}


def started(model: PyroModel, make: Make, template: SiteGuide, start: Start, seed: int) -> dict[str, Tensor]:
    """Return the parameters that a member starts from, and its settings, by name.

    Args:
        model: the model.
        make: makes a member's guide from a model.
        template: a guide that has read the model.
        start: "fresh" or "module".
        seed: of the member; all generators are seeded with it.
    """
    seed_generators(seed, next(site.start.device for site in template._sites.values()))
    if not is_network(model):
        return tensors_of(template) | ({} if start == "module" else _drawn(template))
    fresh = model
    if start == "fresh" and isinstance(template.init, Given):
        raise PyroDropoutError(
            "the guide of the members has init=, one start for all of them, and start='fresh' a new one for each: leave"
            " out init, or write Ensemble(..., start='module')."
        )
    if start == "fresh":
        fresh = copy.deepcopy(model)
        for module in modules_of(fresh):
            if callable(reset := getattr(module, "reset_parameters", None)):
                reset()
    made = make(fresh)
    check_alike(template, made)
    here, again = tensors_of(template), tensors_of(made)
    if start == "fresh" and all(torch.equal(here[name], again[name]) for name in _means(template)):
        again |= _drawn(template)  # no layer was initialised anew
    return again


def at_anchors(template: SiteGuide, seeds: list[int]) -> list[dict[str, Tensor]]:
    """Return the parameters of points that start at their anchors, for each seed."""
    middles = centres(template)
    rows: list[dict[str, Tensor]] = []
    for seed in seeds:
        row = {}
        for name, value in anchored_start(template, middles, seed).items():
            site = template._sites[name]
            row[f"states.{site.key}.loc"] = value.detach().reshape(site.start.shape).to(site.start)
        rows.append(row)
    return rows


def _means(template: SiteGuide) -> dict[str, GuideSite]:
    """Return the sites that have a mean of their own shape, by the name of that parameter."""
    here = tensors_of(template)
    named = {f"states.{site.key}.loc": site for site in template._sites.values()}
    return {name: site for name, site in named.items() if name in here and here[name].shape == site.start.shape}


def _drawn(template: SiteGuide) -> dict[str, Tensor]:
    """Return the means of all sites at draws from the prior."""
    return {name: _free_draw(template, site) for name, site in _means(template).items()}


def _free_draw(template: SiteGuide, site: GuideSite) -> Tensor:
    """Return a draw of a site's prior in unconstrained space, its plates at full size."""
    fn = template.prototype_trace.nodes[site.name]["fn"]
    lead = site.start.shape[: site.start.dim() - site.free_dim] if site.plates else fn.batch_shape
    value = fn.sample() if fn.batch_shape == lead else fn.expand(lead).sample()
    found: Tensor = value if site.transform is None else site.transform.inv(value)
    return found.detach().reshape(site.start.shape).to(site.start)


def all_equal(rows: list[dict[str, Tensor]]) -> bool:
    """Whether all members start at the same point."""
    return all(torch.equal(row[name], value) for row in rows[1:] for name, value in rows[0].items())


def check_alike(template: SiteGuide, made: SiteGuide, settings: bool = False) -> None:
    """Raise an error unless two members differ in numbers only; with ``settings``, in parameters only.

    One member's loss is traced for all of them, so that a layer must not be dropped in one and a point in another.
    """
    if made is template:
        raise PyroDropoutError("guide must make a new guide whenever it is called; it gave the same one twice.")
    mine, theirs = tensors_of(template), tensors_of(made)
    wrong = [name for name in {**mine, **theirs} if name not in mine or name not in theirs]
    wrong += [name for name in mine if name in theirs and mine[name].shape != theirs[name].shape]
    if type(template) is not type(made) or list(template._sites) != list(made._sites):
        wrong.append(f"{type(template).__name__} and {type(made).__name__}")
    elif not wrong:
        with torch.no_grad():
            for ours, site in zip(template._sites.values(), made._sites.values(), strict=True):
                if type(template._marginal(ours)) is not type(made._marginal(site)):
                    wrong.append(site.name)
    if wrong:
        raise PyroDropoutError(
            f"guide must make guides that differ in numbers only, because all members are one computation; they differ"
            f" in {', '.join(wrong[:4])}. Does it draw its settings at random, and is a keep of 1 among them?"
        )
    different = [name for name, _ in template.named_buffers() if not torch.equal(mine[name], theirs[name])]
    if settings and different:
        raise PyroDropoutError(
            f"guide makes guides with different settings ({', '.join(different[:4])}). The members of a model that is"
            " not a network must have the same; make them outside of the function."
        )
