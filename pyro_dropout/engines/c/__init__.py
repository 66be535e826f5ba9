"""Steps of small networks as plain C: compiled within a second, where torch's compiler takes a quarter of a minute."""
