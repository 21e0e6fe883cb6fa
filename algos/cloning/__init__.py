"""Behaviour cloning: batches, validation, distillation."""
