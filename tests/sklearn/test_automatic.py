"""``guide="auto"``: the choice of the command line, behind an estimator."""

import pickle
from typing import Any

import numpy as np
import pytest
from sklearn.base import clone

import pyro_dropout as pd
from pyro_dropout.sklearn.estimators import DropoutClassifier, DropoutRegressor

SMALL: Any = {"hidden_layer_sizes": (5,), "members": 2, "max_steps": 40, "samples": 20}
AUTO: Any = {"guide": "auto", "random_state": 0, **SMALL}


def prices() -> tuple[Any, Any]:
    draw = np.random.default_rng(0)
    X = draw.normal(size=(60, 2))
    return X, np.exp(12 + X[:, 0] + 0.1 * draw.normal(size=60))


@pytest.fixture(scope="module")
def fitted() -> Any:
    return DropoutRegressor(**AUTO).fit(*prices())


def test_a_price_is_never_negative(fitted: Any) -> None:
    X, y = prices()
    assert "log target" in fitted.choice_
    assert "chosen on 20 % held back" in fitted.choice_
    lower, upper = fitted.interval(10 * X, 0.99)
    assert (lower > 0).all()
    assert (upper > lower).all()
    assert np.corrcoef(np.log(fitted.predict(X)), np.log(y))[0, 1] > 0.9
    assert (fitted.sample_y(X, 3) > 0).all()


@pytest.mark.deep
def test_a_choice_repeats(fitted: Any) -> None:
    X, y = prices()
    again = clone(fitted).fit(X, y)
    np.testing.assert_array_equal(again.predict(X), fitted.predict(X))
    assert again.choice_ == fitted.choice_


def test_a_chosen_estimator_travels(fitted: Any) -> None:
    X, _ = prices()
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(fitted)).predict(X), fitted.predict(X))
    model, _ = fitted.model_and_guide()
    assert isinstance(model.likelihood, pd.Transformed)
    assert fitted.tau_ is None  # it is that of log y, and not in units of y


@pytest.mark.deep
def test_classes_are_chosen_for_too() -> None:
    X, _ = prices()
    y = np.where(X[:, 0] > 0, "right", "left")
    found = DropoutClassifier(**AUTO).fit(X, y)
    assert found.score(X, y) > 0.8
    assert "target" not in found.choice_


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"keep": 0.5}, "guide='auto' decides keep itself; got keep=0.5"),
        ({"tau": 3.0}, "guide='auto' decides tau itself; got tau=3.0"),
        ({"learning_rate": 0.5}, "decides learning_rate itself"),
        ({"early_stopping": True}, "decides early_stopping itself"),
        ({"hidden_layer_sizes": (5, 5)}, "one hidden layer; got hidden_layer_sizes=\\(5, 5\\)"),
    ],
)
def test_what_is_decided_cannot_be_set(setting: dict[str, Any], words: str) -> None:
    with pytest.raises(pd.RangeError, match=words):
        DropoutRegressor(**{**AUTO, **setting}).fit(*prices())
