"""Steps of a wide network: its parameters and moments laid out for its kernels, and their launches in a CUDA graph."""

from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor

from pyro_dropout.engines.engine import CHAIN
from pyro_dropout.training.wide_kernels.dropout_network import DropoutNetwork
from pyro_dropout.training.wide_kernels.kernel_steps import KernelSteps
from pyro_dropout.training.wide_kernels.launches import Launches
from pyro_dropout.training.wide_kernels.layer import layers_of, rounded_up
from pyro_dropout.training.wide_kernels.settings import (
    bias_decay,
    kl_constant,
    log_precisions,
    mask_limits,
    weight_decay,
)


def half_on(device: torch.device) -> torch.dtype:
    """Return the type of numbers in products; float32 where Triton's interpreter runs, which rounds in its own way."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


class WideSteps(KernelSteps):
    """Parameters, moments and random numbers of a wide network, and the kernels that move them.

    Args:
        network: what the kernels have to know.
        values: the parameters.
        state: their moments.
        t: the number of the next step.
        lr: the learning rate.
        data: returns all inputs and all targets.
        buffers: settings of model and guide.
        batch: points of a step.
        num_data: points in all.
        rows: None: there is one network.
        ordered: whether every step has a batch of its own.
    """

    def __init__(
        self,
        network: DropoutNetwork,
        values: list[Tensor],
        state: list[list[Tensor]],
        t: Tensor,
        lr: Tensor,
        data: Callable[[], tuple[Tensor, Tensor]],
        buffers: list[Tensor],
        batch: int,
        num_data: int,
        rows: Tensor | None = None,
        ordered: bool = False,
    ) -> None:
        assert rows is None
        super().__init__(network, values, state, t, lr, data, buffers, batch, num_data)
        device = t.device
        self._layers = layers_of(network, rounded_up(batch), CHAIN, half_on(device), device)
        self._order = torch.zeros((CHAIN, batch), dtype=torch.int64, device=device) if ordered else None
        self._kernels = Launches(
            network, self._layers, self._whole, lr, self.t, self.stream, self._order, batch, self._scale
        )
        self._decay_sizes: list[int] = []
        self._version: int | None = None
        self._captured: tuple[tuple[int, ...], torch.cuda.CUDAGraph] | None = None
        if t.is_cuda:
            with torch.cuda.device(device):
                self._prepare(values, state)

    def _prepare(self, values: list[Tensor], state: list[list[Tensor]]) -> None:
        """Compile the kernels by a step that is taken back, and capture a chain of steps."""
        data = self._data()
        self._copy_weights()
        self._launch(1, data)
        for whole, each in zip(self._whole, (values, *zip(*state, strict=True)), strict=True):
            whole.copy_(self._laid_out(list(each)))
        torch.cuda.synchronize(self.t.device)
        self._graph(data)

    def _read(self, buffers: list[Tensor]) -> tuple[Tensor, ...]:
        """Return limits of the masks, log precisions, decays of each layer in turn, and the constant of the KL."""
        network, decays = self._network, []
        for k in range(len(network.keeps)):
            decays += [weight_decay(network, buffers, k)[0].flatten(), bias_decay(network, buffers, k)[0]]
        log_tau = log_precisions(network, buffers)
        constant = kl_constant(network, buffers).float()
        tau = constant if log_tau is None else log_tau[0].float().contiguous()
        self._decay_sizes = [len(each) for each in decays]
        return mask_limits(network, buffers)[0].contiguous(), tau, torch.cat(decays).float(), constant

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
        """Take some steps, at most ``CHAIN``, and return the losses before each, (steps,)."""
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
