"""Dropout in LeNet on handwritten digits, and what its uncertainty is good for: ``python models/mnist.py``.

    p(y | x) ≈ (1/T) Σ_t softmax(f(x, ω_t)),  ω_t ~ q(ω)       MC dropout, against softmax(f(x, E[ω])), the standard way

Caffe's LeNet, with dropout before the last layer only ("ip", as for the paper's rotated 1), before every layer ("all",
the q(ω) of the theory, which drops whole channels of a convolution; the image itself is kept), and nowhere ("none").

§5.1 and §5.2 ask: is the averaged prediction more accurate; does its spread reveal that a rotated 1 is not a digit; are
the inputs that it would defer to a human the ones it gets wrong, and is a cascade of two networks worth its cost; and
does it detect adversarial images (FGSM: x + ε sign ∇_x loss) against the mean network or MC dropout, and plain noise?
"""

from functools import partial

import torch
from experiments import classifiers as tables
from experiments.collection import mnist
from experiments.experiment import VERDICTS, Experiment
from experiments.figures import class_panels
from experiments.summaries import standard_error
from torch import nn

import pyro_dropout as pdrop

LENET, SMALL = (20, 50, 500), (4, 8, 32)  # channels, channels and hidden units; SMALL is the cascade's first network
WEIGHTS = ("0.weight", "2.weight", "5.weight", "7.weight")
KEEP = {"ip": (1.0, 1.0, 1.0, 0.5), "all": (1.0, 0.5, 0.5, 0.5), "none": (1.0, 1.0, 1.0, 1.0)}
WEIGHT_DECAY = 2.5e-4  # λ of ‖M‖² added to the mean loss: LeNet's default (5e-4 as an optimiser's weight_decay)
ROWS = 2**13  # images times draws per forward pass; fixed, so that a seed gives the same draws on any GPU
ANGLES = torch.linspace(0, 90, 12)  # degrees; a 1 on its side is not a digit
BUDGETS, WEAK_DRAWS = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0), 10  # of a cascade; T of its first network
ATTACKS, EPSILONS = ("FGSM, mean network", "FGSM, MC loss", "noise"), (0.0, 0.02, 0.05, 0.1, 0.2, 0.3)
UNSURE = ("MC entropy", "mutual information", "softmax entropy")
CLEAR, SURE = 2.0, 0.9  # standard errors from which a difference counts; probability that counts as certain
HALF = 0.5  # deferring one image in twenty should at least halve the error; a cascade should at least halve the cost
CAUGHT, SEEN, FEW = 0.8, 0.6, 20  # AUROC of a useful detector, and of a detector at all; least number of images


# --- the model, the guide and their training --------------------------------------------------------------------------
def model(widths=LENET, num_data=60_000):
    a, b, c = widths
    convolutions = nn.Conv2d(1, a, 5), nn.MaxPool2d(2), nn.Conv2d(a, b, 5), nn.MaxPool2d(2)
    net = nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(16 * b, c), nn.ReLU(), nn.Linear(c, 10))
    length = pdrop.paper.implied_length_scale(keep=1.0, tau=1.0, weight_decay=WEIGHT_DECAY, num_data=num_data)
    return pdrop.BayesianNet(net, pdrop.Prior(length, length, width_scaled=False), pdrop.Categorical())


def guide(bayesian_net, arm):
    return pdrop.AutoDropout(bayesian_net, keep=dict(zip(WEIGHTS, KEEP[arm], strict=True)))


def trained(arm, widths, train, seed, args, device):
    torch.manual_seed(seed)
    net = model(widths, len(train[0]))
    posterior = guide(net, arm)
    how = {"epochs": args.epochs, "batch_size": args.batch, "compile": False if args.quick else "auto", "seed": seed}
    falling = pdrop.training.inverse_decay(10 * args.batch / (args.epochs * len(train[0])), 1.0)  # lr falls to a tenth
    pdrop.fit(net, posterior, *train, lr=args.lr, schedule=falling, device=device, progress=not args.quiet, **how)
    return net, posterior


def asked(pair, x, args):
    """Return the standard prediction, that of MC dropout, and three measures of uncertainty."""
    standard = pdrop.predict(*pair, x, method="standard")
    mc = pdrop.predict(*pair, x, samples=args.samples, seed=args.seed, chunk=ROWS)
    return standard, mc, dict(zip(UNSURE, (mc.entropy, mc.mutual_information, standard.entropy), strict=True))


def wrong(answer, y):
    return (answer.probs.argmax(-1) != y).double()


def error_rates(experiment, answers, y):
    rows = tables.error_table({arm: [one[:2] for one in seeds] for arm, seeds in answers.items()}, y)
    note = f"{len(y)} images, {len(answers['ip'])} seeds, T = {experiment.args.samples}; gain in points, log p in nats."
    experiment.table("Test error", rows, note)
    won = sum(row["gain"] > CLEAR * row["± gain"] for row in rows[:2])
    said = "; ".join(f"{row['dropout']}: {row['gain']:+.3f} ± {row['± gain']:.3f} points" for row in rows[:2])
    experiment.claim("MC dropout has a lower test error than standard dropout", VERDICTS[2 - won], f"gain {said}")


def rotated_one(experiment, pair, ones):
    x = tables.turned(ones, ANGLES).flatten(0, 1).clamp(0, 1)
    standard, mc, _ = asked(pair, x, experiment.args)
    probability, answer = standard.probs.max(-1)
    found = {"MC entropy": mc.entropy, "softmax entropy": standard.entropy, "answer is 1": answer == 1}
    found["sure and wrong"] = (answer != 1) & (probability > SURE)
    found["envelopes overlap"] = tables.envelopes_overlap(mc.samples)
    found = {name: value.reshape(len(ones), -1).cpu().double() for name, value in found.items()}
    means = {"angle": ANGLES.tolist()} | {name: value.mean(0).tolist() for name, value in found.items()}
    rows = [dict(zip(means, row, strict=True)) for row in zip(*means.values(), strict=True)]
    note = f"Means over {len(ones)} images. Sure: above {SURE}. Envelopes: 95 % of the two largest softmax inputs."
    experiment.table("Ones that are turned", rows, note)
    entropy, _, _, misled, overlap = found.values()
    rise = entropy[:, ANGLES >= 45].mean(1) - entropy[:, 0]
    error, seen, false = standard_error(rise), (overlap * misled).sum() / max(1, misled.sum()), overlap[:, 0].mean()
    held = int(rise.mean() > CLEAR * error) + int(seen >= HALF > false)
    said = f"entropy {rise.mean():+.2f} ± {error:.2f} nats from 45° on; envelopes overlap for {seen:.0%} of"
    said += f" {misled.sum():.0f} sure and wrong softmax answers, and for {false:.0%} of upright ones"
    text = "uncertainty is higher from 45° on than for an upright 1, and draws disagree for most of the softmax's sure"
    text += " and wrong answers"
    experiment.claim(text, VERDICTS[2 - held], said)
    shown = mc.samples[:, : len(ANGLES)], x[: len(ANGLES), 0]
    figure = class_panels(ANGLES, *shown, xlabel="angle (degrees)")
    experiment.figure("rotated", figure, "A 1 that is turned: draws of the softmax's input and output.")


def rejection(experiment, answers, y):
    found = {}
    for arm in ("ip", "all"):
        standard, mc, unsure = answers[arm][0]
        found[arm] = {name: (unsure[name], wrong(standard if "softmax" in name else mc, y)) for name in UNSURE}
    rows, figure = tables.rejection_table(found)
    experiment.table("What is kept when the most uncertain images are deferred", rows)
    (full, most, less), plain = (list(rows[k].values())[2:5] for k in (3, 5))  # dropout everywhere: MC, softmax entropy
    verdict = VERDICTS[(less > HALF * full or most >= full) + (less >= full)]
    said = f"error {full:.2f}, {most:.2f}, {less:.2f} % of 100, 99, 95 % kept; softmax {plain[1]:.2f}, {plain[2]:.2f} %"
    experiment.claim("deferring the 5 % of largest MC entropy halves the error of the rest", verdict, said)
    experiment.figure("rejection", figure, "Error among the images that are kept; bands: ± 2 standard errors.")


def cascades(experiment, small, large, widths, x, y):
    args = experiment.args
    each = [24 * 24 * 25 * a + 8 * 8 * 25 * a * b + 16 * b * c + 10 * c for a, b, c in (SMALL, widths)]  # products
    costs = (WEAK_DRAWS * each[0], args.samples * each[1])
    weak = partial(pdrop.predict, *small, samples=WEAK_DRAWS, seed=args.seed, chunk=ROWS)
    strong = partial(pdrop.predict, *large, samples=args.samples, seed=args.seed, chunk=ROWS)
    rows, figure = tables.cascade_table(weak, strong, x, y, budgets=BUDGETS, costs=costs)
    experiment.table("A small network first, LeNet where it is unsure", rows, "Cost in multiplications of LeNet.")
    alone = rows[-1]["error % by entropy"]
    near = alone + (alone * (100 - alone) / len(y)) ** 0.5
    cost = min(row["cost"] for row in rows if row["error % by entropy"] <= near)
    text = "a cascade has the large network's error, within a standard error, at half its cost or less"
    said = f"{cost:.2f} of the cost, error at most {near:.2f} %"
    experiment.claim(text, VERDICTS[(cost > HALF) + (cost >= 1)], said)
    experiment.figure("cascade", figure, "Error of a cascade against its cost.")


def adversaries(experiment, pair, x, y):
    args, rows, clean = experiment.args, [], asked(pair, x, experiment.args)
    for attack in ATTACKS:
        draws = args.attack_draws if attack == "FGSM, MC loss" else None
        signs = (torch.randn_like(x) if attack == "noise" else tables.loss_gradient(*pair, x, y, draws=draws)).sign()
        for epsilon in EPSILONS:
            standard, mc, unsure = asked(pair, (x + epsilon * signs).clamp(0, 1), args) if epsilon else clean
            errors = {"softmax error %": wrong(standard, y), "MC error %": wrong(mc, y)}
            row = {"attack": attack, "ε": epsilon} | {name: 100 * each.mean().item() for name, each in errors.items()}
            rows.append(row | tables.detection_row(clean[2], unsure, wrong(mc, y) > wrong(clean[1], y), fewest=FEW))
    note = f"{len(x)} images. AUROC against clean ones: of all moved ones, and of the misled (0.5 if under {FEW})."
    experiment.table("Adversarial images", rows, note)
    told = [row for row in rows if row["attack"] != "noise" and row["misled"] >= FEW]
    least = {name: min((row[f"misled, {name}"] for row in told), default=0.5) for name in UNSURE}
    best = max(least["MC entropy"], least["mutual information"])
    said = "least AUROC of misled images: " + ", ".join(f"{name} {value:.2f}" for name, value in least.items())
    verdict = VERDICTS[(best < CAUGHT) + (best <= SEEN)]
    experiment.claim("adversarial images have higher uncertainty", verdict, said if told else "too few were misled")
    text = "Error, uncertainty and detection as images are moved by ε, as a share of the range of a pixel."
    experiment.figure("fgsm", tables.detection_figure(rows, UNSURE), text)


def main(argv=None):
    experiment = Experiment("mnist", __doc__)
    experiment.option("--images", type=int, default=60_000, quick=300, help="training images")
    experiment.option("--test", type=int, default=10_000, quick=150, help="test images")
    experiment.option("--size", type=float, default=1.0, quick=0.2, help="relative width of LeNet's layers (1)")
    experiment.option("--epochs", type=int, default=15, quick=4, help="training epochs")
    experiment.option("--batch", type=int, default=512, quick=50, help="images in a mini-batch")
    experiment.option("--lr", type=float, default=2e-3, quick=0.01, help="learning rate of Adam")
    experiment.option("--seeds", type=int, default=3, quick=2, help="networks per kind")
    experiment.option("--samples", type=int, default=100, quick=5, help="draws T of MC dropout")
    experiment.option("--ones", type=int, default=200, quick=5, help="images of a 1 to rotate")
    experiment.option("--attacked", type=int, default=2000, quick=60, help="images to attack")
    experiment.option("--attack-draws", type=int, default=20, quick=2, help="draws in the gradient of the MC loss")
    args, device = experiment.start(argv), experiment.device
    data, widths = mnist(), tuple(max(1, round(args.size * width)) for width in LENET)
    train = data.x[: args.images].to(device), data.y[: args.images].to(device)
    x, y = data.test_x[: args.test].to(device), data.test_y[: args.test].to(device)
    starts = range(1000 * args.seed, 1000 * args.seed + args.seeds)
    pairs = {arm: [trained(arm, widths, train, seed, args, device) for seed in starts] for arm in KEEP}
    answers = {arm: [asked(pair, x, args) for pair in seeds] for arm, seeds in pairs.items()}
    error_rates(experiment, answers, y)
    rotated_one(experiment, pairs["ip"][0], x[y == 1][: args.ones])
    rejection(experiment, answers, y)
    cascades(experiment, trained("ip", SMALL, train, starts[0], args, device), pairs["all"][0], widths, x, y)
    adversaries(experiment, pairs["all"][0], x[: args.attacked], y[: args.attacked])
    return experiment.finish()


if __name__ == "__main__":
    main()
