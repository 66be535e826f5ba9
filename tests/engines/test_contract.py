"""The contract of all engines: they take the eager steps, with the same noise, and go on after a kill."""

import re
from collections.abc import Callable
from itertools import combinations, product
from pathlib import Path
from typing import Any
from unittest import mock

import pyro
import pytest
import torch
from torch import Tensor, nn

import pyro_dropout as pd
from pyro_dropout.engines import choose, in_cuda, program
from pyro_dropout.engines.cuda.steps import StepsOnGpu
from pyro_dropout.engines.engine import CannotError, Eager, Engine
from pyro_dropout.engines.in_c import InC
from pyro_dropout.engines.in_cuda import InCuda
from pyro_dropout.engines.replayed import Inductor, Replayed
from pyro_dropout.registry import guides
from tests.contracts.guides import GUIDES as OF_SITES
from tests.contracts.likelihoods import LIKELIHOODS as TABLE
from tests.contracts.likelihoods import N
from tests.oracles.host_kernel import HostSteps, InterpretedSteps, SharedHostSteps, SharedSteps

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STEPS = 50 if DEVICE == "cuda" else 8  # on a GPU: some chains, and single steps after them
CLOSE = {torch.float32: 1e-5, torch.float64: 1e-10}

ENGINES: dict[str, Engine] = {"recorded": Replayed(), "C": InC(), "inductor": Inductor()}
GUIDES: dict[str, Callable[[Any], Any]] = {
    **OF_SITES,
    **{
        name: lambda model, make=entry.make: make(model, lambda site: 0.8, members=3)
        for name, entry in guides().items()
        if "members" in entry.options
    },
}
LIKELIHOODS = list(TABLE)
OPTIMISERS: dict[str, Any] = {"adam": "adam", "adamw": "adamw", "sgd": "sgd", "torch's own": torch.optim.RMSprop}
OPTIONS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "schedule": {"schedule": pd.training.inverse_decay(gamma=0.1)},
    "clipping": {"clip_norm": 0.5},
    "temperature": {"loss": pd.ELBO(temperature=lambda done: 0.2 + done / 20)},
    "mini-batches": {"batch_size": 3},
    "learned noise": {},
    "learned priors": {},
}

# What an engine cannot take: settings, and its own words for them.
REFUSED: list[tuple[str, set[str], str]] = [
    ("C", {"torch's own"}, "runs beside the step"),
]

# What has no form in CUDA C: optimisers beside the step, linear algebra and what prepares it.
NOT_IN_CUDA = r"between two steps|linalg|cholesky|triangular|diagonal|copy_|contiguous|digamma|polygamma"

# Guides and likelihoods in all pairs; the rest runs along, so that every two settings meet somewhere.
Case = tuple[str, str, str, str, torch.dtype]
CASES: list[Case] = [
    (
        guide,
        likelihood,
        list(OPTIMISERS)[(i + j) % len(OPTIMISERS)],
        list(OPTIONS)[(i + 2 * j) % len(OPTIONS)],
        list(CLOSE)[(i // 2 + j) % 2],
    )
    for (i, guide), (j, likelihood) in product(enumerate(GUIDES), enumerate(LIKELIHOODS))
]


def test_every_two_settings_meet() -> None:
    choices: list[Any] = [GUIDES, LIKELIHOODS, OPTIMISERS, OPTIONS, CLOSE]
    for (i, left), (j, right) in combinations(enumerate(choices), 2):
        assert {(case[i], case[j]) for case in CASES} == set(product(left, right)), (i, j)


def trained(case: Case, engine: Engine, steps: int = STEPS, folder: Path | None = None) -> dict[str, Tensor]:
    """Train with one engine and no other, and return the losses and all that was learned."""
    guide_name, likelihood_name, optimiser, option, dtype = case
    make, outputs, targets = TABLE[likelihood_name]
    pyro.clear_param_store()
    torch.manual_seed(0)
    x, y = torch.randn(N, 2, dtype=dtype), targets()
    likelihood = make()
    if option == "learned noise" and likelihood_name in ("gaussian", "counts"):
        likelihood = {"gaussian": pd.Gaussian, "counts": pd.Counts}[likelihood_name](0.5, learn=True)
    wide = guide_name in OF_SITES and OF_SITES[guide_name].density  # only those of widths can be learned
    prior = pd.Prior(learn="*.weight" if wide and option == "learned priors" else False, tempered=False)
    net = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, outputs))
    model = pd.BayesianNet(net, prior, likelihood).to(dtype)
    guide = GUIDES[guide_name](model)
    guide.to(dtype)
    how: dict[str, Any] = {"steps": steps, "seed": 1, "optim": OPTIMISERS[optimiser], **OPTIONS[option]}
    if not isinstance(how["optim"], str):
        guide(x, y.to(dtype) if y.is_floating_point() else y)
        pyro.clear_param_store()
        how["optim"] = how["optim"]({id(p): p for p in (*guide.parameters(), *model.parameters())}.values(), lr=1e-3)
    if folder is not None:
        how["checkpoint"] = pd.training.Checkpoint(folder, every=steps, seconds=1e9)
    y = y.to(dtype) if y.is_floating_point() else y
    only = mock.patch.object(choose, "engines_for", return_value=[engine])
    shared = mock.patch.object(program, "settings", return_value={"fallback_random": True})
    with only, shared:
        history = pd.fit(model, guide, x, y, compile="traced", progress=False, device=DEVICE, **how)
    assert history.engine.startswith(engine.name)
    found = {
        f"{part} {name}": v for part, m in (("guide", guide), ("model", model)) for name, v in m.state_dict().items()
    }
    return {"losses": history.losses, **found}


BY_KERNEL = (StepsOnGpu, SharedSteps) if DEVICE == "cuda" else (HostSteps, SharedHostSteps)


@pytest.mark.thinned(400)
@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(map(str, case)))
@pytest.mark.parametrize("by_kernel", BY_KERNEL, ids=lambda each: each.__name__)
def test_a_kernel_in_cuda_takes_the_recorded_steps_and_goes_on_after_a_kill(
    by_kernel: type[StepsOnGpu], case: Case, tmp_path: Path
) -> None:
    with mock.patch.object(in_cuda, "StepsOnGpu", by_kernel):
        try:
            found = trained(case, InCuda())
        except CannotError as reason:
            if not re.search(NOT_IN_CUDA, str(reason)):
                raise
            return
        trained(case, InCuda(), STEPS // 2, tmp_path)
        resumed = trained(case, InCuda(), STEPS, tmp_path)
    torch.testing.assert_close(resumed, found, rtol=0, atol=0)
    with mock.patch.object(in_cuda, "StepsOnGpu", InterpretedSteps):
        expected = trained(case, InCuda())
    torch.testing.assert_close(found, expected, rtol=CLOSE[case[-1]], atol=CLOSE[case[-1]])


# On a CPU torch's compiler takes half a minute for each case: it is asked for every seventh.
PAIRS = [(engine, case) for engine in ("recorded", *(["C"] if DEVICE == "cpu" else [])) for case in CASES]
COMPILED = [pytest.param("inductor", case, marks=pytest.mark.deep) for case in CASES[:: 1 if DEVICE == "cuda" else 7]]


@pytest.mark.thinned(96)
@pytest.mark.parametrize(("engine", "case"), [*PAIRS, *COMPILED], ids=lambda each: str(each).replace("torch.", ""))
def test_an_engine_takes_the_eager_steps_and_goes_on_after_a_kill(engine: str, case: Case, tmp_path: Path) -> None:
    refused = next((words for of, settings, words in REFUSED if of == engine and settings <= {*case}), None)
    if refused is not None:
        with pytest.raises(CannotError, match=refused):
            trained(case, ENGINES[engine])
        return
    eager, found = trained(case, Eager()), trained(case, ENGINES[engine])
    close = CLOSE[case[-1]]
    torch.testing.assert_close(found, eager, rtol=close, atol=close)
    trained(case, ENGINES[engine], STEPS // 2, tmp_path)
    resumed = trained(case, ENGINES[engine], STEPS, tmp_path)
    torch.testing.assert_close(resumed, found, rtol=0, atol=0)
