"""Each check accepts what it should, and its message names the argument, what is allowed and what was given."""

import numpy as np
import pytest
import torch

from pyro_dropout.mathematics import checks
from pyro_dropout.mathematics.errors import RangeError

ACCEPTED = [
    (checks.check_count, (1,)),
    (checks.check_count, (np.int64(3),)),
    (checks.check_count, (0, 0)),
    (checks.check_level, (0.5,)),
    (checks.check_level, (np.float32(0.9),)),
    (checks.check_rate, (0,)),
    (checks.check_rate, (torch.tensor([0.0, 1.0]),)),
    (checks.check_choice, ("a", ("a", "b"))),
    (checks.check_choice, (True, ("auto", True, False))),
]
REFUSED = [
    (checks.check_count, (0,), "n must be a whole number of at least 1; got 0."),
    (checks.check_count, (True,), "n must be a whole number of at least 1; got True."),
    (checks.check_count, (2.0,), "n must be a whole number of at least 1; got 2.0."),
    (checks.check_count, (1, 2), "n must be a whole number of at least 2; got 1."),
    (checks.check_level, (1.0,), "n must lie strictly between 0 and 1; got 1.0."),
    (checks.check_level, (float("nan"),), "n must lie strictly between 0 and 1; got nan."),
    (checks.check_level, ("0.5",), "n must lie strictly between 0 and 1; got '0.5'."),
    (checks.check_rate, (1.5,), "n must lie in [0, 1]; got 1.5."),
    (checks.check_rate, (torch.tensor([0.5, -0.5]),), "n must lie in [0, 1]; got [0.5, -0.5]."),
    (checks.check_choice, ("c", ("a", "b")), "n must be 'a' or 'b'; got 'c'."),
    (checks.check_choice, (1, ("auto", True, False)), "n must be 'auto', True or False; got 1."),
    (checks.check_choice, (["a"], ("a",)), "n must be 'a'; got ['a']."),
]


@pytest.mark.parametrize(("check", "given"), ACCEPTED)
def test_a_good_value_passes(check, given):
    check("n", *given)


@pytest.mark.parametrize(("check", "given", "message"), REFUSED)
def test_a_bad_value_is_refused_in_words(check, given, message):
    with pytest.raises(RangeError) as refusal:
        check("n", *given)
    assert str(refusal.value) == message
