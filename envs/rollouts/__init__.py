"""Rollouts of policies and experts: collecting, playing episodes, recording."""
