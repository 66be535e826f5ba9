"""Training and prediction from a torch DataLoader."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyro
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

import pyro_dropout as pd
from pyro_dropout.training.loader import number_of_data

QUIET: dict[str, Any] = {"compile": False, "progress": False}
N = 22


@pytest.fixture
def data() -> tuple[Tensor, Tensor]:
    x = torch.randn(N, 2)
    return x, x[:, :1] - 0.5 * x[:, 1:]


def made(seed: int = 0, guide: Any = pd.AutoDropout) -> tuple[pd.BayesianNet, Any]:
    torch.manual_seed(seed)
    pyro.clear_param_store()
    model = pd.BayesianNet(nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)), likelihood=pd.Gaussian(tau=4.0))
    return model, guide(model)


def weights(guide: Any) -> Tensor:
    return torch.cat([value.reshape(-1) for value in guide.mean().values()])


class Noisy(Dataset[Any]):
    """Augments its inputs with random numbers of torch and numpy."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, k: int) -> tuple[Tensor, Tensor]:
        return self.x[k] + 0.1 * torch.randn(2), self.y[k]


# --- training ---------------------------------------------------------------------------------------------------------


def test_one_batch_of_all_data_trains_as_the_data_do(data: tuple[Tensor, Tensor]) -> None:
    """The order of the rows changes the masks that they get, so the guide has none: a point estimate."""
    found = []
    for given in (data, (DataLoader(TensorDataset(*data), batch_size=N),)):
        model, guide = made(guide=lambda model: pd.AutoDropout(model, keep=1.0))
        history = pd.fit(model, guide, *given, steps=30, lr=0.01, seed=1, **QUIET)
        found.append((weights(guide), history.losses))
    for loaded, wanted in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(loaded, wanted)


def test_every_batch_is_scaled_to_all_data_and_the_last_one_too(data: tuple[Tensor, Tensor]) -> None:
    """With one point estimate and a rate of zero, the loss of each step is known in closed form."""
    model, guide = made(guide=lambda model: pd.AutoDropout(model, keep=1.0))
    x, y = data
    loader = DataLoader(TensorDataset(x, y), batch_size=8)
    history = pd.fit(model, guide, loader, epochs=1, lr=1e-12, loss=pd.ELBO(temperature=1.0), **QUIET)
    assert history.steps == 3
    with torch.no_grad():
        each = -model.likelihood.distribution(model.evaluate(guide.mean(), x)).log_prob(y)
        kl = pd.ELBO().parts(model, guide, x, y, N)["kl"]
    wanted = torch.stack([N * part.mean() + kl for part in each.split(8)])
    torch.testing.assert_close(history.losses, wanted, rtol=1e-4, atol=1e-3)


def test_dicts_need_the_name_of_their_target(data: tuple[Tensor, Tensor]) -> None:
    class Named(Noisy):
        def __getitem__(self, k: int) -> Any:
            return {"input": self.x[k], "label": self.y[k]}

    model = pd.BayesianNet(nn.Linear(2, 1))
    guide = pd.AutoDropout(model)
    loader = DataLoader(Named(*data), batch_size=5)
    assert pd.fit(model, guide, loader, epochs=2, target="label", **QUIET).steps == 10
    assert pd.predict(model, guide, loader, target="label", samples=3).mean.shape == (N, 1)
    with pytest.raises(pd.errors.ShapeError, match=r"a dict with its targets .* got a dict with 'input', 'label'"):
        pd.fit(model, guide, loader, epochs=2, **QUIET)
    with pytest.raises(pd.errors.ShapeError, match="must have the target 'labels'; got a dict with 'input', 'label'"):
        pd.fit(model, guide, loader, epochs=2, target="labels", **QUIET)


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.deep)])
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("stop", [7, 10])
@pytest.mark.thinned(4)
def test_a_resumed_epoch_goes_on_where_it_stopped(
    data: tuple[Tensor, Tensor], tmp_path: Path, workers: int, own: bool, stop: int
) -> None:
    """Shuffled data with augmentation, in five batches an epoch; ten steps end with an epoch."""

    def train(steps: int, folder: Path) -> Tensor:
        model, guide = made()
        generator = torch.Generator().manual_seed(5) if own else None
        loader = DataLoader(Noisy(*data), batch_size=5, shuffle=True, generator=generator, num_workers=workers)
        pd.fit(model, guide, loader, steps=steps, lr=0.05, seed=3, checkpoint=pd.training.Checkpoint(folder), **QUIET)
        return weights(guide)

    whole = train(18, tmp_path / "whole")
    train(stop, tmp_path / "parts")
    torch.testing.assert_close(train(18, tmp_path / "parts"), whole, rtol=0, atol=0)


@pytest.mark.parametrize("stop", [2, 7])
def test_workers_that_stay_draw_the_same_when_a_training_goes_on(
    data: tuple[Tensor, Tensor], tmp_path: Path, stop: int
) -> None:
    def train(steps: int, folder: Path, loader: DataLoader[Any] | None = None) -> Tensor:
        model, guide = made()
        how: Any = {"batch_size": 5, "shuffle": True, "num_workers": 1, "persistent_workers": True}
        loader = DataLoader(Noisy(*data), **how) if loader is None else loader
        pd.fit(model, guide, loader, steps=steps, lr=0.05, seed=3, checkpoint=pd.training.Checkpoint(folder), **QUIET)
        return weights(guide)

    loader: Any = DataLoader(Noisy(*data), batch_size=5, shuffle=True, num_workers=1, persistent_workers=True)
    assert len(list(loader)) == 5
    whole = train(8, tmp_path / "whole", loader)  # which has been read before
    train(stop, tmp_path / "parts")
    torch.testing.assert_close(train(8, tmp_path / "parts"), whole, rtol=0, atol=0)


def test_training_does_not_depend_on_what_loading_draws(data: tuple[Tensor, Tensor]) -> None:
    class Draws(TensorDataset):
        def __getitem__(self, k: Any) -> Any:
            torch.rand(int(k) + 1)
            return super().__getitem__(k)

    found = []
    for kind in (TensorDataset, Draws):
        model, guide = made()
        pd.fit(model, guide, DataLoader(kind(*data), batch_size=5), steps=12, seed=3, **QUIET)
        found.append(weights(guide))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


@pytest.mark.parametrize("compile", [False, "traced"])
def test_a_batch_that_holds_one_tensor_twice_is_like_others(compile: Any) -> None:
    x, found = torch.ones(4, 2), []
    for targets in (x, x.clone()):
        batches: Any = [(x, targets), (x, 5 * x), (2 * x, x)]
        model = pd.BayesianNet(nn.Linear(2, 2))
        guide = pd.AutoDropout(model, keep=1.0, init=lambda name, shape: torch.zeros(shape))
        loader = DataLoader(batches, batch_size=None)
        how: Any = {"steps": 3, "num_data": 12, "lr": 1e-9, "seed": 0, "compile": compile, "progress": False}
        found.append(pd.fit(model, guide, loader, **how).losses)
    torch.testing.assert_close(found[0], found[1])


class Count(IterableDataset[Any]):
    """A stream of pairs, without a length."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for k in range(N):
            yield torch.full((2,), float(k)), torch.full((1,), float(k))


def test_an_iterable_dataset_needs_its_number_of_data() -> None:
    model, guide = made()
    loader = DataLoader(Count(), batch_size=5)
    with pytest.raises(pd.errors.PyroDropoutError, match=r"the number of data is unknown.*fit\(num_data="):
        pd.fit(model, guide, loader, steps=3, **QUIET)
    with pytest.raises(pd.errors.RangeError, match="epochs needs a DataLoader with a length"):
        pd.fit(model, guide, loader, epochs=3, num_data=N, **QUIET)
    assert pd.fit(model, guide, loader, steps=12, num_data=N, **QUIET).steps == 12


class Odd(Sampler[int]):
    """Chooses every other point."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(0, N, 2))

    def __len__(self) -> int:
        return N // 2


def test_the_number_of_data_is_that_which_the_sampler_chooses_from(data: tuple[Tensor, Tensor]) -> None:
    dataset = TensorDataset(*data)
    many = {
        N: [None, RandomSampler(dataset, replacement=True, num_samples=100), WeightedRandomSampler([1.0] * N, 7)],
        6: [SubsetRandomSampler(range(6))],
    }
    for wanted, samplers in many.items():
        for sampler in samplers:
            assert number_of_data(DataLoader(dataset, sampler=sampler), None) == wanted
    odd: Any = DataLoader(dataset, sampler=Odd())
    with pytest.raises(pd.errors.PyroDropoutError, match="Odd may choose among 11 of 22 data"):
        number_of_data(odd, None)
    assert number_of_data(odd, 11) == 11


def test_the_number_of_data_is_unknown_where_the_loader_does_not_make_the_batches(data: tuple[Tensor, Tensor]) -> None:
    dataset = TensorDataset(*data)
    assert number_of_data(DataLoader(dataset, batch_sampler=BatchSampler(RandomSampler(dataset), 5, False)), None) == N
    six = BatchSampler(SubsetRandomSampler(range(6)), 5, False)
    assert number_of_data(DataLoader(dataset, batch_sampler=six), None) == 6
    batches = TensorDataset(*(each.reshape(2, 11, -1) for each in data))
    unknown: dict[str, DataLoader[Any]] = {
        "does not make its batches": DataLoader(batches, batch_size=None),
        "its batch_sampler does": DataLoader(dataset, batch_sampler=[[0, 1, 2], [3, 4]]),
        "Odd may choose among 11 of 22": DataLoader(dataset, batch_sampler=BatchSampler(Odd(), 5, False)),
    }
    for says, loader in unknown.items():
        for call in (pd.fit, pd.laplace):
            with pytest.raises(pd.errors.PyroDropoutError, match=f"unknown: .*{says}.* Give it, as in fit"):
                call(*made(), loader, **({"steps": 2, **QUIET} if call is pd.fit else {}))


def test_several_rows_of_each_of_its_data_leave_their_number_unknown(data: tuple[Tensor, Tensor]) -> None:
    series = TensorDataset(*(each.reshape(11, 2, -1) for each in data))
    loader = DataLoader(series, 4, collate_fn=lambda found: tuple(map(torch.cat, zip(*found, strict=True))))
    with pytest.raises(pd.errors.PyroDropoutError, match="takes 4 of its data for a batch, and one has 8 rows"):
        pd.fit(*made(), loader, steps=2, **QUIET)
    assert pd.fit(*made(), loader, steps=2, num_data=N, **QUIET).steps == 2


BAD: dict[str, Any] = {
    "no data": (lambda x, y: DataLoader(TensorDataset(x[:0], y[:0])), {}, "its length is 0"),
    "three parts": (lambda x, y: DataLoader(TensorDataset(x, x, y)), {}, "got a list of 3"),
    "a batch size": (lambda x, y: DataLoader(TensorDataset(x, y)), {"batch_size": 3}, "batch_size is that of the"),
    "wrong targets": (lambda x, y: DataLoader(TensorDataset(x, y[:, 0])), {}, "Write y.unsqueeze"),
}  # fmt: skip


@pytest.mark.parametrize("case", list(BAD))
def test_what_cannot_be_right_is_refused(data: tuple[Tensor, Tensor], case: str) -> None:
    make, options, says = BAD[case]
    model, guide = made()
    with pytest.raises(pd.errors.PyroDropoutError, match=says):
        pd.fit(model, guide, make(*data), steps=2, **options, **QUIET)


def test_a_class_that_does_not_exist_is_noticed_in_a_later_batch() -> None:
    model = pd.BayesianNet(nn.Linear(2, 3), likelihood=pd.Categorical())
    y = torch.tensor([0, 1, 2, 0, 1, 3])
    loader = DataLoader(TensorDataset(torch.randn(6, 2), y), batch_size=2)
    with pytest.raises(pd.errors.RangeError, match="class indices from 0 to 2; got 1 to 3"):
        pd.fit(model, pd.AutoDropout(model), loader, epochs=1, **QUIET)


def test_a_pyro_model_takes_a_loader(data: tuple[Tensor, Tensor]) -> None:
    def model(x: Tensor, y: Tensor | None = None, num_data: int = 1) -> None:
        slope = pyro.sample("slope", pyro.distributions.Normal(0.0, 1.0))
        with pyro.plate("data", len(x)), pyro.poutine.scale(scale=num_data / len(x)):
            pyro.sample("y", pyro.distributions.Normal(slope * x[:, 0], 0.1), obs=None if y is None else y[:, 0])

    pyro.clear_param_store()
    guide = pyro.infer.autoguide.AutoDelta(model)
    x = data[0]
    loader = DataLoader(TensorDataset(x, 0.7 * x), batch_size=5, shuffle=True)
    pd.fit(model, guide, loader, epochs=16, lr=0.1, seed=0, **QUIET)
    assert abs(float(guide.median()["slope"]) - 0.7) < 0.02


# --- prediction -------------------------------------------------------------------------------------------------------


def test_loaders_that_cannot_be_predicted_are_refused(data: tuple[Tensor, Tensor]) -> None:
    model, guide = made()
    guide(*data)
    with pytest.raises(pd.errors.PyroDropoutError, match="if one of them is the target, name it"):
        pd.predict(model, guide, DataLoader(TensorDataset(*data)))
    with pytest.raises(pd.errors.PyroDropoutError, match="only fit, predict and laplace take"):
        pd.to_arviz(model, guide, DataLoader(TensorDataset(*data)), data[1])


LEAVE_OUT: dict[str, Any] = {
    "shuffled": lambda d: DataLoader(d, shuffle=True),
    "drop_last": lambda d: DataLoader(d, batch_size=5, drop_last=True),
    "a batch sampler": lambda d: DataLoader(d, batch_sampler=BatchSampler(SequentialSampler(d), 5, drop_last=True)),
    "an iterable dataset": lambda d: DataLoader(Count(), batch_size=5, drop_last=True),
    "shuffled by its batch sampler": lambda d: DataLoader(d, batch_sampler=BatchSampler(RandomSampler(d), 5, False)),
    "one rank's share": lambda d: DataLoader(d, sampler=DistributedSampler(d, 2, 0, shuffle=False)),
}


@pytest.mark.parametrize("case", LEAVE_OUT)
def test_points_without_a_prediction_are_told(data: tuple[Tensor, Tensor], case: str) -> None:
    model, guide = made()
    with pytest.raises(pd.errors.PyroDropoutError, match=r"leaves out|must give all its data in order"):
        pd.predict(model, guide, LEAVE_OUT[case](data[0]), samples=3)


@pytest.mark.deep
def test_a_loader_is_watched_as_its_data_are(data: tuple[Tensor, Tensor]) -> None:
    x, y = data
    loaders = (
        (DataLoader(TensorDataset(x, y), batch_size=4), None),
        (DataLoader([{"input": a, "labels": b} for a, b in zip(x, y, strict=True)], batch_size=4), "labels"),
    )
    histories = []
    for validation, target in (((x, y), None), *loaders):
        history = pd.fit(*made(), x, y, steps=20, validation=validation, target=target, check_every=5, seed=0, **QUIET)
        histories.append(history.validation)
    assert len(histories[0]) >= 2
    assert histories[0] == histories[1] == histories[2]


def test_a_batch_of_one_row_is_told_where_statistics_need_more(data: tuple[Tensor, Tensor]) -> None:
    net = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    model = pd.BayesianNet(net)
    loader = DataLoader(TensorDataset(*data), batch_size=7)
    with pytest.raises(pd.errors.ShapeError, match=r"more than 1 value per channel.*drop_last"):
        pd.fit(model, pd.AutoMeanField(model), loader, epochs=1, **QUIET)
    still = pd.BayesianNet(net, frozen_statistics="all")
    pd.fit(still, pd.AutoMeanField(still), loader, epochs=1, **QUIET)
    dropped = DataLoader(TensorDataset(*data), batch_size=7, drop_last=True)
    pd.fit(model, pd.AutoMeanField(model), dropped, epochs=1, **QUIET)
