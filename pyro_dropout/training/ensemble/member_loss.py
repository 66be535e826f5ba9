"""The loss of all members of an ensemble: one member's loss and gradients as a graph, mapped over the members."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from pyro_dropout.generative.trial_run import quietly
from pyro_dropout.protocols import PyroModel, Tree
from pyro_dropout.training.compile.functional import Buffers, Parameters, loss_and_gradients
from pyro_dropout.training.compile.program import traced
from pyro_dropout.training.ensemble.anchoring import Anchoring, Perturbation, free_points
from pyro_dropout.training.fleet.replicas import check_pure
from pyro_dropout.training.loss.attempt import is_traced, untraced

if TYPE_CHECKING:
    from pyro_dropout.guides.ensemble import Ensemble

ROWS = "rows_of_the_batch"  # the keyword under which a mini-batch says which of all data it holds


@dataclass
class MemberLoss:
    """The loss of one member: that of its guide in its own problem.

    Attributes:
        inner: a loss with ``differentiable_loss``.
        extras: the member's anchors, noise and weights, as a tree; None if it is not anchored.
        free: constrained sites that the guide has as points.
    """

    inner: Any
    extras: dict[str, dict[str, Tensor]] | None
    free: frozenset[str] = frozenset()

    def differentiable_loss(self, model: PyroModel, guide: PyroModel, *args: Tree, **kwargs: Tree) -> Tensor:
        """Return the loss."""
        rows = kwargs.pop(ROWS, None)
        problem = model if self.extras is None else Anchoring(**self.extras, rows=rows, free=self.free)(model)
        found: Tensor = self.inner.differentiable_loss(problem, guide, *args, **kwargs)
        return found


@dataclass
class _Graph:
    """One member's loss and gradients, as a graph of tensor operations.

    Attributes:
        run: (parameters, extras, buffers, arguments) -> (loss, gradients).
        parameters: those of a member's guide and of the model.
        names: the name of each in the member's guide; None for those of the model, which all members share.
        buffers: the settings of the model and the guide.
    """

    run: torch.fx.GraphModule
    parameters: Parameters
    names: list[str | None]
    buffers: Buffers


class EnsembleLoss:
    """The mean loss of all members; each member's parameters have the gradient of its own loss.

    Args:
        inner: the loss of a member.
        perturbation: the members' anchors and perturbed data; None if they are not anchored.
        clip_norm: the largest norm of a member's gradient.
        at_once: how many members are computed at once; None for all.
    """

    def __init__(
        self,
        inner: Any,
        perturbation: Perturbation | None = None,
        clip_norm: float | None = None,
        at_once: int | None = None,
    ) -> None:
        self.inner, self.clip_norm, self.at_once = inner, clip_norm, at_once
        self.extras = None if perturbation is None else perturbation.tensors()
        self._graphs: dict[Any, _Graph] = {}

    def differentiable_loss(self, model: PyroModel, ensemble: "Ensemble", *args: Tree, **kwargs: Tree) -> Tensor:
        """Return the mean loss as a tensor with the members' gradients."""
        stacked = ensemble.tell()
        leaves, shape = tree_flatten((args, kwargs))
        graph = self._graph_of(model, ensemble, leaves, shape)
        values = [graph.parameters.tell(k) if name is None else stacked[name] for k, name in enumerate(graph.names)]
        extras = [] if self.extras is None else tree_flatten(self.extras)[0]
        others = [*graph.buffers.values, *(leaf for leaf in leaves if isinstance(leaf, Tensor))]
        dims = [None if name is None else 0 for name in graph.names] + [0] * len(extras) + [None] * len(others)
        mapped = vmap(graph.run, in_dims=tuple(dims), randomness="different", chunk_size=self.at_once)
        with torch.no_grad():
            losses, *slopes = mapped(*(value.detach() for value in values), *extras, *others)
            slopes = self._clipped(slopes, graph.names)
        # A function of the parameters with these gradients: a tracer and DDP differentiate it as any other loss.
        value: Tensor = losses.mean()
        for held, slope in zip(values, slopes, strict=True):
            value = value + (slope * (held - held.detach())).sum()
        return value

    def _clipped(self, slopes: list[Tensor], names: list[str | None]) -> list[Tensor]:
        """Shrink each member's gradient to the largest norm; average the gradients of what members share."""
        if self.clip_norm is not None:
            squares = [slope.flatten(1).square().sum(1) for slope in slopes]
            norms = torch.stack(squares).sum(0).sqrt()
            shrink = (self.clip_norm / (norms + 1e-6)).clamp(max=1.0)
            slopes = [slope * shrink.reshape(-1, *[1] * (slope.dim() - 1)) for slope in slopes]
        return [slope.mean(0) if name is None else slope for slope, name in zip(slopes, names, strict=True)]

    def _graph_of(self, model: PyroModel, ensemble: "Ensemble", leaves: list[Tree], shape: TreeSpec) -> _Graph:
        kinds = [(tuple(v.shape), v.dtype, v.device) if isinstance(v, Tensor) else v for v in leaves]
        key = (shape, tuple(kinds), getattr(model, "training", None))
        if key not in self._graphs:
            if is_traced():  # this graph is made, not recorded
                with untraced():
                    self._graphs[key] = self._traced(model, ensemble, leaves, shape)
            else:
                self._graphs[key] = self._traced(model, ensemble, leaves, shape)
        return self._graphs[key]

    def _traced(self, model: PyroModel, ensemble: "Ensemble", leaves: list[Tree], shape: TreeSpec) -> _Graph:
        template, free = ensemble.template, free_points(ensemble)
        places = [k for k, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        first = None if self.extras is None else {k: {n: t[0] for n, t in p.items()} for k, p in self.extras.items()}
        extras, spec = tree_flatten(first or {})
        args, kwargs = tree_unflatten(leaves, shape)
        parameters = Parameters(model, template, MemberLoss(self.inner, first, free), args, kwargs)
        own = {id(value): name for name, value in template.named_parameters()}
        names = [own.get(id(value)) for value in parameters.by_name.values()]
        buffers = Buffers(model, template)
        counts = (len(names), len(extras), len(buffers.values), len(places))

        def solo(*inputs: Tensor) -> list[Tensor]:
            values, here, settings, tensors = _split(inputs, counts)
            now = dict(zip(places, tensors, strict=True))
            args, kwargs = tree_unflatten([now.get(k, leaf) for k, leaf in enumerate(leaves)], shape)
            loss = MemberLoss(self.inner, None if first is None else tree_unflatten(here, spec), free)
            with buffers.replaced(settings):
                value, slopes = loss_and_gradients(model, template, loss, parameters, values, args, kwargs)
            return [value, *slopes]

        example = [*parameters.values, *extras, *buffers.values, *(leaves[k] for k in places)]
        with quietly(model, template):
            graph = traced(solo, example)
        check_pure(graph)
        return _Graph(graph, parameters, names, buffers)


def _split(inputs: Sequence[Tensor], counts: Sequence[int]) -> Iterator[list[Tensor]]:
    start = 0
    for count in counts:
        yield list(inputs[start : start + count])
        start += count
