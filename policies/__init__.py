"""Everything needed to run a generative policy, and nothing else."""
