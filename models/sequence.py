"""One dropout mask for a whole sequence, a new one at every step, or none, in an LSTM: ``python models/sequence.py``.

    (i, f, o, g) = W_x x_t + W_h (z_h ∘ h_t)       c_{t+1} = σ(f) c_t + σ(i) tanh(g)       h_{t+1} = σ(o) tanh(c_{t+1})
    y = x_L + W_y (z_y ∘ h_L)                      with x_t the last L values less x_L, so that only changes are learned

A draw of W from a posterior q(W) is used at every step of a sequence, so a dropped row of W_h is dropped at all steps
(Gal and Ghahramani, 2016). ``AutoDropout`` does this by default: a sequence is a data point and has one draw. The usual
recipe draws z_h again at every step, which is not a q(W); here it is noise in the network, with the same ``keep``,
around point-estimate weights, and a prior that gives all arms the same weight decay.

Each arm's ``keep`` and each network's noise τ are chosen on a validation segment; the test segment that follows is used
once: one step ahead, and free-running, where a network continues from its own draws of y, with one mask to the end.
"""

from itertools import pairwise, product

import torch
from experiments.collection import co2_paper, solar
from experiments.experiment import VERDICTS, Experiment
from experiments.figures import PALETTE, draw_fan, draw_std_bands
from experiments.free_running import free_run
from experiments.summaries import standard_error
from matplotlib.figure import Figure
from torch import nn

import pyro_dropout as pdrop

TRAIN, VALIDATION = 0.6, 0.2  # shares of the series, in time order; the rest is the test segment
DROPPED, KEEPS = ("recurrent.weight", "output.weight"), (0.5, 0.7, 0.9, 0.97)  # x_t is one number: not dropped
ROWS = 2**16  # windows times draws per forward pass; fixed, so that a seed gives the same draws on any GPU
STRIDE, CLEAR = 6, 2.0  # from one start of a free run to the next; standard errors from which a difference counts
ARMS = {"sequence": "a mask per sequence", "step": "a mask per step", "none": "no dropout"}


# --- the model and the guide ------------------------------------------------------------------------------------------
class Forecaster(nn.Module):
    """An LSTM from a window of values, (N, L), to the next value, (N, 1); ``keep`` is that of masks at every step."""

    def __init__(self, hidden, keep=None):
        super().__init__()
        self.input, self.recurrent = nn.Linear(1, 4 * hidden), nn.Linear(hidden, 4 * hidden, bias=False)
        self.output = nn.Linear(hidden, 1)
        self.register_buffer("keep", None if keep is None else torch.tensor(float(keep)))

    def noisy(self, h):
        """Return h under a mask for this step, if masks are used; nn.Dropout would be inactive at prediction."""
        return h if self.keep is None else h * (torch.rand_like(h) < self.keep) / self.keep

    def forward(self, x):
        """Return the next value."""
        level = x[:, -1:]
        h = c = x.new_zeros(len(x), self.recurrent.in_features)
        for push in self.input((x - level).unsqueeze(-1)).unbind(1):
            i, f, o, g = (push + self.recurrent(self.noisy(h))).chunk(4, -1)
            c = (f + 1).sigmoid() * c + i.sigmoid() * g.tanh()  # + 1: an untrained cell forgets little
            h = o.sigmoid() * c.tanh()
        return level + self.output(self.noisy(h))


def model(arm, keep, hidden, tau):
    """N(0, 1/K) on W_h and W_y. If masks are noise in the network, its weights are keep·M: l² is divided by keep."""
    inside = None if arm == "sequence" else keep
    prior = pdrop.Prior(length_scale=dict.fromkeys(DROPPED, (hidden / (inside or 1.0)) ** 0.5))
    return pdrop.BayesianNet(Forecaster(hidden, inside), prior, pdrop.Gaussian(tau))


def guide(bayesian_net, arm, keep):
    return pdrop.AutoDropout(bayesian_net, keep=lambda site: keep if arm == "sequence" and site in DROPPED else 1.0)


# --- training, choosing and testing -----------------------------------------------------------------------------------
def series(name):
    """Return a series without gaps in time order, (n,), including the points that other experiments hold out."""
    data = {"co2": co2_paper, "solar": solar}[name]()
    return data, torch.cat([data.y, data.test_y]).flatten()[torch.cat([data.x, data.test_x]).flatten().argsort()]


def windows(values, length, first, last):
    """Return windows (N, length), and the values (N, 1) that follow them, from number ``first`` up to ``last``."""
    return values.unfold(0, length, 1)[first - length : last - length], values[first:last, None]


def trained(arm, keeps, train, args, device):
    """Return a fleet of all pairs of a keep and a seed, trained together."""
    tau = 4 / (train[1] - train[0][:, -1:]).var().item()  # as if the network explained 3/4 of the variance of a change

    def build(keep, seed):
        torch.manual_seed(1000 * args.seed + seed)
        net = model(arm, keep, args.hidden, tau)
        return net, guide(net, arm, keep)

    every = zip(*product(keeps, range(args.seeds)), strict=True)
    fleet = pdrop.Fleet(build, dict(zip(("keep", "seed"), every, strict=True)))
    how = {"steps": args.steps, "batch_size": args.batch, "seed": args.seed, "device": device, "compile": False}
    # Not compiled: an unrolled network is a long program, and compilation would take longer than training.
    fleet.fit(
        *train, lr=0.01, schedule=pdrop.training.inverse_decay(8 / args.steps, 1.0), progress=not args.quiet, **how
    )
    return fleet


def judged(fleet, validation, args):
    """Return each replica's τ from the validation segment, and that segment's log-likelihood, (keeps, seeds)."""
    taus, scores = [], []
    for pair in fleet:
        answer = pdrop.predict(*pair, validation[0], samples=args.samples, seed=args.seed, chunk=ROWS)
        taus.append(pdrop.judging.refit_tau(answer, validation[1]))
        scores.append(pdrop.judging.with_tau(answer, taus[-1]).log_prob(validation[1]).mean().item())
    return taus, torch.tensor(scores).reshape(-1, args.seeds)


def tested(fleet, taus, chosen, test, args):
    """Return log-likelihoods of the replicas of one keep: {"one step": (seeds,), "free-running": (seeds, steps)}."""
    (x, y), starts = test, torch.arange(0, len(test[0]) - args.ahead + 1, STRIDE, device=test[0].device)
    truth, found = y.flatten().unfold(0, args.ahead, 1)[starts], {"one step": [], "free-running": []}
    for k in chosen:
        answer = pdrop.judging.with_tau(
            pdrop.predict(*fleet[k], x, samples=args.samples, seed=args.seed, chunk=ROWS), taus[k]
        )
        found["one step"].append(answer.log_prob(y).mean().cpu())
        run = free_run(*fleet[k], x[starts], args.ahead, tau=taus[k], samples=args.samples)
        found["free-running"].append(run.log_prob(truth).mean(0).cpu())
    return {name: torch.stack(values) for name, values in found.items()}


def compared(experiment, name):
    """Train, choose and test all arms on one series; return their scores."""
    args, (data, values) = experiment.args, series(name)
    values, keeps = values.to(experiment.device), KEEPS[: args.keeps]
    ends = [args.window, *(round(share * len(values)) for share in (TRAIN, TRAIN + VALIDATION, 1.0))]
    train, validation, test = (windows(values, args.window, first, last) for first, last in pairwise(ends))
    masked = trained("sequence", keeps, train, args, experiment.device)
    noisy = trained("step", (*keeps, 1.0), train, args, experiment.device)  # its last keep means no dropout
    known, rows, scores, fans = [judged(fleet, validation, args) for fleet in (masked, noisy)], [], {}, {}
    for arm, fleet, (taus, valid) in zip(ARMS, (masked, noisy, noisy), (*known, known[1]), strict=True):
        best = len(keeps) if arm == "none" else int(valid[: len(keeps)].mean(1).argmax())
        chosen = range(best * args.seeds, (best + 1) * args.seeds)
        scores[arm] = tested(fleet, taus, chosen, test, args)
        run = free_run(*fleet[chosen[0]], test[0][:1], args.ahead, tau=taus[chosen[0]], samples=args.samples)
        fans[arm] = run.f[:, 0].cpu() + torch.randn(len(run.f), args.ahead) / run.tau**0.5
        rows.append({"arm": ARMS[arm], "keep": (*keeps, 1.0)[best], "validation": valid[best].mean().item()})
        for measure, each in scores[arm].items():
            each = each.reshape(args.seeds, -1).mean(1)
            rows[-1] |= {measure: each.mean().item(), f"± {measure}": standard_error(each).item()}
    note = "{} + {} + {} values, {} seeds;".format(*(len(part[0]) for part in (train, validation, test)), args.seeds)
    note += f" free-running up to {args.ahead} steps ahead. {data.note}"
    experiment.table(f"{data.name}: test log-likelihood, nats a value", rows, note)
    experiment.figure(name, drawn(data, values.cpu(), ends[2], fans, scores), f"{data.name}: the forecasts of all arms")
    return scores


# --- what is found ----------------------------------------------------------------------------------------------------
def drawn(data, values, start, fans, scores):
    """Plot the fan of every arm from the start of the test segment, and the likelihood against the horizon."""
    figure = Figure(figsize=(11, 6.5), layout="constrained")
    *panels, last = figure.subplots(2, 2).flat
    for axes, colour, (arm, fan) in zip(panels, PALETTE, fans.items(), strict=False):
        at, past = torch.arange(1, fan.shape[1] + 1), torch.arange(-fan.shape[1], fan.shape[1] + 1)
        axes.sharey(panels[0])
        draw_fan(axes, at, fan, color=colour)
        axes.plot(past, values[start + past - 1], color="black", lw=1, marker=".", ms=3, label="what happened")
        axes.axvline(0.5, color="0.6", lw=0.8)
        axes.set(title=ARMS[arm], xlabel="steps after the start of the test", ylabel=data.y_name.replace(" (", "\n("))
        steps = scores[arm]["free-running"]
        draw_std_bands(last, at, steps.mean(0), standard_error(steps), multiples=[2], color=colour, label=ARMS[arm])
    panels[0].legend(frameon=False, fontsize=8, loc="upper left")
    last.set(
        title="free-running: mean ± 2 standard errors", xlabel="steps ahead", ylabel="log-likelihood (nats a value)"
    )
    last.legend(frameon=False, fontsize=8)
    return figure


def claimed(experiment, found, better, worse):
    """Compare two arms seed by seed, on every series and measure."""
    said, clear = [], []
    for name, measure in product(found, found[next(iter(found))][better]):
        gain = (found[name][better][measure] - found[name][worse][measure]).reshape(experiment.args.seeds, -1).mean(1)
        mean, error = gain.mean().item(), standard_error(gain).item()
        clear.append(0 if abs(mean) <= CLEAR * error else 1 if mean > 0 else -1)
        said.append(f"{name}, {measure} {mean:+.3f} ± {error:.3f}")
    verdict = VERDICTS[0 if min(clear) > 0 else 1 if max(clear) > 0 and min(clear) == 0 else 2]
    experiment.claim(f"{ARMS[better]} beats {ARMS[worse]}", verdict, "nats a value: " + "; ".join(said))


def main(argv=None):
    experiment, known = Experiment("sequence", __doc__), ("co2", "solar")
    experiment.option("--series", nargs="+", default=known, quick=("co2",), choices=known, help="(both)")
    experiment.option("--window", type=int, default=24, quick=6, help="L: two years of months, or two solar cycles")
    experiment.option("--seeds", type=int, default=5, quick=2, help="networks per kind")
    experiment.option("--keeps", type=int, default=len(KEEPS), quick=2, help=f"how many of {KEEPS} to try")
    experiment.option("--hidden", type=int, default=32, quick=4, help="units of the LSTM")
    experiment.option("--steps", type=int, default=300, quick=5, help="training steps")
    experiment.option("--batch", type=int, default=128, quick=32, help="windows in a mini-batch")
    experiment.option("--samples", type=int, default=500, quick=10, help="draws per forecast")
    experiment.option("--ahead", type=int, default=24, quick=6, help="steps of a free run")
    found = {name: compared(experiment, name) for name in experiment.start(argv).series}
    for better, worse in (("sequence", "step"), ("step", "none"), ("sequence", "none")):
        claimed(experiment, found, better, worse)
    return experiment.finish()


if __name__ == "__main__":
    main()
