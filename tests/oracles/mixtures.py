"""Row mixtures computed the slow way, with numpy and scipy only, so that nothing is shared with what they test."""

import itertools

import numpy as np
from scipy import integrate, special, stats


def kl_two_components(keep: float, d: float, rest: int, sigma: float, length_scale: float) -> float:
    """KL of keep·N(m, σ²I) + (1-keep)·N(0, σ²I) to N(0, l⁻²I) with ‖m‖ = dσ, by adaptive quadrature.

    Along m the problem is a one-dimensional mixture; across it, rest - 1 plain Gaussians.
    """
    prior = 1 / length_scale
    mean = d * sigma
    log_weights = np.log([max(keep, 1e-300), max(1 - keep, 1e-300)])

    def integrand(t: float) -> float:
        log_q = np.logaddexp(
            log_weights[0] + stats.norm._logpdf((t - mean) / sigma), log_weights[1] + stats.norm._logpdf(t / sigma)
        ) - np.log(sigma)
        log_p = stats.norm._logpdf(t / prior) - np.log(prior)
        return float(np.exp(log_q) * (log_q - log_p))

    # between the modes the integrand may be flat zero, so each mode and each shoulder gets an interval of its own
    marks = sorted({0.0, mean, mean / 2, *(c + k * sigma for c in (0.0, mean) for k in (-12, -6, -3, -1, 1, 3, 6, 12))})
    along = sum(
        integrate.quad(integrand, a, b, epsabs=1e-13, epsrel=1e-12, limit=200)[0]
        for a, b in itertools.pairwise(marks)
        if b > a
    )
    across = (rest - 1) * 0.5 * ((sigma / prior) ** 2 - 1 - 2 * np.log(sigma / prior))
    return along + across


def mixture_log_density(w: np.ndarray, means: list, covariances: list, probs: list) -> np.ndarray:
    """Log density of a mixture of full-covariance Gaussians at the rows of w."""
    return special.logsumexp(
        [
            np.log(p) + stats.multivariate_normal(m, c, allow_singular=False).logpdf(w)
            for m, c, p in zip(means, covariances, probs, strict=True)
        ],
        axis=0,
    )
