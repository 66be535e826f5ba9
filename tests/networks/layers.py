"""Layers that draw random numbers in training mode, beside dropout: what from_dropout has to notice."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn


class Output(nn.Module):
    """A network and what is made of it: any function of it and of its input."""

    def __init__(self, net: nn.Module, read: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.net, self.read = net, read

    def forward(self, x: Tensor) -> Any:
        return self.read(self.net, x)


class Parts(nn.Module):
    """A module of the given layers and parameters, and what is made of them: any function of it and of its input."""

    def __init__(self, read: Callable[[Any, Tensor], Any], **parts: Any) -> None:
        super().__init__()
        self.read = read
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Any:
        return self.read(self, x)


class Noisy(nn.Module):
    """A layer with a probability, or a size, of its own."""

    def __init__(self, p: float = 0.3) -> None:
        super().__init__()
        self.p = p


class DropPath(Noisy):
    """timm's: the branch of a residual block is dropped for each data point."""

    def forward(self, x: Tensor) -> Tensor:
        if self.p == 0.0 or not self.training:
            return x
        keep = 1 - self.p
        mask = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(keep)
        return x * mask.div_(keep)


@fx.wrap
def stochastic_depth(x: Tensor, p: float, training: bool) -> Tensor:
    if not training or p == 0.0:
        return x
    return x * torch.empty([x.shape[0]] + [1] * (x.ndim - 1)).bernoulli_(1 - p).div_(1 - p)


class StochasticDepth(Noisy):
    """torchvision's, in a function that torch.fx does not look into."""

    def forward(self, x: Tensor) -> Tensor:
        return stochastic_depth(x, self.p, self.training)


class Attention(Noisy):
    """One head over the features, read as positions, with dropout in the kernel."""

    def forward(self, x: Tensor) -> Tensor:
        h = x.unsqueeze(-1)
        return F.scaled_dot_product_attention(h, h, h, dropout_p=self.p if self.training else 0.0).squeeze(-1)


class OldAttention(Noisy):
    """The same before there was a kernel: dropout on the attention's weights, as a function."""

    def forward(self, x: Tensor) -> Tensor:
        weights = F.softmax(x.unsqueeze(-1) * x.unsqueeze(-2), -1)
        if self.training:
            weights = F.dropout(weights, self.p)
        return (weights @ x.unsqueeze(-1)).squeeze(-1)


class GaussianNoise(Noisy):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn_like(x) * self.p if self.training else x


class LayerDrop(nn.Module):
    """fairseq's: a whole layer is left out, by a number of Python's."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p, self.layer = p, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        if self.training and random.random() < self.p:
            return x
        return x + self.layer(x)


class OwnGenerator(nn.Module):
    """Noise from a generator of the layer's own, whose state nobody else sees."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = np.random.default_rng(0)

    def forward(self, x: Tensor) -> Tensor:
        return x + float(self.generator.normal()) if self.training else x


class OwnTorchGenerator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator()

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn(x.shape, generator=self.generator) if self.training else x

    def __deepcopy__(self, memo: object) -> "OwnTorchGenerator":
        return OwnTorchGenerator()


class BatchDepth(Noisy):
    """torchvision's StochasticDepth with mode="batch": a branch is dropped for all data points at once."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.empty([1] * x.ndim).bernoulli_(1 - self.p) / (1 - self.p) if self.training else x


class Shuffle(nn.Module):
    """Mixes each data point with another one, as mixup does."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * (x + x[torch.randperm(len(x))]) if self.training else x


class ForwardOfPart(nn.Module):
    """Does not call its part, so that hooks and those who look for the part's name do not see it."""

    def __init__(self) -> None:
        super().__init__()
        self.part = DropPath(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.part.forward(x)


class Counting(nn.Module):
    """Noise whose size is a running statistic of the layer's own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("size", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        self.size.mul_(0.9).add_(0.1 * x.abs().mean())
        return x + torch.randn_like(x) * self.size


def residual(noisy: nn.Module) -> nn.Module:
    """A block with dropout before its last layer, a noisy layer on its branch, and a shortcut."""
    parts = {"first": nn.Linear(8, 8), "drop": nn.Dropout(0.2), "last": nn.Linear(8, 8), "noisy": noisy}
    return Parts(lambda net, x: x + net.noisy(net.last(net.drop(F.relu(net.first(x))))), **parts)


def network(noisy: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), residual(noisy), nn.Linear(8, 1))
