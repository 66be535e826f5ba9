"""The dropout objective and its weight decays, against exact fractions, numpy loops and torch's optimiser."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import stats
from scipy.special import logsumexp

from pyro_dropout.mathematics.errors import PyroDropoutError, RangeError, ShapeError
from pyro_dropout.mathematics.objective import (
    _check_targets,
    dropout_objective,
    implied_length_scale,
    optimizer_weight_decay,
    precision,
    standardised_precision,
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
def test_precision_undoes_weight_decay(keep, tau, num_data, length_scale, dtype):
    for ulp, p, t, scale in twice(dtype, keep, tau, length_scale):
        decay = weight_decay(p, t, num_data, scale)
        assert relative(precision(p, decay, num_data, scale), t) < 8 * ulp


@given(keeps, positives, counts, positives, dtypes)
def test_implied_length_scale_undoes_weight_decay(keep, tau, num_data, length_scale, dtype):
    for ulp, p, t, scale in twice(dtype, keep, tau, length_scale):
        decay = weight_decay(p, t, num_data, scale)
        assert relative(implied_length_scale(p, t, decay, num_data), scale) < 8 * ulp


@given(keeps, positives, counts, st.integers(1, 50), dtypes)
def test_the_losses_differ_by_two_over_the_number_of_outputs(keep, tau, num_data, outputs, dtype):
    for ulp, p, t in twice(dtype, keep, tau):
        half = optimizer_weight_decay(p, t, num_data, 0.5)
        full = optimizer_weight_decay(p, t, num_data, 0.5, loss="mse", out_features=outputs)
        assert relative(full * outputs, 2 * half) < 4 * ulp
        assert relative(half, 2 * weight_decay(p, t, num_data, 0.5)) < 4 * ulp


def test_settings_of_the_uci_experiments():
    exact = Fraction(1, 100) ** 2 * Fraction(95, 100) / (2 * 455 * Fraction(15, 100))
    assert exact == Fraction(19, 27_300_000)
    assert relative(weight_decay(0.95, 0.15, 455, 1e-2), float(exact)) < 4 * ULP


def test_settings_of_the_co2_experiment_imply_a_length_scale_of_almost_eight():
    implied = implied_length_scale(keep=0.9, tau=1e5, weight_decay=1e-6, num_data=272)
    assert implied == pytest.approx(math.sqrt(54.4 / 0.9), rel=1e-14)
    assert implied == pytest.approx(7.774602526460401, rel=1e-14)
    assert precision(keep=0.9, weight_decay=1e-6, num_data=272) == pytest.approx(0.9 / 544e-6, rel=1e-14)
    assert precision(0.9, 1e-6, 272) == pytest.approx(1654.4, abs=0.02)


@pytest.mark.parametrize("num_data", [455, 455.0, torch.tensor(455), torch.tensor(455.0)])
def test_a_whole_number_may_come_as_any_type(num_data):
    assert float(weight_decay(0.95, 0.15, num_data)) == pytest.approx(0.95 / (910 * 0.15), rel=1e-6)


# --- the converters: tensors ------------------------------------------------------------------------------


@given(seeds, dtypes, st.integers(1, 4), st.integers(1, 4))
def test_tensors_broadcast_and_agree_with_numbers(seed, dtype, rows, columns):
    draw = torch.Generator().manual_seed(seed)
    keep = torch.rand(rows, 1, generator=draw, dtype=dtype) * 0.9 + 0.1
    tau = torch.rand(columns, generator=draw, dtype=dtype) + 0.1
    calls = [
        lambda k, t: weight_decay(k, t, 10, 0.3),
        lambda k, t: precision(k, t, 10, 0.3),
        lambda k, t: implied_length_scale(k, t, 1e-3, 10),
        lambda k, t: optimizer_weight_decay(k, t, 10, 0.3, loss="mse"),
        lambda k, t: standardised_precision(t, k),
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


@given(keeps, positives, st.floats(0.05, 20.0), dtypes)
def test_slope_of_the_weight_decay_in_keep_and_length_scale(keep, tau, length_scale, dtype):
    k = torch.tensor(keep, dtype=dtype, requires_grad=True)
    scale = torch.tensor(length_scale, dtype=dtype, requires_grad=True)
    slack = digits(dtype, 1e-12, 8 * torch.finfo(dtype).eps)
    decay = weight_decay(k, tau, 100, scale)
    decay.backward()
    # λ is of degree one in p and of degree two in l (Euler's theorem on homogeneous functions).
    assert relative(k.grad.item() * k.item(), decay.item()) < slack
    assert relative(scale.grad.item() * scale.item(), 2 * decay.item()) < slack


# --- standardised targets ---------------------------------------------------------------------------------


@given(positives, st.floats(0.01, 100.0), st.floats(-3, 3), st.floats(-3, 3), st.floats(-10, 10), dtypes)
def test_standardised_precision_leaves_the_likelihood_alone(tau, std, y, f, mean, dtype):
    for ulp, t, s in twice(dtype, tau, std):
        width, found = float(s), float(standardised_precision(t, s))
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


@given(seeds, st.floats(0, 1), st.floats(0, 1), dtypes)
def test_ways_to_write_the_decays_agree(seed, first, second, dtype):
    y, y_hat, w, b = random_tensors(seed, dtype, (4, 2), (4, 2), (3, 2), (3,))
    named = dropout_objective(y, y_hat, {"w": w, "b": b}, {"b": second, "w": first})
    forms = [
        dropout_objective(y, y_hat, [w, b], [first, second]),
        dropout_objective(y, y_hat, {"w": w, "b": b}, (first, second)),
        dropout_objective(y, y_hat, iter([w, b]), torch.tensor([first, second], dtype=dtype)),
        dropout_objective(y, y_hat, [b, w], (value for value in (second, first))),
    ]
    for value in forms:
        torch.testing.assert_close(value, named, rtol=digits(dtype, 1e-14, 1e-6), atol=0)
    shared = dropout_objective(y, y_hat, [w, b], torch.tensor(first, dtype=dtype))
    torch.testing.assert_close(shared, dropout_objective(y, y_hat, [w, b], [first, first]), rtol=0, atol=0)


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


# --- what is refused --------------------------------------------------------------------------------------

not_keep = st.floats(allow_nan=True).filter(lambda v: not 0 < v <= 1)
not_positive = st.floats(allow_nan=True).filter(lambda v: not 0 < v < math.inf)
not_a_count = st.one_of(
    st.integers(max_value=0), st.floats(allow_nan=True).filter(lambda v: not (v >= 1 and v.is_integer()))
)


@given(not_keep, not_positive, not_a_count, st.booleans(), dtypes)
def test_numbers_that_mean_nothing_are_refused(keep, positive, count, as_tensor, dtype):
    assume(not (as_tensor and isinstance(count, int) and abs(count) >= 2**63))
    box = (lambda v: torch.tensor(v, dtype=dtype if isinstance(v, float) else None)) if as_tensor else lambda v: v
    bad, minus, uncountable = box(keep), box(positive), box(count)
    # What float32 rounds to a probability or to a whole number is one.
    assume(float(bad) != 1 and not (float(uncountable) >= 1 and float(uncountable).is_integer()))
    calls = [
        ("keep", lambda: weight_decay(bad, 1.0, 10)),
        ("tau", lambda: weight_decay(0.9, minus, 10)),
        ("num_data", lambda: weight_decay(0.9, 1.0, uncountable)),
        ("length_scale", lambda: weight_decay(0.9, 1.0, 10, minus)),
        ("keep", lambda: precision(bad, 1.0, 10)),
        ("weight_decay", lambda: precision(0.9, minus, 10)),
        ("num_data", lambda: precision(0.9, 1.0, uncountable)),
        ("length_scale", lambda: precision(0.9, 1.0, 10, minus)),
        ("keep", lambda: implied_length_scale(bad, 1.0, 1.0, 10)),
        ("tau", lambda: implied_length_scale(0.9, minus, 1.0, 10)),
        ("weight_decay", lambda: implied_length_scale(0.9, 1.0, minus, 10)),
        ("num_data", lambda: implied_length_scale(0.9, 1.0, 1.0, uncountable)),
        ("keep", lambda: optimizer_weight_decay(bad, 1.0, 10)),
        ("tau", lambda: optimizer_weight_decay(0.9, minus, 10)),
        ("tau", lambda: standardised_precision(minus, 1.0)),
        ("target_std", lambda: standardised_precision(1.0, minus)),
    ]
    for name, call in calls:
        with pytest.raises(RangeError, match=f"^{name} must"):
            call()


X = torch.zeros(4, 2)
Y = torch.zeros(4, 2)
CLASSES = torch.tensor([0, 1, 1, 0])
W = torch.ones(3)
BAD = {
    "bool keep": (RangeError, "keep", lambda: weight_decay(True, 1.0, 10)),
    "bool num_data": (RangeError, "num_data", lambda: weight_decay(0.5, 1.0, True)),
    "half a point": (RangeError, "num_data must be a whole number", lambda: weight_decay(0.5, 1.0, 455.5)),
    "one bad element": (RangeError, r"0\.5, 1\.5", lambda: weight_decay(torch.tensor([0.5, 1.5]), 1.0, 10)),
    "bool tensor": (RangeError, "torch.bool", lambda: weight_decay(torch.tensor(True), 1.0, 10)),
    "unknown loss": (RangeError, "'l1'", lambda: optimizer_weight_decay(0.9, 1.0, 10, loss="l1")),
    "no outputs": (RangeError, "out_features", lambda: optimizer_weight_decay(0.9, 1.0, 10, out_features=0)),
    "tau of labels": (
        RangeError,
        "tau must be 1",
        lambda: optimizer_weight_decay(0.9, 2.0, 10, loss="cross_entropy"),
    ),
    "tau of labels, tensor": (
        RangeError,
        "tau must be 1",
        lambda: optimizer_weight_decay(0.9, torch.tensor([1.0, 2.0]), 10, loss="cross_entropy"),
    ),
    "no N axis": (ShapeError, "at least one point", lambda: dropout_objective(X[0, 0], X[0, 0], [W], 0.1)),
    "no points": (ShapeError, "at least one point", lambda: dropout_objective(X[:0], Y[:0], [W], 0.1)),
    "missing target": (RangeError, "y must be finite", lambda: dropout_objective(X / 0, Y, [W], 0.1)),
    "numpy targets": (ShapeError, "got ndarray and Tensor", lambda: _check_targets(X.numpy(), Y)),
    "bool targets": (RangeError, "torch.bool", lambda: dropout_objective(X > 0, Y, [W], 0.1)),
    "integer targets": (ShapeError, "floating point", lambda: dropout_objective(Y.long(), Y, [W], 0.1)),
    "logits short": (ShapeError, "class indices", lambda: dropout_objective(CLASSES, Y[:3], [W], 0.1)),
    "class too large": (
        RangeError,
        "classes from 0 to 1",
        lambda: dropout_objective(CLASSES + 1, Y, [W], 0.1),
    ),
    "class negative": (
        RangeError,
        "classes from 0 to 1",
        lambda: dropout_objective(CLASSES - 1, Y, [W], 0.1),
    ),
    "lone weight": (ShapeError, r"\[w\]", lambda: dropout_objective(X, Y, W, 0.1)),
    "not a tensor": (ShapeError, "must be a tensor", lambda: dropout_objective(X, Y, iter([1.0]), 0.1)),
    "too few decays": (ShapeError, "1 for 2 weights", lambda: dropout_objective(X, Y, [W, W], [0.1])),
    "other keys": (ShapeError, "keys", lambda: dropout_objective(X, Y, {"w": W}, {"v": 0.1})),
    "missing key": (ShapeError, "keys", lambda: dropout_objective(X, Y, {"w": W, "b": W}, {"w": 0.1})),
    "names for a list": (ShapeError, "keys", lambda: dropout_objective(X, Y, [W], {"w": 0.1})),
    "decay per weight": (ShapeError, "one number", lambda: dropout_objective(X, Y, [W], [torch.ones(3)])),
    "negative decay": (RangeError, r"weight_decays\['w'\]", lambda: dropout_objective(X, Y, {"w": W}, -1.0)),
    "decay not a number": (
        RangeError,
        r"weight_decays\[0\]",
        lambda: dropout_objective(X, Y, [W], [math.nan]),
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_named(case):
    error, words, call = BAD[case]
    with pytest.raises(error, match=words) as caught:
        call()
    assert type(caught.value) is error
    assert isinstance(caught.value, PyroDropoutError)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.lists(st.integers(1, 4), min_size=1, max_size=3), dtypes)
def test_shapes_that_would_broadcast_are_refused(left, right, dtype):
    assume(left != right)
    with pytest.raises(ShapeError, match="share one shape"):
        dropout_objective(torch.zeros(left, dtype=dtype), torch.zeros(right, dtype=dtype), [], 0.0)


def test_the_error_about_a_missing_axis_says_what_to_write():
    with pytest.raises(ShapeError, match=r"\(4,\) and \(4, 1\).*broadcasts to \(N, N\).*y\.reshape\(y_hat\.shape\)"):
        dropout_objective(torch.zeros(4), torch.zeros(4, 1), [], 0.0)
