"""The loss: what each site adds to it, and draws for each data point."""
