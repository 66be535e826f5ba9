"""Layers with weights that come as one draw, as many draws at once, or as a draw for every data point.

Pyro puts sample dimensions in front and reserves one for the data plate: a matrix is then (P, 1, K, Q) and a bias
(P, 1, K), and results computed from them and inputs (N, Q) must be (P, N, K).
"""

import contextlib
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Size, Tensor, nn

from pyro_dropout.engines.torch_internals import onednn
from pyro_dropout.errors import NotFollowedError
from pyro_dropout.generative.inputs import AnyInputs, X, copies
from pyro_dropout.generative.own_rows import check_own_rows, placed, trial_counts
from pyro_dropout.mathematics.per_data_point import (
    Probe,
    drawn_per_data_point,
)
from pyro_dropout.mathematics.shapes import broadcast_shape


def sample_dimensions(batch: Size) -> Size:
    """Return a batch shape without its last dimension, that of the plate "data"; Predictive omits that dimension."""
    return batch[:-1] if batch and batch[-1] == 1 else batch


def one_for_each_point(
    weights: Mapping[str, Tensor], dimensions: Mapping[str, int], x: X
) -> tuple[dict[str, Tensor], X, Size]:
    """Return weights without sample dimensions, matching inputs, and the sample dimensions of the result.

    Where weights are drawn for each data point inside the layers, P draws become P copies of every data point. Other
    weights are returned as they are, and broadcast. ``dimensions`` are how many each weight has of its own.
    """
    recipes = {site: drawn_per_data_point(value) for site, value in weights.items()}
    if all(recipe is None for recipe in recipes.values()):
        return dict(weights), x, Size()
    batches = {site: value.shape[: value.dim() - dimensions[site]] for site, value in weights.items()}
    particles = broadcast_shape(*map(sample_dimensions, batches.values()))
    single: dict[str, Tensor] = {}
    for site, value in weights.items():
        recipe, batch = recipes[site], batches[site]
        if recipe is not None:
            recipe.count = particles.numel() * len(x)
        elif batch.numel() > 1 and any(step for step, size in zip(value.stride(), batch, strict=False) if size > 1):
            raise NotFollowedError(
                f"site {site!r} has shared draws for many particles, but others have a draw for each point.", site
            )
        single[site] = value[(0,) * len(batch)] if recipe is None else recipe.weight
    if particles.numel() > 1:
        x = copies(x, particles.numel())
    return single, x, particles


def check_points_first(
    net: nn.Module, run: Callable[[dict[str, Tensor], AnyInputs], Tensor], weights: Mapping[str, Tensor], x: AnyInputs
) -> None:
    """Raise unless the rows of a network's output each depend on the draws of one data point; ``run`` runs it.

    An input may have as many rows as there are data points and still not have one for each: a table of positions,
    learned queries, a sequence that comes first. So the network is run with another number of points: rows of the data
    change with it, and others do not.
    """
    for count in trial_counts(len(x)):
        try:
            with placed():
                _check_rows(net, run, weights, x[torch.arange(count, device=x.device) % len(x)])
        except NotFollowedError:
            raise
        except Exception as cause:
            raise NotFollowedError(
                f"the network runs with {len(x)} data points but not with {count}, so a draw for each of them cannot be"
                f" checked: {cause}. Use shared draws (per_example=False)."
            ) from cause


def _check_rows(
    net: nn.Module, run: Callable[[dict[str, Tensor], AnyInputs], Tensor], weights: Mapping[str, Tensor], x: AnyInputs
) -> None:
    recipes = {site: recipe for site, value in weights.items() if (recipe := drawn_per_data_point(value)) is not None}
    probes = {site: Probe(recipe, len(x)) for site, recipe in recipes.items()}
    # A trained factor of the network's own may begin at zero, and hide what it multiplies.
    others = {name: value for name, value in net.named_parameters() if name not in weights and value.requires_grad}
    shaken = {name: value.detach() + 0.1 * torch.randn_like(value) for name, value in others.items()}

    def outputs() -> dict[str, Tensor]:
        drawn = {site: probe.weight for site, probe in probes.items()}
        f = run({**weights, **shaken, **drawn}, x)
        return {"the network": (f * torch.linspace(1, 2, f.shape[1]).to(f)).sum(1)}

    def of_modules() -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        with contextlib.ExitStack() as hooks:
            for path, module in list(net.named_modules())[1:]:
                name = f"its module {path!r} ({type(module).__name__})"

                def note(_: nn.Module, __: object, output: object, name: str = name) -> None:
                    if isinstance(output, Tensor):
                        found.setdefault(name, output.clone())

                hooks.callback(module.register_forward_hook(note).remove)
            final = outputs()
        return {**found, **final}

    check_own_rows(outputs, [*probes.values()], net, closer=of_modules)


def recordable(modules: Iterable[nn.Module], recorded: bool) -> contextlib.AbstractContextManager[None]:
    """Within this context, where operations are recorded, an LSTM among ``modules`` uses those that can be compiled.

    On a CPU oneDNN has one kernel for a whole layer, and a compiled program cannot call it.
    """
    return onednn(not (recorded and any(isinstance(module, nn.LSTM) for module in modules)))
