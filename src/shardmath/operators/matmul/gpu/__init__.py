"""Products on GPUs: the pieces that a strategy is carried out with there."""
