"""The paper's mathematics: tensors in, tensors out; this floor knows no Pyro model."""
