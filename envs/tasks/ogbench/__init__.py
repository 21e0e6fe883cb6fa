"""OGBench's manipulation tasks."""
