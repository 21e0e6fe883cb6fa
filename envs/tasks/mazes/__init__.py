"""Point and ant mazes of D4RL and OGBench."""
