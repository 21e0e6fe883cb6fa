"""Samplers: the loop, the step table, one file per family."""
