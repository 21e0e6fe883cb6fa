"""Engines that step many environments at once, and rendering."""
