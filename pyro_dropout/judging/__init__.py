"""Whether to believe a prediction: scores, diagnostics, decisions."""
