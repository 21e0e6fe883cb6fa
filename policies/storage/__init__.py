"""Policy directories: reading, writing, model cards, the hub."""
