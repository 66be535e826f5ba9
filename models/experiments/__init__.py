"""Code shared by the scripts of the paper's experiments."""
