"""Answers to compare with: NUTS, conjugate posteriors, exact Gaussian processes."""
