"""What every training run shares: the trainer, run directories, metrics, resuming."""
