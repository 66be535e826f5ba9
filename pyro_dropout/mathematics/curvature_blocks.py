"""How a log-likelihood bends in some sites: a matrix, its diagonal, or two Kronecker factors.

A block holds the curvature H of the sites that are correlated with each other. With the prior's precisions P on the
diagonal, Λ = H + P is the precision of the posterior. All blocks are in float64, and what is factorised is
I + P^-½ H P^-½: its eigenvalues are at least 1, so that it is as well conditioned as the problem allows.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Size, Tensor, nn
from torch.nn.functional import pad

from pyro_dropout.errors import PyroDropoutError
from pyro_dropout.mathematics.full_rank_normal import FullRankNormal, KroneckerNormal, Rotated, SharedNoise
from pyro_dropout.mathematics.row_mixture_distribution import RowMixture
from pyro_dropout.protocols import Distribution

F64 = torch.float64
_NUMBERS = 2**24  # of a root that are held at once
Shapes = Mapping[str, Size]


class Block(nn.Module):
    """The curvature of some sites, zero at first, and the prior's precisions of their numbers.

    A structure says how its curvature grows, what it is in the units of the prior (``spectrum``), and what follows for
    draws (``distribution``). Unless all numbers are independent, ``sites_share`` noise.
    """

    factors: ClassVar[tuple[str, ...]]
    order: ClassVar[int] = 2  # how many dimensions each of them has
    sites_share: ClassVar[bool] = True
    prior: Tensor

    def __init__(self, shapes: Shapes, prior: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.shapes = dict(shapes)
        gathered = self.gathered(prior)
        for name, size in self.sizes().items():
            self.register_buffer(name, torch.zeros(size, dtype=F64, device=gathered.device))
        self.register_buffer("prior", gathered)
        self._kept: tuple[list[Tensor], object, Any] = ([], None, None)

    def sizes(self) -> dict[str, Size]:
        """Return the shapes of the factors."""
        return dict.fromkeys(self.factors, Size([self.size()] * self.order))

    def multiply(self, factor: float) -> None:
        """Multiply the curvature."""
        self.get_buffer(self.factors[-1]).mul_(factor)

    def gathered(self, precisions: Mapping[str, Tensor]) -> Tensor:
        """Return the prior's precisions as the block needs them, from those by site; with gradients."""
        return torch.cat([precisions[name].to(F64).expand(shape).flatten() for name, shape in self.shapes.items()])

    def size(self) -> int:
        """Return how many numbers the sites of the block have."""
        return sum(shape.numel() for shape in self.shapes.values())

    def divided(self, numbers: Tensor) -> dict[str, Tensor]:
        """Return the numbers of a block by site, each of the site's shape."""
        parts = numbers.split([shape.numel() for shape in self.shapes.values()])
        return {name: part.reshape(self.shapes[name]) for name, part in zip(self.shapes, parts, strict=True)}

    def by_site(self) -> dict[str, Tensor]:
        """Return the prior's precisions by site, each of the site's shape."""
        return self.divided(self.prior)

    def flat(self, by_site: Mapping[str, Tensor]) -> Tensor:
        """Return tensors (..., *shape) by site as rows, (..., n), in the order of the block; in float64."""
        return torch.cat([_leading(by_site[name], shape).flatten(-2) for name, shape in self.shapes.items()], -1)

    @abstractmethod
    def spectrum(self, prior: Tensor) -> tuple[Tensor, Callable[[Mapping[str, Tensor]], Tensor]]:
        """Return λ, (n,), and a function of rows R by site that returns R', (B, n), for any factor c of the prior.

        R (H + cP)⁻¹ Rᵀ = R' diag(1/(λ + c)) R'ᵀ: λ and R' are those of the eigenvectors of P^-½ H P^-½.
        """

    def log_det(self, prior: Tensor | None = None) -> Tensor:
        """Return log det(H + P) = log det P + Σ log(λ + 1), with gradients in a prior as ``gathered`` returns it."""
        prior = self.prior if prior is None else prior
        return self.size() // len(prior) * prior.log().sum() + self.spectrum(prior)[0].log1p().sum()

    # --- the posterior, in the type of its point ----------------------------------------------------------------------

    def root(self, like: Tensor) -> Any:
        """Return what draws are made of, in the type of ``like``; the last one is kept until the curvature changes."""
        versions = [tensor._version for tensor in self.buffers()]
        now = (versions, like.dtype, like.device)
        tensors, before, root = self._kept
        if now != before or any(a is not b for a, b in zip(tensors, self.buffers(), strict=True)):
            with torch.no_grad():
                root = self._root(like)
            self._kept = list(self.buffers()), now, root
        return root

    @abstractmethod
    def _root(self, like: Tensor) -> Any: ...

    @abstractmethod
    def distribution(self, name: str, loc: Tensor, noise: SharedNoise | None) -> Distribution:
        """Return the posterior of a site around a point: by itself, or drawn with the others by their ``noise``."""

    def squared_length(self, by_site: Mapping[str, Tensor]) -> Tensor:
        """Return gᵀ Λ⁻¹ g of a vector g, given by site, with gradients in g."""
        noise, roots = SharedNoise(self.size()), []
        for name, value in by_site.items():
            root = self.distribution(name, value, noise).covariance_root(value.unsqueeze(0))
            roots.append(pad(root, (0, noise.size - root.shape[-1])))
        return (torch.cat(roots).sum(0) if self.sites_share else torch.cat(roots)).square().sum()

    def layer_covariance(self, features: Tensor) -> Tensor:
        """Return Cov[W φ + b] at N points, (N, outputs, outputs), of a layer whose numbers share noise."""
        raise NotImplementedError

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_kept": ([], None, None)}


class Diagonal(Block):
    """Independent numbers: H = diag h."""

    factors, order, sites_share = ("diagonal",), 1, False
    diagonal: Tensor

    def add(self, rows: Tensor) -> None:
        """Add the diagonal of Rᵀ R, for rows R of a root of the curvature, (B, n)."""
        self.diagonal += rows.to(F64).square().sum(0)

    def spectrum(self, prior: Tensor) -> tuple[Tensor, Callable[[Mapping[str, Tensor]], Tensor]]:
        """Return h/P, and R P^-½."""
        return self.diagonal / prior, lambda rows: self.flat(rows) * prior.rsqrt()

    def _root(self, like: Tensor) -> Tensor:
        return (self.diagonal + self.prior).rsqrt().to(like)

    def distribution(self, name: str, loc: Tensor, noise: SharedNoise | None) -> Distribution:
        """Return independent Gaussians."""
        scale = self.divided(self.root(loc))[name]
        return RowMixture(loc.unsqueeze(0), scale, loc.new_ones(1), row_dim=None, validate_args=False)


class Dense(Block):
    """One matrix H for all numbers of the block."""

    factors = ("hessian",)
    hessian: Tensor

    def add(self, rows: Tensor) -> None:
        """Add Rᵀ R, for rows R of a root of the curvature, (B, n)."""
        rows = rows.to(F64)
        self.hessian += rows.mT @ rows

    def spectrum(self, prior: Tensor) -> tuple[Tensor, Callable[[Mapping[str, Tensor]], Tensor]]:
        """Return the eigenvalues of P^-½ H P^-½, and R P^-½ U."""
        values, vectors = torch.linalg.eigh(_scaled(self.hessian, prior))
        basis = prior.rsqrt()[:, None] * vectors
        return values.clamp_min(0), lambda rows: self.flat(rows) @ basis

    def _cholesky(self, prior: Tensor, backwards: bool = False) -> Tensor:
        """Return C with C Cᵀ = I + P^-½ H P^-½, or its order of numbers reversed."""
        matrix = _scaled(self.hessian, prior) + torch.eye(len(prior), dtype=F64, device=prior.device)
        found: Tensor
        found, info = torch.linalg.cholesky_ex(matrix.flip(0, 1) if backwards else matrix)
        if int(info):
            raise PyroDropoutError(
                f"the precision of {', '.join(map(repr, self.shapes))} cannot be factorised, in float64 either: the"
                f" data say more than {1 / torch.finfo(F64).eps:.0e} times as much as the prior about some weights, or"
                " a number is not finite. Are inputs, targets and tau in units that make sense?"
                " Standardised(model, x, y) may help."
            )
        return found

    def log_det(self, prior: Tensor | None = None) -> Tensor:
        """Return log det(H + P), from the Cholesky factor."""
        prior = self.prior if prior is None else prior
        return prior.log().sum() + 2 * self._cholesky(prior).diagonal().log().sum()

    def _root(self, like: Tensor) -> Tensor:
        """Return the lower-triangular L with L Lᵀ = Λ⁻¹, (n, n)."""
        # Λ turned around is C Cᵀ, so Λ = K Kᵀ with an upper-triangular K, and L = K⁻ᵀ.
        upper = self._cholesky(self.prior, backwards=True).flip(0, 1)
        eye = torch.eye(len(upper), dtype=F64, device=upper.device)
        lower: Tensor = torch.linalg.solve_triangular(upper.mT, eye, upper=False)
        return (lower * self.prior.rsqrt()[:, None]).to(like)

    def distribution(self, name: str, loc: Tensor, noise: SharedNoise | None) -> Distribution:
        """Return the site's rows of L, up to the diagonal of the last one."""
        names, root = list(self.shapes), self.root(loc)
        start = sum(self.shapes[before].numel() for before in names[: names.index(name)])
        end = start + loc.numel()
        return FullRankNormal(loc, root[start:end, :end], noise)

    def layer_covariance(self, features: Tensor) -> Tensor:
        """Return the covariance from L, with its rows sorted by outputs."""
        root, outputs = self.root(features), next(iter(self.shapes.values()))[0]
        parts = root.split([shape.numel() for shape in self.shapes.values()])
        by_output = torch.cat([part.reshape(outputs, -1, len(root)) for part in parts], 1)
        ones = torch.ones_like(features[:, : len(self.shapes) - 1])
        found = []
        for phi in torch.cat([features, ones], -1).split(max(1, _NUMBERS // (outputs * len(root)))):
            each = torch.einsum("ni,dip->ndp", phi, by_output).double()
            found.append(each @ each.mT)
        return torch.cat(found)


class Kronecker(Block):
    """A layer: H = B ⊗ A over the matrix (W, b) of its weight and its bias, (outputs, inputs and one for the bias).

    The prior's precisions must be the same for all outputs, D for the inputs and the bias. With B = U diag(β) Uᵀ and
    D^-½ A D^-½ = V diag(λ) Vᵀ, Λ⁻¹ = (U ⊗ D^-½V) diag(1/(β_k λ_j + 1)) (U ⊗ D^-½V)ᵀ.

    Equation: laplace-kronecker.
    """

    factors = ("inputs", "outputs")
    inputs: Tensor
    outputs: Tensor

    def sizes(self) -> dict[str, Size]:
        """Return the shapes of A and B."""
        outputs = next(iter(self.shapes.values()))[0]
        inputs = self.size() // outputs
        return {"inputs": Size([inputs] * 2), "outputs": Size([outputs] * 2)}

    def gathered(self, precisions: Mapping[str, Tensor]) -> Tensor:
        """Return D; raise unless all outputs have the same."""
        whole = self.matrix({name: precisions[name].expand(shape) for name, shape in self.shapes.items()})
        if not bool((whole == whole[:1]).all()):
            raise PyroDropoutError(
                "structure='kron' needs one prior width for all outputs of a layer, and"
                f" {', '.join(map(repr, self.shapes))} have several. Use structure='full', 'layer' or 'diagonal'."
            )
        return whole[0]

    def by_site(self) -> dict[str, Tensor]:
        """Return the prior's precisions by site, each of the site's shape."""
        parts = self.prior.split([math.prod(shape[1:]) for shape in self.shapes.values()])
        pairs = zip(self.shapes.items(), parts, strict=True)
        return {name: part.reshape(1, *shape[1:]).expand(shape) for (name, shape), part in pairs}

    def matrix(self, by_site: Mapping[str, Tensor]) -> Tensor:
        """Return tensors (..., *shape) by site as (W, b), (..., outputs, inputs and bias); in float64."""
        return torch.cat([_leading(by_site[name], shape) for name, shape in self.shapes.items()], -1)

    def flat(self, by_site: Mapping[str, Tensor]) -> Tensor:
        """Return tensors by site as rows, in the order of (W, b)."""
        return self.matrix(by_site).flatten(-2)

    def _eigen(self, prior: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return U, V, and β_k λ_j."""
        beta, left = torch.linalg.eigh(self.outputs)
        lam, right = torch.linalg.eigh(_scaled(self.inputs, prior))
        return left, right, beta.clamp_min(0)[:, None] * lam.clamp_min(0)  # rounding may leave a little less than 0

    def spectrum(self, prior: Tensor) -> tuple[Tensor, Callable[[Mapping[str, Tensor]], Tensor]]:
        """Return β_k λ_j, and Uᵀ R D^-½ V."""
        left, right, values = self._eigen(prior)
        columns = prior.rsqrt()[:, None] * right
        return values.flatten(), lambda rows: (left.mT @ self.matrix(rows) @ columns).flatten(-2)

    def _root(self, like: Tensor) -> Rotated:
        left, right, values = self._eigen(self.prior)
        widths = (values + 1).rsqrt()
        half_log_det = widths.log().sum() - 0.5 * len(left) * self.prior.log().sum()
        factors = (left, right * self.prior.rsqrt()[:, None], widths, half_log_det)
        return Rotated(*(factor.to(like) for factor in factors))

    def distribution(self, name: str, loc: Tensor, noise: SharedNoise | None) -> Distribution:
        """Return the weight or the bias."""
        return KroneckerNormal(loc, self.root(loc), list(self.shapes).index(name) > 0, noise)

    def layer_covariance(self, features: Tensor) -> Tensor:
        """Return U diag_k(Σ_j (Tᵀφ)_j² s_kj²) Uᵀ; the last row of T is that of the bias, if there is one."""
        root = self.root(features)
        right, bias = root.right.split([features.shape[-1], len(self.shapes) - 1])
        sizes = (features @ right + bias.sum(0)).square() @ root.widths.square().mT
        left = root.left.double()
        found: Tensor = (left * sizes.double().unsqueeze(-2)) @ left.mT
        return found


def _leading(value: Tensor, shape: Size) -> Tensor:
    """Return a tensor (..., *shape) in float64 as (..., first dimension, the rest)."""
    lead = value.shape[: value.dim() - len(shape)]
    first = shape[0] if len(shape) else 1
    return value.to(F64).reshape(*lead, first, shape.numel() // first)


def _scaled(matrix: Tensor, prior: Tensor) -> Tensor:
    """Return P^-½ M P^-½."""
    half = prior.rsqrt()
    return half[:, None] * matrix * half
