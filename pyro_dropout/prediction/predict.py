"""The posterior predictive p(y | x) ≈ (1/T) Σ_t p(y | f_t), from T draws of the weights with outputs f_t."""

from typing import Any, Literal

from torch import Tensor, nn

from pyro_dropout.generative.likelihoods import likelihood_of
from pyro_dropout.generative.model_call import ModelCall, call_of, check_keywords
from pyro_dropout.generative.observed_sites import speaks_by_likelihood
from pyro_dropout.mathematics.checks import check_count, check_finite, check_flag, check_seed, describe
from pyro_dropout.mathematics.errors import PyroDropoutError, RangeError, ShapeError
from pyro_dropout.prediction.blocks import Block, Walk
from pyro_dropout.prediction.draws.weight_draws import FunctionDraws, KeptDraws, MeanWeights, PerExample, WholeFunctions
from pyro_dropout.prediction.moments import Running, Sums, block_sums
from pyro_dropout.prediction.predict_sites import predict_sites
from pyro_dropout.prediction.prediction import Prediction
from pyro_dropout.prediction.sharded import Shard, predict_together
from pyro_dropout.prediction.snapshot import frozen
from pyro_dropout.protocols import FunctionPosterior, HasDraws, Posterior
from pyro_dropout.training.distributed.process_group import join
from pyro_dropout.training.fit import place_of

Keep = Literal["auto"] | bool

_FEW = 2**24  # the most numbers that keep_samples="auto" keeps
_ROWS = 2**16  # pairs of a draw and a point, for functions drawn together


def predict(
    model: Any,
    posterior: Any,
    *args: Any,
    samples: int = 1000,
    method: Literal["mc", "standard"] = "mc",
    shared: bool = False,
    seed: int | None = None,
    keep_samples: Keep = "auto",
    compile: bool = False,
    chunk: int | None = None,
    progress: bool = False,
    distributed: bool = False,
    shard: Shard = "points",
    **kwargs: Any,
) -> Any:
    """Predict a model's outputs or sites at new data, averaged over draws of its posterior.

    For a network, the targets at ``x``: draws are summed as they come, so that memory does not grow with their number,
    and the network runs in evaluation mode. For any other Pyro model, all sites that the posterior does not have,
    observed or not: one run of the model for each draw.

    Args:
        model: a network of this package, ``model(x)``, which returns its outputs f, (N, D); or any Pyro model.
        posterior: a guide of its latent sites; or a reference that gives whole functions, by ``nuts`` (its draws,
            shuffled, each used once before any is repeated), ``conjugate`` or ``gp_posterior`` (which use only the
            likelihood of the model).
        args: the model's own arguments; for a network x, N data points, first dimension first; moved to the model's
            device. Data to be predicted are left out, as in ``model(x, y=None)``.
        samples: the number T of draws.
        method: "mc"; or "standard", one pass with the mean weights, without epistemic uncertainty.
        shared: whether all points share each draw, which is then a whole function. Otherwise every point has its own
            weights in every draw: the answer at each point has the same distribution, and the points' errors are
            independent. References, and Pyro models other than networks, always share.
        seed: makes the draws reproducible, and leaves torch's random state as it was. On a GPU give ``chunk`` as well:
            it decides in which order random numbers are used, and is measured if not given.
        keep_samples: whether ``samples`` of the outputs are kept, T·N·D numbers; "auto", when they are few (2²⁴).
        compile: whether to compile the forward passes: about ten seconds for each block shape, worth it in long runs.
            This and the next two options are for networks.
        chunk: rows, pairs of a draw and a point, in one forward pass; by default what fits into memory. It is halved
            whenever memory runs out.
        progress: whether to show a bar.
        distributed: whether this is one of several processes that torchrun has started, which share the work; all make
            the same call and all get the whole answer. Where samples are not kept, ``log_prob`` and ``covariance`` of
            it must be called by all of them as well.
        shard: what they divide, "points" or "samples"; draws differ from those of one process.
        kwargs: the model's own keyword arguments.

    Returns:
        A ``Prediction``; for a Pyro model that is not a network, a ``SitePrediction``, or a dict of them by site if the
        posterior leaves several sites to predict.

    Example:
        >>> import torch, pyro_dropout as pd
        >>> model = pd.BayesianNet(torch.nn.Linear(3, 1, bias=False), likelihood=pd.Gaussian(tau=4.0))
        >>> guide = pd.AutoDropout(model, keep=0.5)
        >>> answer = pd.predict(model, guide, torch.ones(5, 3), samples=200, seed=0)
        >>> answer.mean.shape, answer.aleatoric[0].item()
        (torch.Size([5, 1]), 0.25)
        >>> bool((answer.epistemic > 0).all()), answer.log_prob(torch.zeros(5, 1)).shape
        (True, torch.Size([5]))
    """
    network = isinstance(posterior, FunctionPosterior) or speaks_by_likelihood(ModelCall(model, args, kwargs))
    if network:
        x = _points_of(model, args, kwargs)
        _check_points(model, x)
        x = x.to(place_of([model, posterior]))
    else:
        call = call_of(predict, model, args, kwargs)
    check_count("samples", samples)
    if chunk is not None:
        check_count("chunk", chunk)
    if method not in ("mc", "standard"):
        raise RangeError(f"method must be 'mc' or 'standard'; got {method!r}.")
    if not (keep_samples == "auto" or isinstance(keep_samples, bool)):
        raise RangeError(f"keep_samples must be 'auto', True or False; got {keep_samples!r}.")
    check_seed(seed)
    check_flag("compile", compile)
    if posterior is None:
        raise PyroDropoutError("posterior must be a guide, or what nuts, conjugate or gp_posterior give; got None.")
    samples = 1 if method == "standard" else samples
    _check_met(posterior)
    if not network:
        _check_alone(compile, distributed)
        _check_drawn(posterior)
        own: Any = {"samples": samples, "method": method, "seed": seed, "keep": keep_samples, "progress": progress}
        return predict_sites(call, posterior, **own)
    likelihood = likelihood_of(model)
    if distributed:
        return _together(
            model, posterior, x, shard, samples=samples, method=method, shared=shared, seed=seed,
            keep_samples=keep_samples, compile=compile, chunk=chunk, progress=progress
        )  # fmt: skip
    options: Any = {"chunk": chunk, "seed": seed, "compile": compile}
    walk = _walk(model, posterior, x, samples, method, shared, options)
    likelihood = frozen(likelihood)
    keep = samples * len(x) * walk.like.shape[-1] <= _FEW if keep_samples == "auto" else keep_samples
    kept = walk.like.new_empty(samples, len(x), walk.like.shape[-1]) if keep else None
    running = Running(len(x))

    def reduce(f: Tensor) -> tuple[Sums, list[Tensor]]:
        return block_sums(likelihood, f), [f] if keep else []

    def receive(block: Block, result: tuple[Sums, list[Tensor]]) -> None:
        running.add(block.draws.start, block.count, block.points, result[0])
        if kept is not None:
            kept[block.draws, block.points] = result[1][0]

    walk.first("moments", reduce, receive, progress)
    if not keep:
        walk.remember()
    return Prediction(likelihood, running.sums, samples, walk.like, kept, None if keep else walk)


def _together(model: Any, posterior: Any, x: Tensor, shard: Shard, **asked: Any) -> Prediction:
    """Predict on all ranks; the total size decides whether samples are kept."""
    group = join(x.device)
    if asked["keep_samples"] == "auto":
        one = predict(model, posterior, x[:1], **{**asked, "samples": 1, "keep_samples": True, "seed": 0})
        asked["keep_samples"] = one.samples.numel() * asked["samples"] * len(x) <= _FEW
    return predict_together(group, predict, model, posterior, x, shard, **asked)


def _points_of(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return x, the input of a network, given by position or by name."""
    check_keywords(predict, model, kwargs)
    given = [*args, *(kwargs[name] for name in ("x",) if name in kwargs)]
    rest = [name for name in kwargs if name != "x"]
    if len(given) != 1 or rest:
        got = [*(type(arg).__name__ for arg in args), *(f"{name}=..." for name in kwargs)]
        raise PyroDropoutError(f"a network takes only x, as in predict(model, posterior, x); got {got}.")
    return given[0]


def _check_alone(compile: bool, distributed: bool) -> None:
    """Raise if an option that only networks support was given."""
    for name, value in (("compile", compile), ("distributed", distributed)):
        if value:
            raise PyroDropoutError(
                f"{name}=True is for networks: here any other Pyro model is run once for each draw. Leave it out."
            )


def _check_drawn(posterior: Any) -> None:
    """Raise unless latent sites can be drawn from a posterior."""
    if not (callable(posterior) or isinstance(posterior, Posterior)):
        raise PyroDropoutError(
            f"posterior must be a guide, or what nuts, conjugate or gp_posterior give; got {describe(posterior)}."
        )


def _check_points(model: Any, x: Any) -> None:
    words = isinstance(model, nn.Module) and any(isinstance(m, nn.Embedding) for m in model.modules())
    if not (words and isinstance(x, Tensor) and not x.is_floating_point()):  # an embedding takes indices
        check_finite("x", x)
    if x.dim() == 0 or len(x) == 0:
        raise ShapeError(f"x must hold at least one data point, (N, ...); got shape {tuple(x.shape)}.")


def _check_met(posterior: Any) -> None:
    """Raise if a guide has not read its model, which it cannot do here: without ``y`` it would take y for a weight."""
    if getattr(posterior, "prototype_trace", posterior) is None:
        raise PyroDropoutError(
            f"{type(posterior).__name__} has not seen its model yet: first fit it, or call posterior(x, y) once, with"
            " the data."
        )


def _walk(model: Any, posterior: Any, x: Tensor, samples: int, method: str, shared: bool, options: Any) -> Walk:
    """Return the walk, ready to run; raise with advice if weights cannot be drawn for each point."""
    if method == "standard":
        return Walk(MeanWeights(model, posterior), x, samples, **options)
    if isinstance(posterior, FunctionPosterior):
        # Points in different blocks would lie on different functions, so a block has all of them.
        options = {**options, "chunk": max(options["chunk"] or _ROWS, len(x)), "compile": False}
        return Walk(FunctionDraws(model, posterior), x, samples, **options)
    if isinstance(posterior, HasDraws):
        return Walk(KeptDraws(model, posterior, samples), x, samples, **options)
    if shared or getattr(posterior, "whole_functions", False):
        return Walk(WholeFunctions(model, posterior), x, samples, **options)
    try:
        return Walk(PerExample(model, posterior), x, samples, **options)
    except PyroDropoutError as cause:
        Walk(WholeFunctions(model, posterior), x[:1], 1, **options)  # not an error of per-point draws if this fails too
        raise PyroDropoutError(
            f"weights cannot be drawn for each data point here: {cause} Write predict(..., shared=True)."
        ) from cause
