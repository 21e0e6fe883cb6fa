"""Scripted demonstrators."""
