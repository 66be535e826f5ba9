"""Posterior approximations side by side: trained, scored, plotted, and saved to a folder."""
