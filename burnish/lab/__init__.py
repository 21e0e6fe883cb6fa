"""The laboratory: a local page on which a policy acts, is steered, and its runs grow."""
