"""What the posterior says."""
