"""Where the members of an ensemble start: at its anchor, at a new initialisation, or all where their guide starts."""

import copy
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from pyro_dropout.generative.model_call import is_network
from pyro_dropout.generative.trial_run import modules_of
from pyro_dropout.guides.anchors import anchored_start, centres
from pyro_dropout.guides.base import SiteGuide
from pyro_dropout.guides.sites import GuideSite
from pyro_dropout.protocols import PyroModel

Start = Literal["anchor", "fresh", "module"]


def started(
    model: PyroModel, make: Callable[[Any], SiteGuide], template: SiteGuide, start: Start, seed: int
) -> dict[str, Tensor]:
    """Return the parameters that a member starts from, by name.

    Args:
        model: the model.
        make: makes a member's guide from a model.
        template: a guide that has read the model.
        start: "fresh" or "module".
        seed: of the member; torch's generator is seeded with it.
    """
    torch.manual_seed(seed)
    here = {name: value.detach().clone() for name, value in template.named_parameters()}
    if start == "module":
        return here
    if is_network(model):
        fresh = copy.deepcopy(model)
        for module in modules_of(fresh):
            if callable(reset := getattr(module, "reset_parameters", None)):
                reset()
        again = {name: value.detach() for name, value in make(fresh).named_parameters()}
        if not all_equal([here, again]):
            return again
    for site in template._sites.values():  # nothing was drawn: start at a draw from the prior
        name = f"states.{site.key}.loc"
        if name in here and here[name].shape == site.start.shape:
            here[name] = _free_draw(template, site)
    return here


def at_anchors(template: SiteGuide, seeds: list[int]) -> list[dict[str, Tensor]]:
    """Return the parameters of points that start at their anchors, for each seed."""
    middles, rows = centres(template), []
    for seed in seeds:
        row = {}
        for name, value in anchored_start(template, middles, seed).items():
            site = template._sites[name]
            row[f"states.{site.key}.loc"] = value.detach().reshape(site.start.shape).to(site.start)
        rows.append(row)
    return rows


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
