"""Robosuite's manipulation tasks."""
