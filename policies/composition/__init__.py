"""Composition of several policies."""
