"""Trees of arguments: every tensor in them is an input of a compiled step, whatever holds it."""

import collections
import itertools
import os
from contextlib import nullcontext
from typing import Any, NamedTuple

import hypothesis.strategies as st
import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

import pyro_dropout as pd
from pyro_dropout.engines import program as compiled

F64 = torch.float64


class Pair(NamedTuple):
    left: Any
    right: Any


def fill(template: Any, step: int) -> Any:
    """A tree of the template's structure with the values of one step."""
    if template == "tensor":
        return torch.linspace(-1, 1, 6, dtype=F64).reshape(2, 3) * (1 + step)
    if template == "float":
        return 0.1 * (step + 1)
    if isinstance(template, dict):
        return type(template)((key, fill(value, step + k)) for k, (key, value) in enumerate(template.items()))
    if isinstance(template, Pair):
        return Pair(*(fill(part, step + k) for k, part in enumerate(template)))
    if isinstance(template, list | tuple):
        return type(template)(fill(part, step + k) for k, part in enumerate(template))
    return template


def leaves(tree: Any) -> list[Any]:
    if isinstance(tree, dict):
        return [leaf for key in tree for leaf in leaves(tree[key])]
    if isinstance(tree, list | tuple):
        return [leaf for part in tree for leaf in leaves(part)]
    return [tree]


def model(*args: Any, **kwargs: Any) -> None:
    w = pyro.sample("w", dist.Normal(torch.zeros(3, dtype=F64), 1.0).to_event(1))
    total, weight = w.sum(), torch.ones((), dtype=F64)
    for leaf in leaves([list(args), kwargs]):
        if isinstance(leaf, Tensor) and leaf.dim():
            total = total + (leaf @ w).sum() / 7
        elif isinstance(leaf, float | Tensor):
            weight = weight + leaf
        elif isinstance(leaf, int):
            total = total * leaf
    pyro.sample("y", dist.Normal(total, weight), obs=torch.ones((), dtype=F64))


LEAVES = st.sampled_from(["tensor", "tensor", "float", None, "text", 2, True])


def nodes(children: Any) -> Any:
    keys = st.sampled_from(["a", "b", "c", 3])
    return st.one_of(
        st.dictionaries(keys, children, max_size=3),
        st.dictionaries(keys, children, max_size=3).map(collections.OrderedDict),
        st.lists(children, max_size=3),
        st.lists(children, max_size=3).map(tuple),
        st.builds(Pair, children, children),
    )


TREES = st.recursive(LEAVES, nodes, max_leaves=8)


def steps_of(trees: list[Any], compile: bool) -> tuple[list[float], list[Tensor], int]:
    pyro.clear_param_store()
    torch.manual_seed(0)
    guide = pd.AutoMeanField(model)
    guide(*trees[0])
    svi = pd.SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), pd.ELBO(per_example=False), compile=compile)
    losses = []
    for k, tree in enumerate(trees):
        torch.manual_seed(k)
        losses.append(svi.step(*tree))
    return losses, [value.detach().clone() for value in guide.parameters()], svi._built


@pytest.fixture(scope="module")
def as_traced() -> Any:
    """Programs run as the graphs that they were traced into; a C++ compiler takes seconds to build each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "compiled", lambda graph, inputs: graph)
        yield


@pytest.mark.deep
@settings(max_examples=100 if os.environ.get("HYPOTHESIS_PROFILE") == "deep" else 4)
@given(st.lists(TREES, min_size=1, max_size=3))
def test_compiled_steps_on_any_tree_are_the_eager_ones(as_traced: Any, templates: list[Any]) -> None:
    """Twenty steps, each with other values, end at the same numbers in float64."""
    trees = [[fill(template, step) for template in templates] for step in range(20)]
    eager, compiled_ = steps_of(trees, False), steps_of(trees, True)
    assert compiled_[0] == pytest.approx(eager[0], rel=1e-10, abs=1e-10)
    for one, other in zip(eager[1], compiled_[1], strict=True):
        assert torch.allclose(one, other, rtol=1e-10, atol=1e-10)
    assert compiled_[2] == 1  # one program for one structure


def annealed(x: Tensor, y: Tensor, beta: float) -> None:
    with pyro.poutine.scale(scale=beta):
        w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    with pyro.plate("d", len(x)):
        pyro.sample("y", dist.Normal(x @ w, 1.0), obs=y)


def thresholded(x: Tensor, y: Tensor, beta: float) -> None:
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    with pyro.plate("d", len(x)):
        pyro.sample("y", dist.Normal(x @ w, 1.0 if beta > 0.5 else 2.0), obs=y)


def test_a_float_that_the_model_looks_at_keeps_steps_eager() -> None:
    x = torch.randn(5, 3)
    svi = pd.SVI(thresholded, pd.AutoMeanField(thresholded), pyro.optim.Adam({"lr": 0.0}), pd.ELBO(per_example=False))
    found = []
    for beta in (0.2, 0.8, 0.2):
        torch.manual_seed(0)
        said = "it reads the value of a tensor.*if beta >"
        with nullcontext() if found else pytest.warns(UserWarning, match=said):
            found.append(svi.step(x, x.sum(1), beta))
    assert found[2] == found[0] != found[1]


class Opaque:
    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y


def on_objects(batch: Any) -> None:
    x, y = (torch.as_tensor(part) for part in (batch.x, batch.y))
    annealed(x, y, 1.0)


@pytest.mark.parametrize(
    ("batch", "word"),
    [
        (lambda k: Opaque(torch.zeros(2, 3), torch.full((2,), float(k))), "Opaque"),
        (lambda k: Pair(np.ones((2, 3), np.float32), None), "ndarray"),
    ],
)
def test_what_cannot_be_looked_into_runs_eagerly_and_is_named(batch: Any, word: str) -> None:
    program = on_objects if word == "Opaque" else lambda b: annealed(torch.as_tensor(b.left), torch.ones(2), 1.0)
    svi = pd.SVI(program, pd.AutoMeanField(program), pyro.optim.Adam({"lr": 0.0}), pd.ELBO(per_example=False))
    with pytest.warns(UserWarning, match=f"{word}, which cannot be searched") as said:
        losses = [svi.step(batch(k)) for k in range(4)]
    assert len(said) == 1
    if word == "Opaque":
        assert [round(b - a) for a, b in itertools.pairwise(losses)] == [1, 3, 5]
    with pytest.raises(pd.errors.PyroDropoutError, match=word):
        pd.SVI(program, svi.guide, svi.optim, pd.ELBO(per_example=False), compile=True).step(batch(0))
