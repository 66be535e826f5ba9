"""Steps of small networks on a GPU, many of them in one kernel: a program for each network."""
