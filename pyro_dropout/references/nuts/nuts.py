"""The reference for approximate posteriors: draws from the posterior itself, by Hamiltonian Monte Carlo."""

import time

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from pyro_dropout.engines.choose import Compile
from pyro_dropout.errors import warn_caller
from pyro_dropout.generative.likelihoods import Gaussian
from pyro_dropout.generative.misfits import check_call_finite
from pyro_dropout.generative.model_call import ModelCall, call_of, is_network
from pyro_dropout.generative.observed_sites import speaks_by_likelihood
from pyro_dropout.generative.process_state import modules_stay, one_at_a_time, seeded
from pyro_dropout.generative.trial_run import evaluating
from pyro_dropout.mathematics.checks import also, check_count, check_data_finite, check_level
from pyro_dropout.prediction.joint_draws import checked_call
from pyro_dropout.prediction.sampled_posterior import SampledPosterior
from pyro_dropout.prediction.weight_draws import WholeFunctions
from pyro_dropout.protocols import PyroModel, Weights
from pyro_dropout.references.nuts.adaptation import Plan
from pyro_dropout.references.nuts.chains import ChainResult, run_chains
from pyro_dropout.references.nuts.energy import Energy
from pyro_dropout.training.fit import place_of
from pyro_dropout.training.preflight import check_gradients
from pyro_dropout.training.svi import check_compile

_AGREE = 1.01  # Vehtari et al. (2021): do not use chains with a larger R-hat
_APART = 1.5  # of chains that do not overlap
_MOST_POINTS = 50  # at which R-hat is computed


@also(num_chains="chains", num_samples="samples", warmup_steps="warmup")
@one_at_a_time
@modules_stay
def nuts(
    model: PyroModel,
    *args: object,
    chains: int = 4,
    samples: int = 500,
    warmup: int = 500,
    seed: int = 0,
    target_accept: float = 0.8,
    max_tree_depth: int = 10,
    compile: Compile = "auto",
    progress: bool = True,
    **kwargs: object,
) -> SampledPosterior:
    """Draw weights from the posterior itself with the no-U-turn sampler; for small models and few data.

    All chains run as one batch in float64, with one evaluation of the model per step for all of
    them. If a small model is on a GPU, a long run goes on there, in one kernel for all chains and steps, which
    takes about as long for 64 chains as for two; its draws are those of the CPU up to rounding.

    Chains start at draws from the prior. Parameters that are not random (hidden ones, a learned τ) stay fixed. It warns
    if trajectories diverge, or if chains disagree about the outputs of a network or the sites of another model. The
    draws are returned in any case; where warnings are errors, the ``posterior`` of the exception has them.

    Pyro's names ``num_samples``, ``num_chains`` and ``warmup_steps`` are accepted too.

    Args:
        model: a network of this package, or any Pyro model whose latent sites are continuous.
        args: the model's own arguments, data included: (x, y) for a network.
        chains: number of chains; R-hat compares them, so use at least two, preferably four.
        samples: draws kept per chain.
        warmup: draws before them, in which a chain adapts its step size and scales; they are discarded.
        seed: the same seed gives the same draws; torch's own random state is neither used nor changed.
        target_accept: the target acceptance rate; closer to 1, steps are shorter and fewer trajectories diverge.
        max_tree_depth: a trajectory has at most 2 to this power steps.
        compile: "auto", record the steps soon and compile them, for the model's GPU if it has one, if many are to
            come; True, compile them at once; False, never.
        progress: whether to show a progress bar.
        kwargs: the model's own keyword arguments.

    Returns:
        The draws, as a posterior that ``predict`` takes.

    Example:
        >>> import torch, pyro_dropout as pdrop
        >>> x = torch.tensor([[-1.0], [0.0], [1.0], [2.0]])
        >>> model = pdrop.BayesianNet(torch.nn.Linear(1, 1, bias=False), likelihood=pdrop.Gaussian(tau=4.0))
        >>> posterior = pdrop.nuts(model, x, 2 * x, samples=250, warmup=100, seed=1, compile=False, progress=False)
        >>> posterior.num_chains, posterior.num_draws, posterior.divergences
        (4, 250, 0)
        >>> exact = pdrop.references.conjugate(model, x, 2 * x).mean()["weight"].item()
        >>> abs(posterior.mean()["weight"].item() - exact) < 0.05
        True
    """
    for name, value in {"chains": chains, "samples": samples, "max_tree_depth": max_tree_depth}.items():
        check_count(name, value)
    check_count("warmup", warmup, least=0)
    check_count("seed", seed, least=0)
    check_level("target_accept", target_accept)
    check_compile(compile)
    check_gradients(doing="sampling")
    call = checked(call_of(nuts, model, args, kwargs))
    began = time.perf_counter()
    with seeded(int(seed), torch.device("cpu")), evaluating(model):
        energy = Energy(call)
        starts = torch.stack([energy.start() for _ in range(chains)])
    plan = Plan(int(samples), int(warmup), float(target_accept), int(max_tree_depth))
    bar = tqdm(total=chains * (warmup + samples), disable=not progress, unit="draw", desc="nuts")

    def tick(draws: int, steps: int) -> None:
        bar.set_postfix_str(f"{steps} steps", refresh=False)
        bar.update(draws)

    with bar, evaluating(model):
        device = place_of([model], call)
        ran = run_chains(energy, starts, plan, int(seed), tick, compile, device)
    z = torch.stack([torch.from_numpy(chain.draws) for chain in ran])
    weights = in_types_of(call, energy.weights(z))
    lost = sum(chain.diverged for chain in ran)
    posterior = SampledPosterior(weights, divergences=lost, seconds=time.perf_counter() - began)
    doubts = _of_lost(posterior, plan)
    if posterior.num_chains == 1:
        doubts.append("R-hat needs at least two chains, and there is one; use chains=4.")
    elif posterior.num_draws >= 4:  # R-hat needs two draws in each half of a chain
        try:
            doubts += _of_disagreement(*disagreement(call, posterior, z, energy), ran, plan)
        except (Exception, KeyboardInterrupt) as cause:
            doubts.append(
                f"R-hat could not be computed ({type(cause).__name__}: {cause}); the draws are returned anyway."
                " Use posterior.rhat_of(values) to check values yourself."
            )
    for doubt in doubts:
        warning = UserWarning(doubt)
        warning.posterior = posterior  # type: ignore[attr-defined]
        warn_caller(warning)
    return posterior


def checked(call: ModelCall) -> ModelCall:
    """Return a call of a model with its data; raise if they cannot be sampled from."""
    call = checked_call(call)
    if is_network(call.model):
        check_data_finite("y", call.args[1])
    else:
        check_call_finite(call)
    likelihood = getattr(call.model, "likelihood", None)
    if isinstance(likelihood, Gaussian):
        likelihood.warn_of_classes(call.args[1])
    return call


def in_types_of(call: ModelCall, weights: Weights) -> Weights:
    """Return draws on the device and in the dtype of the model's own weights or, if it has none, of its data."""
    found = next((p.dtype for p in call.model.parameters()), None) if isinstance(call.model, nn.Module) else None
    return {name: value.to(place_of([call.model], call), found or call.dtype) for name, value in weights.items()}


def disagreement(call: ModelCall, posterior: SampledPosterior, z: Tensor, energy: Energy) -> tuple[float, str]:
    """Return the largest R-hat, and its quantity: the function's values, or a site in unconstrained space."""
    if speaks_by_likelihood(call):
        x, shape = call.args[0], (posterior.num_chains, posterior.num_draws)
        x = x[torch.linspace(0, len(x) - 1, min(len(x), _MOST_POINTS)).round().long().to(x.device)]
        with evaluating(call.model):
            total = shape[0] * shape[1]
            draws = posterior.draws_at(torch.arange(total))
            f = WholeFunctions(call.model, posterior).outputs(draws, x.to(place_of([call.model])), total)
        return float(posterior.rhat_of(f.reshape(*shape, *f.shape[1:])).max()), "the function"
    each = {name: float(posterior.rhat_of(part).max()) for name, part in energy.parts(z).items()}
    worst = max(each, key=lambda name: each[name])
    return each[worst], f"site {worst!r}"


def _of_lost(posterior: SampledPosterior, plan: Plan) -> list[str]:
    """Return warnings about divergent trajectories, and what to do."""
    if not posterior.divergences:
        return []
    total = posterior.num_chains * plan.samples
    higher = 1 - (1 - plan.target_accept) / 4
    cure = f"Set target_accept={higher:.3g} (now {plan.target_accept:g}), which takes shorter steps."
    if posterior.divergences > total / 50 or plan.target_accept > 0.98:
        cure += " If many remain, narrow the prior, or use pyro.infer.reparam.LocScaleReparam."
    lost = f"{posterior.divergences} of {total} trajectories diverged"
    return [f"{lost}: parts of the posterior may be missing. {cure}"]


def _of_disagreement(worst: float, what: str, ran: list[ChainResult], plan: Plan) -> list[str]:
    """Return a warning if the chains disagree, and what to do."""
    if worst <= _AGREE:
        return []
    deepest = sum(chain.deepest for chain in ran)
    cure = f"Use more samples and a longer warmup: samples={2 * plan.samples}, warmup={2 * max(plan.warmup, 250)}."
    if deepest > len(ran) * plan.samples / 20:
        cure += f" {deepest} trajectories reached max_tree_depth: set max_tree_depth={plan.max_depth + 2}."
    if worst > _APART:
        cure += " Chains so far apart are in different modes, which longer chains rarely leave."
    return [f"chains disagree about {what}: the largest R-hat is {worst:.3f} and should be below {_AGREE}. {cure}"]
