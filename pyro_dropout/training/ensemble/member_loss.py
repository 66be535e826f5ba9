"""The loss of all members of an ensemble: one member's loss and gradients as a graph, mapped over the members."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from pyro import poutine
from torch import Tensor

from pyro_dropout.engines.torch_internals import TreeSpec, is_traced, tree_flatten, tree_unflatten
from pyro_dropout.generative.registration import forget
from pyro_dropout.protocols import PyroModel, Tree
from pyro_dropout.training.compile.functional import Buffers, Parameters, loss_and_gradients, unvalidated
from pyro_dropout.training.ensemble.anchoring import Anchoring, Problem, free_points
from pyro_dropout.training.fleet.replicas import over_replicas
from pyro_dropout.training.loss.elbo import untraced
from pyro_dropout.training.loss.temperature import at_step, current_step

if TYPE_CHECKING:
    from pyro_dropout.guides.ensemble import Ensemble

ROWS = "rows_of_the_batch"  # the keyword under which a mini-batch says which of all data it holds


@dataclass
class MemberLoss:
    """The loss of a member's guide in its own problem; of one that is not anchored, ``extras`` is None."""

    inner: Any
    extras: Problem | None
    free: frozenset[str] = frozenset()  # constrained sites that the guide has as points
    heat: float = 1.0  # T of anchored points

    def differentiable_loss(self, model: PyroModel, guide: PyroModel, *args: Tree, **kwargs: Tree) -> Tensor:
        """Return the loss."""
        rows = kwargs.pop(ROWS, None)
        if self.extras is not None:
            model = Anchoring(**self.extras, rows=rows, free=self.free, heat=self.heat)(model)
        found: Tensor = self.inner.differentiable_loss(model, guide, *args, **kwargs)
        return found


@dataclass
class _Graph:
    """The loss and the gradients of every member.

    Attributes:
        run: (parameters, extras, buffers, arguments, number of the step) -> (loss, gradients), of all members.
        parameters: those of a member's guide and of the model.
        names: the name of each in the member's guide; None for those of the model, which all members share.
        buffers: the settings of the model and the guide.
    """

    run: Callable[..., Any]
    parameters: Parameters
    names: list[str | None]
    buffers: Buffers


class EnsembleLoss:
    """The mean loss of all members; each member's parameters have the gradient of its own loss.

    What members share has the mean gradient of those whose loss is finite: one that diverges does not harm the others.
    """

    def __init__(
        self, inner: Any, extras: Problem | None = None, clip_norm: float | None = None, heat: float = 1.0
    ) -> None:
        self.inner, self.extras, self.clip_norm, self.heat = inner, extras, clip_norm, heat
        self._graphs: dict[Any, _Graph] = {}

    def differentiable_loss(self, model: PyroModel, ensemble: "Ensemble", *args: Tree, **kwargs: Tree) -> Tensor:
        """Return the mean loss as a tensor with the members' gradients."""
        _, values, losses, slopes = self._computed(model, ensemble, ensemble.tell(), (args, kwargs))
        # A function of the parameters with these gradients, which can be differentiated as any other loss.
        value: Tensor = losses.mean()
        for held, slope in zip(values, slopes, strict=True):
            value = value + (slope * (held - held.detach())).sum()
        return value

    def gradients(
        self,
        model: PyroModel,
        ensemble: "Ensemble",
        parameters: Parameters,
        values: list[Tensor],
        arguments: tuple[Sequence[Tree], dict[str, Tree]],
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the loss of each member, and the gradients at ``values`` in the order of ``parameters``."""
        leaves = [value.detach().requires_grad_() for value in values]
        with unvalidated(), poutine.block(), parameters.replaced(leaves):
            graph, held, losses, slopes = self._computed(model, ensemble, ensemble.stacked(), arguments)
        place = {id(value): k for k, value in enumerate(held)}
        order = [place[id(leaf)] for leaf in leaves]
        parameters.unused = {k for k, number in enumerate(order) if number in graph.parameters.unused}
        return losses, [slopes[number] for number in order]

    def _computed(
        self,
        model: PyroModel,
        ensemble: "Ensemble",
        stacked: dict[str, Tensor],
        arguments: tuple[Sequence[Tree], dict[str, Tree]],
    ) -> tuple[_Graph, list[Tensor], Tensor, list[Tensor]]:
        """Return the graph of a member, the parameters as they are held now, and each member's loss and gradients."""
        leaves, shape = tree_flatten(arguments)
        graph = self._graph_of(model, ensemble, leaves, shape)
        values = [graph.parameters.tell(k) if name is None else stacked[name] for k, name in enumerate(graph.names)]
        tensors, own = [leaf for leaf in leaves if isinstance(leaf, Tensor)], _own_settings(ensemble)
        settings = [own.get(name, value) for name, value in zip(graph.buffers.names, graph.buffers.values, strict=True)]
        held = [value.detach() for value in values]
        with torch.no_grad():
            losses, *slopes = graph.run(held, self.extras or {}, settings, tensors, _step_now(values))
            if self.clip_norm is not None:
                norms = torch.stack([slope.reshape(len(slope), -1).square().sum(1) for slope in slopes]).sum(0).sqrt()
                shrink = (self.clip_norm / (norms + 1e-6)).clamp(max=1.0)
                slopes = [slope * _beside(shrink, slope) for slope in slopes]
            return graph, values, losses, _averaged(graph, losses, slopes)

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
        args, kwargs = tree_unflatten(leaves, shape)
        own = {id(value): name for name, value in template.named_parameters()}
        template.is_member = False  # so that it registers its parameters, by which they are found
        try:
            parameters = Parameters(model, template, MemberLoss(self.inner, first, free, self.heat), args, kwargs)
        finally:
            template.is_member = True
        forget(template.parameters())  # it is the ensemble's that are trained
        names = [own.get(id(value)) for value in parameters.by_name.values()]
        buffers, values = Buffers(model, template), parameters.values
        example = (values, first or {}, buffers.values, [leaves[k] for k in places], _step_now(values))

        def solo(
            values: list[Tensor], here: Problem, settings: list[Tensor], tensors: list[Tensor], step: Tensor
        ) -> list[Tensor]:
            now = dict(zip(places, tensors, strict=True))
            args, kwargs = tree_unflatten([now.get(k, leaf) for k, leaf in enumerate(leaves)], shape)
            loss = MemberLoss(self.inner, None if first is None else here, free, self.heat)
            with buffers.replaced(settings), at_step(step):
                value, slopes = loss_and_gradients(model, template, loss, parameters, values, args, kwargs)
            return [value, *slopes]

        by_member = [0 if name in _own_settings(ensemble) else None for name in buffers.names]
        dims = ([None if name is None else 0 for name in names], 0, by_member, None, None)
        return _Graph(over_replicas(solo, example, dims, (model, template)), parameters, names, buffers)


def _own_settings(ensemble: "Ensemble") -> dict[str, Tensor]:
    return {f"guide.{name}": value for name, value in ensemble.settings().items()}


def _step_now(values: list[Tensor]) -> Tensor:
    """Return the number of the step that is being taken."""
    t = current_step()
    return values[0].new_ones(()) if t is None else t


def _averaged(graph: _Graph, losses: Tensor, slopes: list[Tensor]) -> list[Tensor]:
    """Average the gradients of what members share, over those members for which they and the loss are finite."""
    common = [slope for slope, name in zip(slopes, graph.names, strict=True) if name is None]
    if not common:
        return slopes
    finite = torch.stack([losses.isfinite(), *(s.reshape(len(s), -1).isfinite().all(1) for s in common)]).all(0)
    count = finite.sum().to(common[0]).clamp(min=1.0)
    means = iter([torch.where(_beside(finite, slope), slope, 0.0).sum(0) / count for slope in common])
    return [next(means) if name is None else slope for slope, name in zip(slopes, graph.names, strict=True)]


def _beside(each: Tensor, slope: Tensor) -> Tensor:
    """Return one number for each member, shaped as its gradient."""
    return each.reshape(-1, *[1] * (slope.dim() - 1))
