"""Thompson sampling by dropout against ε-greedy, in a world of food, poison and walls: ``python models/thompson.py``.

    Q(s, a) = r + γ max_a' Q(s', a')          what a network of 27-50-50-5 units learns, from a memory of 30,000 steps

Main paper, §5.4. Both learners train the same network with dropout by the same steps, and differ only in how
they act. ε-greedy takes the best action of the mean network or, with probability ε, any; Thompson sampling takes the
best action of one network drawn from the posterior, so it explores where it is uncertain. The targets' Q is that of the
mean network; inputs, where 1 means a free view, are not dropped. The world is that of Karpathy's ConvNetJS, and pays up
to 1 per tick for staying clear of walls; without that (``--reward meals``) the paper's average cannot be reached.
"""

import math

import numpy as np
import torch
from experiments.experiment import VERDICTS, Experiment
from experiments.figures import curve_panels
from experiments.foraging import BEST_AVERAGE, EYES, OBSERVATION, WHEELS, Foraging
from experiments.summaries import first_reach, running_mean
from matplotlib.figure import Figure
from torch import nn
from tqdm import tqdm

import pyro_dropout as pdrop

ACTIONS, K = len(WHEELS), 50
KEEP, TAU = 0.9, 1.0  # any τ gives the same steps: the learning rate is divided by it, and λ is fixed
KEEPS = {"net.0.weight": 1.0, "net.2.weight": KEEP, "net.4.weight": KEEP}
GAMMA, MEMORY, MINIBATCH, LR, DECAY = 0.7, 30_000, 64, 1e-3, 1e-3  # DECAY as torch.optim counts it: 2λ
BATCH, WINDOW = 1000, 5  # the paper's "batch" is 1,000 steps; averages are of the last five of them
LEVEL, PAPER_EPSILON, PAPER_THOMPSON = 1.0, 175, 25  # the paper: an average reward of 1, batches after the burn-in
STRATEGIES, MOST = ("Thompson sampling", "ε-greedy"), 0.8  # share of seeds that must be faster: of five, all but one


# --- the model: a future reward, observed with noise, for a state and an action ---------------------------------------
class QOfAction(nn.Module):
    """The Q network; a row of a state and a one-hot action, (N, 32), selects one of its five outputs."""

    def __init__(self):
        super().__init__()
        hidden = nn.Linear(OBSERVATION, K), nn.ReLU(), nn.Linear(K, K), nn.ReLU()
        self.net = nn.Sequential(*hidden, nn.Linear(K, ACTIONS))

    def forward(self, x):
        """Return Q of the action, (N, 1)."""
        return (self.net(x[:, :OBSERVATION]) * x[:, OBSERVATION:]).sum(-1, keepdim=True)


def model(seed):
    torch.manual_seed(seed)
    decay = {"tau": TAU, "weight_decay": DECAY / 2, "num_data": MINIBATCH}
    lengths = {site: pdrop.paper.implied_length_scale(keep=keep, **decay) for site, keep in KEEPS.items()}
    prior = pdrop.Prior(lengths, bias_length_scale=pdrop.paper.implied_length_scale(keep=1.0, **decay))
    return pdrop.BayesianNet(QOfAction(), prior, pdrop.Gaussian(TAU))


def guide(model):
    return pdrop.AutoDropout(model, keep=KEEPS)


# --- what the learners remember, and how they evaluate Q: thousands of times a second, one state at a time, in numpy --
def relu_networks(weights, x, kept):
    """Run E networks of linear layers with ReLU between them, each on its own inputs."""
    h = x
    for w, b, k in zip(weights[0:-2:2], weights[1:-2:2], kept, strict=True):
        h = h @ w.swapaxes(1, 2)
        h += b[:, None]
        np.maximum(h, 0, out=h)
        h *= k
    return np.asarray(h @ weights[-2].swapaxes(1, 2) + weights[-1][:, None])


class Replay:
    """The last transitions of several parallel learners: state, action, reward, and next state.

    A state is stored once, as the next state of one transition and the state of the following one.
    """

    def __init__(self, learners, capacity, state, actions):
        self._capacity, self._state, self._actions = capacity, state, actions
        self._first = np.arange(learners)[:, None] * (capacity + 1)  # one more row, for the state after the last step
        self.rows = np.zeros((learners * (capacity + 1), state + actions), np.float32)
        self._rewards = np.zeros((len(self.rows), 1), np.float32)

    def write(self, t, states, actions, rewards, following):
        """Store the transition of tick ``t`` of every learner: (E, state), (E,), (E,) and (E, state)."""
        now, then = (self._first[:, 0] + at % (self._capacity + 1) for at in (t, t + 1))
        self.rows[now, : self._state], self.rows[now, self._state :] = states, np.eye(self._actions)[actions]
        self._rewards[now, 0] = rewards
        self.rows[then, : self._state] = following

    def draw(self, t, count, rng):
        """Return ``count`` transitions of each learner, drawn uniformly; the latest is that of tick ``t``."""
        ago = (rng.random((len(self._first), count)) * min(t + 1, self._capacity)).astype(int)
        now, then = ((at % (self._capacity + 1) + self._first).ravel() for at in (t - ago, t - ago + 1))
        following = self.rows.take(then, 0)[:, : self._state].reshape(len(self._first), count, self._state)
        return self.rows.take(now, 0), self._rewards.take(now, 0), following


# --- the learners: one fleet, whose first half acts by Thompson sampling ----------------------------------------------
def epsilon(t):
    return min(1.0, max(0.05, 1 - (t - 3000) / (200_000 - 3000)))


class Learners:
    """E learners, their memories, and the fleet that trains their networks; only its steps are not in numpy."""

    def __init__(self, args, device):
        self.args, self.rng, self.count = args, np.random.default_rng(args.seed), 2 * args.seeds
        seeds = {"seed": 2 * [args.seed + k for k in range(args.seeds)]}
        self.fleet = pdrop.Fleet(lambda seed: (net := model(seed), guide(net)), seeds)
        self.memory = Replay(self.count, MEMORY, OBSERVATION, ACTIONS)
        self.x = torch.zeros(self.count * MINIBATCH, OBSERVATION + ACTIONS, device=device)
        self.y = torch.zeros(len(self.x), 1, device=device)
        rows = torch.arange(len(self.x), device=device).view(self.count, MINIBATCH)
        descend = pdrop.training.Update("sgd", LR, 0, lambda p, g, state, lr, t: (p - lr * g, state))
        # -ELBO is Nτ times (½ the mean square + weight decay); the learning rate is for the latter.
        options = {"lr": LR / (MINIBATCH * TAU), "optim": descend, "compile": args.compile, "device": device}
        self.run = self.fleet.prepare(self.x, self.y, indices=rows, steps=args.ticks, **options)
        self.mean = np.full((2, self.count, 1, K), KEEP, np.float32)

    @property
    def weights(self):
        """The means of all replicas, layer by layer."""
        return [value.detach().cpu().numpy() for value in self.run.values]

    def act(self, t, states):
        """Return an action for every learner; ``states`` is (E, 27)."""
        kept = self.mean.copy()
        kept[:, : self.args.seeds] = self.rng.random((2, self.args.seeds, 1, K)) < KEEP  # one network for each decision
        best = relu_networks(self.weights, states[:, None], kept)[:, 0].argmax(-1)
        chance = np.full(self.count, float(t < self.args.burn_in))
        chance[self.args.seeds :] = max(chance[0], epsilon(t))
        return np.where(self.rng.random(self.count) < chance, self.rng.integers(0, ACTIONS, self.count), best)

    def learn(self, t):
        """Take a training step on 64 remembered transitions of each learner, up to tick t."""
        rows, rewards, following = self.memory.draw(t, MINIBATCH, self.rng)
        ahead = relu_networks(self.weights, following, self.mean).max(-1)
        self.x.copy_(torch.from_numpy(rows))
        self.y.copy_(torch.from_numpy(rewards + GAMMA * ahead.reshape(-1, 1)))
        return self.run.advance(1)


def live(args, device):
    """Run all learners; return average rewards, (batches, E), what they ate in each batch, and the worlds."""
    learners = Learners(args, device)
    world = Foraging(2 * args.seeds, args.seed, clearance=args.reward == "demonstration")
    total, eaten = np.zeros((args.ticks // args.batch, 2 * args.seeds)), []
    for t in tqdm(range(len(total) * args.batch), disable=args.quiet, unit="tick", mininterval=1.0):
        before = world.observation
        actions = learners.act(t, before)
        after, rewards = world.step(actions)
        learners.memory.write(t, before, actions, rewards, after)
        if t >= args.learn_after:
            learners.learn(t)
        total[t // args.batch] += rewards / args.batch
        if (t + 1) % args.batch == 0:
            eaten.append(world.eaten.copy())
    return total, np.diff(eaten, axis=0, prepend=0), world


# --- what is found ----------------------------------------------------------------------------------------------------
def plain(number):
    return float(number) if math.isfinite(number) else "never"


def judged(thompson, greedy):
    """Return a verdict on "Thompson sampling is faster", and its numbers: medians, their ratio, failures."""
    ours, theirs = (float(np.median(times)) for times in (thompson, greedy))
    verdict = VERDICTS[2 if ours >= theirs else 0 if (thompson < greedy).mean() >= MOST else 1]
    ratio = f" (ratio {theirs / ours:.3g})" if math.isfinite(ours + theirs) else ""
    lost = [f"{int(np.isinf(times).sum())} of {len(times)}" for times in (thompson, greedy)]
    return verdict, f"median batches: {plain(ours)} against {plain(theirs)}{ratio}; never: {lost[0]} against {lost[1]}"


def report(experiment, average, eaten, world):
    args = experiment.args
    average = running_mean(average, WINDOW).reshape(len(average), 2, args.seeds)
    mean, error = average.mean(-1), average.std(-1, ddof=1) / math.sqrt(args.seeds)
    after = average[args.burn_in // args.batch :]
    level, most = float(after[:PAPER_EPSILON, 1].mean(-1)[-1]), BEST_AVERAGE + (args.reward == "demonstration")
    food, poison = (eaten[-WINDOW:].mean(0) * 1000 / args.batch).reshape(2, args.seeds, 2).transpose(2, 0, 1)
    columns = {"average reward at the end": after[-1], "food in 1000 ticks": food, "poison in 1000 ticks": poison}
    paper, here = first_reach(after, LEVEL), first_reach(after, level)
    columns |= {f"batches to {LEVEL:g}": paper, f"batches to {level:.3f}": here}
    rows = [
        {"strategy": STRATEGIES[k], "seed": args.seed + n} | {title: plain(columns[title][k, n]) for title in columns}
        for k, n in np.ndindex(2, args.seeds)
    ]
    note = f"Averages are over {WINDOW} batches of {args.batch} ticks; at most {most:.4g} a tick can be earned."
    experiment.table("Each learner", rows, note)
    ticks = args.batch * np.arange(1, len(average) + 1)
    names = ("ticks", *(f"{name}{what}" for what in ("", " ±") for name in STRATEGIES))
    shown = np.unique(np.geomspace(1, len(average), 25).astype(int)) - 1
    rows = [dict(zip(names, (ticks[b], *mean[b], *error[b]), strict=True)) for b in shown]
    experiment.table("Average reward per tick", rows, f"Mean and standard error over seeds, of {WINDOW} batches.")
    where = f"{level:.3f}, which ε-greedy has after {min(PAPER_EPSILON, len(after))} batches,"
    for goal, times in ((f"{LEVEL:g}", paper), (where, here)):
        verdict, numbers = judged(*times)
        claim = f"Thompson sampling reaches an average reward of {goal} in fewer steps than ε-greedy"
        experiment.claim(claim, verdict, f"{numbers}; the paper: {PAPER_THOMPSON} against {PAPER_EPSILON}")
    curves = {f"{name}, {args.seeds} seeds": (ticks, mean[:, k], error[:, k]) for k, name in enumerate(STRATEGIES)}
    levels = {f"{most:.4g}, the most to earn for long": most, f"{level:.3f}, where ε-greedy arrives": level}
    levels |= {f"{LEVEL:g}, the paper's level": LEVEL} if most > LEVEL else {}
    figure = curve_panels({"": curves}, xlabel="ticks (grey: random actions)", size=(8.5, 5.2), levels=levels)
    figure.axes[0].axvspan(ticks[0], args.burn_in, color="0.88", lw=0, zorder=0)
    figure.axes[0].set(xscale="log", xlim=(ticks[0], ticks[-1]), ylabel="average reward per tick")
    experiment.figure("rewards", figure, f"Average reward over {WINDOW} batches, ± its standard error over seeds.")
    axes = Figure(figsize=(8, 6), layout="constrained").subplots()
    world.draw(axes, int((world.observation.reshape(-1, len(EYES), 3)[..., 1:] < 1).sum((1, 2)).argmax()))
    axes.figure.legend(loc="outside upper center", ncols=3, frameon=False)
    experiment.figure("world", axes.figure, "One of the worlds at the end, and what its agent sees with nine eyes.")


def main(argv=None):
    experiment, rewards = Experiment("thompson", __doc__), ("demonstration", "meals")
    experiment.option("--ticks", type=int, default=250_000, quick=1500, help="ticks per world (250000)")
    experiment.option("--seeds", type=int, default=5, quick=2, help="learners per strategy (5)")
    experiment.option("--batch", type=int, default=BATCH, quick=100, help=f"ticks per batch ({BATCH})")
    experiment.option("--burn-in", type=int, default=5000, quick=1300, help="ticks of random actions (5000)")
    experiment.option("--learn-after", type=int, default=1000, quick=1300, help="ticks before training (1000)")
    experiment.option("--reward", choices=rewards, default=rewards[0], help="with or without pay for clearance")
    experiment.option("--no-compile", dest="compile", action="store_const", const=False, default="auto", quick=False)
    args = experiment.start(argv)
    if args.seeds < 2 or args.ticks < args.burn_in + args.batch:
        raise pdrop.errors.PyroDropoutError(
            "--seeds must be at least 2, and --ticks at least --burn-in plus one --batch."
        )
    if args.device is None:
        experiment.device = torch.device("cpu")  # too small for a GPU
        torch.set_num_threads(1)
    before = torch.backends.mkldnn.set_flags(False)  # slow with small transposed matrices on some machines
    report(experiment, *live(args, experiment.device))
    torch.backends.mkldnn.set_flags(before[0])
    return experiment.finish()


if __name__ == "__main__":
    main()
