"""Off-policy learning from a replay buffer: the loop, the critic and actor updates."""
