"""Reference posteriors: NUTS, conjugate posteriors, exact Gaussian processes."""
