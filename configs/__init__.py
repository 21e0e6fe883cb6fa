"""Hydra configuration: the defaults lists of the commands, and experiments. Data, no code."""
