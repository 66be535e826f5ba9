"""Judge predictions and posteriors: scores, diagnostics, decisions."""
