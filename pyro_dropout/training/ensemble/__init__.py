"""Training the members of an ensemble as one computation."""
