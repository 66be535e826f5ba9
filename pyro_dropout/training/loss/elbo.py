"""The evidence lower bound with the KL in closed form: expected log-likelihood by sampling, divergence by formula.

-ELBO = E_q[-log p(y|w)] + KL(q(w)‖p(w)). With dropout's guide and the large-K form it is the dropout objective times
τN, up to a constant; with the exact KL it is a lower bound on the evidence.
"""

import functools
import weakref
from collections.abc import Iterable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Literal, get_args

import pyro
import pyro.infer
import torch
from pyro import poutine
from pyro.util import warn_if_nan
from torch import Tensor

from pyro_dropout.engines.torch_internals import disable_current_modes, is_traced, without_torch_function
from pyro_dropout.errors import NotFollowedError, warn_caller
from pyro_dropout.generative.model_call import ModelCall, name_of
from pyro_dropout.generative.networks import BayesianNet
from pyro_dropout.generative.observed_sites import sample_sites
from pyro_dropout.generative.own_rows import check_own_rows, placed, trial_counts
from pyro_dropout.generative.process_state import one_at_a_time
from pyro_dropout.generative.trial_run import aside, can_run, owner_of, quietly
from pyro_dropout.mathematics.checks import check_choice, check_count
from pyro_dropout.mathematics.divergence import Method
from pyro_dropout.mathematics.per_data_point import Probe, drawn_per_data_point
from pyro_dropout.mathematics.shapes import base_distribution
from pyro_dropout.protocols import Distribution, PyroModel, Trace
from pyro_dropout.training.compile.functional import unvalidated
from pyro_dropout.training.loss.particle import Particle
from pyro_dropout.training.loss.per_example import per_example as draw_per_example
from pyro_dropout.training.loss.row_tracking import Args, Kwargs
from pyro_dropout.training.loss.temperature import Temperature, check_temperature, current_step

PerExample = bool | Literal["auto"]


class ELBO(pyro.infer.ELBO):
    """Minus the evidence lower bound, for Pyro's own ``pyro.infer.SVI`` or for your own training loop.

    The KL of the package's guides is computed, not sampled, so only the log-likelihood is noisy; with ``per_example``
    each data point has its own weights, and that noise averages out over the batch.

    Args:
        kl: "large_k", the paper's form; "exact", which makes the ELBO a true lower bound where no site is a point (not
            with ``bias="map"``); or "monte_carlo".
        per_example: whether every data point gets its own weight draw; "auto": if the model allows it, and otherwise
            shared draws from its first failure on, with a warning. A site whose distribution is not a ``RowMixture``
            (in a guide of your own) is drawn once for all data points.
        num_particles: how many draws to average.
        kl_samples: draws for the parts of a KL that have no closed form.
        temperature: T, a factor on the KL: below 1 for a tempered posterior, which trusts the data more than Bayes'
            rule does. Or a function of the number of steps done, such as ``warm_up(1000)``. "auto": 1, except where the
            model's prior is tempered, as that of a ``BayesianNet`` without a prior is: see ``Prior``. The loss is a
            bound at T = 1 only; ``parts`` returns the KL itself at any T.

    Attributes:
        steps: how many gradients were taken with it by Pyro's SVI, by ``SVI`` or in a loop of your own: where a
            schedule of the temperature stands. Set it to resume one. ``fit`` and ``Fleet`` count by themselves.

    Example:
        >>> import pyro, torch, pyro_dropout as pdrop
        >>> _ = torch.manual_seed(0)
        >>> x = torch.linspace(-1, 1, 50).unsqueeze(-1)
        >>> net = torch.nn.Sequential(torch.nn.Linear(1, 20), torch.nn.ReLU(), torch.nn.Linear(20, 1))
        >>> model = pdrop.BayesianNet(net, likelihood=pdrop.Gaussian(tau=25.0))
        >>> guide = pdrop.AutoDropout(model, keep=0.95)
        >>> svi = pyro.infer.SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), pdrop.ELBO())
        >>> losses = [svi.step(x, x**2) for _ in range(200)]
        >>> losses[-1] < losses[0] / 2
        True
        >>> sorted(pdrop.ELBO().parts(model, guide, x, x**2))
        ['kl', 'nll']
    """

    __slots__ = ("steps",)  # outside __dict__, where compiled steps look for settings

    def __init__(
        self,
        kl: Method = "large_k",
        per_example: PerExample = True,
        num_particles: int = 1,
        *,
        kl_samples: int = 16,
        temperature: Temperature = "auto",
    ) -> None:
        check_choice("kl", kl, get_args(Method))
        check_choice("per_example", per_example, (True, False, "auto"))
        check_count("num_particles", num_particles)
        check_count("kl_samples", kl_samples)
        check_temperature(temperature)
        super().__init__(num_particles=num_particles)  # type: ignore[no-untyped-call]
        self.kl, self.per_example, self.kl_samples = kl, per_example, kl_samples
        self.temperature = float(temperature) if isinstance(temperature, Real | Tensor) else temperature
        self.steps = 0
        self._refusals: list[str] = []  # why draws for each data point failed; a compiled step looks for a change

    def _tries(self, model: PyroModel, guide: PyroModel) -> "_Tries":
        """Return what is known of draws for each data point, with a guide of a model; of a method it is its owner's."""
        own = _TRIED.setdefault(self, weakref.WeakKeyDictionary()).setdefault(owner_of(guide), {})
        return own.setdefault((id(owner_of(model)), name_of(model)), _Tries())

    def _shares(self, model: PyroModel, guide: PyroModel) -> bool:
        """Whether all data points share each draw."""
        return self.per_example is False or self._tries(model, guide).refused

    # --- one particle -----------------------------------------------------------------------------------------------

    def _get_trace(self, model: PyroModel, guide: PyroModel, args: Args, kwargs: Kwargs) -> tuple[Trace, Trace]:
        drawn = self._drawn(model, guide, args, kwargs)
        return drawn.model_trace, drawn.guide_trace

    def _drawn(self, model: PyroModel, guide: PyroModel, args: Args, kwargs: Kwargs) -> Particle:
        """Return the terms of one draw for each data point or, if the model does not allow that, of a shared draw."""
        call = ModelCall(model, args, dict(kwargs))
        if self.per_example == "auto" and not self._shares(model, guide):
            self._look(guide, call)
        drawn = self._run(model, guide, args, kwargs)
        if self.per_example is True:  # a guide may make its parameters in its first run, as many as there are data
            self._look(guide, call)
        return drawn

    def _look(self, guide: PyroModel, call: ModelCall) -> None:
        """See, once for arguments of these shapes, whether each data point can have a draw; leave no other trace.

        If not, "auto" notes it and warns; otherwise it is an error.
        """
        tries, key = self._tries(call.model, guide), tuple(leaf.shape for leaf in call.leaves())
        if key in tries.shapes:
            return
        reader: Any = guide
        store = pyro.get_param_store()
        with disable_current_modes(), torch.no_grad(), poutine.block():
            if getattr(reader, "prototype_trace", self) is None:  # a guide draws while it reads its model, once
                reader._setup_prototype(*call.args, **call.kwargs)
            names = set(store.keys())
            try:
                if self.per_example == "auto":
                    with quietly(call.model, guide):
                        self._run(call.model, guide, call.args, call.kwargs)
                check_data_axis(guide, call)
            except NotFollowedError as refusal:
                if self.per_example is True:
                    raise
                site = "weights" if refusal.site is None else f"site {refusal.site!r}"
                self._refusals.append(f"{site} cannot be drawn for each data point: {refusal.reason}")
                tries.refused = True
                warn_caller(
                    f"{self._refusals[-1]}; all points share each draw from here on. ELBO(per_example=False) silences"
                    " this.",
                )
            for name in set(store.keys()) - names:
                with suppress(KeyError):  # of a tensor with two names, once the first is gone
                    del store[name]
        tries.shapes.add(key)

    def _run(self, model: PyroModel, guide: PyroModel, args: Args, kwargs: Kwargs) -> Particle:
        """Draw from the guide, and run the model with the draw."""
        with nullcontext() if self._shares(model, guide) else draw_per_example():
            guide_trace = poutine.trace(guide).get_trace(*args, **kwargs)
            particle = Particle(guide_trace, self.kl, self.kl_samples)
            particle.run(model, args, kwargs)
        particle.add_up()
        return particle

    def _tempered(self, drawn: Particle) -> list[Tensor]:
        """Return divergences times the temperature of this step."""
        terms, heat = drawn.divergences, self.temperature
        if heat == "auto":
            own = drawn.temperatures()
            return [term * own[name] if name in own else term for name, term in terms.items()]
        if heat == 1.0:
            return list(terms.values())
        if callable(heat):
            now = current_step()
            factor = torch.as_tensor(heat(torch.tensor(float(self.steps)) if now is None else now - 1))
        else:
            factor = torch.as_tensor(heat)
        return [term * factor.to(term) for term in terms.values()]

    # --- the loss, as Pyro and as torch use it ------------------------------------------------------------------------

    @one_at_a_time
    def parts(self, model: PyroModel, guide: PyroModel, *args: object, **kwargs: object) -> dict[str, Tensor]:
        """Return the two parts of -ELBO: {"nll": E[-log p(y|w)], "kl": KL(q‖p)}, averaged over particles."""
        drawn = [self._drawn(model, guide, args, kwargs) for _ in range(self.num_particles)]
        nll = torch.stack([_total(each.surprises.values()) for each in drawn]).mean()
        return {"nll": nll, "kl": torch.stack([_total(each.divergences.values()) for each in drawn]).mean()}

    def by_site(self, model: PyroModel, guide: PyroModel, *args: object, **kwargs: object) -> dict[str, Tensor]:
        """Return the terms of -ELBO of one draw by site: the KL of a latent site, -log p of an observed one.

        A constrained site has two terms: log q of its draw in unconstrained space is under the name of that draw.
        """
        drawn = self._drawn(model, guide, args, kwargs)
        return {name: term.sum() for name, term in (drawn.divergences | drawn.surprises).items()}

    def differentiable_loss(self, model: PyroModel, guide: PyroModel, *args: object, **kwargs: object) -> Tensor:
        """Return -ELBO, with its KL times the temperature; its gradient is an unbiased estimate of the gradient."""
        drawn = (self._drawn(model, guide, args, kwargs) for _ in range(self.num_particles))
        found = torch.stack([_total(each.surprises.values()) + _total(self._tempered(each)) for each in drawn]).mean()
        if torch.is_grad_enabled() and current_step() is None and not is_traced():
            self.steps += 1
        return found

    def loss(self, model: PyroModel, guide: PyroModel, *args: object, **kwargs: object) -> float:
        """Return an estimate of -ELBO."""
        with torch.no_grad():
            value = float(self.differentiable_loss(model, guide, *args, **kwargs))
        warn_if_nan(value, "loss")  # type: ignore[call-overload]
        return value

    def loss_and_grads(self, model: PyroModel, guide: PyroModel, *args: object, **kwargs: object) -> float:
        """Return an estimate of -ELBO, and add its gradient to the parameters'."""
        value = self.differentiable_loss(model, guide, *args, **kwargs)
        if value.requires_grad:
            value.backward(retain_graph=self.retain_graph)
        found = float(value.detach())
        warn_if_nan(found, "loss")  # type: ignore[call-overload]
        return found


def _total(terms: Iterable[Tensor]) -> Tensor:
    """Return the sum of all terms, on their device: a zero from another device would be copied at every step."""
    sums = [term.sum() for term in terms]
    found: Tensor = functools.reduce(torch.add, sums) if sums else torch.zeros(())
    return found


@dataclass
class _Tries:
    """The shapes of arguments that draws for each data point were tried with, and whether they were refused."""

    shapes: set[tuple[torch.Size, ...]] = field(default_factory=set)
    refused: bool = False


_TRIED: "weakref.WeakKeyDictionary[ELBO, weakref.WeakKeyDictionary[Any, dict[tuple[int, str], _Tries]]]"
_TRIED = weakref.WeakKeyDictionary()


# --- whether a model and its guide support a draw for each data point: seen by running them with known weights --------


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
            _check_axis(guide, call.at(torch.arange(other) % (count or 1)))
    except NotFollowedError:
        raise
    except Exception:
        count = None  # some of its data are elsewhere
    if not count:
        _check_axis(guide, call)


def _check_axis(guide: PyroModel, call: ModelCall) -> None:
    with aside(call.model, guide), draw_per_example(), unvalidated(), placed():
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
