"""CO₂ beyond the data: is a network uncertain where it has no data? The paper's first experiment.

    (1/2N) Σ‖y - f(x)‖² + λ Σ‖M‖²  =  -ELBO/(Nτ) + constant,    λ = l²p/(2Nτ) = 10⁻⁶                       (eq. 3)

Networks learn 23 years of detrended CO₂ and predict the years after. SGD on minus the ELBO, with the rate divided by
Nτ, takes the same steps as SGD on eq. 3: λ determines what dropout learns, τ only the interpretation l² = 2Nτλ/p.

Beside them: five other posteriors of the network with four layers, three with learned prior widths, a GP, and anchored
ensembles of the network with five layers. The prior that λ implies is far too wild to draw anchors from (weights with a
standard deviation of 4 in layers of 1024), so ensembles have their own: N(0, 1) in the first layer and for biases,
N(0, 2/fan-in) or N(0, 2) after it. Their rows say which.
"""

from itertools import pairwise, product
from types import SimpleNamespace

import pyro
import torch
from experiments import series_posteriors as beside
from experiments.collection import co2_paper
from experiments.experiment import Experiment
from experiments.figures import co2_panels, spreads
from experiments.summaries import apart, few_draws, rms
from torch import nn

import pyro_dropout as pdrop

LAMBDA, RATE = 1e-6, 0.01  # the paper's weight decay, and its rate before the schedule (1 + 10⁻⁴t)^(-1/4)
TAU = 100.0  # noise of 0.1: a monthly mean is accurate to about 0.2 ppm, and y is in units of about 2 ppm
NEAR, FAR, LIMIT = 2.5, 3.72, 10.0  # points beyond the data, which end at 1.73; the paper's dashed line is FAR
SURE = 0.5  # ±2σ should contain 95 %: with less than half of the targets inside, a prediction is confidently wrong
GROWS, BOUNDED = 1.25, 1.25  # std at FAR over that at NEAR, and at LIMIT over FAR; a line through 0: 1.49 and 2.69
AGREE, ASIDE = 1.25, 1.0  # stds closer than this factor, and means closer than this many stds, count as equal
ENOUGH = 0.5  # half a standard deviation is the finest shade in the paper's figures
NEAR_ENOUGH = 2.0  # times the error of dropout on the data
DEPTHS, KINDS, DROPPED, PARTS = (4, 5), ("ReLU", "TanH"), (0.1, 0.2), ("4", "5", "guides", "learned", "ensembles")
OTHERS = beside.other_guides(lambda site: kept(site, 0.1))  # five more posteriors, of the 4-layer ReLU network
LEARNED, COLD = beside.learned_prior_guides(), 1e-4  # and three with learned priors, whose T reaches 1 at the last step
ADAM = {"dropout, as many steps of Adam": lambda net: guide(net, 0.1)}  # as these have


class Activation(nn.Module):
    """ReLU or TanH, switched by a buffer, so that both networks have one structure and train as one fleet."""

    def __init__(self, kind):
        super().__init__()
        self.register_buffer("tanh", torch.tensor(float(kind == "TanH")))

    def forward(self, x):
        """Return relu(x) or tanh(x)."""
        return torch.where(self.tanh > 0.5, torch.tanh(x), torch.relu(x))


def kept(site, dropped):
    return 1.0 if site == "0.weight" else 1 - dropped  # the only input is never dropped: f would be constant


def model(depth, width, kind, dropped, num_data, learn=False):
    """Return the network, with the prior under which every weight and bias has the same λ in eq. 3."""
    layers = [part for a, b in pairwise([1, *[width] * depth]) for part in (nn.Linear(a, b), Activation(kind))]
    lengths = [pdrop.paper.implied_length_scale(p, TAU, LAMBDA, num_data) for p in (1.0, 1 - dropped)]
    how = {"width_scaled": False, "learn": learn, "tempered": False}
    prior = pdrop.Prior(lambda site: lengths[site != "0.weight"], lengths[0], **how)
    return pdrop.BayesianNet(nn.Sequential(*layers, nn.Linear(width, 1)), prior, pdrop.Gaussian(TAU))


def guide(net, dropped):
    return pdrop.AutoDropout(net, keep=lambda site: kept(site, dropped), init="paper")


def train(x, y, args, device):
    """Return all posteriors by name, dropout's by (depth, kind, dropped), each as (model, guide)."""
    how = {"progress": not args.quiet, "compile": False if args.quick else "auto", "seed": args.seed, "device": device}

    def build(depth, kind, dropped, learn=False):
        pyro.set_rng_seed(args.seed)  # all start from the same numbers
        net = model(depth, args.width, kind, dropped, len(x), learn)
        return net, guide(net, dropped)

    found, rate = {}, RATE / (TAU * len(x))
    for part in args.parts:
        if part in ("guides", "learned"):
            learn, warm = part == "learned", pdrop.training.warm_up(args.guide_steps, COLD)
            of = {"steps": args.guide_steps, "loss": pdrop.ELBO(temperature=warm) if learn else None, **how}
            guides = LEARNED if learn else OTHERS
            found |= beside.fit_beside(lambda a=learn: build(4, "ReLU", 0.1, a)[0], guides, x, y, **of)
            if learn:
                found |= beside.fit_beside(lambda: build(4, "ReLU", 0.1)[0], ADAM, x, y, **of | {"loss": None})
            continue
        if part == "ensembles":
            found |= beside.anchored_ensembles(lambda: build(5, "ReLU", 0.1)[0].net, x, y, TAU, args, **how)
            continue
        keys = list(product([int(part)], KINDS, DROPPED))
        fleet = pdrop.Fleet(build, dict(zip(("depth", "kind", "dropped"), zip(*keys, strict=True), strict=True)))
        fleet.fit(x, y, steps=args.steps, lr=rate, optim="sgd", schedule=pdrop.training.inverse_decay(), **how)
        found |= dict(zip(keys, fleet, strict=True))
    return found if set(args.parts) < set(PARTS) else found | beside.fitted_gp(x, y, TAU, args)


class Questions:
    """The points at which every posterior predicts: ``data``, the months ``after`` it, a ``grid`` and ``points``."""

    def __init__(self, data):
        parts = [data.x, data.test_x, torch.linspace(-1.8, 4, 400)[:, None], torch.tensor([[NEAR], [FAR], [LIMIT]])]
        self.x, self.y = torch.cat(parts), torch.cat([data.y, data.test_y, torch.zeros(403, 1)])
        self.data, self.after, self.grid, self.points = torch.arange(len(self.x)).split([len(part) for part in parts])
        self.ahead = self.grid[(self.x[self.grid, 0] > data.x.max()) & (self.x[self.grid, 0] <= FAR)]

    def ask(self, net, posterior, args, method="mc"):
        """Return f in every draw, (T, N), its mean and spread, the std of y, and the scores on the months after."""
        asked = pdrop.predict(net, posterior, self.x, samples=args.samples, method=method, seed=args.seed, chunk=2**16)
        f, mean, std, spread = (t[..., 0].cpu() for t in (asked.samples, asked.mean, asked.std, asked.epistemic.sqrt()))
        error = (mean - self.y[:, 0])[self.after] / std[self.after]
        at = dict(zip((NEAR, FAR, LIMIT), spread[self.points].tolist(), strict=True))
        row = {"std on data": spread[self.data].mean().item()} | {f"at {x:g}": value for x, value in at.items()}
        row |= {"RMSE on data": rms((mean - self.y[:, 0])[self.data]), "RMSE after": rms(error * std[self.after])}
        log_p = asked.log_prob(self.y)[self.after].mean().item()
        row |= {"error / σ": rms(error), "in ±2σ": (error.abs() <= 2).double().mean().item(), "log p after": log_p}
        return SimpleNamespace(f=f, mean=mean, std=std, spread=spread, at=at, row=row)


def judged(mc, standard, questions):
    """Yield the paper's claims: the numbers for every network or pair, the rule, and a text for the numbers."""
    rows = [(one.row["in ±2σ"], one.row["error / σ"], mc[key].row["in ±2σ"]) for key, one in standard.items()]
    words = f"±2σ hold {{}} of the months after (< {SURE} asked), errors are {{}} σ; ±2σ of MC dropout hold {{}}"
    yield "Standard dropout is wrong far from the data, and sure of it", rows, lambda row: row[0] < SURE, words
    rows = [(answer.at[FAR] / answer.at[NEAR],) for key, answer in mc.items() if key[1] == "ReLU"]
    words = f"std at {FAR} over std at {NEAR}: {{}}; ≥ {GROWS} asked"
    yield "With ReLU the uncertainty grows away from the data", rows, lambda row: row[0] >= GROWS, words
    rows = [(answer.at[LIMIT] / answer.at[FAR],) for key, answer in mc.items() if key[1] == "TanH"]
    words = f"std at {LIMIT} over std at {FAR}: {{}}; ≤ {BOUNDED} asked"
    yield "With TanH the uncertainty stays bounded", rows, lambda row: row[0] <= BOUNDED, words
    words = f"from the end of the data to {FAR}, in root mean square, means are {{}} stds apart, and stds a factor of"
    words += f" {{}}; ≤ {ASIDE} and ≤ {AGREE} asked"
    for text, k, (a, b) in (("4 and 5 layers agree", 0, DEPTHS), ("Dropout 0.1 and 0.2 agree", 2, DROPPED)):
        rows = [apart(mc[key], mc[(*key[:k], b, *key[k + 1 :])], questions.ahead) for key in mc if key[k] == a]
        yield text, rows, lambda row: row[0] <= ASIDE and row[1] <= AGREE, words
    rows = [few_draws(answer.f[:, questions.grid], 10) for answer in mc.values()]
    words = f"errors of {{}} stds in the mean and {{}} in the std, against all draws; ≤ {ENOUGH} asked"
    yield "T = 10 draws give a reasonable mean and uncertainty", rows, lambda row: max(row) <= ENOUGH, words


def main(argv=None):
    experiment = Experiment("co2", __doc__)
    experiment.option("--steps", type=int, default=1_000_000, quick=20, help="SGD steps per network (1000000)")
    experiment.option("--guide-steps", type=int, default=10_000, quick=4, help="Adam steps of other guides (10000)")
    experiment.option("--members", type=int, default=16, quick=3, help="networks in an ensemble (16)")
    experiment.option("--ensemble-steps", type=int, default=8000, quick=4, help="Adam steps of an ensemble (8000)")
    experiment.option("--gp-steps", type=int, default=300, quick=20, help="Adam steps for the GP (300)")
    experiment.option("--width", type=int, default=1024, quick=16, help="hidden units per layer (1024)")
    experiment.option("--samples", type=int, default=1000, quick=40, help="draws T per prediction (1000)")
    experiment.option("--parts", nargs="+", choices=PARTS[2:], default=PARTS, help="only these rows")
    args, data = experiment.start(argv), co2_paper()
    if experiment.device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32: its rounding is negligible relative to dropout's noise
    found, questions = train(data.x, data.y, args, experiment.device), Questions(data)
    answers = {name: questions.ask(*pair, args) for name, pair in found.items()}
    mc = {key: answer for key, answer in answers.items() if isinstance(key, tuple)}
    standard = {key: questions.ask(*found[key], args, method="standard") for key in mc}
    said = "{}, {} layers, {}, dropout {}".format
    named = {said("MC", *key): mc[key] for key in mc} | {said("standard", *key): standard[key] for key in mc}
    named |= {name: answers[name] for name in ("GP", *OTHERS, *LEARNED, *ADAM, *beside.SCALED) if name in answers}
    note = f"{data.note} std is that of f; σ has noise of {TAU**-0.5:g} in it (the GP fits its own)."
    experiment.table("CO₂, extrapolated", [{"posterior": name, **answer.row} for name, answer in named.items()], note)
    error = {key: answer.row["RMSE on data"] for key, answer in answers.items()}
    others = {"dropout": (4, "ReLU", 0.1), **dict(zip(ADAM, ADAM, strict=True))}
    last = []
    for whose, key in others.items():
        text = f"Gaussian guides with learned priors reproduce the data, beside {whose}"
        words = f"RMSE on the data over that of {whose}: {{}}; ≤ {NEAR_ENOUGH:g} asked"
        if {key, *LEARNED} <= set(error):
            last.append((text, [(error[n] / error[key],) for n in LEARNED], lambda row: row[0] <= NEAR_ENOUGH, words))
    for text, rows, rule, words in (*(judged(mc, standard, questions) if mc else ()), *last):
        passed = [rule(row) for row in rows]
        ranges = [f"{min(values):.2f} to {max(values):.2f}" for values in zip(*rows, strict=True)]
        experiment.claim(text, passed, words.format(*ranges))
    if not mc:
        return experiment.finish()
    four = {f"MC dropout, {kind}": mc[5, kind, 0.1] for kind in KINDS}
    four = {"Standard dropout, ReLU": standard[5, "ReLU", 0.1], "GP, squared exponential": answers["GP"], **four}
    six = four | {name[0].upper() + name[1:]: answers[name] for name in beside.SCALED}
    text = "Five layers with dropout 0.1, the GP, and anchored ensembles"
    experiment.figure("co2", co2_panels(six, questions, data, 2, FAR), text)
    experiment.figure("co2_std", spreads(mc, questions), "Standard deviation of f against x, for eight networks")
    six = {"MC dropout 0.1": mc[4, "ReLU", 0.1]} | {name: answers[name] for name in OTHERS}
    text = "Six posteriors of the 4-layer ReLU network"
    experiment.figure("co2_guides", co2_panels(six, questions, data, 3, FAR), text)
    return experiment.finish()


if __name__ == "__main__":
    main()
