"""Exact Gaussian process regression, without features or weights: the reference for the approximations."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self, cast

import pyro
import torch
from pyro import poutine
from pyro.contrib.gp.kernels import RBF, Kernel
from pyro.contrib.gp.models import GPRegression
from pyro.infer import Trace_ELBO
from pyro.nn import PyroModule
from torch import Tensor
from tqdm.auto import tqdm

from pyro_dropout.errors import PyroDropoutError, RangeError, ShapeError, SingularError
from pyro_dropout.generative.process_state import RUNNING
from pyro_dropout.mathematics.checks import check_count, check_finite, check_non_negative, check_positive, check_shape
from pyro_dropout.mathematics.gaussian_rows import semidefinite_root
from pyro_dropout.mathematics.shapes import Float


@contextmanager
def _apart() -> Iterator[None]:
    """Isolate from Pyro's parameter store and the caller's handlers: two GPs have parameters of the same names."""
    with RUNNING, poutine.block(), pyro.get_param_store().scope():
        try:
            yield
        except torch.linalg.LinAlgError as cause:  # type: ignore[attr-defined]
            raise SingularError(
                "the covariance of y is singular in float64: points repeat and tau is very large. "
                "Give the GP a smaller tau, or a jitter such as 1e-8."
            ) from cause


class GP:
    """Exact Gaussian process regression with noise of precision τ; the outputs are independent of each other.

    Fitting maximises the marginal likelihood over the kernel's hyper-parameters, and over τ if requested; those that
    have a prior (a ``PyroSample`` of the kernel) take their MAP values. Everything is computed in float64, in time
    cubic in N. A fitted one is a posterior over f, which ``predict`` takes.

    Args:
        kernel: A Pyro kernel, of which a copy is fitted, such as ``RBF``, the default, or ``ArcCosine``; its
            hyper-parameters are starting points.
        tau: Observation precision τ; where it is learned, its starting point.
        learn_tau: Whether τ is fitted too.
        jitter: Added to the diagonal of the covariance, for a τ so large that its Cholesky factor does not exist.

    Example:
        >>> import torch, pyro_dropout as pdrop
        >>> x, y = torch.tensor([[0.0], [1.0]]), torch.tensor([[1.0], [2.0]])
        >>> gp = pdrop.generative.GP(tau=100.0).fit(x, y, steps=0)  # hyper-parameters as they are given
        >>> mean, variance = gp.predict(torch.tensor([[0.5]]))
        >>> round(mean.item(), 2), round(variance.item(), 2)
        (1.64, 0.05)
    """

    whole_functions = True  # each draw is one function at all points

    def __init__(
        self,
        kernel: Kernel | None = None,
        tau: float | Tensor = 1.0,
        *,
        learn_tau: bool = False,
        jitter: float = 0.0,
    ) -> None:
        if not isinstance(kernel, Kernel | None):
            raise RangeError(f"kernel must be a Pyro kernel, such as RBF(input_dim=1); got {kernel!r}.")
        check_positive("tau", tau)
        check_non_negative("jitter", jitter)
        self._given, self._tau, self._learn_tau, self._jitter = kernel, tau, learn_tau, jitter
        self._regression: GPRegression | None = None
        self._known: tuple[Tensor, Tensor, Tensor] | None = None  # the last x, with mean and root of f there
        self.history: list[float] = []

    def _built_kernel(self, columns: int) -> Kernel:
        kernel = RBF(columns) if self._given is None else copy.deepcopy(self._given)
        if max(kernel.active_dims) >= columns:
            raise ShapeError(f"x must have the columns that the kernel uses, {kernel.active_dims}; got {columns}.")
        for module in kernel.modules():  # a kernel that was tried out alone may still become part of a model
            if isinstance(module, PyroModule):
                module._pyro_context.used = False
        return kernel

    def fit(
        self,
        x: Float[Tensor, "n q"],
        y: Float[Tensor, "n d"],
        *,
        steps: int = 500,
        lr: float = 0.05,
        progress: bool = True,
    ) -> Self:
        """Fit the hyper-parameters from their starting points, and condition on the data.

        Args:
            x: Inputs, (N, Q).
            y: Targets, (N, D).
            steps: Steps of Adam; 0 keeps the hyper-parameters as they are.
            lr: Learning rate, of the logarithms of the hyper-parameters.
            progress: Whether to show a bar when the fit takes more than a few seconds.

        Returns:
            This GP. Its ``history`` holds the log marginal likelihood before each step.
        """
        self._check_inputs(x)
        check_finite("y", y, data=True)
        if y.dim() != 2 or len(y) != len(x):
            hint = " Write y.unsqueeze(-1)." if y.shape == x.shape[:1] else ""
            raise ShapeError(f"y must have shape (N, D) with N = {len(x)}, as x has; got {tuple(y.shape)}.{hint}")
        check_count("steps", steps, least=0)
        check_positive("lr", lr)
        with _apart():
            noise = 1 / torch.as_tensor(self._tau, device=x.device).double()
            inputs, targets = x.detach().double(), y.detach().double().mT.contiguous()
            regression = GPRegression(inputs, targets, self._built_kernel(x.size(1)), noise, jitter=self._jitter)
            regression.to(inputs)
            regression.noise_unconstrained.requires_grad_(self._learn_tau)
            free = [parameter for parameter in regression.parameters() if parameter.requires_grad]
            optimiser, objective = torch.optim.Adam(free or [inputs.new_zeros(1)], lr=lr), Trace_ELBO()
            self.history = []
            for _ in tqdm(range(steps if free else 0), desc="GP", delay=3.0, disable=not progress):
                optimiser.zero_grad()
                loss = objective.differentiable_loss(regression.model, regression.guide)  # the prior's too, if any
                loss.backward()
                optimiser.step()
                self.history.append(-loss.item())
            self._columns, self._regression, self._known = x.size(1), regression.requires_grad_(False), None
            return self

    def __repr__(self) -> str:
        fitted = "" if self._regression is None else f"{type(self.kernel).__name__}, tau {self.tau.item():.4g}"
        return f"GP({fitted})"

    def _check_inputs(self, x: Tensor, columns: int | None = None) -> None:
        check_finite("x", x, data=True)
        fits = x.dim() == 2 and columns in (None, x.size(1)) and len(x) > 0
        check_shape(fits, "x", f"(N, {columns or 'Q'})", x)

    def _fitted(self) -> Any:
        if self._regression is None:
            raise PyroDropoutError("this GP has no data yet: call fit(x, y) first (steps=0 keeps hyper-parameters).")
        return self._regression

    @property
    def kernel(self) -> Kernel:
        """The fitted kernel."""
        return cast(Kernel, self._fitted().kernel)

    @property
    def tau(self) -> Tensor:
        """The observation precision τ."""
        return cast(Tensor, 1 / self._fitted().noise)

    def predict(
        self, x: Float[Tensor, "m q"], *, noise: bool = True
    ) -> tuple[Float[Tensor, "m d"], Float[Tensor, "m d"]]:
        """Return the mean and the variance at each row of ``x`` of new targets, or without ``noise`` of f."""
        regression = self._fitted()
        self._check_inputs(x, self._columns)
        with _apart(), torch.no_grad():
            mean, variance = regression(x.double(), noiseless=not noise)
        return mean.mT.to(x), variance.mT.to(x)

    def sample_functions(self, x: Float[Tensor, "m q"], n: int) -> Float[Tensor, "n m d"]:
        """Return ``n`` draws of the function at all rows of ``x`` together, (n, M, D), in the type of ``x``."""
        check_count("n", n)
        if self._known is None or not torch.equal(self._known[0], x):
            self._known = (x.detach().clone(), *self._joint(x))
        _, mean, root = self._known
        noise = torch.randn(n, *mean.shape, dtype=mean.dtype, device=x.device)
        return (mean + root @ noise).to(x)

    def _joint(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean (M, D) of f, and a root (M, M) of the covariance, which all outputs share."""
        regression = self._fitted()
        self._check_inputs(x, self._columns)
        with _apart(), torch.no_grad():
            mean, covariance = regression(x.double(), full_cov=True, noiseless=True)
        return mean.mT, semidefinite_root(covariance[0] if covariance.dim() == 3 else covariance)

    def log_marginal_likelihood(self) -> float:
        """Return log p(y | x) of the data at the current hyper-parameters, in nats, summed over outputs."""
        regression = self._fitted()
        with _apart(), torch.no_grad():
            hyper = poutine.trace(regression.guide).get_trace()
            site = poutine.trace(poutine.replay(regression.model, hyper)).get_trace().nodes["y"]
            return float(site["fn"].log_prob(site["value"]))
