"""Meta-World's tasks."""
