"""The page of a comparison, which opens anywhere."""
