"""Whether a Pyro model and its guide support a draw for each data point: seen by running them with known weights."""

import torch
from pyro import poutine
from torch import Tensor

from pyro_dropout.engines.torch_internals import without_torch_function
from pyro_dropout.errors import NotFollowedError
from pyro_dropout.generative.model_call import ModelCall
from pyro_dropout.generative.networks import BayesianNet
from pyro_dropout.generative.observed_sites import sample_sites
from pyro_dropout.generative.own_rows import check_own_rows, placed, trial_counts
from pyro_dropout.generative.trial_run import aside, can_run
from pyro_dropout.mathematics.per_data_point import Probe, drawn_per_data_point
from pyro_dropout.mathematics.shapes import base_distribution
from pyro_dropout.protocols import Distribution, PyroModel
from pyro_dropout.training.compile.functional import unvalidated
from pyro_dropout.training.loss.per_example import per_example


def check_data_axis(guide: PyroModel, call: ModelCall) -> None:
    """Raise unless draws follow the data, and every density depends on the draws of one data point.

    A model that has its data among its arguments is run with another number of them; any other with its own.
    """
    count = call.count
    # A network looks at its inputs by itself.
    if type(call.model) is BayesianNet or not can_run(next(call.leaves(), torch.empty(0))):
        return
    try:
        for other in trial_counts(count) if count else ():
            _check(guide, call.at(torch.arange(other) % (count or 1)))
    except NotFollowedError:
        raise
    except Exception:
        count = None  # some of its data are elsewhere
    if not count:
        _check(guide, call)


def _check(guide: PyroModel, call: ModelCall) -> None:
    with aside(call.model, guide), per_example(), unvalidated(), placed():
        trace = call.of(poutine.trace(guide).get_trace)
        run = poutine.trace(poutine.replay(call.model, trace=trace))
        call.of(run.get_trace)  # the first use of a site says for how many data points it is drawn
        drawn = {name: drawn_per_data_point(site.get("value")) for name, site in trace.nodes.items()}
        probes = {name: Probe(recipe, recipe.count) for name, recipe in drawn.items() if recipe and recipe.count}

        def densities() -> dict[str, Tensor]:
            with without_torch_function():
                for name, probe in probes.items():
                    site = trace.nodes[name]
                    site["value"] = probe.mark(probe.weight.expand(site["value"].shape))
            found: dict[str, Tensor] = {}
            for name, site in sample_sites(call.of(run.get_trace)).items():
                if (site["infer"] or {}).get("_deterministic"):
                    continue
                value = probes[name].known if name in probes else site["value"]
                found[f"the density of {name!r}"] = _by_point(site["fn"], value)
                more = {f"the {what} of {name!r}": site[what] for what in ("scale", "mask")}
                found |= {what: each for what, each in more.items() if isinstance(each, Tensor)}
            return found

        check_own_rows(densities, [*probes.values()], call.model)


def _by_point(fn: Distribution, value: Tensor) -> Tensor:
    """Return log densities with a dimension for data points, which come first where all of them are in one event."""
    found: Tensor = (fn if fn.batch_shape else base_distribution(fn)).log_prob(value)
    return found if fn.batch_shape or found.dim() < 2 else found.flatten(1).sum(1)
