"""Datasets of episodes: readers, writers, windows and reference scores."""
