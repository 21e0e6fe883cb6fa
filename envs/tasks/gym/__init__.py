"""Environments with gymnasium's interface."""
