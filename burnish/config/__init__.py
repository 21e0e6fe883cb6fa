"""Schemas of the commands, overrides, and the texts of configuration errors."""
