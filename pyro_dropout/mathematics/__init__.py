"""The paper's mathematics: functions and distributions of tensors, independent of any Pyro model."""
