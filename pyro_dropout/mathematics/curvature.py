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
    """The curvature of some sites, and the prior's precisions of their numbers.

    Args:
        shapes: the sites of the block, in order, with their shapes.
        prior: the prior's precisions by site, each broadcast to its shape.
        factors: the tensors of the curvature.
    """

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
        parts = (precisions[name].to(F64).expand(shape).flatten() for name, shape in self.shapes.items())
        return torch.cat(list(parts))

    def size(self) -> int:
        """Return how many numbers the sites of the block have."""
        return sum(shape.numel() for shape in self.shapes.values())

    def by_site(self) -> dict[str, Tensor]:
        """Return the prior's precisions by site, each of the site's shape."""
        parts = self.prior.split([shape.numel() for shape in self.shapes.values()])
        return {name: part.reshape(self.shapes[name]) for name, part in zip(self.shapes, parts, strict=True)}

    def log_det(self, prior: Tensor | None = None) -> Tensor:
        """Return log det(H + P), with gradients in ``prior``, which is as ``gathered`` returns it."""
        raise NotImplementedError

    def flat(self, by_site: Mapping[str, Tensor]) -> Tensor:
        """Return tensors (..., *shape) by site as rows, (..., n), in the order of the block; in float64."""
        rows = []
        for name, shape in self.shapes.items():
            value = by_site[name].to(F64)
            rows.append(value.reshape(*value.shape[: value.dim() - len(shape)], shape.numel()))
        return torch.cat(rows, -1)

    def squared_length(self, by_site: Mapping[str, Tensor]) -> Tensor:
        """Return gᵀ Λ⁻¹ g for a vector g, given by site."""
        raise NotImplementedError

    def spectrum(self) -> tuple[Tensor, Callable[[Mapping[str, Tensor]], Tensor]]:
        """Return λ, (n,), and a function of rows R by site that returns R', (B, n), for any factor c of the prior.

        R (H + cP)⁻¹ Rᵀ = R' diag(1/(λ + c)) R'ᵀ: λ and R' are those of the eigenvectors of P^-½ H P^-½.
        """
        raise NotImplementedError


class Diagonal(Block):
    """Independent numbers: H = diag h."""

    factors, order = ("diagonal",), 1
    diagonal: Tensor

    def log_det(self, prior: Tensor | None = None) -> Tensor:
        """Return Σ log(h + P)."""
        return (self.diagonal + (self.prior if prior is None else prior)).log().sum()

    def scales(self) -> dict[str, Tensor]:
        """Return the standard deviations of the posterior, by site."""
        parts = (self.diagonal + self.prior).rsqrt().split([shape.numel() for shape in self.shapes.values()])
        return {name: part.reshape(self.shapes[name]) for name, part in zip(self.shapes, parts, strict=True)}

    def squared_length(self, by_site: Mapping[str, Tensor]) -> Tensor:
        """Return Σ g²/(h + P)."""
        return (self.flat(by_site).square() / (self.diagonal + self.prior)).sum()

    def spectrum(self) -> tuple[Tensor, Callable[[Mapping[str, Tensor]], Tensor]]:
        """Return h/P, and R P^-½."""
        return self.diagonal / self.prior, lambda rows: self.flat(rows) * self.prior.rsqrt()


class Dense(Block):
    """One matrix H for all numbers of the block."""

    factors = ("hessian",)
    hessian: Tensor

    def log_det(self, prior: Tensor | None = None) -> Tensor:
        """Return log det(H + P)."""
        prior = self.prior if prior is None else prior
        return prior.log().sum() + 2 * _cholesky(self.scaled(prior), self.shapes).diagonal().log().sum()

    def scaled(self, prior: Tensor) -> Tensor:
        """Return I + P^-½ H P^-½."""
        half = prior.rsqrt()
        return torch.eye(len(prior), dtype=F64, device=prior.device) + half[:, None] * self.hessian * half

    def root(self) -> Tensor:
        """Return the lower-triangular L with L Lᵀ = Λ⁻¹, (n, n)."""
        # Λ turned around is C Cᵀ, so Λ = K Kᵀ with an upper-triangular K, and L = K⁻ᵀ.
        upper = _cholesky(self.scaled(self.prior).flip(0, 1), self.shapes).flip(0, 1)
        eye = torch.eye(len(upper), dtype=F64, device=upper.device)
        lower: Tensor = torch.linalg.solve_triangular(upper.mT, eye, upper=False)
        return lower * self.prior.rsqrt()[:, None]

    def squared_length(self, by_site: Mapping[str, Tensor]) -> Tensor:
        """Return ‖C⁻¹ P^-½ g‖²."""
        half = (self.flat(by_site) * self.prior.rsqrt()).unsqueeze(-1)
        cholesky = _cholesky(self.scaled(self.prior), self.shapes)
        whitened: Tensor = torch.linalg.solve_triangular(cholesky, half, upper=False)
        return whitened.square().sum()

    def spectrum(self) -> tuple[Tensor, Callable[[Mapping[str, Tensor]], Tensor]]:
        """Return the eigenvalues of P^-½ H P^-½, and R P^-½ U."""
        half = self.prior.rsqrt()
        values, vectors = torch.linalg.eigh(half[:, None] * self.hessian * half)
        basis = half[:, None] * vectors
        return values.clamp_min(0), lambda rows: self.flat(rows) @ basis


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
        columns = []
        for name, shape in self.shapes.items():
            each = precisions[name].to(F64).expand(shape).reshape(shape[0], -1)
            if not bool((each == each[:1]).all()):
                raise PyroDropoutError(
                    f"structure='kron' needs one prior width for all outputs of a layer, and {name!r} has several."
                    " Use structure='full', 'layer' or 'diagonal'."
                )
            columns.append(each[0])
        return torch.cat(columns)

    def by_site(self) -> dict[str, Tensor]:
        """Return the prior's precisions by site, each of the site's shape."""
        parts = self.prior.split([math.prod(shape[1:]) for shape in self.shapes.values()])
        pairs = zip(self.shapes.items(), parts, strict=True)
        return {name: part.reshape(1, *shape[1:]).expand(shape) for (name, shape), part in pairs}

    def matrix(self, by_site: Mapping[str, Tensor]) -> Tensor:
        """Return tensors (..., *shape) by site as (W, b), (..., outputs, inputs and bias); in float64."""
        parts = []
        for name, shape in self.shapes.items():
            value = by_site[name].to(F64)
            lead = value.shape[: value.dim() - len(shape)]
            parts.append(value.reshape(*lead, shape[0], math.prod(shape[1:])))
        return torch.cat(parts, -1)

    def flat(self, by_site: Mapping[str, Tensor]) -> Tensor:
        """Return tensors by site as rows, in the order of (W, b)."""
        return self.matrix(by_site).flatten(-2)

    def log_det(self, prior: Tensor | None = None) -> Tensor:
        """Return Σ_kj log(β_k λ_j + 1) + outputs · Σ log D."""
        prior = self.prior if prior is None else prior
        products = _eigenvalues(self.outputs)[:, None] * _eigenvalues(self.scaled(prior))
        return products.log1p().sum() + len(self.outputs) * prior.log().sum()

    def scaled(self, prior: Tensor) -> Tensor:
        """Return D^-½ A D^-½."""
        half = prior.rsqrt()
        return half[:, None] * self.inputs * half

    def rotations(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return U, V and the standard deviations s_kj = (β_k λ_j + 1)^-½ in the rotated units."""
        with torch.no_grad():
            beta, left = torch.linalg.eigh(self.outputs)
            lam, right = torch.linalg.eigh(self.scaled(self.prior))
        return left, right, (beta.clamp_min(0)[:, None] * lam.clamp_min(0) + 1).rsqrt()

    def squared_length(self, by_site: Mapping[str, Tensor]) -> Tensor:
        """Return ‖s ∘ Uᵀ G D^-½ V‖² of the matrix G."""
        left, right, widths = self.rotations()
        return (left.mT @ (self.matrix(by_site) * self.prior.rsqrt()) @ right * widths).square().sum()

    def spectrum(self) -> tuple[Tensor, Callable[[Mapping[str, Tensor]], Tensor]]:
        """Return β_k λ_j, and Uᵀ R D^-½ V."""
        left, right, widths = self.rotations()
        left, right = left.mT, self.prior.rsqrt()[:, None] * right
        return (widths.pow(-2) - 1).flatten(), lambda rows: (left @ self.matrix(rows) @ right).flatten(-2)


class Curvature(nn.Module):
    """The curvature of a log-likelihood at a point, in blocks of sites that are correlated with each other.

    Args:
        blocks: the blocks.
        log_likelihood: log p(y | w) at the point, of all data.
        num_data: how many data these are.
        noise: of Gaussian noise, its precision ``tau``, how many ``numbers`` the targets have, and Σ τ(y - f)², their
            ``squares``.

    Example:
        >>> import torch
        >>> shapes, prior = {"w": torch.Size([2])}, {"w": torch.tensor(1.0)}
        >>> block = Dense(shapes, prior, hessian=torch.tensor([[2.0, 0.0], [0.0, 3.0]]))
        >>> curvature = Curvature([block], torch.tensor(-7.0), 10)
        >>> torch.allclose(curvature.log_det(), torch.tensor(12.0, dtype=torch.float64).log())
        True
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
        self.blocks = nn.ModuleDict({_key(block): block for block in blocks})
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

    @classmethod
    def room_for(cls, tensors: Mapping[str, Tensor], shapes: Shapes, device: torch.device) -> "Curvature | None":
        """Return a curvature with tensors of these names and sizes, without their values; None if it cannot be one."""
        factors: dict[str, dict[str, Tensor]] = {}
        for name, value in tensors.items():
            if name.startswith("blocks."):
                key, _, factor = name.removeprefix("blocks.").rpartition(".")
                factors.setdefault(key, {})[factor] = value
        noise = {name: torch.zeros_like(tensors[name]) for name in OF_NOISE if name in tensors}
        made = cls([], torch.zeros((), device=device), 0, noise)
        for key, found in factors.items():
            names = key.replace("/", ".").split(",")
            kind = next((kind for kind in (Diagonal, Dense, Kronecker) if set(found) == {*kind.factors, "prior"}), None)
            if kind is None or not set(names) <= set(shapes):
                return None
            own = {name: shapes[name] for name in names}
            sizes = kind.sizes(own)
            if {factor: value.shape for factor, value in found.items()} != sizes:
                return None
            ones = {name: torch.ones((), device=device) for name in names}
            empty = {name: torch.zeros(sizes[name], device=device) for name in kind.factors}
            made.blocks[key] = kind(own, ones, **empty)
        return made


def _key(block: Block) -> str:
    """Return the names of a block's sites as torch allows them for a submodule, which may hold no dot."""
    return ",".join(block.shapes).replace(".", "/")


def _eigenvalues(matrix: Tensor) -> Tensor:
    found: Tensor = torch.linalg.eigvalsh(matrix)
    return found.clamp_min(0)  # rounding may leave a little less than nothing


def _cholesky(matrix: Tensor, shapes: Shapes) -> Tensor:
    found: Tensor
    found, info = torch.linalg.cholesky_ex(matrix)
    if int(info):
        raise PyroDropoutError(
            f"the precision of {', '.join(map(repr, shapes))} cannot be factorised, in float64 either: the data say"
            f" more than {1 / torch.finfo(F64).eps:.0e} times as much as the prior about some weights, or a number is"
            " not finite. Are inputs, targets and tau in units that make sense? Standardised(model, x, y) may help."
        )
    return found


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
    if log_ratio is not None:
        numbers, squares = _noise(curvature)
        likelihood = likelihood + 0.5 * (numbers * log_ratio - torch.expm1(log_ratio) * squares)
    precisions = precisions_of(curvature, logs)
    prior = [0.5 * (p.log() - p * point[name].to(F64).square()).sum() for name, p in precisions.items()]
    if log_ratio is None:
        log_det = curvature.log_det(precisions)
    else:  # log det(rH + P) = n log r + log det(H + P/r)
        size = sum(block.size() for block in curvature)
        log_det = size * log_ratio + curvature.log_det({n: p * torch.exp(-log_ratio) for n, p in precisions.items()})
    return likelihood + torch.stack(prior).sum() - 0.5 * log_det


def _noise(curvature: Curvature) -> tuple[Tensor, Tensor]:
    """Return how many numbers the targets have, and Σ τ(y - f)²."""
    if curvature.numbers is None or curvature.squares is None:
        raise PyroDropoutError("the likelihood has no precision tau; only the widths of the prior can be changed.")
    return curvature.numbers, curvature.squares


def precisions_of(curvature: Curvature, logs: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Return the prior's precisions by site, each of the site's shape, with their logs changed by ``logs``."""
    logs = logs or {}
    found = {name: value for block in curvature for name, value in block.by_site().items()}
    return {name: value * logs[name].exp() if name in logs else value for name, value in found.items()}
