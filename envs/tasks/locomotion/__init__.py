"""Gymnasium's MuJoCo walkers."""
