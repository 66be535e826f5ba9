"""The one-dimensional integral, against mpmath and against what must be true of any label's entropy."""

import mpmath
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pyro_dropout.paper import label_entropy
from tests.oracles.both_types import digits, dtypes

keeps = st.floats(1e-6, 1 - 1e-6)


def entropy(keep: float, d: float, dtype: torch.dtype = torch.float64) -> float:
    probs = torch.tensor([keep, 1 - keep], dtype=dtype)
    return label_entropy(probs, torch.tensor(d * d, dtype=dtype)).item()


def mixture_entropy_oracle(keep: float, d: float) -> float:
    """E[H(z|w)] from the definition: responsibilities of two unit Gaussians at 0 and d, integrated over w."""
    with mpmath.workdps(30):
        p, q, d = mpmath.mpf(keep), 1 - mpmath.mpf(keep), mpmath.mpf(d)

        def integrand(w: mpmath.mpf) -> mpmath.mpf:
            a, b = p * mpmath.npdf(w, d), q * mpmath.npdf(w)
            return -(a * mpmath.log(a / (a + b)) + b * mpmath.log(b / (a + b)))

        even = d / 2 - mpmath.log(p / q) / d if d else mpmath.mpf(0)  # where both labels are as likely
        marks = sorted({*(c + k for c in (mpmath.mpf(0), d) for k in (-14, -4, 0, 4, 14)), even, even - 1, even + 1})
        return float(mpmath.quad(integrand, marks))


@pytest.mark.parametrize("keep", [1e-6, 0.05, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("d", [0.01, 0.5, 1, 3, 7, 15, 30])
@pytest.mark.thinned(4)
def test_against_mpmath(keep: float, d: float) -> None:
    assert entropy(keep, d) == pytest.approx(mixture_entropy_oracle(keep, d), abs=1e-13)


@given(keeps, st.floats(0, 20))
def test_float32_has_the_digits_of_float64(keep: float, d: float) -> None:
    probs = torch.tensor([keep, 1 - keep])  # rounded before, so that both types are asked the same
    single, double = (label_entropy(p, torch.tensor(d * d).to(p)).item() for p in (probs, probs.double()))
    assert single == pytest.approx(double, rel=1e-4, abs=1e-30)


@given(keeps, st.floats(0, 20), dtypes)
def test_slopes_are_those_of_information_theory(keep: float, d: float, dtype: torch.dtype) -> None:
    """Slope in d² is -½E[Var(z|w)], so it lies in [-p(1-p)/2, 0]; slopes in p are mean surprises, at least 0."""
    probs = torch.tensor([keep, 1 - keep], dtype=dtype, requires_grad=True)
    d2 = torch.tensor(d * d, dtype=dtype, requires_grad=True)
    by_probs, by_d2 = torch.autograd.grad(label_entropy(probs, d2), (probs, d2))
    assert -keep * (1 - keep) / 2 * (1 + digits(dtype, 0.0, 1e-5)) - 1e-14 <= by_d2.item() <= 0
    assert (by_probs >= 0).all()
    # Euler's identity for a function homogeneous of degree one
    assert (by_probs * probs).sum().item() == pytest.approx(
        entropy(keep, d, dtype), rel=digits(dtype, 1e-10), abs=digits(dtype, 1e-300, 1e-37)
    )


@pytest.mark.parametrize("d", [0.3, 2.0, 9.0])
def test_first_and_second_derivatives(d: float) -> None:
    keep = torch.tensor([0.5, 0.9, 0.02], dtype=torch.float64, requires_grad=True)
    d2 = torch.full((3,), d * d, dtype=torch.float64, requires_grad=True)

    def function(keep: torch.Tensor, d2: torch.Tensor) -> torch.Tensor:
        return label_entropy(torch.stack([keep, 1 - keep], -1), d2)

    assert torch.autograd.gradcheck(function, (keep, d2))
    assert torch.autograd.gradgradcheck(function, (keep, d2), atol=1e-4)


@pytest.mark.parametrize("keep", [1.0, 1 - 1e-16, 1e-30])
@pytest.mark.parametrize("d", [0.0, 1.0, 1e3])
def test_certain_labels_have_no_entropy_and_no_nan(keep: float, d: float, dtype: torch.dtype) -> None:
    probs = torch.tensor([keep, 1 - keep], dtype=dtype, requires_grad=True)
    d2 = torch.tensor(d * d, dtype=dtype, requires_grad=True)
    value = label_entropy(probs, d2)
    slopes = torch.autograd.grad(value, (probs, d2))
    assert value.item() == pytest.approx(0, abs=1e-14)
    assert all(torch.isfinite(s).all() for s in slopes)
