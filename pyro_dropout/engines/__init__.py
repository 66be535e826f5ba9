"""Ways to take a step: tensors and graphs in, a fast loop out."""
