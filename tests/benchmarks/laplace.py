"""What Laplace approximations cost, and what the evidence finds."""

import itertools
import time
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn

import pyro_dropout as pd
from tests.benchmarks.figures import Asked, Figure, benchmark
from tests.benchmarks.settings import GUIDES, WIDE
from tests.benchmarks.timing import seconds

NOISE, HIDDEN = 0.3, 50
WAYS = {"1,000 steps": (1000, 0.0), "300 steps": (300, 0.0), "1,000 steps, weight decay 0.001": (1000, 1e-3)}  # of Adam
EVIDENCE = ((450, 13, "Tanh", "full"), (450, 13, "Tanh", "kron"), (450, 13, "ReLU", "full"), (8000, 8, "Tanh", "full"))


@benchmark("linearised", "cpu", "cuda")
def linearised(asked: Asked) -> Iterator[Figure]:
    """Linearised predictions with the last layer's Laplace approximation, class probabilities included."""
    model, images = WIDE.model(asked.device), 10_000 if asked.device == "cuda" else 1000
    x, y = WIDE.data(asked.device, images)
    guide = pd.laplace(model, model, x[:2000], y[:2000], structure="last")  # untrained, which costs nothing here

    def forward() -> object:
        with torch.no_grad():
            return model.net(x)

    def predict(method: Any, **how: Any) -> float:
        return seconds(lambda: pd.predict(model, guide, x, method=method, **how).probs, asked.device, asked.rounds)

    base = seconds(forward, asked.device, asked.rounds)
    yield Figure(f"{WIDE.name}, {images} images: a forward pass", 1e3 * base, "ms")
    yield Figure("predict with mean weights", predict("standard") / base, "forward passes")
    taken = predict("linearised", samples=asked.pick(1000, 10), seed=0)
    yield Figure("predict, linearised", taken / base, "forward passes", most=3.0)


@benchmark("laplace", "cuda")
def laplace(asked: Asked) -> Iterator[Figure]:
    """The structure "kron" for 60,000 images, beside two epochs of training."""
    images = asked.pick(60_000, 1000)
    model, (x, y) = WIDE.model(asked.device), WIDE.data(asked.device, images)
    guide = GUIDES["dropout"](model).to(asked.device)
    how: dict[str, Any] = {"batch_size": 128, "progress": False, "seed": 0}
    pd.fit(model, guide, x, y, steps=40, **how)  # compiled now
    history = pd.fit(model, guide, x, y, epochs=2, **how)
    yield Figure(f"two epochs of AutoDropout, {images} images", history.seconds, "s")
    taken = seconds(lambda: pd.laplace(model, guide, x, y, "kron").posterior("0.weight").mean, asked.device, 3)
    yield Figure(f"laplace, {taken:.3f} s, over two epochs", taken / history.seconds, most=1.0)


@benchmark("evidence")
def evidence(asked: Asked) -> Iterator[Figure]:
    """``maximise_evidence`` on data made by a network with 10 hidden units; the model has 50."""
    for points, inputs, activation, structure in EVIDENCE[: asked.pick(4, 1)]:
        torch.manual_seed(1)
        teacher = nn.Sequential(nn.Linear(inputs, 10), nn.Tanh(), nn.Linear(10, 1))
        x = torch.randn(points + 1000, inputs)
        with torch.no_grad():
            for value in teacher.parameters():
                value *= 2.5
            f = teacher(x) / teacher(x).std()
        y = f + NOISE * torch.randn_like(f)
        net = nn.Sequential(nn.Linear(inputs, HIDDEN), getattr(nn, activation)(), nn.Linear(HIDDEN, 1))
        model = pd.Standardised(pd.BayesianNet(net, pd.Prior()), x[:points], y[:points])
        start = time.process_time()
        found = pd.training.maximise_evidence(model, x[:points], y[:points], structure, progress=False)  # type: ignore[arg-type]
        case = f"{points} points, {inputs} inputs, {activation}, {structure}"
        yield Figure(f"{case}: seconds of the processor", time.process_time() - start)
        true = float(model.y_std) ** 2 / NOISE**2
        yield Figure(f"{case}: τ found, made with {true:.1f}", found.tau)
        answer = pd.predict(model, found.guide, x[points:], method="linearised")
        error = (answer.mean - y[points:]).square().mean().sqrt().item()
        yield Figure(f"{case}: error of the mean, {NOISE} of it noise", error)


def digits(seed: int, steps: int, decay: float) -> Iterator[tuple[str, float, float]]:
    """Yield, for one network, the nats that each Laplace approximation loses to a temperature by hand, and its ECE."""
    torch.manual_seed(seed)
    images, labels = (torch.tensor(each) for each in load_digits(return_X_y=True))
    order = torch.randperm(len(images))
    x, y = (images[order] / 16).float(), labels[order]
    train, held, test = slice(300), slice(300, 500), slice(500, 1300)
    net, loss = nn.Sequential(nn.Linear(64, 50), nn.ReLU(), nn.Linear(50, 10)), nn.functional.cross_entropy
    optimiser = torch.optim.Adam(net.parameters(), lr=0.01, weight_decay=decay)
    for _ in range(steps):
        optimiser.zero_grad()
        loss(net(x[train]), y[train]).backward()
        optimiser.step()
    f = net(x).detach()
    temperature = min(torch.logspace(-1, 1, 200), key=lambda t: loss(f[held] / t, y[held]).item())
    by_hand = loss(f[test] / temperature, y[test]).item()
    model = pd.BayesianNet(net, likelihood=pd.Categorical())
    for structure, tuned in itertools.product(("last", "kron"), (False, True)):
        guide = pd.laplace(model, net, x[train], y[train], structure, validation=(x[held], y[held]) if tuned else None)  # type: ignore[arg-type]
        answer = pd.predict(model, guide, x[test], method="linearised", seed=0)
        lost = -answer.log_prob(y[test]).mean().item() - by_hand
        yield "with validation" if tuned else "default prior", lost, float(pd.ece(answer, y[test]))


@benchmark("laplace-digits", "cpu")
def laplace_digits(asked: Asked) -> Iterator[Figure]:
    """Laplace approximations of networks trained on 300 digits, beside a temperature fitted on 200 others."""
    found: dict[str, list[tuple[float, float]]] = {}
    ways = itertools.product(range(asked.pick(3, 1)), list(WAYS.values())[: asked.pick(3, 1)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed, (steps, decay) in ways:
            for how, lost, error in digits(seed, steps, decay):
                found.setdefault(how, []).append((lost, error))
    for how, cases in found.items():
        losses, errors = zip(*cases, strict=True)
        yield Figure(f"{how}: cases within 0.01 nats, of {len(cases)}", sum(lost <= 0.01 for lost in losses))
        yield Figure(f"{how}: most that is lost", max(losses), "nats")
        yield Figure(f"{how}: smallest calibration error", min(errors))
        yield Figure(f"{how}: largest calibration error", max(errors))
