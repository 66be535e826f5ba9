"""The loss: the term of each site, and draws for each data point."""
