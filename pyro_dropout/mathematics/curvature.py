"""What a Laplace approximation knows of its point: how the log-likelihood bends there, and the prior's precisions.

A block holds the curvature H of the sites that are correlated with each other. With the prior's precisions P on the
diagonal, Λ = H + P is the precision of the posterior. All blocks are in float64, and what is factorised is
I + P^-½ H P^-½: its eigenvalues are at least 1, so that it is as well conditioned as the problem allows.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import ClassVar

import torch
from torch import Size, Tensor, nn

from pyro_dropout.errors import PyroDropoutError

F64 = torch.float64
Shapes = Mapping[str, Size]
OF_NOISE = ("tau", "numbers", "squares")  # what is known of Gaussian noise
NOISE = "tau"  # the name of the noise among what is found, beside the sites


class Block(nn.Module):
    """The curvature of some sites, and the prior's precisions of their numbers."""

    factors: ClassVar[tuple[str, ...]]
    order: ClassVar[int] = 2  # how many dimensions each of them has
    prior: Tensor

    def __init__(self, shapes: Shapes, prior: Mapping[str, Tensor], **factors: Tensor) -> None:
        super().__init__()
        self.shapes = dict(shapes)
        for name, value in factors.items():
            self.register_buffer(name, value.to(F64))
        self.register_buffer("prior", self.gathered(prior))

    @classmethod
    def sizes(cls, shapes: Shapes) -> dict[str, Size]:
        """Return the shapes of the block's tensors, for sites of these shapes."""
        number = sum(shape.numel() for shape in shapes.values())
        return {"prior": Size([number])} | dict.fromkeys(cls.factors, Size([number] * cls.order))

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

    def spectrum(self, prior: Tensor) -> tuple[Tensor, Callable[[Mapping[str, Tensor]], Tensor]]:
        """Return λ, (n,), and a function of rows R by site that returns R', (B, n), for any factor c of the prior.

        R (H + cP)⁻¹ Rᵀ = R' diag(1/(λ + c)) R'ᵀ: λ and R' are those of the eigenvectors of P^-½ H P^-½.
        """
        raise NotImplementedError

    def log_det(self, prior: Tensor | None = None) -> Tensor:
        """Return log det(H + P) = log det P + Σ log(λ + 1), with gradients in a prior as ``gathered`` returns it."""
        prior = self.prior if prior is None else prior
        return self.size() // len(prior) * prior.log().sum() + self.spectrum(prior)[0].log1p().sum()

    def rooted(self, rows: Mapping[str, Tensor]) -> Tensor:
        """Return R L, (B, n), of rows R by site, for some L with L Lᵀ = Λ⁻¹."""
        values, rotated = self.spectrum(self.prior)
        return rotated(rows) * (values + 1).rsqrt()


class Diagonal(Block):
    """Independent numbers: H = diag h."""

    factors, order = ("diagonal",), 1
    diagonal: Tensor

    def spectrum(self, prior: Tensor) -> tuple[Tensor, Callable[[Mapping[str, Tensor]], Tensor]]:
        """Return h/P, and R P^-½."""
        return self.diagonal / prior, lambda rows: self.flat(rows) * prior.rsqrt()

    def scales(self) -> dict[str, Tensor]:
        """Return the standard deviations of the posterior, by site."""
        return self.divided((self.diagonal + self.prior).rsqrt())


class Dense(Block):
    """One matrix H for all numbers of the block."""

    factors = ("hessian",)
    hessian: Tensor

    def spectrum(self, prior: Tensor) -> tuple[Tensor, Callable[[Mapping[str, Tensor]], Tensor]]:
        """Return the eigenvalues of P^-½ H P^-½, and R P^-½ U."""
        values, vectors = torch.linalg.eigh(_scaled(self.hessian, prior))
        basis = prior.rsqrt()[:, None] * vectors
        return values.clamp_min(0), lambda rows: self.flat(rows) @ basis

    def cholesky(self, prior: Tensor, backwards: bool = False) -> Tensor:
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
        return prior.log().sum() + 2 * self.cholesky(prior).diagonal().log().sum()

    def rooted(self, rows: Mapping[str, Tensor]) -> Tensor:
        """Return R P^-½ C⁻ᵀ."""
        half = (self.flat(rows) * self.prior.rsqrt()).reshape(-1, len(self.prior))
        found: Tensor = torch.linalg.solve_triangular(self.cholesky(self.prior), half.mT, upper=False)
        return found.mT

    def root(self) -> Tensor:
        """Return the lower-triangular L with L Lᵀ = Λ⁻¹, (n, n)."""
        # Λ turned around is C Cᵀ, so Λ = K Kᵀ with an upper-triangular K, and L = K⁻ᵀ.
        upper = self.cholesky(self.prior, backwards=True).flip(0, 1)
        eye = torch.eye(len(upper), dtype=F64, device=upper.device)
        lower: Tensor = torch.linalg.solve_triangular(upper.mT, eye, upper=False)
        return lower * self.prior.rsqrt()[:, None]


class Kronecker(Block):
    """A layer: H = B ⊗ A over the matrix (W, b) of its weight and its bias, (outputs, inputs and one for the bias).

    The prior's precisions must be the same for all outputs, D for the inputs and the bias. With B = U diag(β) Uᵀ and
    D^-½ A D^-½ = V diag(λ) Vᵀ, Λ⁻¹ = (U ⊗ D^-½V) diag(1/(β_k λ_j + 1)) (U ⊗ D^-½V)ᵀ.

    Equation: laplace-kronecker.
    """

    factors = ("inputs", "outputs")
    inputs: Tensor
    outputs: Tensor

    @classmethod
    def sizes(cls, shapes: Shapes) -> dict[str, Size]:
        """Return the shapes of A, B and D."""
        outputs = next(iter(shapes.values()))[0]
        inputs = sum(shape.numel() for shape in shapes.values()) // outputs
        return {"prior": Size([inputs]), "inputs": Size([inputs] * 2), "outputs": Size([outputs] * 2)}

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

    def rotations(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return U, V and the standard deviations s_kj = (β_k λ_j + 1)^-½ in the rotated units."""
        with torch.no_grad():
            left, right, values = self._eigen(self.prior)
        return left, right, (values + 1).rsqrt()

    def spectrum(self, prior: Tensor) -> tuple[Tensor, Callable[[Mapping[str, Tensor]], Tensor]]:
        """Return β_k λ_j, and Uᵀ R D^-½ V."""
        left, right, values = self._eigen(prior)
        columns = prior.rsqrt()[:, None] * right
        return values.flatten(), lambda rows: (left.mT @ self.matrix(rows) @ columns).flatten(-2)


class Curvature(nn.Module):
    """The curvature of a log-likelihood at a point, in blocks of sites that are correlated with each other.

    Args:
        blocks: the blocks.
        log_likelihood: log p(y | w) at the point, of all data.
        num_data: how many data these are.
        noise: of Gaussian noise, its precision ``tau``, how many ``numbers`` the targets have, and Σ τ(y - f)², their
            ``squares``.
    """

    log_likelihood: Tensor
    num_data: Tensor
    tau: Tensor | None
    numbers: Tensor | None
    squares: Tensor | None

    def __init__(
        self, blocks: list[Block], log_likelihood: Tensor, num_data: int, noise: Mapping[str, Tensor] | None = None
    ) -> None:
        super().__init__()
        # torch allows no dot in the name of a submodule
        self.blocks = nn.ModuleDict({",".join(block.shapes).replace(".", "/"): block for block in blocks})
        self.register_buffer("log_likelihood", log_likelihood.detach().to(F64))
        self.register_buffer("num_data", torch.tensor(num_data, device=log_likelihood.device))
        for name in OF_NOISE:
            value = (noise or {}).get(name)
            self.register_buffer(name, None if value is None else value.detach().to(log_likelihood.device, F64))

    def __iter__(self) -> Iterator[Block]:
        return iter(self.blocks.values())  # type: ignore[arg-type]

    def log_det(self, precisions: Mapping[str, Tensor] | None = None) -> Tensor:
        """Return log det(H + P) of all blocks, with gradients in the prior's precisions, given by site."""
        each = [block.log_det(None if precisions is None else block.gathered(precisions)) for block in self]
        return torch.stack(each).sum()

    def squared_length(self, by_site: Mapping[str, Tensor]) -> Tensor:
        """Return gᵀ Λ⁻¹ g of a vector g, given by site."""
        return torch.stack([block.rooted(by_site).square().sum() for block in self]).sum()

    @classmethod
    def room_for(cls, tensors: Mapping[str, Tensor], shapes: Shapes, device: torch.device) -> "Curvature | None":
        """Return a curvature with tensors of these names and sizes, without their values; None if it cannot be one."""
        factors: dict[str, dict[str, Tensor]] = {}
        for name, value in tensors.items():
            if name.startswith("blocks."):
                key, _, factor = name.removeprefix("blocks.").rpartition(".")
                factors.setdefault(key, {})[factor] = value
        blocks: list[Block] = []
        for key, found in factors.items():
            names = key.replace("/", ".").split(",")
            kind = next((kind for kind in (Diagonal, Dense, Kronecker) if set(found) == {*kind.factors, "prior"}), None)
            if kind is None or not set(names) <= set(shapes):
                return None
            own = {name: shapes[name] for name in names}
            if {factor: value.shape for factor, value in found.items()} != (sizes := kind.sizes(own)):
                return None
            ones = {name: torch.ones((), device=device) for name in names}
            blocks.append(kind(own, ones, **{name: torch.zeros(sizes[name], device=device) for name in kind.factors}))
        noise = {name: torch.zeros_like(tensors[name]) for name in OF_NOISE if name in tensors}
        return cls(blocks, torch.zeros((), device=device), 0, noise)


def _leading(value: Tensor, shape: Size) -> Tensor:
    """Return a tensor (..., *shape) in float64 as (..., first dimension, the rest)."""
    lead = value.shape[: value.dim() - len(shape)]
    first = shape[0] if len(shape) else 1
    return value.to(F64).reshape(*lead, first, shape.numel() // first)


def _scaled(matrix: Tensor, prior: Tensor) -> Tensor:
    """Return P^-½ M P^-½."""
    half = prior.rsqrt()
    return half[:, None] * matrix * half


def log_evidence(curvature: Curvature, point: Mapping[str, Tensor], logs: Mapping[str, Tensor] | None = None) -> Tensor:
    """Return log p(D) ≈ log p(y | w) + log p(w) + n/2 log 2π - ½ log det(H + P), in float64.

    Equation: laplace-evidence.

    Args:
        curvature: at the point.
        point: w by site.
        logs: by how much to change the log precisions: of the noise ("tau") and of the prior of some sites; with
            gradients.

    Example:
        >>> import torch
        >>> from pyro_dropout.mathematics.curvature import Curvature, Dense
        >>> from pyro_dropout.mathematics.curvature import log_evidence
        >>> block = Dense({"w": torch.Size([1])}, {"w": torch.ones(1)}, hessian=torch.tensor([[3.0]]))
        >>> log_evidence(Curvature([block], torch.tensor(-7.0), 10), {"w": torch.zeros(1)}).item() # -7 - ½ log 4
        -7.693147180559945
    """
    logs = logs or {}
    likelihood, log_ratio = curvature.log_likelihood, logs.get(NOISE)
    precisions = precisions_of(curvature, logs)
    prior = [0.5 * (p.log() - p * point[name].to(F64).square()).sum() for name, p in precisions.items()]
    if log_ratio is None:
        log_det = curvature.log_det(precisions)
    else:  # log det(rH + P) = n log r + log det(H + P/r)
        assert curvature.numbers is not None, "without Gaussian noise"
        assert curvature.squares is not None
        likelihood = likelihood + 0.5 * (curvature.numbers * log_ratio - torch.expm1(log_ratio) * curvature.squares)
        size = sum(block.size() for block in curvature)
        log_det = size * log_ratio + curvature.log_det({n: p * torch.exp(-log_ratio) for n, p in precisions.items()})
    return likelihood + torch.stack(prior).sum() - 0.5 * log_det


def precisions_of(curvature: Curvature, logs: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Return the prior's precisions by site, each of the site's shape, with their logs changed by ``logs``."""
    logs = logs or {}
    found = {name: value for block in curvature for name, value in block.by_site().items()}
    return {name: value * logs[name].exp() if name in logs else value for name, value in found.items()}
