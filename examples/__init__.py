"""Short programs that use the parts without command line, trainer or Hydra, readable from top to bottom."""
