"""Solar irradiance with five gaps: how certain should a posterior be between the data? The paper's second experiment.

    (1/2N) Σ‖y - f(x)‖² + λ Σ‖M‖²  =  -ELBO/(Nτ) + constant,    λ = l²p/(2Nτ)                             (eq. 3)

Five ReLU layers with dropout 0.1 learn the series outside the gaps and are tested in the gaps. The paper prints
λ = 5·10⁻⁷, and its authors' files also have 5·10⁻⁶ and 5·10⁻²: here they are three networks of one fleet. τ is the same
for all during training, and λ sets the prior's length-scale, l² = 2Nτλ/p: the same noise in the data, three priors of
the weights. For comparison: the exact GP, other posteriors of the network with the paper's λ, and anchored ensembles.
The prior that the paper's λ implies is far too wild to draw anchors from (weights with a standard deviation of 6 in
layers of 1024), so ensembles have their own: N(0, 1) in the first layer and for biases, N(0, 2/fan-in) or N(0, 2) after
it. Their rows say which.

The coverage of an interval for y depends on τ, so τ is estimated for each posterior separately, and never in the gaps:
on every eleventh point outside them, which no posterior was trained on.
"""

from types import SimpleNamespace

import pyro
import torch
from experiments.collection import solar
from experiments.experiment import Experiment
from experiments.figures import PALETTE, band_panels
from experiments.series_posteriors import SCALED, anchored_ensembles, fit_beside, fitted_gp, other_guides
from torch import nn

import pyro_dropout as pdrop

DEPTH, DROPPED, RATE = 5, 0.1, 5e-3  # the paper's, with the schedule of its first experiment
LAMBDAS = (5e-7, 5e-6, 5e-2)  # the paper's, then its authors' files'
TAU = 100.0  # during training: noise of 0.1 in standardised units; τ is estimated afterwards
HELD_BACK = 11  # one point in eleven is used to estimate τ: 25 of 275, whose neighbours stay
PROMISED = 0.954  # of the targets are within ±2σ of a normal distribution
OVER, UNDER = 0.995, 0.91  # underconfident above, overconfident below: two standard errors, 0.021 each, of 100 points
WELL = 0.5  # an rms error of half the targets' own std explains three quarters of their variance
ENOUGH = 0.9  # of the targets in the gaps; a posterior that is not much too sure has at least so many within ±2σ
WIDER = 1.1  # a tenth is more than the noise of a mean over gaps and a thousand draws


# --- the model and its posteriors -------------------------------------------------------------------------------------
def kept(site):
    return 1.0 if site == "0.weight" else 1 - DROPPED  # the only input is never dropped: f would be constant


def model(width, decay, num_data):
    """Return the network, with the prior under which every weight and bias has λ = ``decay`` in eq. 3."""
    layers = [nn.Linear(1, width), nn.ReLU()]
    for _ in range(DEPTH - 1):
        layers += [nn.Linear(width, width), nn.ReLU()]
    lengths = [pdrop.paper.implied_length_scale(p, TAU, decay, num_data) for p in (1.0, 1 - DROPPED)]
    prior = pdrop.Prior(lambda site: lengths[site != "0.weight"], bias_length_scale=lengths[0], width_scaled=False)
    return pdrop.BayesianNet(nn.Sequential(*layers, nn.Linear(width, 1)), prior, pdrop.Gaussian(TAU))


def guide(net):
    return pdrop.AutoDropout(net, keep=kept, init="paper")


OTHERS = other_guides(kept)  # five more posteriors of the same network


def train(x, y, args, device):
    """Return all posteriors by name, dropout's by λ, each as (model, guide)."""
    how = {"progress": not args.quiet, "compile": False if args.quick else "auto", "seed": args.seed, "device": device}

    def build(decay):
        pyro.set_rng_seed(args.seed)  # all start from the same numbers
        net = model(args.width, decay, len(x))
        return net, guide(net)

    found = anchored_ensembles(lambda: build(LAMBDAS[0])[0].net, x, y, TAU, args, **how)
    if args.ensembles:
        return found
    fleet, rate = pdrop.Fleet(build, {"decay": LAMBDAS}), RATE / (TAU * len(x))
    fleet.fit(x, y, steps=args.steps, lr=rate, optim="sgd", schedule=pdrop.training.inverse_decay(), **how)
    found = dict(zip(LAMBDAS, fleet, strict=True)) | found
    found |= fit_beside(lambda: build(LAMBDAS[0])[0], OTHERS, x, y, steps=args.guide_steps, **how)
    return found | fitted_gp(x, y, TAU, args)


# --- what they answer -------------------------------------------------------------------------------------------------
class Questions:
    """The points at which every posterior predicts: ``learned`` from, ``held`` back, in ``gaps``, on a ``grid``."""

    def __init__(self, data):
        rows = torch.arange(len(data.x))
        held = rows % HELD_BACK == HELD_BACK // 2
        parts = [data.x[~held], data.x[held], data.test_x, torch.linspace(-1.8, 1.8, 400)[:, None]]
        self.x, self.y = torch.cat(parts), torch.cat([data.y[~held], data.y[held], data.test_y, torch.zeros(400, 1)])
        self.learned, self.held, self.gaps, self.grid = torch.arange(len(self.x)).split([len(part) for part in parts])

    def ask(self, net, posterior, args):
        """Return the mean, the spread of f and the std of y everywhere, with scores in the gaps, at the estimated τ."""
        options = {"samples": args.samples, "seed": args.seed, "chunk": 2**16}
        tau = pdrop.judging.refit_tau(pdrop.predict(net, posterior, self.x[self.held], **options), self.y[self.held])
        asked = pdrop.judging.with_tau(pdrop.predict(net, posterior, self.x, **options), tau)
        mean, std, spread = (each[:, 0].cpu() for each in (asked.mean, asked.std, asked.epistemic.sqrt()))
        error, at_data = (mean - self.y[:, 0])[self.gaps], spread[self.learned].mean()
        row = {"noise 1/√τ": tau**-0.5, "std of f on data": at_data.item()}
        row["in gaps / on data"] = (spread[self.gaps].mean() / at_data).item()
        row["RMSE in gaps"] = error.square().mean().sqrt().item()
        for name, wide in (("in ±2σ", std), ("in ±2 std of f", spread)):
            row[name] = (error.abs() <= 2 * wide[self.gaps]).double().mean().item()
        row["log p in gaps"] = asked.log_prob(self.y)[self.gaps].mean().item()
        return SimpleNamespace(mean=mean, std=std, row=row)


def judged(gp, dropout, ensembles, scale):
    """Yield the paper's claims, and one more: the rows to judge by, the column, the rule, and the rule in words."""
    text = "The GP and MC dropout both interpolate well"
    yield text, [gp, dropout[0]], "RMSE in gaps", lambda error: error <= WELL * scale, f"≤ {WELL * scale:.2f}"
    yield "The GP is too cautious in the gaps", [gp], "in ±2σ", lambda held: held > OVER, f"> {OVER}"
    yield "MC dropout is too sure in the gaps", dropout, "in ±2σ", lambda held: held < UNDER, f"< {UNDER}"
    text = "MC dropout is less sure in the gaps than on the data"
    yield text, dropout, "in gaps / on data", lambda ratio: ratio > WIDER, f"> {WIDER}"
    text = "An anchored ensemble's ±2σ hold at least 90 % in the gaps"
    yield text, ensembles, "in ±2σ", lambda held: held >= ENOUGH, f"≥ {ENOUGH}"


def panels(answers, questions, data, columns):
    shown = {title: (answer.mean[questions.grid], answer.std[questions.grid]) for title, answer in answers.items()}
    size = (9 if columns == 1 else 5, 2.9)
    figure = band_panels(questions.x[questions.grid, 0], shown, columns, size, band_label="±1σ and ±2σ of y")
    for axes in figure.axes:
        for k, (low, high) in enumerate(data.gaps):
            axes.axvspan(low, high, color="0.9", lw=0, label=None if k else "gap", zorder=0)
        axes.plot(data.x, data.y, ".", color="black", ms=2, label="data")
        axes.plot(data.test_x, data.test_y, ".", color=PALETTE[1], ms=3, label="in the gaps")
        axes.set(xlabel=data.x_name, ylabel=f"{data.name} (standardised)", xlim=(-1.8, 1.8), ylim=(-4, 5))
    figure.axes[0].legend(frameon=False, fontsize=8, ncols=2, loc="upper left")
    return figure


def main(argv=None):
    experiment = Experiment("solar", __doc__)
    experiment.option("--steps", type=int, default=300_000, quick=20, help="SGD steps, our choice (300000)")
    experiment.option("--guide-steps", type=int, default=4000, quick=4, help="Adam steps for the other guides (4000)")
    experiment.option("--members", type=int, default=16, quick=3, help="networks in an ensemble (16)")
    experiment.option("--ensemble-steps", type=int, default=8000, quick=20, help="Adam steps of an ensemble (8000)")
    experiment.option("--ensembles", action="store_true", help="only the rows of the ensembles")
    experiment.option("--gp-steps", type=int, default=300, quick=20, help="Adam steps for the GP (300)")
    experiment.option("--width", type=int, default=1024, quick=16, help="hidden units per layer (1024)")
    experiment.option("--samples", type=int, default=1000, quick=40, help="draws T per prediction (1000)")
    args, data = experiment.start(argv), solar()
    if experiment.device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32: its rounding is negligible relative to dropout's noise
    questions = Questions(data)
    found = train(questions.x[questions.learned], questions.y[questions.learned], args, experiment.device)
    named = {f"MC dropout, λ = {name:g}" if name in LAMBDAS else name: pair for name, pair in found.items()}
    answers = {name: questions.ask(*pair, args) for name, pair in named.items()}
    table = [{"posterior": name, **answer.row} for name, answer in answers.items()]
    note = (
        f"{data.note} ±2σ promise {PROMISED}; τ is measured on {len(questions.held)} points outside the gaps that were"
    )
    experiment.table("In five gaps", table, f"{note} held back. Other guides: λ = {LAMBDAS[0]:g}.")
    if args.ensembles:
        return experiment.finish()
    dropout = [row for row in table if row["posterior"].startswith("MC")]
    gp, *ensembles = (next(row for row in table if row["posterior"] == name) for name in ("GP", *SCALED))
    for text, rows, column, rule, words in judged(gp, dropout, ensembles, data.test_y.std().item()):
        passed = [rule(row[column]) for row in rows]
        numbers = ", ".join(f"{row['posterior']}: {row[column]:.2f}" for row in rows)
        experiment.claim(text, passed, f"{column}: {numbers}; {words} asked")
    shown = {name: answers[name] for name in ("GP", dropout[0]["posterior"], *SCALED)}
    text = "The GP, MC dropout with the paper's λ, and anchored ensembles with their own priors"
    experiment.figure("solar", panels(shown, questions, data, 1), text)
    rest = {name: answer for name, answer in answers.items() if name != "GP"}
    experiment.figure("solar_guides", panels(rest, questions, data, 2), "Ten posteriors of one network")
    return experiment.finish()


if __name__ == "__main__":
    main()
