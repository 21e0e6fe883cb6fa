"""Shared parts of every training run: trainer, run directories, metrics, resuming."""
