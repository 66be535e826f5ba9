"""Steps of a wide network: its parameters and moments laid out for its kernels, and their launches in a CUDA graph.

The settings that kernels read are those of the KL in the paper's form at σ = 0: for a weight
Σ_rows [p Σ m²/(2s²) + p log p + (1 - p) log(1 - p)], and Σ b²/(2s²) for a bias at a point.
"""

from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor

from pyro_dropout.engines.engine import CHAIN, Loop, Step
from pyro_dropout.training.wide_kernels.launches import Launches
from pyro_dropout.training.wide_kernels.layer import layers_of, rounded_up
from pyro_dropout.training.wide_kernels.wide_network import DropoutNetwork


def half_on(device: torch.device) -> torch.dtype:
    """Return the type of numbers in products; float32 where Triton's interpreter runs, which rounds in its own way."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


class WideSteps(Loop):
    """Steps that kernels take, many at a time, on copies of the step's tensors.

    Args:
        step: the step.
        network: what the kernels have to know.
        data: returns all inputs and all targets, as they are now.
        buffers: settings of model and guide.
        batch: points of a step.
        num_data: points in all.

    Attributes:
        values: the parameters, which the kernels change.
        state: their two moments.
        t: the number of the next step.
        stream: the key of the random numbers, and how many steps have drawn some.
    """

    name = "kernels"

    def __init__(
        self,
        step: Step,
        network: DropoutNetwork,
        data: Callable[[], tuple[Tensor, Tensor]],
        buffers: list[Tensor],
        batch: int,
        num_data: int,
    ) -> None:
        super().__init__(step)
        self._network, self._data, self._buffers = network, data, buffers
        self.t, device = step.t.clone(), step.t.device
        parts = (step.values, *([slots[k] for slots in step.state] for k in range(2)))
        self._whole = [self._laid_out(each) for each in parts]
        self.values, *own = [self._views(whole, step.values) for whole in self._whole]
        self.state = [list(pair) for pair in zip(*own, strict=True)]
        self.stream = torch.stack([torch.randint(2**62, ()), torch.zeros((), dtype=torch.long)]).to(device)
        self.changed = [*self.values, *(slot for slots in self.state for slot in slots), self.t]
        self.kept = {"stream": self.stream}  # the random numbers of the kernels
        self._seen: list[int] = []
        self._settings: tuple[Tensor, ...] = ()
        self._decay_sizes: list[int] = []
        self._layers = layers_of(network, rounded_up(batch), CHAIN, half_on(device), device)
        self._order = torch.zeros((CHAIN, batch), dtype=torch.int64, device=device) if step.row else None
        about = (self._whole, step.lr, self.t, self.stream, self._order, batch, num_data / batch)
        self._kernels = Launches(network, self._layers, *about)
        self._version: int | None = None
        self._captured: tuple[tuple[int, ...], torch.cuda.CUDAGraph] | None = None
        if device.type == "cuda":
            with torch.cuda.device(device):
                self._prepare(parts)

    def _laid_out(self, values: list[Tensor]) -> Tensor:
        """Return tensors as one, in the order of the layers."""
        return torch.cat([values[k].detach().reshape(-1) for k in self._network.places])

    def _views(self, whole: Tensor, like: list[Tensor]) -> list[Tensor]:
        """Return the parts of such a tensor, in the order and the shapes of the parameters."""
        places = self._network.places
        parts = dict(zip(places, whole.split([like[k].numel() for k in places]), strict=True))
        return [parts[k].view(value.shape) for k, value in enumerate(like)]

    def _prepare(self, parts: tuple[list[Tensor], ...]) -> None:
        """Compile the kernels by a step that is taken back, and capture a chain of steps."""
        data = self._data()
        self._copy_weights()
        self._launch(1, data)
        for whole, each in zip(self._whole, parts, strict=True):
            whole.copy_(self._laid_out(each))
        torch.cuda.synchronize(self.t.device)
        self._graph(data)

    # --- settings -----------------------------------------------------------------------------------------------------

    def _current_settings(self) -> tuple[Tensor, ...]:
        """Return limits of masks, log precisions, decays and a constant of the KL; anew if a setting has changed."""
        seen = [buffer._version for buffer in self._buffers]
        if seen != self._seen:
            self._settings, self._seen = self._read(), seen
        return self._settings

    def _read(self) -> tuple[Tensor, ...]:
        network, buffers = self._network, [buffer.double() for buffer in self._buffers]
        layers = zip(network.keeps, network.widths, network.temperatures, strict=False)
        keeps = [(buffers[keep].reshape(-1).expand(width), heat) for keep, width, heat in layers]
        decays, constant = [], torch.zeros_like(buffers[0]).sum()
        for k, (keep, heat) in enumerate(keeps):
            width, bias = (buffers[place] for place in network.priors[2 * k : 2 * k + 2])
            # One row of decays for all outputs, if they agree.
            decays.append((heat * keep / width.reshape((1,) * (2 - width.dim()) + width.shape).square()).flatten())
            decays.append(bias.square().reciprocal().reshape(-1).expand(network.widths[k + 1]))
            constant = constant + heat * (torch.xlogy(keep, keep) + torch.xlogy(1 - keep, 1 - keep)).sum()
        self._decay_sizes = [len(each) for each in decays]
        # Of the numbers of 32 bits, as many are at most the limit as keep says.
        limits = (torch.cat([keep for keep, _ in keeps]) * 2**32).ceil().long() - 1
        log_tau = constant if network.log_tau is None else self._buffers[network.log_tau].reshape(-1)
        tau = log_tau.expand(network.widths[-1]).float().contiguous()
        return limits, tau, torch.cat(decays).float(), constant.float()

    # --- steps --------------------------------------------------------------------------------------------------------

    def ready(self) -> None:
        """Draw the key of the random numbers."""
        self.stream[0] = torch.randint(2**62, ())

    def at_once(self, steps: int) -> int:
        """Return how many of some steps a launch takes."""
        return min(steps, CHAIN)

    def many(self, steps: int, rows: Tensor | None) -> Tensor:
        """Take steps, each with one of the rows, and return the losses."""
        return self.advance(steps, rows)

    def _copy_weights(self) -> None:
        """Write the weights in half precision again, if something else than a kernel has changed the parameters."""
        version = self._whole[0]._version
        if version == self._version:
            return
        for k, layer in enumerate(self._layers):
            if not layer.thin:
                layer.half[: layer.outputs, : layer.inputs] = self.values[self._network.places[2 * k]]
        self._version = version

    def advance(self, steps: int, order: Tensor | None = None, masks: Tensor | None = None) -> Tensor:
        """Take some steps, at most ``CHAIN``, and return the losses before each, (steps,).

        Args:
            steps: how many.
            order: the rows of each step's batch, (steps, batch); None if they stay.
            masks: zeros and ones in place of drawn ones, (steps, 1, batch, units), for tests.
        """
        data = self._data()
        if order is not None:
            assert self._order is not None
            self._order[:steps] = order
        self._copy_weights()
        with torch.cuda.device(self.t.device) if self.t.is_cuda else nullcontext():
            if steps == CHAIN and masks is None and self.t.is_cuda:
                self._graph(data).replay()
            else:
                self._launch(steps, data, masks)
        self.t.add_(steps)
        self.stream[1:].add_(steps)
        return self._kernels.losses[:steps].sum(1) + self._current_settings()[3]

    def _launch(self, steps: int, data: tuple[Tensor, Tensor], masks: Tensor | None = None) -> None:
        settings = self._current_settings()
        self._kernels.launch(steps, data, settings, self._decay_sizes, masks)

    def _graph(self, data: tuple[Tensor, Tensor]) -> torch.cuda.CUDAGraph:
        """Return a graph of ``CHAIN`` steps; one that was captured before, unless it reads other tensors."""
        reads = tuple(each.data_ptr() for each in (*data, *self._current_settings()))
        if self._captured is None or self._captured[0] != reads:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._launch(CHAIN, data)
            self._captured = reads, graph
        return self._captured[1]
