"""What the scripts of the paper's experiments share."""
