"""Steps of wide networks with dropout on a GPU: a few kernels for each layer, and the optimiser inside them."""
