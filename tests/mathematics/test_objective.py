"""The dropout objective and its weight decays, against exact fractions, numpy loops and torch's optimiser."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from scipy.special import logsumexp

from pyro_dropout.mathematics.objective import (
    dropout_objective,
    implied_length_scale,
    implied_tau,
    optimizer_weight_decay,
    standardised_tau,
    weight_decay,
)
from tests.oracles.both_types import digits, dtypes

keeps = st.floats(0.01, 1.0)
positives = st.floats(1e-3, 1e4)
counts = st.integers(1, 100_000)
seeds = st.integers(0, 2**32 - 1)
ULP = 2.0**-52


def relative(a: float, b: float) -> float:
    return abs(a - b) / abs(b)


def twice(dtype, *values):
    """The values as Python numbers and as tensors of a type, each with the size of one rounding."""
    return [(ULP, *values), (torch.finfo(dtype).eps, *(torch.tensor(value, dtype=dtype) for value in values))]


# --- the converters: numbers ------------------------------------------------------------------------------


@given(keeps, positives, counts, positives, dtypes)
def test_weight_decay_is_the_exact_fraction(keep, tau, num_data, length_scale, dtype):
    for ulp, p, t, scale in twice(dtype, keep, tau, length_scale):
        exact = Fraction(float(scale)) ** 2 * Fraction(float(p)) / (2 * num_data * Fraction(float(t)))
        found = weight_decay(p, t, num_data, scale)
        assert abs(Fraction(float(found)) / exact - 1) < 4 * Fraction(ulp)


@given(keeps, positives, counts, positives, dtypes)
def test_implied_values_undo_weight_decay(keep, tau, num_data, length_scale, dtype):
    for ulp, p, t, scale in twice(dtype, keep, tau, length_scale):
        decay = weight_decay(p, t, num_data, scale)
        assert relative(implied_tau(p, decay, num_data, scale), t) < 8 * ulp
        assert relative(implied_length_scale(p, t, decay, num_data), scale) < 8 * ulp


# --- the converters: tensors ------------------------------------------------------------------------------


@given(seeds, dtypes, st.integers(1, 4), st.integers(1, 4))
def test_tensors_broadcast_and_agree_with_numbers(seed, dtype, rows, columns):
    draw = torch.Generator().manual_seed(seed)
    keep = torch.rand(rows, 1, generator=draw, dtype=dtype) * 0.9 + 0.1
    tau = torch.rand(columns, generator=draw, dtype=dtype) + 0.1
    calls = [
        lambda k, t: weight_decay(k, t, 10, 0.3),
        lambda k, t: implied_tau(k, t, 10, 0.3),
        lambda k, t: implied_length_scale(k, t, 1e-3, 10),
        lambda k, t: optimizer_weight_decay(k, t, 10, 0.3, loss="mse"),
        lambda k, t: standardised_tau(t, k),
    ]
    for call in calls:
        table = call(keep, tau)
        assert table.shape == (rows, columns)
        assert table.dtype == dtype
        for i in range(rows):
            for j in range(columns):
                number = call(keep[i, 0].item(), tau[j].item())
                assert type(number) is float
                assert relative(table[i, j].item(), number) < 8 * torch.finfo(dtype).eps


# --- standardised targets ---------------------------------------------------------------------------------


@given(positives, st.floats(0.01, 100.0), st.floats(-3, 3), st.floats(-3, 3), st.floats(-10, 10), dtypes)
def test_standardised_precision_leaves_the_likelihood_alone(tau, std, y, f, mean, dtype):
    for ulp, t, s in twice(dtype, tau, std):
        width, found = float(s), float(standardised_tau(t, s))
        raw = stats.norm.logpdf(mean + width * y, mean + width * f, float(t) ** -0.5)
        standardised = stats.norm.logpdf(y, f, found**-0.5)
        # One ulp of τ moves the log density by an ulp of its square and half an ulp: of less than the density and 10.
        slack = 1e-7 if ulp == ULP else 16 * ulp
        # The densities are of different variables: dy = σ_y dz.
        assert raw == pytest.approx(standardised - math.log(width), rel=slack, abs=slack)


# --- the objective ----------------------------------------------------------------------------------------


def random_tensors(seed, dtype, *shapes):
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=draw, dtype=dtype) for shape in shapes]


@given(seeds, dtypes, st.integers(1, 6), st.integers(1, 3))
def test_objective_is_the_numpy_loop(seed, dtype, n, d):
    y, y_hat, w, b = random_tensors(seed, dtype, (n, d), (n, d), (3, 2), (3,))
    by_hand = sum((float(y[i, j]) - float(y_hat[i, j])) ** 2 for i in range(n) for j in range(d)) / (2 * n)
    by_hand += 0.3 * sum(v**2 for v in w.flatten().tolist()) + 0.7 * sum(v**2 for v in b.tolist())
    value = dropout_objective(y, y_hat, {"w": w, "b": b}, {"b": 0.7, "w": 0.3})
    assert value.dtype == dtype
    assert value.item() == pytest.approx(by_hand, rel=32 * torch.finfo(dtype).eps)


@given(seeds, dtypes, st.integers(1, 6), st.integers(1, 4))
def test_objective_for_classes_is_the_numpy_loop(seed, dtype, n, classes):
    logits, w = random_tensors(seed, dtype, (n, classes), (3, 2))
    y = torch.arange(n) % classes
    rows = logits.double().numpy()
    by_hand = sum(logsumexp(rows[i]) - rows[i][i % classes] for i in range(n)) / n
    by_hand += 0.2 * sum(v**2 for v in w.flatten().tolist())
    value = dropout_objective(y, logits, [w], 0.2)
    assert value.item() == pytest.approx(by_hand, rel=32 * torch.finfo(dtype).eps)


def minus_elbo_by_loops(x, y, loc_w, loc_b, mask, keep, tau, length_scale):
    """Minus the log-likelihood of one draw at scale=0, plus the terms of the KL that the means can move."""
    total = 0.0
    n, q = x.shape
    d = y.shape[1]
    for i in range(n):
        for j in range(d):
            f = loc_b[j] + sum(mask[r] * loc_w[r, j] * x[i, r] for r in range(q))
            total += 0.5 * tau * (y[i, j] - f) ** 2 - 0.5 * math.log(tau / (2 * math.pi))
    for r in range(q):
        total += keep * 0.5 * length_scale**2 * sum(loc_w[r, j] ** 2 for j in range(d))
    return total + 0.5 * length_scale**2 * sum(v**2 for v in loc_b)


@given(seeds, st.floats(0.1, 1.0), st.floats(0.1, 10.0), st.floats(0.1, 3.0), dtypes)
def test_objective_is_minus_the_elbo_over_n_tau_up_to_a_constant(seed, keep, tau, length_scale, dtype):
    rng = np.random.default_rng(seed)
    n, q, d = 5, 3, 2

    def normal(*shape):
        """As the type has them, but in float64, for loops that do not round."""
        return torch.from_numpy(rng.normal(size=shape)).to(dtype).double().numpy()

    x, y = normal(n, q), normal(n, d)
    mask = (rng.random(q) < keep).astype(float)
    decays = {"w": weight_decay(keep, tau, n, length_scale), "b": weight_decay(1.0, tau, n, length_scale)}
    constant = 0.5 * d * math.log(tau / (2 * math.pi)) / tau
    for _ in range(3):
        w, b = normal(q, d), normal(d)
        y_hat = torch.from_numpy((x * mask) @ w + b).to(dtype)
        weights = {"w": torch.from_numpy(w).to(dtype), "b": torch.from_numpy(b).to(dtype)}
        objective = dropout_objective(torch.from_numpy(y).to(dtype), y_hat, weights, decays).item()
        elbo = minus_elbo_by_loops(x, y, w, b, mask, keep, tau, length_scale)
        # In float32 ŷ and some twenty terms are rounded, each to 6e-8 of numbers below ten times the objective.
        slack = digits(dtype, 1e-9, 1e-5 * max(1, objective))
        assert objective - elbo / (n * tau) == pytest.approx(constant, rel=1e-9, abs=slack)


def masked_net(parameters, x, mask):
    hidden = torch.tanh((x * mask[0]) @ parameters["first.weight"].T + parameters["first.bias"])
    return (hidden * mask[1]) @ parameters["second.weight"].T + parameters["second.bias"]


@given(seed=seeds, drop=st.floats(0.0, 0.9))
@pytest.mark.thinned(2)
def test_the_decay_beside_nn_dropout_is_that_of_the_papers_weights(seed: int, drop: float) -> None:
    """The same masks in a network of nn.Dropout, whose weights are keep·M, and in the paper's."""
    keep, n = 1 - drop, 7
    x, y, m = random_tensors(seed, torch.float64, (n, 3), (n, 2), (2, 3))
    w = (keep * m).requires_grad_()
    torch.manual_seed(seed)
    mask = F.dropout(torch.ones(n, 3, dtype=torch.float64), drop) * keep
    torch.manual_seed(seed)
    half_mse = (y - F.dropout(x, drop) @ w.mT).square().sum() / (2 * n)
    c = optimizer_weight_decay(keep, 2.0, n, 0.7, rescaled=True)
    ours = dropout_objective(y, x * mask @ m.mT, {"weight": m}, {"weight": weight_decay(keep, 2.0, n, 0.7)})
    torch.testing.assert_close(half_mse + c / 2 * w.square().sum(), ours)


@pytest.mark.parametrize(("loss", "outputs"), [("half_mse", 3), ("mse", 1), ("mse", 3), ("cross_entropy", 4)])
@given(seed=seeds, keep=st.floats(0.1, 1.0), tau=st.floats(0.1, 10.0), dtype=dtypes)
@pytest.mark.thinned(2)
def test_one_step_of_torchs_sgd_is_one_step_down_the_objective(loss, outputs, seed, keep, tau, dtype):
    n, q, width, lr = 7, 3, 4, 0.01
    tau = 1.0 if loss == "cross_entropy" else tau
    shapes = {
        "first.weight": (width, q),
        "first.bias": (width,),
        "second.weight": (outputs, width),
        "second.bias": (outputs,),
    }
    x, y, *start = random_tensors(seed, dtype, (n, q), (n, outputs), *shapes.values())
    draw = torch.Generator().manual_seed(seed)
    mask = [torch.bernoulli(torch.full((size,), keep, dtype=dtype), generator=draw) for size in (q, width)]
    keep_of = {name: 1.0 if name.endswith("bias") else keep for name in shapes}
    if loss == "cross_entropy":
        y = y.argmax(1)

    # What a user does: a stock loss, and weight_decay in the optimiser's parameter groups.
    theirs = {name: value.clone().requires_grad_() for name, value in zip(shapes, start, strict=True)}
    groups = [
        {
            "params": [value],
            "weight_decay": optimizer_weight_decay(
                keep_of[name], tau, n, 0.7, loss=loss, out_features=1 if loss == "cross_entropy" else outputs
            ),
        }
        for name, value in theirs.items()
    ]
    optimiser = torch.optim.SGD(groups, lr=lr)
    prediction = masked_net(theirs, x, mask)
    stock = {
        "half_mse": lambda: F.mse_loss(prediction, y, reduction="sum") / (2 * n),
        "mse": lambda: F.mse_loss(prediction, y),
        "cross_entropy": lambda: F.cross_entropy(prediction, y),
    }
    stock[loss]().backward()
    optimiser.step()

    # The mathematics: a gradient step down the objective, longer by as much as torch's loss is larger.
    ours = {name: value.clone().requires_grad_() for name, value in zip(shapes, start, strict=True)}
    decays = {name: weight_decay(keep_of[name], tau, n, 0.7) for name in shapes}
    dropout_objective(y, masked_net(ours, x, mask), ours, decays).backward()
    step = lr * (2 / outputs if loss == "mse" else 1)
    for name in shapes:
        moved = ours[name].detach() - step * ours[name].grad
        slack = digits(dtype, 1e-12, 1e-5)
        torch.testing.assert_close(theirs[name].detach(), moved, rtol=slack, atol=slack)
