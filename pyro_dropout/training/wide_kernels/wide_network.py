"""Which trainings the kernels take, and what they have to know: wide dropout networks with products in bfloat16.

Everything here is asked before the first step. Whatever is not in the lists here is trained as any other model: the
same loss, the same optimiser, more kernels.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import pyro.distributions as dist
import torch
from torch import Tensor, nn

from pyro_dropout.engines.engine import CannotError
from pyro_dropout.generative.likelihoods import Categorical, Gaussian
from pyro_dropout.generative.networks import BayesianNet
from pyro_dropout.generative.precision import precision_now
from pyro_dropout.generative.priors import Prior
from pyro_dropout.generative.standardised import Standardised
from pyro_dropout.guides.dropout import AutoDropout
from pyro_dropout.mathematics.distributions import BernoulliMixture
from pyro_dropout.training.compile.captured_state import is_known
from pyro_dropout.training.compile.functional import Buffers, Parameters
from pyro_dropout.training.loss.elbo import ELBO
from pyro_dropout.training.optimisers import Update, adam

_KINDS: dict[type[nn.Module], int] = {nn.ReLU: 0, nn.Tanh: 1, nn.Sigmoid: 2, nn.SiLU: 3}  # as the kernel counts them
# What was measured on an H200: within these sizes the kernels take less time than compiled steps.
NARROWEST = 256  # units of a hidden layer
WIDEST = 1024  # units of a layer, inputs too
DEEPEST = 12  # weight layers
MOST_OUTPUTS = 64
MOST_POINTS = 512  # of a step


@dataclass(frozen=True)
class DropoutNetwork:
    """What a kernel has to know of a network, its guide and its optimiser.

    Attributes:
        widths: units of each layer, inputs and outputs included.
        kinds: the activation after each layer but the last, as the kernel counts them.
        places: where the weight and the bias of each layer are among the parameters.
        keeps: where each layer's keep is among the buffers.
        priors: where the prior's width of each weight and bias is among them, in turn.
        log_tau: where the log precision of the noise is among them; None if there is none.
        adam: β₁, β₂ and ε.
        classes: whether the outputs are the logits of classes; otherwise they are means of normal targets.
        temperatures: the factor on the KL of each weight.
    """

    widths: tuple[int, ...]
    kinds: tuple[int, ...]
    places: tuple[int, ...]
    keeps: tuple[int, ...]
    priors: tuple[int, ...]
    log_tau: int | None
    adam: tuple[float, float, float]
    classes: bool = False
    temperatures: tuple[float, ...] = ()


def wide_network(
    model: object, guide: object, loss: object, update: Update, parameters: Parameters, x: object, y: object, batch: int
) -> DropoutNetwork:
    """Return what the kernels have to know of a training, or raise ``CannotError``.

    Args:
        model: the model.
        guide: its guide.
        loss: the loss.
        update: the optimiser.
        parameters: what is trained.
        x: all inputs.
        y: all targets.
        batch: how many points a step has.

    Example:
        >>> import torch, pyro_dropout as pdrop
        >>> from pyro_dropout.generative.precision import products_in
        >>> from pyro_dropout.training.optimisers import named
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
        >>> model = pdrop.BayesianNet(net, likelihood=pdrop.Gaussian(tau=4.0))
        >>> guide, loss, x, y = pdrop.AutoDropout(model), pdrop.ELBO(), torch.zeros(5, 2), torch.zeros(5, 1)
        >>> parameters = Parameters(model, guide, loss, (x, y), {})
        >>> with products_in("bf16"):
        ...     wide_network(model, guide, loss, named("adam", 1e-3), parameters, x, y, 5).widths
        (2, 256, 1)
    """
    check(is_known(model, guide, loss, update), "code of a user runs at every step")
    check(precision_now() == "bf16" and not _autocast(), "products are not in bf16")
    loss = _checked_loss(loss)
    options = _adam_of(update)
    inner = model.model if type(model) is Standardised else model
    check(type(inner) is BayesianNet, "the model is not a BayesianNet")
    assert isinstance(inner, BayesianNet)
    layers, kinds = _layers(inner)
    likelihood = inner.likelihood
    check(type(likelihood) in (Gaussian, Categorical), "the likelihood is not Gaussian or Categorical")
    widths = (layers[0][1].in_features, *(layer.out_features for _, layer in layers))
    names = [f"{path}{part}" for path, _ in layers for part in ("weight", "bias")]
    _check_model(inner, names)
    check(type(guide) is AutoDropout, "the guide is not AutoDropout")
    assert isinstance(guide, AutoDropout)
    trained = _means(guide, names)
    _check_noise(likelihood, widths[-1])
    found = list(parameters.by_name.values())
    check(len(found) == len(trained) and not parameters.divided, "something else is trained too")
    buffers = Buffers(model, guide)
    held = {name: place for place, name in enumerate(buffers.names)}
    within = "model.model" if type(model) is Standardised else "model"
    classes = type(likelihood) is Categorical
    _check_data(x, y, widths, found, classes)
    check_sizes(widths, batch)
    return DropoutNetwork(
        widths,
        kinds,
        tuple(_index(found, value) for value in trained),
        tuple(held[f"guide.states.{guide._sites[name].key}.keep"] for name in names[::2]),
        tuple(held[f"{within}.prior_scale/{name.replace('.', '/')}"] for name in names),
        None if classes else held[f"{within}.likelihood.log_tau"],
        options,
        classes,
        tuple(_heat(loss, inner, name) for name in names[::2]),
    )


def _heat(loss: ELBO, model: BayesianNet, name: str) -> float:
    """Return the factor on the KL of a weight that is dropped or a point."""
    how = model.tempered(name) if loss.temperature == "auto" else None
    return 1.0 if how is None else how.at_point


def _check_noise(likelihood: object, outputs: int) -> None:
    if isinstance(likelihood, Categorical):
        single = likelihood.shape is None and likelihood.ignore_index is None
        check(single, "a point has many targets, or some have none")
        return
    assert isinstance(likelihood, Gaussian)
    check(likelihood.log_tau.numel() in (1, outputs), "the precision has another shape than the outputs")
    check(not isinstance(likelihood.log_tau, nn.Parameter), "the precision of the noise is learned")


def check(fits: bool, reason: str) -> None:
    """Raise ``CannotError`` for this reason unless something fits."""
    if not fits:
        raise CannotError(reason)


def check_sizes(widths: Sequence[int], batch: int) -> None:
    """Raise ``CannotError`` unless the kernels take layers of these sizes."""
    check(len(widths) > 2, "there is no hidden layer")
    check(min(widths[1:-1]) >= NARROWEST, f"a hidden layer has fewer than {NARROWEST} units")
    check(max(widths) <= WIDEST, f"a layer has more than {WIDEST} units")
    check(len(list(pairwise(widths))) <= DEEPEST, f"there are more than {DEEPEST} layers")
    check(widths[-1] <= MOST_OUTPUTS, f"there are more than {MOST_OUTPUTS} outputs")
    check(batch <= MOST_POINTS, f"a step has more than {MOST_POINTS} points")


def _autocast() -> bool:
    return torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu")


def _checked_loss(loss: object) -> ELBO:
    check(type(loss) is ELBO, "the loss is not the ELBO of this package")
    assert isinstance(loss, ELBO)
    check(loss.kl == "large_k", "the KL is not the paper's")
    check(loss.num_particles == 1, "there are several particles")
    check(loss.temperature in (1.0, "auto"), "the KL has a temperature")
    check(not loss._shares, "all points share a draw")
    return loss


def _adam_of(update: Update) -> tuple[float, float, float]:
    """Return β₁, β₂ and ε of Adam without anything beside it."""
    check(update.optimiser is None, "the optimiser runs outside the step")
    options = dict(update.options)
    ours = update.apply.__code__ is adam().apply.__code__ if hasattr(update.apply, "__code__") else False
    check(ours and update.name == "adam" and {"betas", "eps", "weight_decay"} <= options.keys(), "it is not Adam")
    check(not options["weight_decay"], "Adam has a weight decay")
    check(update.schedule is None, "the learning rate has a schedule")
    check(update.clip_norm is None and update.clip_value is None, "gradients are clipped")
    betas, eps = options["betas"], options["eps"]
    assert isinstance(betas, list | tuple)
    assert isinstance(eps, float | int)
    return float(betas[0]), float(betas[1]), float(eps)


def _layers(model: BayesianNet) -> tuple[list[tuple[str, nn.Linear]], tuple[int, ...]]:
    """Return the Linear layers of a network, each with the start of its parameters' names, and the activations."""
    net = model.net
    parts = list(net.named_children()) if type(net) is nn.Sequential else [("", net)]
    layers, kinds = [], []
    for place, (path, part) in enumerate(parts):
        if place % 2:
            check(type(part) in _KINDS, f"{type(part).__name__} is not an activation that the kernel has")
            kinds.append(_KINDS[type(part)])
            continue
        check(type(part) is nn.Linear, f"{type(part).__name__} stands where a Linear layer should")
        assert isinstance(part, nn.Linear)
        layers.append((f"{path}." if path else "", part))
    check(len(layers) == len(kinds) + 1, "the last layer is not Linear")
    return layers, tuple(kinds)


def _check_model(model: BayesianNet, names: list[str]) -> None:
    check(type(model.prior) is Prior and not model.learned, "a prior's width is learned")
    check(list(model.sites) == names, "a parameter is not random, or a layer has no bias")
    check(all(site.uses == 1 for site in model.sites.values()), "layers share a parameter")
    check(not model.hidden_parameters(), "a parameter is not random")
    check(not model.noise and not model.dropped and model._search is None, "the network has noise of its own")
    check(model.output is None and not model.whole_batch, "the network returns more than its outputs")


def _means(guide: AutoDropout, names: list[str]) -> list[Tensor]:
    """Return the means of the guide, in this order, if it is dropout of input units and points for biases."""
    check(sorted(guide._sites) == sorted(names), "guide and model have different sites")
    check(not guide.plates, "the guide has plates")
    found: list[Tensor] = []
    for name in names:
        site, q = guide._sites[name], guide.posterior(name)
        state = guide._states[site.key]
        point = type(q) is dist.Delta
        rows = type(q) is BernoulliMixture and q.noiseless and q.row_dim == 1 and name.endswith("weight")
        check(point or rows, f"{name} is neither a point nor dropped by input unit")
        kept = state._buffers.get("keep")  # a point whose keep was changed by hand would be dropped by the kernel
        check(not point or kept is None or bool((kept == 1).all()), f"keep of {name} is not that of a point")
        check(set(state._parameters) == {"loc"}, f"more than the mean of {name} is trained")
        found.append(state.get_parameter("loc"))
    return found


def _check_data(x: object, y: object, widths: tuple[int, ...], trained: Sequence[Tensor], classes: bool) -> None:
    for name, value, width in (("x", x, widths[0]), ("y", y, widths[-1])):
        check(isinstance(value, Tensor), f"{name} is not a tensor")
        assert isinstance(value, Tensor)
        check(
            value.is_contiguous() and not value.requires_grad, f"{name} is not float32, row by row, without a gradient"
        )
        if classes and name == "y":
            check(value.dim() == 1 and value.dtype == torch.int64, "y does not hold whole numbers of 64 bits, (N,)")
            continue
        check(value.dim() == 2 and value.shape[1] == width, f"{name} is not (N, {width})")
        check(value.dtype == torch.float32, f"{name} is not float32, row by row")
    assert isinstance(x, Tensor)
    for value in trained:
        check(value.dtype == torch.float32 and value.device == x.device, "parameters are not float32, beside the data")


def _index(found: list[Tensor], value: Tensor) -> int:
    place = next((k for k, each in enumerate(found) if each is value), None)
    if place is None:
        raise CannotError("a mean of the guide is not trained")
    return place
