"""Posterior approximations side by side: trained, scored, drawn, and kept in a folder."""
