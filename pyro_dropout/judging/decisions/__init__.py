"""What to do with uncertainty: abstain, defer, explore."""
