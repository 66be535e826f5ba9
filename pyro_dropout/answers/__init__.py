"""What the posterior says, and whether to believe it."""
