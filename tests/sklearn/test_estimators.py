"""The scikit-learn estimators: scikit-learn's own checks, calibrated answers, and manners towards the process."""

import copy
import pickle
import random
from typing import Any

import joblib
import numpy as np
import pandas
import pyro
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_digits
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, train_test_split
from sklearn.preprocessing import OneHotEncoder
from sklearn.utils.estimator_checks import check_estimator

import pyro_dropout as pd
from pyro_dropout.registry import guide_names, resolve_guide
from pyro_dropout.sklearn.estimators import DropoutClassifier, DropoutRegressor

QUICK: Any = {"hidden_layer_sizes": (8,), "max_steps": 5, "samples": 20, "random_state": 0, "learning_rate": 0.1}
QUICK |= {"guide": "dropout"}
AUTO: Any = {"hidden_layer_sizes": (5,), "members": 2, "max_steps": 40, "samples": 20, "random_state": 0}
FAMILIES = {name: resolve_guide(name).guide for name in guide_names()}


def plane(count: int = 60, noise: float = 0.5, seed: int = 0) -> tuple[Any, Any]:
    """Rows of two features, and y = 2a - b with Gaussian noise."""
    draw = np.random.default_rng(seed)
    X = draw.normal(size=(count, 2))
    return X, 2 * X[:, 0] - X[:, 1] + noise * draw.normal(size=count)


def sides(count: int = 60) -> tuple[Any, Any]:
    X, _ = plane(count)
    return X, np.where(X[:, 0] > X[:, 1], "right", "left")


@pytest.fixture(scope="module")
def fitted() -> Any:
    """A linear model with Gaussian weights, whose posterior is narrow: most of the predicted spread is noise."""
    X, y = plane(500)
    return DropoutRegressor((), guide="mean-field", max_steps=60, learning_rate=0.05, refit=False, random_state=0).fit(
        X, 30 * y
    )


# --- scikit-learn's own checks ----------------------------------------------------------------------------------------


SMALL: Any = {"hidden_layer_sizes": (), "max_steps": 5, "learning_rate": 0.2, "samples": 10, "guide": "dropout"}


@pytest.mark.deep
@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(
    "estimator",
    [
        DropoutRegressor(**SMALL, tau=1.0),
        DropoutClassifier(**SMALL),
        pytest.param(DropoutRegressor(4, max_steps=5, samples=10), marks=pytest.mark.deep),
        pytest.param(DropoutClassifier(4, max_steps=5, samples=10), marks=pytest.mark.deep),
    ],
)
@pytest.mark.thinned(2)
@pytest.mark.filterwarnings("ignore:the posterior ignores its inputs")  # of noise, in a few steps
def test_scikit_learn_checks_pass(estimator: Any) -> None:
    results = check_estimator(estimator, on_skip=None, on_fail=None)
    assert len(results) > 45
    # The estimators convert to tensors of their own, and claim no support of foreign arrays. Five steps that choose
    # learn too little for one check; the next test takes more.
    known = {"check_array_api_input"} | ({"check_regressors_train"} if estimator.guide == "auto" else set())
    assert {result["check_name"] for result in results if result["status"] != "passed"} <= known


# --- answers ----------------------------------------------------------------------------------------------------------


def test_digits_are_told_apart() -> None:
    X, y = load_digits(return_X_y=True)
    X, X_test, y, y_test = train_test_split(X, y, train_size=500, test_size=500, random_state=0)
    classifier = DropoutClassifier(guide="dropout", max_steps=80, learning_rate=0.05, random_state=0).fit(X, y)
    assert classifier.score(X_test, y_test) > 0.88
    probs = classifier.predict_proba(X_test)
    assert -np.log(probs[np.arange(500), y_test]).mean() < 0.5  # ten equal classes have 2.3
    doubt = 1 - probs.max(1)
    wrong = classifier.classes_[probs.argmax(1)] != y_test
    assert doubt[wrong].mean() > 2 * doubt[~wrong].mean()


def test_a_point_is_answered_alike_alone_and_among_many(fitted: Any) -> None:
    X, _ = plane(1100, seed=3)
    mean, std = fitted.predict(X, return_std=True)
    for rows in (slice(700, 701), slice(300, 900)):
        alone = fitted.predict(X[rows], return_std=True)
        assert alone[0] == pytest.approx(mean[rows], rel=1e-9)
        assert alone[1] == pytest.approx(std[rows], rel=1e-9)


# --- by default, what ``fit`` does ------------------------------------------------------------------------------------


def prices() -> tuple[Any, Any]:
    draw = np.random.default_rng(0)
    X = draw.normal(size=(60, 2))
    return X, np.exp(12 + X[:, 0] + 0.1 * draw.normal(size=60))


@pytest.fixture(scope="module")
def chosen() -> Any:
    return DropoutRegressor(**AUTO).fit(*prices())


@pytest.mark.deep
def test_a_price_is_never_negative(chosen: Any) -> None:
    X, y = prices()
    assert "log target" in chosen.choice_
    assert "chosen on 20 % held back" in chosen.choice_
    lower, upper = chosen.predict_interval(10 * X, 0.99)
    assert (lower > 0).all()
    assert (upper > lower).all()
    assert np.corrcoef(np.log(chosen.predict(X)), np.log(y))[0, 1] > 0.9
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(chosen)).predict(X), chosen.predict(X))
    assert chosen.tau_ is None  # it is that of log y, and not in units of y


@pytest.mark.deep
def test_intervals_are_calibrated_on_the_held_back_rows(chosen: Any) -> None:
    X, _ = prices()
    own = chosen.calibration_
    assert own.rows == 12
    model, guide = chosen.model_and_guide()
    answer = pd.predict(model, guide, torch.tensor(X), samples=20, seed=chosen.seed_, shared=True, together=20)
    lower, upper = own.interval(answer, 0.9)
    found = chosen.predict_interval(X, 0.9)
    assert np.allclose(np.stack(found, 1), torch.cat([lower, upper], 1))
    assert np.allclose(np.stack(found, 1), chosen.predict_quantiles(X, [0.05, 0.95]))
    assert not np.allclose(found[0], answer.interval(0.9)[0][:, 0])
    with pytest.warns(DeprecationWarning, match="predict_interval"):
        assert np.array_equal(chosen.interval(X, 0.9)[0], found[0])


TARGETS: Any = {
    "heavy tails": lambda f, noise: f + noise / abs(noise[::-1]) ** 0.5,
    "far from zero": lambda f, noise: 1e6 + f + noise,
    "positive": lambda f, noise: np.exp(f + noise),
    "positive and far from zero": lambda f, noise: 1e6 + np.exp(f + noise),
}


@pytest.mark.deep
@pytest.mark.parametrize("made", TARGETS.values(), ids=TARGETS)
def test_intervals_hold_their_level_on_fresh_rows(made: Any) -> None:
    # Given 80 held-back rows, the share of fresh rows inside is Beta(73, 8): outside of these limits in 0.1 % of cases.
    draw = np.random.default_rng(0)
    X, noise = draw.normal(size=(2400, 2)), 0.5 * draw.normal(size=2400)
    y = made(X[:, 0], noise)
    regressor = DropoutRegressor(**AUTO).fit(X[:400], y[:400])
    lower, upper = regressor.predict_interval(X[400:], 0.9)
    assert 0.77 < ((y[400:] >= lower) & (y[400:] <= upper)).mean() < 0.985
    assert np.median(upper - lower) < 1.5 * (np.quantile(y, 0.95) - np.quantile(y, 0.05))


def test_a_sparse_matrix_is_its_dense_one() -> None:
    X = OneHotEncoder().fit_transform(np.arange(40)[:, None] % 3)
    y = np.arange(40) % 3 == 1
    one, other = (DropoutClassifier(**{**QUICK, "max_steps": 40}).fit(each, y) for each in (X, X.toarray()))
    assert np.array_equal(one.predict_proba(X), other.predict_proba(X.toarray()))
    assert one.score(X, y) == 1


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"keep": 0.5}, "guide='auto' decides keep itself; got keep=0.5"),
        ({"hidden_layer_sizes": (5, 5)}, "one hidden layer; got hidden_layer_sizes=\\(5, 5\\)"),
    ],
)
def test_what_is_decided_cannot_be_set(setting: dict[str, Any], words: str) -> None:
    with pytest.raises(pd.errors.RangeError, match=words):
        DropoutRegressor(**{**AUTO, **setting}).fit(*prices())


# --- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:the point of this Laplace")
@pytest.mark.parametrize("guide", FAMILIES)
@pytest.mark.thinned(2)
def test_every_guide_fits(guide: str) -> None:
    X, y = plane()
    regressor = DropoutRegressor(**{**QUICK, "guide": guide}, keep=0.8, tau=4.0).fit(X, y)
    mean, std = regressor.predict(X, return_std=True)
    assert np.isfinite(mean).all()
    assert (std > 0.5).all()
    model, posterior = regressor.model_and_guide()
    assert type(posterior) is FAMILIES[guide]
    answer = pd.predict(model, posterior, torch.tensor(X), samples=2000, shared=True, seed=0)
    assert answer.mean[:, 0].numpy() == pytest.approx(mean, abs=6 * answer.std.max().item() / np.sqrt(20))


# --- manners ----------------------------------------------------------------------------------------------------------


def test_fitted_estimators_travel() -> None:
    X, y = sides()
    classifier = DropoutClassifier(**{**QUICK, "guide": "low-rank"}).fit(X, y)
    for copied in (pickle.loads(pickle.dumps(classifier)), copy.deepcopy(classifier)):
        assert np.array_equal(copied.predict_proba(X), classifier.predict_proba(X))
    for answer in ("predict", "predict_proba"):
        with pytest.raises(NotFittedError):
            getattr(clone(classifier), answer)(X)


@pytest.mark.parametrize("backend", ["threading", pytest.param("loky", marks=pytest.mark.deep)])
def test_a_grid_search_over_guides_gives_the_same_beside_others(backend: str) -> None:
    X, y = sides()
    search = GridSearchCV(
        DropoutClassifier(**QUICK), {"guide": ["dropout", "mean-field"]}, cv=2, scoring="neg_log_loss", refit=False
    )
    expected = clone(search).fit(X, y).cv_results_["mean_test_score"]
    assert len(set(expected)) == 2
    with joblib.parallel_config(backend=backend, n_jobs=2):
        found = clone(search).fit(X, y).cv_results_["mean_test_score"]
    assert found == pytest.approx(expected, rel=1e-5)


# --- large numbers ----------------------------------------------------------------------------------------------------

LARGE = 2**62 + np.arange(40)


@pytest.mark.parametrize(
    "given", [LARGE[:, None], pandas.DataFrame({"a": np.linspace(0, 1, 40), "id": LARGE})], ids=str
)
def test_whole_numbers_that_float64_merges_are_refused(given: Any) -> None:
    y, message = np.arange(40.0), r"X holds whole numbers beyond 2\*\*53, such as \d+, .*subtract a constant"
    with pytest.raises(pd.errors.RangeError, match=message):
        DropoutRegressor(**AUTO).fit(given, y)
    with pytest.raises(pd.errors.RangeError, match=message):
        DropoutClassifier(**AUTO).fit(given, y > 20)
    with pytest.raises(pd.errors.RangeError, match=r"y holds whole numbers beyond 2\*\*53"):
        DropoutRegressor(**AUTO).fit(y[:, None], LARGE)


def test_dates_are_refused() -> None:
    days, y = pandas.DataFrame({"day": pandas.date_range("2020", periods=40)}), np.arange(40.0)
    with pytest.raises(pd.errors.RangeError, match=r"X holds dates or spans of time \(datetime64.*days since a date"):
        DropoutRegressor(**AUTO).fit(days, y)
    with pytest.raises(pd.errors.RangeError, match="y holds dates"):
        DropoutRegressor(**AUTO).fit(y[:, None], days["day"])


@pytest.mark.deep
@pytest.mark.usefixtures("unchecked_shapes")  # the checks throw dice of their own
def test_nothing_leaks_into_the_process() -> None:
    X, y = plane()
    pyro.param("mine", torch.ones(2))
    states = torch.get_rng_state(), np.random.mtrand._rand.get_state()[1], random.getstate()
    regressor = DropoutRegressor(**QUICK).fit(X, y)
    regressor.predict(X)
    with pytest.raises(pd.errors.RangeError, match="level"):
        regressor.predict_interval(X, level=2)
    assert list(pyro.get_param_store()) == ["mine"]
    assert torch.equal(torch.get_rng_state(), states[0])
    assert np.array_equal(np.random.mtrand._rand.get_state()[1], states[1])
    assert random.getstate() == states[2]


def test_several_targets_have_a_noise_each() -> None:
    X, y = plane(400)
    both = np.stack([y, 1000 * (X[:, 1] + 0.1 * np.random.default_rng(1).normal(size=400))], 1)
    regressor = DropoutRegressor(
        (), guide="mean-field", max_steps=50, learning_rate=0.1, refit=False, random_state=0
    ).fit(X, both)
    mean, std = regressor.predict(X, return_std=True)
    assert mean.shape == std.shape == (400, 2)
    # 160 held-back numbers for one factor, and 320 trained ones for each ratio: 4 standard errors of 0.14
    assert abs(np.log(regressor.tau_ * np.array([0.5, 100.0]) ** 2)).max() < 0.56


@pytest.mark.parametrize("kind", [DropoutRegressor, pytest.param(DropoutClassifier, marks=pytest.mark.deep)])
def test_rows_unlike_the_training_rows_are_named(kind: type[Any]) -> None:
    """As ``fit_table`` does, whatever the units, and after a pickle; rows like those of training seldom."""
    dice = np.random.default_rng(0)
    rows = np.array([1.0, 1e-3]) * dice.normal(size=(700, 2)) + np.array([1e6, 0.0])
    fitted = kind((5,), guide="dropout", max_steps=3, random_state=0).fit(rows[:600], rows[:600, 0] > 1e6)
    fitted = pickle.loads(pickle.dumps(fitted))
    assert fitted.unfamiliar(rows[600:]).mean() < 0.1
    assert fitted.unfamiliar(rows[:3] + np.array([0.0, 0.02])).tolist() == [True] * 3
    frame = pandas.DataFrame(rows, columns=["a", "b"])
    table = pd.fit_table(frame[:600].assign(y=rows[:600, 0]), "y", guide="dropout", steps=3, progress=False)
    said = table.predict(frame[600:])["unfamiliar"].to_numpy()
    assert (said == fitted.unfamiliar(rows[600:])).mean() > 0.95
    with pytest.raises(ValueError, match="features"):
        fitted.unfamiliar(rows[:, :1])
