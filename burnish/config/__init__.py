"""Schemas of the commands, overrides, and texts of configuration errors."""
