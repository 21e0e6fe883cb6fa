"""Pages and figures of runs and datasets."""
