"""Any ``nn.Module`` as a Pyro model: priors over its parameters, a forward pass, a likelihood."""

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Self, TypeVar

import pyro
import torch
from torch import Size, Tensor, nn
from torch.func import functional_call, vmap

from pyro_dropout.engines.torch_internals import is_traced
from pyro_dropout.errors import NotFollowedError, PyroDropoutError, ShapeError
from pyro_dropout.generative.inputs import (
    AnyInputs,
    Output,
    copies,
    inputs_of,
    leaves_of,
    picked,
    shown,
    wrong_with,
)
from pyro_dropout.generative.layers import (
    check_points_first,
    one_for_each_point,
    recordable,
    sample_dimensions,
)
from pyro_dropout.generative.layouts import Site, freeze_all_but
from pyro_dropout.generative.likelihoods import Gaussian
from pyro_dropout.generative.likelihoods.likelihood import Likelihood as OwnLikelihood
from pyro_dropout.generative.likelihoods.likelihood import is_likelihood, observe
from pyro_dropout.generative.own_forward import check_no_hooks, follow_forward, running
from pyro_dropout.generative.own_noise import (
    FrozenStatistics,
    drawn_in_place,
    kept_random,
    may_write,
    still_layers,
    with_statistics,
)
from pyro_dropout.generative.precision import HALF, lowered
from pyro_dropout.generative.priors import Prior, PriorWidths
from pyro_dropout.generative.registration import tell_pyro
from pyro_dropout.generative.trial_run import aside, can_run, checked_with, in_mode
from pyro_dropout.mathematics.checks import check_choice, check_flag, describe
from pyro_dropout.mathematics.per_data_point import drawn_per_data_point
from pyro_dropout.mathematics.shapes import broadcast_shape
from pyro_dropout.protocols import Likelihood, Weights

# Finds the modules that draw noise, given whether inputs stay whole; None if the network does not run with them.
Search = Callable[[nn.Module, AnyInputs, bool], list[str] | None]
Part = TypeVar("Part")
_SHOWN = 8  # the most names that a summary lists
# Without a batching rule of their own.
_LOOPED = (nn.RNNBase, nn.RNNCellBase, nn.TransformerEncoderLayer, nn.MultiheadAttention, nn.EmbeddingBag, nn.Bilinear)


class BayesianNet(PriorWidths):
    """A network whose parameters are random: sites named as in its ``state_dict()``, then the likelihood of ``y``.

    Takes any module. Parameters that the prior hides (normalisation and positions, by default) stay ordinary and are
    trained too; frozen ones (``requires_grad=False``) are neither random nor trained. ``repr`` lists all three. Buffers
    and ``train()``/``eval()`` work as in the network itself. A parameter shared by several layers is one site. Leading
    sample dimensions of the weights give leading dimensions of the output, so particles and posterior samples can be
    vectorised.

    Args:
        net: the network; it maps x of shape (N, ...) to (N, D). If x is a dict of tensors, they are its keyword
            arguments; if x is a tuple, its positional ones.
        prior: the prior over its parameters; by default ``Prior(width_scaled="all", tempered=True)``, with which
            no network that was measured, up to 3 x 1,024 units, stayed at a constant. ``Prior()`` is the paper's.
        likelihood: the distribution of the targets given the network's output.
        frozen_statistics: which normalisation layers use their running statistics in training mode too, and leave them
            as they are: True, those with frozen parameters; "all"; or False, none, as in torch.
        output: which part of what the network returns is its outputs: a key of a dict, the name of an attribute, or the
            index in a tuple. None: it returns one tensor.
        whole_batch: whether the network needs all its points at once, because the output at one depends on the others,
            as in a graph network. It then trains without mini-batches, all points share each draw, and predictions are
            never divided between points.
        only: the parameters that are random, by one or several patterns such as "classifier.*", as in a shell. All
            others are frozen: ``requires_grad=False`` is set on them. What the prior hides is not random anyway.

    Example:
        >>> import pyro, torch, pyro_dropout as pdrop
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
        >>> model = pdrop.BayesianNet(net, likelihood=pdrop.Gaussian(tau=4.0))
        >>> trace = pyro.poutine.trace(model).get_trace(torch.zeros(5, 2))
        >>> [name for name in trace.stochastic_nodes if name != "data"]
        ['0.weight', '0.bias', '2.weight', '2.bias', 'y']
        >>> model(torch.zeros(5, 2)).shape
        torch.Size([5, 1])
    """

    lowers_products = True  # precision="bf16" reaches its products

    def __init__(
        self,
        net: nn.Module,
        prior: Prior | None = None,
        likelihood: Likelihood | None = None,
        *,
        frozen_statistics: FrozenStatistics = True,
        output: Output = None,
        whole_batch: bool = False,
        only: str | Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(net, nn.Module):
            raise PyroDropoutError(f"net must be a torch nn.Module; got {type(net).__name__}.")
        # Steps are compiled here, weight draws included, and a compiled network inside them cannot be looked into.
        net = getattr(net, "_orig_mod", net) if type(net).__name__ == "OptimizedModule" else net
        if prior is not None and not isinstance(prior, Prior):
            raise PyroDropoutError(f"prior must be a Prior, such as Prior(length_scale=1.0); got {describe(prior)}.")
        if likelihood is not None and not is_likelihood(likelihood):
            raise PyroDropoutError(f"likelihood must be one such as Gaussian(tau=1.0); got {describe(likelihood)}.")
        check_choice("frozen_statistics", frozen_statistics, (True, False, "all"))
        if isinstance(output, bool) or not isinstance(output, str | int | None):
            raise PyroDropoutError(f"output must be a key, the name of an attribute or an index; got {output!r}.")
        check_flag("whole_batch", whole_batch)
        if only is not None:
            freeze_all_but(net, only)
        self.net, self.output, self.whole_batch = net, output, whole_batch
        self._still = still_layers(net, frozen_statistics)
        # What from_dropout sets: the dropout layers that are in the guide now, the modules known to draw noise at every
        # pass, and a search for more that needs data.
        self.dropped: list[str] = []
        self.noise: list[str] = []
        self.search: Search | None = None
        self.prior = Prior(width_scaled="all", tempered=True) if prior is None else prior
        if likelihood is None:
            likelihood = Gaussian(1.0)
            likelihood.assumed = True
        self.likelihood: Likelihood = likelihood
        self.sites: dict[str, Site] = {site.name: site for site in self.prior.sites(net)}
        if not self.sites:
            frozen = [parameter for parameter in net.parameters() if not parameter.requires_grad]
            raise PyroDropoutError(
                f"net has no parameter that is random under this prior: all {len(frozen)} parameters that it does not"
                " hide have requires_grad=False, or it hides all. Write net.requires_grad_(True), or"
                " Prior(include_frozen=True), or Prior(hide=...)."
            )
        for name in self.sites:
            if net.get_parameter(name).is_complex():
                raise PyroDropoutError(
                    f"{name!r} is complex, and weights are real here. Hold its real and imaginary part as two"
                    " parameters, or leave it out with Prior(hide=...)."
                )
        self.register_widths(net)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Let a class with a ``forward`` of its own be asked for what that returns."""
        super().__init_subclass__(**kwargs)
        follow_forward(cls)

    def sample_sites(self, num_data: int | None = None) -> Weights:
        """Call ``pyro.sample`` for every random parameter, in order, and return the values by name."""
        weights: Weights = {}
        for name, site in self.sites.items():
            infer: Any = {"kind": site.kind, "row_dim": site.row_dim, "reused": site.uses > 1, "fan_in": site.fan_in}
            infer["init"], infer["tempered"] = self._parameter(name), self.tempered(name, num_data)
            weights[name] = pyro.sample(name, self.prior_of(name), infer=infer)
        return weights

    def hidden_parameters(self) -> dict[str, Tensor]:
        """Return the ordinary parameters of the network, which have no posterior; they are trained unless frozen."""
        return {name: value for name, value in self.net.named_parameters() if name not in self.sites}

    def extra_repr(self) -> str:
        """Return what is random, and what is not: a part of ``repr(model)``."""
        hidden = self.hidden_parameters()
        kinds = {
            "random": list(self.sites),
            "prior width learned": self.learned,
            "ordinary, trained": [name for name, value in hidden.items() if value.requires_grad],
            "frozen (requires_grad=False)": [name for name, value in hidden.items() if not value.requires_grad],
            "assumed to be (out, in, ...)": [name for name, site in self.sites.items() if site.assumed],
            "running statistics that move in train()": self._moving(),
            "running statistics that stay": self._still,
            "dropout of rows, in the guide": self.dropped,
            "noise of the network's own, at every pass": self.noise,
        }
        more = {kind: f", and {len(names) - _SHOWN} more" * (len(names) > _SHOWN) for kind, names in kinds.items()}
        return "\n".join(f"{kind}: {', '.join(names[:_SHOWN])}{more[kind]}" for kind, names in kinds.items() if names)

    def evaluate(self, weights: Weights, x: Any) -> Tensor:
        """Run the network with the given weights, (*batch, ...), on x: (*batch without the data plate, N, D)."""
        self._check_sites(weights)
        check_no_hooks(self)
        x = inputs_of(x, whole=self.whole_batch)
        self.look_at(x)
        weights = {name: self._typed(name, value) for name, value in weights.items()}
        dimensions = {name: self._parameter(name).dim() for name in weights}
        if any(drawn_per_data_point(value) is not None for value in weights.values()):
            if self.whole_batch:
                raise NotFollowedError(
                    "the network takes all its points at once (whole_batch=True), so they share each draw. Use shared"
                    " draws: ELBO(per_example=False), predict(..., shared=True)."
                )
            weights, x, batch = one_for_each_point(weights, dimensions, x)
            try:
                self._check_points_first(weights, x)  # before the run, whose activations need the memory too
            except NotFollowedError:
                self._run(weights, x)  # an error of the network itself comes first
                raise
            f = self._run(weights, x)
            return f.reshape(*batch, -1, f.shape[-1])
        leads = {name: value.shape[: value.dim() - dimensions[name]] for name, value in weights.items()}
        samples = {name: sample_dimensions(lead) for name, lead in leads.items()}
        plain = {
            name: value.reshape(samples[name] + value.shape[len(leads[name]) :]) if leads[name] else value
            for name, value in weights.items()
        }
        batch = broadcast_shape(*samples.values())
        return self._vectorised(plain, x, batch) if batch else self._run(plain, x)

    def look_at(self, x: AnyInputs) -> None:
        """Find noise of the network's own, with the first data."""
        found = self.search(self.net, x, self.whole_batch) if self.search is not None and can_run(x) else None
        if found is not None:
            self.noise, self.search = found, None

    def forward(self, x: Any, y: Tensor | None = None, num_data: int | None = None) -> Tensor:
        """Draw the weights, run the network and observe ``y``; returns the network's output."""
        tell_pyro(self, self.hidden_parameters())
        count = len(y) if num_data is None and isinstance(y, Tensor) and y.dim() else num_data
        with running(self):
            f = self.evaluate(self.sample_sites(count), x)
        observe(self.likelihood, f, y, num_data)
        return f

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return a copy, as of any module; torch's own fails on weights that hooks have computed."""
        made = memo[id(self)] = type(self).__new__(type(self))
        made.__dict__.update(copied(self.__dict__, self.net, memo))
        return made

    # --- how the network is run ---------------------------------------------------------------------------------------

    def _run(self, weights: Weights, x: AnyInputs) -> Tensor:
        """Run the network once, on x of shape (N, ...)."""
        try:
            still, noisy = (map(self.net.get_submodule, paths) for paths in (self._still, self.noise))
            recorded = recordable(self.net.modules(), is_traced())
            x = copies(x, 1) if may_write(self.net, self.noise) else x
            with kept_random(noisy), recorded, in_mode(still, False), lowered(leaves_of(x)[0].device):
                given = _call(self.net, weights, x)
        except (RuntimeError, TypeError, ValueError) as cause:
            wrong = drawn_in_place(self.noise, cause) or wrong_with(x, self.net, cause)
            if wrong is None:
                raise
            raise wrong from cause
        f = picked(given, self.output)
        if isinstance(f, Tensor) and isinstance(self.likelihood, OwnLikelihood):
            f = self.likelihood.flattened(f)
        if not isinstance(f, Tensor) or f.dim() != 2:
            gave = tuple(f.shape) if isinstance(f, Tensor) else type(f).__name__
            raise ShapeError(
                f"net must map x of shape {shown(x)} to outputs (N, D); it gave {gave}. For sequences and maps write"
                " Categorical(dims=...)."
            )
        # A likelihood adds up many terms, for which half precision is too coarse.
        return f.float() if f.dtype in HALF else f

    def _typed(self, name: str, value: Tensor) -> Tensor:
        """Return a draw in the type of its parameter: guides of half-precision networks have float32."""
        recipe, dtype = drawn_per_data_point(value), self._parameter(name).dtype
        if recipe is None:
            return value.to(dtype) if dtype in HALF else value
        recipe.dtype = dtype if dtype in HALF else recipe.dtype
        return value

    def _check_points_first(self, weights: Weights, x: AnyInputs) -> None:
        """Raise if a draw for each data point met another dimension of the same size; once for inputs of a shape."""
        shapes = tuple(leaf.shape[1:] for leaf in leaves_of(x))
        key = (
            shapes,
            self.net.training,
            torch.is_inference_mode_enabled(),
            *(drawn_per_data_point(value) is None for value in weights.values()),
        )
        known = checked_with(self)
        if key in known or not can_run(x):
            return
        with aside(self.net):
            check_points_first(self.net, self._run, weights, x)
        known.add(key)

    def _vectorised(self, weights: Weights, x: AnyInputs, batch: Size) -> Tensor:
        """Run one copy of the network for each draw."""
        flat = {
            name: value.expand(batch + self._parameter(name).shape).flatten(0, len(batch) - 1)
            for name, value in weights.items()
        }
        f: Tensor
        if self._needs_a_loop():
            draws = ({name: value[k] for name, value in flat.items()} for k in range(batch.numel()))
            f = torch.stack([self._run(draw, x) for draw in draws])
        else:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="There is a performance drop")  # an operation that is looped
                f = vmap(lambda draw: self._run(draw, x), randomness="different")(flat)
        return f.reshape(*batch, *f.shape[1:])

    def _moving(self) -> list[str]:
        """Return the layers whose running statistics move in training mode."""
        return [path for path in with_statistics(self.net) if path not in self._still]

    def _needs_a_loop(self) -> bool:
        """Whether a module of the network cannot run under vmap, or updates its statistics or draws noise in place."""
        moving = self._moving()
        return may_write(self.net, self.noise) or any(
            isinstance(module, _LOOPED)
            or (path in moving and module.training)
            or (path in self.noise and not isinstance(module, nn.modules.dropout._DropoutNd))
            for path, module in self.net.named_modules()
        )


def copied(part: Part, net: nn.Module, memo: dict[int, Any] | None = None) -> Part:
    """Return a deep copy of a network, or of what holds it; weights that hooks compute (weight_norm, prune) are values.

    torch refuses to copy them with their gradients; the next pass computes them anew.
    """
    kept = (value for module in net.modules() for value in vars(module).values() if isinstance(value, Tensor))
    memo = {} if memo is None else memo
    memo.update({id(value): value.detach().clone() for value in kept if not value.is_leaf})
    return copy.deepcopy(part, memo)


def _call(net: nn.Module, weights: Weights, x: AnyInputs) -> object:
    """Return net(x) with other weights, put in the places of all parameters that share them.

    torch's ``tie_weights`` would swap a module with two names twice, and leave the weights in place of its parameters.
    """
    names = {id(net.get_parameter(name)): name for name in weights}
    everywhere = {
        f"{path}.{own}" if path else own: weights[names[id(value)]]
        for path, module in net.named_modules()
        for own, value in module._parameters.items()
        if id(value) in names
    }
    args, kwargs = ((x,), {}) if isinstance(x, Tensor) else (x.args, x.kwargs)
    return functional_call(net, everywhere, args, kwargs, tie_weights=False)
