"""Learning from a fixed dataset: the loop, the TD3 update with constraints, nearest rows."""
