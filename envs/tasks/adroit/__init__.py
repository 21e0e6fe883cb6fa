"""Adroit hand tasks."""
