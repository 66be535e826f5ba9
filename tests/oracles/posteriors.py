"""Every guide's posterior over a net 2-3-1 written out: its nodes and its divergence, as functions of its parameters.

Of the package only the guides themselves are used, to be built in the test. What a call returns has torch's default
type, which the test sets to float64.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import pyro_dropout as pd
from tests.oracles import small_net as oracle
from tests.oracles.small_net import Nodes

L_WEIGHT, L_BIAS, KEEP, SIGMA, ALPHA, RANK = 1.3, 0.8, 0.7, 0.3, 0.4, 2
Q, K = 2, 3

State = dict[str, dict[str, Tensor]]  # parameters by site and name


@dataclass
class Case:
    """A guide, the nodes of its posterior, and its divergence; ``exact`` says which KL."""

    guide: Callable[[Any], Any]
    nodes: Callable[[State], Nodes]
    divergence: Callable[[State, bool], Tensor]
    kls: tuple[str, ...] = ("large_k",)  # more, where they differ in their gradient
    value: bool = True  # whether the loss itself is defined, not only up to a constant


def still(*shape: int) -> Tensor:
    return torch.zeros(shape)


def by_layer(state: State, name: str) -> tuple[Tensor, Tensor]:
    return state["0." + name]["loc"], state["2." + name]["loc"]


def biases(state: State, count: int) -> dict[str, Tensor]:
    """Means and variances of biases that are points or Gaussians."""
    found = {}
    for short, site, shape in (("b1", "0.bias", (count, K)), ("b2", "2.bias", (count, 1))):
        b = state[site]
        variance = (2 * b["log_scale"]).exp() if "log_scale" in b else torch.zeros_like(b["loc"])
        for key, value in ((short, b["loc"]), (f"{short}_var", variance)):
            found[key] = value.expand(shape) if short == "b1" else value.expand(shape)[:, 0]
    return found


def bias_kl(state: State) -> Tensor:
    total = torch.zeros(())
    for site in ("0.bias", "2.bias"):
        b = state[site]
        if "log_scale" in b:
            total = total + oracle.kl_independent(b["loc"], (2 * b["log_scale"]).exp(), L_BIAS)
        else:
            total = total + oracle.kl_point(b["loc"], L_BIAS)
    return total


def dropout_case(sigma: float, bias: Any, keeps: tuple[float, float] = (KEEP, KEEP)) -> Case:
    keep = {"0.weight": keeps[0], "2.weight": keeps[1]}
    if bias == "dropout":
        keep |= {"0.bias": 0.6, "2.bias": 0.9}

    def nodes(state: State) -> Nodes:
        (m1, m2), (n1, n2) = by_layer(state, "weight"), by_layer(state, "bias")
        masks, probs = oracle.coin_flips(keeps[0], Q)
        rest = biases(state, len(masks))
        if bias == "dropout":  # a bias vector is one row: kept or dropped as a whole
            masks, probs = masks.repeat(2, 1), torch.cat([0.4 * probs, 0.6 * probs])
            z = torch.cat([torch.zeros(2**Q), torch.ones(2**Q)])
            rest["b1"], rest["b1_var"] = z[:, None] * n1, (sigma**2 + still(len(z), K))
            rest["b2"], rest["b2_var"] = (0.9 * n2).expand(len(z)), (0.09 * n2**2 + sigma**2).expand(len(z))
        s = len(masks)
        variance = keeps[1] * (1 - keeps[1]) * m2[0] ** 2 + sigma**2
        return Nodes(
            probs, masks[:, None] * m1, sigma**2 + still(s, K, Q), w2=(keeps[1] * m2).expand(s, -1),
            w2_var=variance.expand(s, -1), **rest,
        )  # fmt: skip

    def divergence(state: State, exact: bool) -> Tensor:
        if not sigma:
            return bias_kl(state) + sum(
                p * L_WEIGHT**2 / 2 * m.square().sum() for p, m in zip(keeps, by_layer(state, "weight"), strict=True)
            )
        total = torch.zeros(())
        for p, m in zip(keeps, by_layer(state, "weight"), strict=True):
            total = total + oracle.kl_two_point_rows(m, p, sigma, L_WEIGHT, exact=exact)
        if bias != "dropout":
            return total + bias_kl(state)
        for p, m in zip((0.6, 0.9), by_layer(state, "bias"), strict=True):
            total = total + oracle.kl_two_point_rows(m[:, None], p, sigma, L_BIAS, exact=exact)
        return total

    kls = ("large_k", "exact") if sigma else ("large_k",)
    return Case(lambda m: pd.AutoDropout(m, keep, sigma, bias), nodes, divergence, kls, bool(sigma))


def multiplicative_case(per: Any, sigma: float, learn: bool) -> Case:
    def alphas(state: State) -> list[Tensor]:
        return [state[s]["log_alpha"].exp() if learn else torch.tensor(ALPHA) for s in ("0.weight", "2.weight")]

    def nodes(state: State) -> Nodes:
        m1, m2 = by_layer(state, "weight")
        a1, a2 = alphas(state)
        if per == "row":
            noise, probs = oracle.product(*[oracle.hermite(30)] * Q)
            w1, w1_var = m1 * (1 + a1.sqrt() * noise[:, None]), sigma**2 + still(len(noise), K, Q)
        else:
            probs, w1, w1_var = torch.ones(1), m1[None], (a1 * m1**2 + sigma**2)[None]
        s = len(probs)
        w2_var = (a2 * m2[0] ** 2 + sigma**2).expand(s, -1)
        return Nodes(probs, w1, w1_var, w2=m2.expand(s, -1), w2_var=w2_var, **biases(state, s))

    def divergence(state: State, exact: bool) -> Tensor:
        total = bias_kl(state)
        for m, a in zip(by_layer(state, "weight"), alphas(state), strict=True):
            if per == "weight":
                total = total + oracle.kl_independent(m, a * m**2 + sigma**2, L_WEIGHT)
                continue
            for row in m.T:
                if sigma:
                    covariance = sigma**2 * torch.eye(len(row)) + a * torch.outer(row, row)
                    total = total + oracle.kl_dense(row, covariance, torch.full((len(row),), L_WEIGHT**2))
                else:  # log det(σ²I + αmmᵀ) = log(α‖m‖²) + terms in σ alone, as σ → 0
                    size = row.square().sum()
                    total = total + L_WEIGHT**2 / 2 * (1 + a) * size - 0.5 * (a * size).log()
        return total

    def guide(model: Any) -> Any:
        return pd.AutoMultiplicative(model, ALPHA, per=per, learn_alpha=learn, scale=sigma)

    return Case(guide, nodes, divergence, value=per == "weight" or sigma > 0)


def mean_field_case() -> Case:
    def nodes(state: State) -> Nodes:
        first, second = state["0.weight"], state["2.weight"]
        return Nodes(
            torch.ones(1), first["loc"][None], (2 * first["log_scale"]).exp()[None], w2=second["loc"],
            w2_var=(2 * second["log_scale"]).exp(), **biases(state, 1),
        )  # fmt: skip

    def divergence(state: State, exact: bool) -> Tensor:
        weights = (state["0.weight"], state["2.weight"])
        return bias_kl(state) + sum(
            oracle.kl_independent(w["loc"], (2 * w["log_scale"]).exp(), L_WEIGHT) for w in weights
        )

    return Case(pd.AutoMeanField, nodes, divergence)


def low_rank_case(per: Any) -> Case:
    sites = ("0.weight", "0.bias", "2.weight", "2.bias")

    def spread(w: dict[str, Tensor]) -> Tensor:
        """V, which the guide holds in units of σ."""
        return w["factor"] * w["log_scale"].exp().reshape(-1, 1)

    def nodes(state: State) -> Nodes:
        if per == "net":
            eta1, probs = oracle.product(*[oracle.hermite(24)] * RANK)
            eta2 = eta1
        else:  # the loss is quadratic in what the last layer draws, so three points a dimension are exact there
            eta, probs = oracle.product(*[oracle.hermite(24)] * RANK, *[oracle.hermite(3)] * RANK)
            eta1, eta2 = eta[:, :RANK], eta[:, RANK:]
        s = len(probs)
        found = {} if per == "net" else biases(state, s)
        places = (("w1", "0.weight", eta1, (K, Q)), ("w2", "2.weight", eta2, (K,)))
        if per == "net":
            places = (*places, ("b1", "0.bias", eta1, (K,)), ("b2", "2.bias", eta2, ()))
        for short, site, eta, shape in places:
            w = state[site]
            found[short] = (w["loc"].flatten() + eta @ spread(w).T).reshape(s, *shape)
            found[f"{short}_var"] = (2 * w["log_scale"]).exp().flatten().expand(s, -1).reshape(s, *shape)
        return Nodes(probs, **found)

    def divergence(state: State, exact: bool) -> Tensor:
        blocks = [sites] if per == "net" else [("0.weight",), ("2.weight",)]
        total = torch.zeros(()) if per == "net" else bias_kl(state)
        for block in blocks:
            v = torch.cat([spread(state[s]) for s in block])
            variance = torch.cat([(2 * state[s]["log_scale"]).exp().flatten() for s in block])
            precisions = [
                (L_BIAS if "bias" in s else L_WEIGHT) ** 2 * torch.ones(state[s]["loc"].numel()) for s in block
            ]
            mean = torch.cat([state[s]["loc"].flatten() for s in block])
            total = total + oracle.kl_dense(mean, variance.diag() + v @ v.T, torch.cat(precisions))
        return total

    return Case(lambda m: pd.AutoLowRank(m, rank=RANK, per=per), nodes, divergence)


def mixture_case(components: int) -> Case:
    fixed = torch.tensor([0.3, 0.7, 0.5])[:components]
    fixed = fixed / fixed.sum()

    def probabilities(state: State) -> list[Tensor]:
        """(rows, L) of both layers."""
        return [fixed.expand(Q, -1), fixed.expand(K, -1)]

    def nodes(state: State) -> Nodes:
        first, second = state["0.weight"], state["2.weight"]
        pi1, pi2 = probabilities(state)
        labels = torch.tensor(list(itertools.product(range(components), repeat=Q)))
        probs = torch.stack([pi1[r, labels[:, r]] for r in range(Q)]).prod(0)
        w1, w1_var = (
            torch.stack([values[labels[:, r], :, r] for r in range(Q)], -1)
            for values in (first["locs"], (2 * first["log_scale"]).exp())
        )
        means, variances = second["locs"][:, 0], (2 * second["log_scale"]).exp()[:, 0]
        w2 = (pi2.T * means).sum(0)
        w2_var = (pi2.T * (means**2 + variances)).sum(0) - w2**2
        s = len(probs)
        return Nodes(probs, w1, w1_var, w2=w2.expand(s, -1), w2_var=w2_var.expand(s, -1), **biases(state, s))

    def divergence(state: State, exact: bool) -> Tensor:
        return bias_kl(state) + sum(
            oracle.kl_mixture_rows(state[s]["locs"], state[s]["log_scale"].exp(), pi, L_WEIGHT, exact=exact)
            for s, pi in zip(("0.weight", "2.weight"), probabilities(state), strict=True)
        )

    def guide(model: Any) -> Any:
        return pd.AutoRowMixture(model, components, probs=fixed)

    return Case(guide, nodes, divergence, ("large_k", "exact"))


def concrete_case() -> Case:
    temperature, most = 0.1, 0.9
    v = torch.arange(-30, 30, 0.1)  # v = logit u is logistic; the trapezoid rule is exact to rounding here
    density = 0.1 * torch.sigmoid(v) * torch.sigmoid(-v)

    def kept(site: dict[str, Tensor]) -> Tensor:
        return most * torch.sigmoid(site["share_logit"])

    def nodes(state: State) -> Nodes:
        (m1, m2), (p1, p2) = by_layer(state, "weight"), (kept(state[f"{layer}.weight"]) for layer in (0, 2))
        g1, g2 = (p.log() - (1 - p).log() for p in (p1, p2))
        flips, probs = oracle.product(*[(torch.sigmoid((g1 + v) / temperature), density)] * Q)
        soft = torch.sigmoid((g2 + v) / temperature)
        mean, square = (density * soft).sum(), (density * soft**2).sum()
        s = len(probs)
        return Nodes(
            probs, flips[:, None] * m1, still(s, K, Q), w2=(mean * m2).expand(s, -1),
            w2_var=((square - mean**2) * m2**2).expand(s, -1), **biases(state, s),
        )  # fmt: skip

    def divergence(state: State, exact: bool) -> Tensor:
        total = bias_kl(state)
        for site in ("0.weight", "2.weight"):
            m, p = state[site]["loc"], kept(state[site])
            entropy = -p * p.log() - (1 - p) * (1 - p).log()
            total = total + p * L_WEIGHT**2 / 2 * m.square().sum() - m.shape[1] * entropy
        return total

    return Case(
        lambda m: pd.AutoConcreteDropout(m, KEEP, max_keep=most, temperature=temperature),
        nodes,
        divergence,
        value=False,
    )


CASES = {
    "dropout": dropout_case(0.0, "map", keeps=(0.8, 0.6)),
    "dropout-wide": dropout_case(SIGMA, "gaussian"),
    "dropout-bias-dropped": dropout_case(SIGMA, "dropout", keeps=(0.8, 0.6)),
    "multiplicative-row": multiplicative_case("row", 0.0, learn=False),
    "multiplicative-row-wide": multiplicative_case("row", SIGMA, learn=True),
    "multiplicative-weight": multiplicative_case("weight", 0.0, learn=True),
    "mean-field": mean_field_case(),
    "low-rank-layer": low_rank_case("layer"),
    "low-rank-net": low_rank_case("net"),
    "row-mixture-fixed": mixture_case(3),
    "concrete": concrete_case(),
}  # fmt: skip
