"""Converts a network with dropout layers as the paper reads it: a model without dropout, and a guide that drops."""

from functools import partial

from torch import Tensor, nn

from pyro_dropout.errors import PyroDropoutError
from pyro_dropout.generative.inputs import AnyInputs, Output, inputs_of
from pyro_dropout.generative.layouts import computes_otherwise
from pyro_dropout.generative.likelihoods import Gaussian, Likelihood
from pyro_dropout.generative.networks import BayesianNet, copied
from pyro_dropout.generative.priors import BySite, Prior
from pyro_dropout.guides.dropout import AutoDropout
from pyro_dropout.guides.other_randomness import find_noise, with_dropout
from pyro_dropout.guides.row_masks import Copy, Points, on_rows
from pyro_dropout.mathematics.checks import describe


def from_dropout(
    net: nn.Module,
    tau: float | Tensor | None = None,
    length_scale: BySite = 1.0,
    *,
    likelihood: Likelihood | None = None,
    prior: Prior | None = None,
    output: Output = None,
    whole_batch: bool = False,
    example: object = None,
) -> tuple[BayesianNet, AutoDropout]:
    """Turn a network with dropout, trained or not, into the model and the posterior that it represents.

    Predictions of the pair are those of stochastic forward passes through ``net``. An ``nn.Dropout`` layer whose mask
    is on the rows of one weight moves into the guide: the guide drops these rows, and the model has no such layer.
    torch multiplies what it keeps by 1/keep; here that factor is folded into the weights. All other dropout, stochastic
    depth and noise stays in the model, which draws it anew for every data point at every pass, in evaluation mode too:
    dropout in a subclass with a ``forward`` of its own, before such a layer, or at a layer with hooks, is of this kind.
    All other weights are points. ``repr(model)`` lists both kinds. The network is copied. Frozen parameters
    (``requires_grad=False``) stay frozen, those that are dropped too.

    Args:
        net: the network. Masks on rows are found if ``torch.fx`` can trace it; otherwise all dropout stays in the
            model.
        tau: observation precision, for a Gaussian likelihood; 1 by default.
        length_scale: l of the prior N(0, l⁻²) on every weight layer and bias.
        likelihood: of the targets: ``Categorical()`` for a classifier; ``tau`` is then not used.
        prior: another prior; ``length_scale`` is then not used.
        output: which part of what the network returns is its outputs, as in ``BayesianNet``.
        whole_batch: whether the network needs all its points at once, as in ``BayesianNet``.
        example: some inputs, (N, ...), to run the network with now and not with the first data. Needed for networks on
            sequences: a mask for each position is not one on the rows of a weight, and shapes tell the two apart.

    Returns:
        The model and the guide.

    Raises:
        PyroDropoutError: the network draws random numbers that cannot be kept as they are (one draw for a whole batch,
            Python's generator), or none at all, which may be noticed with the first data. The message names the layer.

    Example:
        >>> import torch, pyro_dropout as pdrop
        >>> from torch import nn
        >>> net = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))
        >>> model, guide = pdrop.from_dropout(net, tau=10.0)
        >>> guide.posterior("3.weight").keep[0].item(), bool(torch.allclose(guide.mean()["3.weight"], net[3].weight))
        (0.800000011920929, True)
    """
    if not isinstance(net, nn.Module):
        raise PyroDropoutError(f"net must be a torch nn.Module with dropout; got {describe(net)}.")
    for path, module in net.named_modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p >= 1 and not computes_otherwise(module):
            raise PyroDropoutError(
                f"{type(module).__name__} {path!r} drops everything (p={module.p}), so nothing before it is used. Use a"
                " smaller p, or a network without it."
            )
    x = None if example is None else inputs_of(example, "example", whole_batch)
    # Where all points share a draw, a mask for each of them is not a draw of the weights.
    masks = [] if whole_batch else on_rows(net, x)
    clean, points = copied(net, net), Points()
    keep: dict[str, float] = {}
    names = {id(parameter): name for name, parameter in net.named_parameters()}
    for mask in masks:
        keep[names[id(net.get_submodule(mask.layer)._parameters["weight"])]] = 1 - mask.p
        dropout, copy = clean.get_submodule(mask.dropout), Copy()
        for path in [path for path, found in clean.named_modules(remove_duplicate=False) if found is dropout]:
            clean.set_submodule(path, copy)
        clean.get_submodule(mask.layer).register_forward_pre_hook(partial(points.check, mask))
    if masks:
        clean.register_forward_pre_hook(points.note, with_kwargs=True)
    if prior is None:
        prior = Prior(length_scale, bias_length_scale=length_scale, width_scaled=False)
    fixed = {name: value for name, value in clean.named_parameters() if name in keep and not value.requires_grad}
    for value in fixed.values():
        value.requires_grad_(True)  # it is dropped, so it is random; what it is when kept stays frozen, in the guide
    if likelihood is None and tau is not None:
        likelihood = Gaussian(tau)
    model = BayesianNet(clean, prior, likelihood, output=output, whole_batch=whole_batch)
    model.dropped, model.noise = list(dict.fromkeys(mask.dropout for mask in masks)), with_dropout(clean)
    model.search = _find_noise
    if not _has_dropout(net) and all(type(module).__module__.startswith("torch.") for module in net.modules()):
        raise _nothing_random(net)  # any other module may draw its noise itself, which its first data show
    if x is not None:
        model.look_at(x)
    for site in keep:
        if site not in model.sites:
            raise PyroDropoutError(f"prior hides {site!r}, whose rows the network drops; it must be random.")
    guide = AutoDropout(model, keep=lambda site: keep.get(site, 1.0), scale=0.0, bias="map")
    for name, value in fixed.items():
        value.requires_grad_(False)
        guide._state(guide._sites[name]).requires_grad_(False)
    return model, guide


def _has_dropout(net: nn.Module) -> bool:
    """Whether a network has a layer of dropout, of any probability, or one that the guide has taken over."""
    return bool(with_dropout(net)) or any(isinstance(m, nn.modules.dropout._DropoutNd | Copy) for m in net.modules())


def _find_noise(net: nn.Module, x: AnyInputs, whole: bool = False) -> list[str] | None:
    """Return the modules of a network that draw noise, as ``find_noise`` does; raise if nothing is random at all."""
    found = find_noise(net, x, whole)
    if found is not None and not found and not _has_dropout(net):
        raise _nothing_random(net)
    return found


def _nothing_random(net: nn.Module) -> PyroDropoutError:
    return PyroDropoutError(
        f"net must have dropout, or noise of its own, in training mode; {type(net).__name__} has none, so that the pair"
        " would be one function without uncertainty. Put nn.Dropout(p) before a layer whose inputs are to be dropped;"
        " or choose a posterior: model = BayesianNet(net) and AutoDropout(model, keep=0.9), or laplace(model, ...)."
    )
